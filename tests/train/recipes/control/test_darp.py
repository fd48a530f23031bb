"""DARP's experiment end to end at its smallest, on the first 64 rows of the real Hopper demonstrations."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from papyrax.methods.control.darp import bc
from papyrax.methods.control.darp.config import BCConfig
from papyrax.methods.control.darp.demos import make_demos
from papyrax.train import compile as aot
from papyrax.train import recipe as recipes
from papyrax.train.recipes.control import darp
from papyrax.train.report import read
from papyrax.train.run import Run

CONFIG = dataclasses.replace(darp.PRESETS["smoke"], darp_seeds=1, bc_seeds=1)


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    import os

    if not os.path.isdir(os.path.join(os.environ.get("PAPYRAX_DATA", ""), "darp")):
        pytest.skip("the demonstrations (data set darp) are not here")
    folder = tmp_path_factory.mktemp("darp")
    with Run(folder, system="darp", preset="smoke", config=CONFIG, quiet=True) as run:
        recipes.execute(run, darp)
    return folder, *read(folder)


@pytest.mark.proof("darp", "run")
def test_the_report_compares_all_methods(report):
    folder, found, meta = report
    methods = [row[0] for row in found.tables[0].rows]
    assert methods == [
        "DARP",
        "BC",
        "DARP, query",
        "retrieve and play",
        "nearest sequence",
        "locally weighted regression",
    ]
    assert all(np.isfinite(n.ours) for n in found.numbers)
    assert {"learning.png", "methods.png", "film.gif"} <= {f.path.split("/")[1] for f in found.figures}
    assert all((folder / f.path).stat().st_size > 1000 for f in found.figures)
    assert meta["preset"] == "smoke"


@pytest.mark.proof("darp", "run")
def test_running_again_only_reads(report):
    folder, found, _ = report
    with Run(folder, system="darp", preset="smoke", config=CONFIG, quiet=True) as run:
        again, _ = recipes.execute(run, darp)
    assert [n.ours for n in again.numbers] == [n.ours for n in found.numbers]


@pytest.mark.proof("darp", "run")
def test_the_smoothing_weight_is_chosen_on_held_out_rows(tmp_path):
    rng = np.random.default_rng(0)
    obs = rng.normal(size=(60, 3)).astype(np.float32)
    demos = make_demos(obs, np.tanh(obs[:, :1]), [0])
    with Run(tmp_path, system="darp", preset="smoke", config=CONFIG, quiet=True) as run:
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
