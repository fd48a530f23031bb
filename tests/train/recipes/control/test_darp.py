"""DARP's experiment end to end at its smallest, on the first 64 rows of the real Hopper demonstrations; rules of the report on made-up returns."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from papyrax.envs import classic
from papyrax.envs.gymnasium_host import Episodes
from papyrax.methods.control.darp import bc, learner
from papyrax.methods.control.darp.config import BC_TASKS, TASKS, BCConfig
from papyrax.methods.control.darp.demos import fit_scalers, make_demos
from papyrax.train import compile as aot
from papyrax.train import recipe as recipes
from papyrax.train.errors import RunFolderError
from papyrax.train.recipes.control import darp, darp_arena, darp_drift, darp_extra, darp_report
from papyrax.train.report import read
from papyrax.train.run import Run

SMOKE = darp.PRESETS["smoke"]
SMALL = dataclasses.replace(SMOKE.darp, width=8, depth=1, epochs=2)
CONFIG = dataclasses.replace(
    SMOKE, darp_seeds=1, bc_seeds=1, bc=dataclasses.replace(SMOKE.bc, epochs=3), bc_long=True, mril=(0.1,), ensemble=2
)
DATA = Path(os.environ.get("PAPYRAX_DATA", ""))
needs_data = pytest.mark.skipif(not (DATA / "darp").is_dir(), reason="the demonstrations (data set darp) are not here")


def opened(folder, config=CONFIG):
    return Run(folder, system="darp", preset="smoke", config=config, quiet=True)


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    if not (DATA / "darp").is_dir():
        pytest.skip("the demonstrations (data set darp) are not here")
    folder = tmp_path_factory.mktemp("darp")
    with opened(folder) as run:
        recipes.execute(run, darp)
    return folder, *read(folder)


@pytest.mark.proof("darp", "run")
def test_the_report_compares_all_methods(report):
    folder, found, meta = report
    rows = {row[0]: row for row in found.tables[0].rows}
    assert list(rows) == [
        "DARP",
        "BC",
        "BC, epochs of DARP",
        "DARP, query",
        "MRIL",
        "retrieve and play",
        "nearest sequence",
        "locally weighted regression",
        "BC ensemble of 2",
    ]
    assert [rows[name][2] for name in ("DARP", "BC", "BC, epochs of DARP", "BC ensemble of 2")] == [4, 3, 4, 3]
    assert all(row[4] is None for row in rows.values())  # one seed has no spread
    assert all(np.isfinite(n.ours) for n in found.numbers) and all(n.spread is None for n in found.numbers)
    paper = {n.name: n.paper for n in found.numbers}
    assert paper["return of retrieve and play"] == 711.8 and paper["return of locally weighted regression"] == 1703.8
    assert paper["return of MRIL, mean of training seeds"] == 2793.6
    assert "return of the BC ensemble of 2" in paper
    assert {"learning.png", "methods.png", "film.gif"} <= {f.path.split("/")[1] for f in found.figures}
    assert all((folder / f.path).stat().st_size > 1000 for f in found.figures)
    assert meta["preset"] == "smoke"


@pytest.mark.proof("darp", "run")
def test_one_training_seed_settles_nothing(report):
    _, found, _ = report
    assert found.shown is None and "does not settle" in found.verdict
    assert "DARP 4, BC 3" in found.notes[0]
    assert "nor for the ensemble" in found.tables[0].note


@pytest.mark.proof("darp", "run")
def test_running_again_only_reads_and_a_lost_score_is_told(report):
    folder, found, _ = report
    with opened(folder) as run:
        again, _ = recipes.execute(run, darp)
    assert [n.ours for n in again.numbers] == [n.ours for n in found.numbers]
    kept = folder / "once" / "last__bc__0.npz"
    moved = kept.rename(kept.with_suffix(".away"))
    with opened(folder) as run, pytest.raises(RunFolderError, match="not the score of its last weights"):
        recipes.execute(run, darp)
    moved.rename(kept)


@pytest.mark.proof("darp", "run")
def test_checkpoints_and_the_loss_of_all_rows(report):
    """A checkpoint every 2 epochs and after the last one; the training loss is of the last weights over every row once."""
    folder, found, _ = report
    demos = darp_arena.demonstrations_of(DATA / "darp", "hopper", 64)
    with opened(folder) as run:
        arena = darp_arena.Arena(run, CONFIG)
        for name, train, cfg in (("darp", darp._darp, CONFIG.darp), ("bc", darp._bc, CONFIG.bc)):
            (arm,), memory = train(run, arena, name, demos, cfg, 1)
            method = {"darp": learner, "bc": bc}[name]
            np.testing.assert_array_equal(arm.epochs, [2, cfg.epochs])
            assert arm.curve.shape == (2,) and arm.selection == arm.curve.max()
            whole = jax.jit(method.loss, static_argnums=3)(arm.last_params, memory, jnp.arange(64), cfg)
            np.testing.assert_allclose(arm.loss, whole, rtol=1e-5)
            assert arm.loss == pytest.approx(next(r for r in found.tables[0].rows if r[0] == name.upper())[-1])


@needs_data
def test_rows_keep_the_starts_of_trajectories():
    demos = darp_arena.demonstrations_of(DATA / "darp", "halfcheetah", 1500)
    np.testing.assert_array_equal(demos.start, [0, 1000])
    assert demos.obs.shape[0] == 1500
    assert darp_arena.demonstrations_of(DATA / "darp", "halfcheetah", 900).start.tolist() == [0]


def test_a_task_wants_its_own_settings():
    for name, config in darp.PRESETS.items():
        darp.check(config)
        assert config.darp.epochs <= config.bc.epochs or config.task == "hopper", name  # the paper's clone has 120
    assert darp.PRESETS["study-walker"].darp == TASKS["walker"]
    assert all(BC_TASKS[task].epochs >= TASKS[task].epochs for task in ("walker", "halfcheetah", "ant"))
    study = darp.PRESETS["study"]
    for change, match in (
        ({"task": "walker"}, "darp holds the decay and ratio of hopper; take the preset study-walker"),
        ({"task": "walker", "darp": TASKS["walker"]}, "bc holds the learning_rate and weight_decay of hopper"),
        ({"task": "swimmer"}, "wanted one of hopper"),
        ({"ablations": ("nothing",)}, "ablations holds 'nothing'"),
        ({"checkpoint_epochs": 0}, "checkpoint_epochs is 0"),
        ({"swingup": darp_extra.SwingUp(env="pendulums")}, "wanted cartpole_swingup"),
    ):
        with pytest.raises(ValueError, match=match):
            darp.check(dataclasses.replace(study, **change))
    darp.check(dataclasses.replace(study, darp=dataclasses.replace(study.darp, k=50)))


def trained(*lasts, selections=None):
    """Arms with these returns of their last weights."""
    selections = lasts if selections is None else selections
    return [
        darp_arena.Trained(np.full(2, a), None, 0.1, np.full(2, a), None, s, 20, np.array([20, 40]), np.array([s, 0.0]))
        for a, s in zip(lasts, selections)
    ]


def test_the_verdict_needs_several_seeds():
    config = dataclasses.replace(darp.PRESETS["study"], darp_seeds=3, bc_seeds=3, ablations=())
    methods = {"DARP": trained(3000.0, 2000.0, 1000.0), "BC": trained(500.0, 400.0, 600.0)}
    numbers = darp_report.numbers(config, methods, {})
    assert numbers[0].spread == pytest.approx(1000.0)
    assert [n.reached for n in numbers] == [True, True, False, True]
    report = darp_report.conclude(config, "Hopper-v4", methods, 1.0, numbers, [])
    assert report.shown is True and "Missed: return of the selected clone." in report.verdict
    assert any("lambda 1" in note for note in report.notes)
    methods["DARP"] = methods["DARP"][:1]
    single = dataclasses.replace(config, darp_seeds=1)
    report = darp_report.conclude(single, "Hopper-v4", methods, None, darp_report.numbers(single, methods, {}), [])
    assert report.shown is None and report.numbers[0].spread is None


def test_the_failing_step_needs_no_density():
    shown = np.array([[1.0, -0.1], [1.5, 0.1]])
    inside, low, tilted = [1.2, 0.0], [0.9, 0.0], [1.2, 0.15]
    assert darp_drift.failing_step(np.array([inside, low, inside, tilted, low]), shown) == 3
    assert darp_drift.failing_step(np.array([inside, inside]), shown) == 1  # never outside: the last step
    assert darp_drift.failing_step(np.array([low, tilted]), shown) == 0


def test_drift_rolls_the_last_weights_and_names_what_left_the_data(monkeypatch):
    """An episode along the expert's path that is pushed off it at step 6; one that the world did not end is passed over."""
    rng = np.random.default_rng(0)
    walk = np.cumsum(0.1 * rng.normal(size=(60, 11)), 0).astype(np.float32)
    demos = make_demos(walk, rng.normal(size=(60, 3)), [0])
    cfg = dataclasses.replace(SMALL, k=10)
    clone = BCConfig(width=4, depth=1)
    last, chosen = (bc.init(jax.random.key(i), demos, clone).params for i in (0, 1))
    arm = dataclasses.replace(trained(1.0)[0], last_params=last, params=chosen)
    scalers = fit_scalers(demos, 0, 0)
    path = walk[20:30].copy()
    path[6:] += 50.0
    played = []

    def rollout(env, act, seeds, **options):
        assert options["record"] and len(seeds) == 2
        played.append(act(walk[:2, None], np.ones(2, np.int32), 0))
        obs = np.stack([np.concatenate([path, np.full((2, 11), np.nan, np.float32)]), walk[:12]])
        return Episodes(np.zeros(2), np.array([10, 12]), np.array([True, False]), obs=obs)

    monkeypatch.setattr(darp_drift, "host_rollout", rollout)

    class Kept:
        def once(self, name, fn):
            return fn()

    class Hopper:
        env = "Hopper-v4"

    config = dataclasses.replace(CONFIG, rollouts=2)
    found = darp_drift.drift(Kept(), Hopper(), arm, scalers, learner.prepare(demos, cfg), cfg, config)
    np.testing.assert_allclose(played[0], bc.act(last, scalers, walk[:2]), rtol=1e-5, atol=1e-6)
    assert [row[:4] for row in found["rows"]] == [[0, 10, 6, True]]
    assert found["curve"]["state"].shape == (10,) and found["curve"]["failing_step"] == 6
    assert (found["curve"]["state"][6:] < found["curve"]["state_threshold"]).all()


