"""Both optimisation recipes: the smoke preset end to end, resumption, eight devices, compilation, benchmarks."""

import dataclasses
import importlib
from pathlib import Path

import jax
import numpy as np
import pytest

from papyrax.train import recipe as runner
from papyrax.train.bench import Bench
from papyrax.train.compile import compile_target
from papyrax.train.run import Run
from papyrax.train.sharding import make_mesh
from tests.support.optimization_devices import metrics
from tests.support.processes import finish, start

ROOT = Path(__file__).parents[4]
SYSTEMS = ("clipped_sgd", "riemannian_frank_wolfe")


def module(system):
    return importlib.import_module(f"papyrax.train.recipes.optimization.{system}")


def executed(system, folder):
    recipe = module(system)
    with Run(folder, system=system, preset="smoke", config=recipe.PRESETS["smoke"], quiet=True) as run:
        return runner.execute(run, recipe)[0]


def smoke(system, tmp_path):
    report = executed(system, tmp_path)
    assert report.claim and report.verdict and len(report.numbers) >= 6 and report.tables
    assert (tmp_path / "report.json").is_file() and len(report.figures) >= 4
    assert all((tmp_path / figure.path).is_file() for figure in report.figures)
    again = executed(system, tmp_path)
    assert [n.ours for n in again.numbers] == [n.ours for n in report.numbers]
    assert all(n.ours is None or np.isfinite(n.ours) for n in report.numbers if "factor" not in n.name)


@pytest.mark.proof("clipped_sgd", "run")
def test_clipped_sgd_smoke_and_resumption(tmp_path):
    smoke("clipped_sgd", tmp_path)


@pytest.mark.proof("riemannian_frank_wolfe", "run")
def test_riemannian_frank_wolfe_smoke_and_resumption(tmp_path):
    smoke("riemannian_frank_wolfe", tmp_path)


def eight_devices(system, tmp_path):
    finish(start("tests.support.optimization_devices", system, tmp_path / "out.npz", devices=8))
    alone = metrics(system)
    with np.load(tmp_path / "out.npz") as found:
        assert int(found["devices"]) == 8
        for name, value in alone.items():
            # Runs do not talk to each other: only fused arithmetic inside a run may round differently.
            np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.proof("clipped_sgd", "scale")
def test_clipped_sgd_on_eight_devices(tmp_path):
    eight_devices("clipped_sgd", tmp_path)


@pytest.mark.proof("riemannian_frank_wolfe", "scale")
def test_riemannian_frank_wolfe_on_eight_devices(tmp_path):
    eight_devices("riemannian_frank_wolfe", tmp_path)


@pytest.mark.proof("clipped_sgd", "scale")
@pytest.mark.proof("riemannian_frank_wolfe", "scale")
@pytest.mark.parametrize("system", SYSTEMS)
def test_targets_compile(system):
    target = module(system).compile_targets(module(system).PRESETS["smoke"], make_mesh(jax.devices()[:1]))[0]
    result = compile_target(target)
    assert result.devices == 1 and result.memory.arguments > 0


@pytest.mark.proof("clipped_sgd", "bench")
@pytest.mark.proof("riemannian_frank_wolfe", "bench")
@pytest.mark.parametrize(("system", "env"), [("clipped_sgd", "torch"), ("riemannian_frank_wolfe", "geometry")])
def test_benchmarks_run_and_agree_with_their_peers(system, env):
    if not (ROOT / ".peers" / env / "bin" / "python").exists():
        pytest.skip(f"the peers' environment {env!r} is not built: run make peers")
    with Bench() as bench:
        tables = module(system).bench(module(system).PRESETS["smoke"], bench)
    assert len(tables) >= 3 and all(len(t.rows) == 3 and t.headline for t in tables)


@pytest.mark.parametrize("system", SYSTEMS)
def test_presets_are_named_and_configs_hash(system):
    presets = module(system).PRESETS
    assert set(presets) == {"smoke", "cpu", "study", "paper"}
    for config in presets.values():
        assert dataclasses.is_dataclass(config) and isinstance(config.seed, int) and hash(config) is not None
