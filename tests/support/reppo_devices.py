"""REPPO's smoke arm with environments over eight devices: `python -m tests.support.reppo_devices FOLDER`."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import jax
import numpy as np

from papyrax.envs import physics
from papyrax.methods.control.reppo import agent
from papyrax.train.recipes.control import reppo, reppo_arms
from papyrax.train.run import Run
from papyrax.train.sharding import make_mesh


def main(folder: str) -> None:
    """Trains; every number is finite and the critic's loss falls."""
    config = dataclasses.replace(reppo.PRESETS["smoke"], env_steps=4096)

    def trained(run, config):
        plan = reppo_arms.Plan(config.seeds, config.env_steps, config.evaluations, config.eval_episodes)
        world = physics.make(config.env)
        return reppo_arms.train(run, "reppo", agent, config.agent, world, plan, config.env_steps).fit

    with Run(Path(folder), system="reppo", preset="smoke", config=config, quiet=True) as run:
        assert run.mesh.shape["data"] == 8 == jax.device_count()
        fit = trained(run, config)
    assert fit.state.envs.obs.sharding.spec[1] == "data"
    eight = dataclasses.replace(config, seeds=8, env_steps=1024)
    with Run(Path(folder) / "seeds", system="reppo", preset="smoke", config=eight, quiet=True) as run:
        dealt = trained(run, eight)
    with Run(
        Path(folder) / "one",
        system="reppo",
        preset="smoke",
        config=eight,
        mesh=make_mesh(jax.devices()[:1]),
        quiet=True,
    ) as run:
        alone = trained(run, eight)
    assert dealt.state.envs.obs.sharding.spec[0] == "data"
    # the same numbers, seed by seed: devices that hold different seeds never exchange anything
    np.testing.assert_allclose(dealt.metrics["critic_loss"], alone.metrics["critic_loss"], rtol=1e-4)
    np.testing.assert_allclose(dealt.evals["return"], alone.evals["return"], rtol=1e-4)
    assert all(np.isfinite(v).all() for v in fit.metrics.values())
    loss = fit.metrics["critic_loss"]
    assert loss[-4:].mean() < loss[:4].mean(), loss


if __name__ == "__main__":
    main(*sys.argv[1:])
