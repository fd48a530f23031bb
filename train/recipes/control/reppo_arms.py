"""One arm of REPPO's experiment: every seed of one algorithm on one world in one fit, and how its evaluations are read."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from papyrax.envs.protocol import World
from papyrax.methods.control.reppo import agent
from papyrax.methods.control.reppo.config import ReppoConfig
from papyrax.train.errors import UserError
from papyrax.train.loop import Fit
from papyrax.train.recipes.control import spread
from papyrax.train.run import Run


@dataclasses.dataclass(frozen=True)
class Plan:
    """How arms that are compared are trained: `seeds` each, `evaluations` over `span` environment steps (an arm that trains for
    less is evaluated as often a step), each of so many `episodes`."""

    seeds: int
    span: int
    evaluations: int
    episodes: int


@dataclasses.dataclass(frozen=True)
class Arm:
    """A trained arm: the fit and the settings of its algorithm."""

    fit: Fit
    config: Any

    @property
    def steps(self) -> np.ndarray:
        """Environment steps a seed at the evaluations."""
        return self.fit.evals["step"] * self.config.num_envs * self.config.steps

    @property
    def returns(self) -> np.ndarray:
        """Mean returns, [seeds, evaluations]."""
        return np.atleast_2d(self.fit.evals["return"].T)

    def at(self, env_steps: int) -> np.ndarray:
        """Returns of the seeds at the evaluation nearest to so many steps."""
        return self.returns[:, int(np.argmin(np.abs(self.steps - env_steps)))]

    def by(self, env_steps: int) -> np.ndarray:
        """Returns of the seeds at the best evaluation (mean over seeds) of those within so many steps, or at the first."""
        within = max(1, int(np.sum(self.steps <= env_steps)))
        return self.returns[:, int(np.argmax(self.returns[:, :within].mean(0)))]


def iterations(config: Any, env_steps: int) -> int:
    """Whole iterations within so many environment steps, at least one."""
    return max(1, env_steps // (config.num_envs * config.steps))


def fitted(config: ReppoConfig, world: World) -> ReppoConfig:
    """The agent's settings for this world: where observations are pictures and `image` is not set, it is their shape."""
    if world.picture is None or config.image is not None:
        return config
    return dataclasses.replace(config, image=world.picture)


def probe(label: str, module: Any, config: Any, world: World, state: Any) -> None:
    """Raises ValueError, which begins with `label`, where these settings do not fit the world. Nothing is computed: `state` is
    the shape of one of the world's states."""

    def first(key, state):
        return module.init(key, config, dataclasses.replace(world, reset=lambda key: state))

    try:
        jax.eval_shape(first, jax.random.key(0), state)
    except ValueError as error:
        raise ValueError(f"{label}: {error}") from error


def train(run: Run, name: str, module: Any, config: Any, world: World, plan: Plan, env_steps: int) -> Arm:
    """Trains `module` (REPPO's agent or PPO) for `env_steps` a seed; an earlier fit of that name goes on.

    Raises UserError when the environments can't be cut over the mesh.
    """
    cut = run.mesh.shape["data"] if spread.layout(run.mesh, plan.seeds) == "environments" else 1
    if config.num_envs % cut:
        raise UserError(f"{name} has {config.num_envs} environments, which {cut} devices can't share evenly")
    every = max(1, max(env_steps, plan.span) // (config.num_envs * config.steps) // plan.evaluations)
    keys = jax.random.split(jax.random.fold_in(run.key, 0), plan.seeds)
    state = spread.start(module, config, world, run.mesh, keys)
    starts = jax.random.split(jax.random.fold_in(run.key, 1), plan.seeds)

    play = jax.jit(spread.evaluator(module, config, run.mesh, state, plan.seeds, plan.episodes))
    # the mean over episodes is taken on the devices: what comes back is whole on every process
    mean = jax.jit(lambda x: x.mean(-1), out_shardings=NamedSharding(run.mesh, PartitionSpec()))

    fit = run.fit(
        spread.many(module, config, run.mesh, state, plan.seeds),
        state,
        name=name,
        steps=iterations(config, env_steps),
        config=config,
        evaluate=lambda state: {"return": mean(play(starts, state))},
        eval_every=every,
        shard=spread.shard(run.mesh, plan.seeds),
        show="episode_return",
    )
    return Arm(fit, config)


def train_agent(run: Run, name: str, config: ReppoConfig, world: World, plan: Plan, env_steps: int) -> Arm:
    """`train` of REPPO with settings fitted to the world."""
    return train(run, name, agent, fitted(config, world), world, plan, env_steps)


def cells(values: np.ndarray) -> list[Any]:
    """Mean and the seeds, for a table."""
    return [float(values.mean()), " ".join(f"{v:.4g}" for v in values)]


def reliability(returns: np.ndarray, maximum: float, share: float = 0.9) -> float:
    """Share of seeds that reach `share` of the maximum and never fall below it at a later evaluation."""
    above = returns >= share * maximum
    kept = [bool(row.any() and row[int(np.argmax(row)) :].all()) for row in above]
    return float(np.mean(kept))
