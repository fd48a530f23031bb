"""REPPO's experiment end to end at its smallest, and over eight devices."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from papyrax.train import recipe as recipes
from papyrax.train.recipes.control import reppo
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


@pytest.mark.proof("reppo", "run")
def test_reliability_counts_seeds_that_stay():
    returns = np.asarray([[1, 9.5, 9.2], [9.5, 8, 9.5], [1, 2, 3], [1, 2, 9.9]])
    assert reppo.reliability(returns, 10.0) == 0.5


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
