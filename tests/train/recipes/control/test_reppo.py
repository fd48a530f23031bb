"""REPPO's experiment end to end at its smallest, and over eight devices."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from papyrax.envs import physics
from papyrax.methods.control.reppo import agent
from papyrax.train import recipe as recipes
from papyrax.train.errors import UserError
from papyrax.train.loop import Fit
from papyrax.train.recipes.control import reppo, reppo_arms, reppo_tasks
from papyrax.train.report import read
from papyrax.train.run import Run
from tests.support.processes import finish, start


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reppo")
    with Run(folder, system="reppo", preset="smoke", config=reppo.PRESETS["smoke"], quiet=True) as run:
        recipes.execute(run, reppo)
    return folder, *read(folder)


@pytest.mark.proof("reppo", "run")
def test_the_report_has_numbers_tables_and_figures(report):
    folder, found, meta = report
    names = [n.name for n in found.numbers]
    assert {
        "return, worst seed",
        "PPO return, best of its settings",
        "drop without the KL bound",
        "peak memory",
        "wall time of the whole run",
        "share of targets outside [vmin, vmax], last quarter of the training",
    } <= set(names)
    assert all(np.isfinite(n.ours) for n in found.numbers)
    maximum = next(n for n in found.numbers if n.name == "return, worst seed").note
    assert float(maximum.split("maximum ")[1]) == pytest.approx(186.6, abs=0.2)
    assert {f.path.split("/")[1] for f in found.figures} == {"learning.png", "traces.png", "episode.png", "film.gif"}
    assert all((folder / f.path).stat().st_size > 1000 for f in found.figures)
    assert [row[0] for row in found.tables[0].rows] == ["REPPO", "PPO, lr 0.001, 16 environments", "REPPO, no_kl"]
    assert meta["preset"] == "smoke" and meta["seed"] == 0


@pytest.mark.proof("reppo", "run")
def test_running_again_only_reads(report):
    folder, found, _ = report
    with Run(folder, system="reppo", preset="smoke", config=reppo.PRESETS["smoke"], quiet=True) as run:
        again, _ = recipes.execute(run, reppo)
    assert [n.ours for n in again.numbers] == [n.ours for n in found.numbers]


SMOKE = reppo.PRESETS["smoke"]


@pytest.mark.proof("reppo", "run")
@pytest.mark.parametrize("ablation_steps", [512, 4096], ids=["equal", "above"])
def test_ppo_is_not_trained_on_when_its_tuning_was_as_long(monkeypatch, ablation_steps):
    config = dataclasses.replace(SMOKE, env_steps=512, ablation_steps=ablation_steps, ppo_rates=(1e-3, 3e-4))
    asked = []

    def train(run, name, module, setting, world, plan, env_steps):
        asked.append((name, env_steps))
        return arm([[setting.lr]], config=setting)

    monkeypatch.setattr(reppo, "train", train)
    tuned, best = reppo._tune(None, config, None, None, min(config.ablation_steps, config.env_steps))
    assert best == (1e-3, 16) and len(tuned) == 2
    assert asked == [("ppo/lr0.001/envs16", 512), ("ppo/lr0.0003/envs16", 512)]
    longer = dataclasses.replace(config, env_steps=1024, ablation_steps=512)
    reppo._tune(None, longer, None, None, 512)
    assert asked[-1] == ("ppo/lr0.001/envs16", 1024) and len(asked) == 5


@pytest.mark.proof("reppo", "run")
def test_equal_budgets_run(tmp_path):
    config = dataclasses.replace(SMOKE, seeds=1, env_steps=256, ablation_steps=512, evaluations=1, eval_episodes=1)
    with Run(tmp_path, system="reppo", preset="smoke", config=config, quiet=True) as run:
        tuned, best = reppo._tune(
            run, config, physics.make(config.env), reppo_arms.Plan(1, 256, 1, 1), config.env_steps
        )
    assert tuned[best].steps[-1] == 256 and np.isfinite(tuned[best].returns).all()


def arm(returns, *, metrics=None, config=SMOKE.agent):
    """An arm with these evaluations [seeds, evaluations], one each iteration."""
    returns = np.asarray(returns, np.float32)
    evals = {"step": 1 + np.arange(returns.shape[1]), "return": returns.T}
    return reppo_arms.Arm(Fit(None, metrics or {}, evals, 1.0, 0.0, None, returns.shape[1]), config)


@pytest.mark.proof("reppo", "run")
def test_reliability_counts_seeds_that_stay():
    returns = np.asarray([[1, 9.5, 9.2], [9.5, 8, 9.5], [1, 2, 3], [1, 2, 9.9]])
    assert reppo_arms.reliability(returns, 10.0) == 0.5


@pytest.mark.proof("reppo", "run")
def test_an_arm_is_read_at_a_step_or_at_its_best_by_then():
    one = arm([[1, 9, 2, 10], [1, 7, 2, 10]])
    np.testing.assert_array_equal(one.steps, 256 * np.arange(1, 5))
    np.testing.assert_array_equal(one.at(700), [2, 2])
    np.testing.assert_array_equal(one.by(1023), [9, 7])
    np.testing.assert_array_equal(one.by(10), [1, 1])


@pytest.mark.proof("reppo", "run")
def test_the_claim_wants_more_return_and_no_less_reliability():
    config = dataclasses.replace(SMOKE, env="pendulums:2", env_steps=768, ablation_steps=512)
    metrics = {"target_outside": np.asarray([[0.9, 0.9]] * 7 + [[0.2, 0.1]])}
    steady, wild = arm([[5, 95, 96], [5, 95, 96]], metrics=metrics), arm([[95, 5, 99], [95, 5, 99]], metrics=metrics)

    def report(ours, theirs):
        numbers = reppo._numbers(config, ours, theirs, {}, 512, 100.0, main=False)
        return reppo._report(config, ours, theirs, 1, {}, 512, 100.0, numbers, [], main=False)

    found = report(steady, arm([[5, 50, 91], [5, 50, 92]], config=SMOKE.ppo))
    assert found.shown
    numbers = {n.name.split(" (")[0]: n for n in found.numbers}
    assert (numbers["reliability"].ours, numbers["reliability"].baseline) == (1.0, 1.0)
    late = numbers["interquartile mean of the last half of the evaluations"]
    assert late.ours > late.baseline > 0
    outside = numbers["share of targets outside [vmin, vmax], last quarter of the training"]
    assert outside.ours == pytest.approx(0.525)
    assert "vmax 40" in outside.note and "gamma 0.97" in outside.note and "widen config.agent.vmin" in outside.note
    assert not report(wild, arm([[5, 50, 91], [5, 50, 92]], config=SMOKE.ppo)).shown


@pytest.mark.proof("reppo", "run")
def test_the_note_on_ablations_gives_what_was_measured():
    config = dataclasses.replace(SMOKE, ablations=("mse", "no_aux"))
    ours = arm([[10, 20], [14, 24]])
    note = reppo._differences(config, ours, {"mse": arm([[9, 20], [9, 20]]), "no_aux": arm([[13, 20], [13, 20]])}, 256)
    assert "3 lower with the mean-squared-error critic and 1 higher without the auxiliary loss" in note
    assert "pendulums:4 at 256 steps" in note and "seeds of REPPO is 2." in note
    assert "study preset" in reppo._differences(SMOKE, ours, {}, 256)


@pytest.mark.proof("reppo", "run")
def test_the_wall_time_of_an_interrupted_run_is_not_told(tmp_path):
    config = dataclasses.replace(reppo.PRESETS["cpu"], seed=5)
    for name, whole in (("one", True), ("two", False)):
        with Run(tmp_path / name, system="reppo", preset="cpu", config=config, quiet=True) as run:
            number = reppo._wall(run, config, whole=whole)
            assert number.target == "<= 360" and (number.ours is None) != whole
            assert number.reached is (True if whole else None)
            assert reppo._wall(run, SMOKE, whole=True).target == ""


@pytest.mark.proof("reppo", "run")
@pytest.mark.parametrize(
    "change, told",
    [
        ({"seeds": 0}, "seeds must be at least 1"),
        ({"evaluations": 0}, "evaluations must be at least 1"),
        ({"eval_episodes": 0}, "eval_episodes must be at least 1"),
        ({"env_steps": 0}, "env_steps must be at least 1"),
        ({"ppo_rates": ()}, "ppo_rates must hold numbers above 0"),
        ({"ppo_rates": (-1.0,)}, "ppo_rates must hold numbers above 0"),
        ({"ppo_envs": ()}, "ppo_envs must hold numbers above 0"),
        ({"ppo_envs": (16, 16)}, "ppo_envs holds 16 twice"),
        ({"ablations": ("no_kl", "nokl")}, "ablations holds 'nokl'"),
    ],
)
def test_bad_settings_are_told_before_anything_runs(change, told):
    with pytest.raises(ValueError, match=told):
        dataclasses.replace(SMOKE, **change)


@pytest.mark.proof("reppo", "run")
@pytest.mark.parametrize(
    "change, told",
    [
        (
            {"env": "gymnax:CartPole-v1", "ablations": ("score_q",)},
            "ablations, 'score_q': policy 'score_q' needs continuous actions",
        ),
        (
            {"agent": dataclasses.replace(SMOKE.agent, image=(3, 3, 1))},
            r"agent: image \(3, 3, 1\) does not hold the 12",
        ),
        ({"ppo_envs": (3,), "ppo": dataclasses.replace(SMOKE.ppo, minibatches=32)}, "minibatches must divide the 48"),
        (
            {
                "tasks": (
                    reppo_tasks.Task("pendulums:1", 1, dataclasses.replace(SMOKE.agent, image=(3, 3, 1)), SMOKE.ppo),
                )
            },
            r"tasks, agent: image \(3, 3, 1\) does not hold the 3",
        ),
    ],
    ids=["discrete", "image", "minibatches", "task"],
)
def test_settings_that_do_not_fit_their_world_are_told(change, told):
    with pytest.raises(ValueError, match=told) as error:
        reppo.check(dataclasses.replace(SMOKE, **change))
    assert "\n" not in str(error.value)


@pytest.mark.proof("reppo", "run")
def test_presets_fit_their_worlds():
    for name in ("smoke", "cpu"):
        reppo.check(reppo.PRESETS[name])
    for task in reppo_tasks.TASKS:
        assert task.env_steps % (task.agent.num_envs * task.agent.steps) == 0, task.env


@pytest.mark.proof("reppo", "run")
def test_pictures_are_read_by_the_encoder():
    world = physics.make("gymnax:Breakout-MinAtar")
    assert world.picture == (10, 10, 4)
    config = reppo_arms.fitted(SMOKE.agent, world)
    assert config.image == (10, 10, 4)

    def step(key):
        return agent.update(agent.init(key, config, world), None, config)

    state, metrics = jax.eval_shape(step, jax.random.key(0))
    assert state.params["actor"]["encoder"]["conv"]["w"].shape == (3, 3, 4, 16)
    assert state.envs.obs.shape == (16, 400) and metrics["kl"].shape == ()
    assert reppo_arms.fitted(SMOKE.agent, physics.make("pendulums:4")).image is None


@pytest.mark.proof("reppo", "run")
def test_environments_that_devices_can_not_share_are_told():
    class Wide:
        mesh = jax.sharding.AbstractMesh((8,), ("data",))

    plan = reppo_arms.Plan(3, 1, 1, 1)
    config = dataclasses.replace(SMOKE.agent, num_envs=12)
    with pytest.raises(UserError, match="12 environments, which 8 devices can't share"):
        reppo_arms.train(Wide(), "reppo", agent, config, physics.make("pendulums:1"), plan, 1)


@pytest.mark.proof("reppo", "scale")
def test_seeds_are_dealt_out_so_that_cores_are_busy():
    from papyrax.train.recipes.control import spread

    assert [spread.cpu_devices(seeds, 2) for seeds in (1, 2, 3, 4, 97)] == [1, 2, 3, 2, 1]
    assert spread.cpu_devices(6, 4) == 6


@pytest.mark.proof("reppo", "scale")
def test_eight_devices_train(tmp_path):
    finish(start("tests.support.reppo_devices", tmp_path, devices=8))


@pytest.mark.proof("reppo", "scale")
def test_a_step_compiles_for_a_pod_slice():
    from papyrax.train import compile as aot

    config = dataclasses.replace(reppo.PRESETS["smoke"], seeds=1)
    results = aot.execute(reppo, config, "v5e:4x4")
    assert results[0].devices == 16 and results[0].flops > 0
    assert any("all-reduce" in kind for kind in results[0].collective_bytes)
    assert jax.devices()[0].platform == "cpu"