@needs_data
@pytest.mark.proof("darp", "run")
@pytest.mark.parametrize("name", list(darp.ABLATIONS))
def test_every_ablation_runs_through_the_recipe(name, tmp_path):
    config = dataclasses.replace(CONFIG, max_steps=2, rollouts=1, selection_rollouts=1)
    demos = darp_arena.demonstrations_of(DATA / "darp", "hopper", 24)
    cfg = dataclasses.replace(SMALL, epochs=1, lookback=1, k=4, **darp.ABLATIONS[name])
    with opened(tmp_path, config) as run:
        (arm,), _ = darp._darp(run, darp_arena.Arena(run, config), name, demos, cfg, 1)
    assert np.isfinite(arm.last).all() and np.isfinite(arm.loss) and arm.epochs.tolist() == [1]


@pytest.mark.proof("darp", "run")
def test_swinging_up_after_a_reppo_expert(tmp_path):
    expert = dataclasses.replace(
        darp_extra.SwingUp().expert, num_envs=4, steps=4, epochs=1, minibatches=1, hidden_actor=8, hidden_critic=8
    )
    setting = darp_extra.SwingUp(
        expert_steps=16,
        expert=expert,
        darp=dataclasses.replace(SMALL, k=6, epochs=1),
        bc=BCConfig(width=8, depth=1, epochs=1),
        seeds=1,
        episodes=2,
        steps=16,
    )
    with opened(tmp_path) as run:
        numbers, table = darp_extra.swingup(run, setting)
    assert np.isfinite([numbers[0].ours, numbers[0].baseline]).all() and len(table.rows) == 1
    assert "noise of 0.3" in numbers[0].note and numbers[0].spread is None


