"""One device = eight devices = two processes; a run may go on with another number of devices; kill -9 loses only time."""

from __future__ import annotations

import random

import numpy as np
import pytest

from papyrax.train.run import Run
from tests.support.learners import Config, batch, init, update
from tests.support.processes import finish, joined, start

# Splitting the batch's mean over devices sums it in another order: float32 rounding, some 1e-7 a step, over 40 steps.
TOLERANCE = {"rtol": 2e-5, "atol": 2e-6}


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    with Run(tmp_path_factory.mktemp("single"), system="toy", preset="smoke", config=Config(), quiet=True) as run:
        return run.fit(update, init(run.key, Config()), batch, name="a/0", steps=40, config=Config())


def test_eight_devices_and_back_to_one(single, tmp_path):
    half, whole = tmp_path / "half.npz", tmp_path / "whole.npz"
    finish(start("tests.support.fit_process", tmp_path / "run", 20, "2,2,2", half, devices=8))
    finish(start("tests.support.fit_process", tmp_path / "run", 40, "1,1,1", whole, devices=1))
    with np.load(half) as a, np.load(whole) as b:
        assert int(a["devices"]) == 8 and int(b["devices"]) == 1 and int(b["resumed"]) == 20
        np.testing.assert_allclose(b["w"], single.state.w, **TOLERANCE)
        np.testing.assert_allclose(b["loss"], single.metrics["loss"], rtol=1e-3, atol=1e-6)


def test_two_processes(single, tmp_path):
    out = tmp_path / "out.npz"
    joined("tests.support.fit_process", tmp_path / "run", 40, "2,2,2", out, processes=2, devices=4)
    with np.load(out) as found:
        assert int(found["devices"]) == 8
        np.testing.assert_allclose(found["w"], single.state.w, **TOLERANCE)
        np.testing.assert_allclose(found["loss"], single.metrics["loss"], rtol=1e-3, atol=1e-6)


def test_kill_9_at_random_steps_changes_nothing(tmp_path):
    rng = random.Random(0)
    with Run(tmp_path / "whole", system="toy", preset="smoke", config=Config(), quiet=True) as run:
        whole = run.fit(update, init(run.key, Config()), batch, name="a/0", steps=90, config=Config())
    for stop in (rng.randrange(12, 45), rng.randrange(46, 85)):
        process = start("tests.support.fit_killed", tmp_path / "cut", 90)
        for line in process.stdout:
            if line.strip().isdigit() and int(line) >= stop:
                break
        process.kill()
        process.communicate()
    with Run(tmp_path / "cut", system="toy", preset="smoke", config=Config(), quiet=True) as run:
        cut = run.fit(update, init(run.key, Config()), batch, name="a/0", steps=90, config=Config())
    assert cut.resumed_from is not None and cut.resumed_from >= 10
    np.testing.assert_array_equal(cut.state.w, whole.state.w)
    np.testing.assert_array_equal(cut.metrics["loss"], whole.metrics["loss"])