def test_start_states_are_moved():
    world = classic.cartpole_swingup()
    states = jax.vmap(world.reset)(jax.random.split(jax.random.key(0), 200))
    moved = darp_extra.disturbed(jax.random.key(1), states, 0.5)
    for name in ("x", "angle", "x_speed", "angle_speed"):
        change = np.asarray(getattr(moved, name) - getattr(states, name))
        assert 0.4 < change.std() < 0.6 and abs(change.mean()) < 0.15
    with pytest.raises(ValueError, match="wanted cartpole_swingup"):
        darp_extra.disturbed(jax.random.key(1), classic.Point(x=jnp.zeros(2), v=jnp.zeros(2)), 0.5)


@needs_data
@pytest.mark.proof("darp", "run")
def test_push_t_crosses_heads_with_aggregators(tmp_path):
    setting = darp_extra.PushT(1, 1, dataclasses.replace(SMALL, k=4, lookback=1, epochs=1, batch=128), modes=2)
    with opened(tmp_path) as run:
        numbers, table = darp_extra.push_t(run, setting)
    assert [row[0] for row in table.rows] == ["mean", "set"] and len(numbers) == 2
    assert all(np.isfinite([n.ours, n.baseline]).all() and "paper 1725" in n.note for n in numbers)


@pytest.mark.proof("darp", "run")
def test_the_smoothing_weight_is_chosen_on_held_out_rows(tmp_path):
    rng = np.random.default_rng(0)
    obs = rng.normal(size=(60, 3)).astype(np.float32)
    demos = make_demos(obs, np.tanh(obs[:, :1]), [0])
    with opened(tmp_path) as run:
        weight = darp.held_out_smoothing(
            run, demos, BCConfig(width=16, depth=1, epochs=80, neighbours=5), (0.0, 1000.0)
        )
    assert weight == 0.0  # a clone forced to be constant fits held-out rows worse
    assert bc.prepare(demos, BCConfig(smoothing=weight)).near.shape == (60, 0)


@pytest.mark.proof("darp", "scale")
def test_a_step_and_the_search_compile_for_a_slice():
    results = aot.execute(darp, dataclasses.replace(CONFIG, darp=dataclasses.replace(CONFIG.darp, k=24)), "v5e:2x2")
    assert [r.devices for r in results] == [4, 4]
    assert all(r.flops > 0 and r.memory.peak < 16 * 2**30 for r in results)
    assert sum(results[0].collective_bytes.values()) > 0
