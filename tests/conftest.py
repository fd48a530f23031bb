"""One place for what every test shares: the CPU platform, shape checks, and the record of outcomes that `papyrax list` reads."""

from __future__ import annotations

import fcntl
import json
import os
import tempfile
from pathlib import Path

import pytest

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("MPLBACKEND", "Agg")
os.environ.setdefault(
    "XLA_FLAGS", "--xla_backend_optimization_level=0"
)  # tests compile much and run little: a third of the time
_CACHE = tempfile.TemporaryDirectory(prefix="papyrax-test-")
os.environ.setdefault(
    "JAX_COMPILATION_CACHE_DIR", _CACHE.name
)  # programs of the processes that tests start compile once
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")

import jax  # noqa: E402

# Not in the long-lived workers themselves: writing one of thousands of executables has ended a worker by a segmentation fault.
jax.config.update("jax_enable_compilation_cache", False)

ROOT = Path(__file__).parent.parent
_OUTCOMES: dict[str, str] = {}


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    """Notes how each test ended, by file and function (a parametrised one fails when any case fails)."""
    outcome = yield
    report = outcome.get_result()
    if report.when == "call" or report.outcome != "passed":
        name = f"{Path(item.path).relative_to(ROOT)}::{item.originalname or item.name}"
        if _OUTCOMES.get(name) != "failed":
            _OUTCOMES[name] = report.outcome


def pytest_sessionfinish(session):
    """Merges the outcomes of this session (of this worker, where several run) into .proofs.json, which is not committed."""
    path = ROOT / ".proofs.json"
    with open(ROOT / ".proofs.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            before = json.loads(path.read_text()) if path.is_file() else {}
        except ValueError:
            before = {}
        before.update(_OUTCOMES)
        temporary = path.with_suffix(f".{os.getpid()}.part")
        temporary.write_text(json.dumps(before, indent=0, sort_keys=True))
        temporary.replace(path)


@pytest.fixture
def data_folder():
    """The data root (PAPYRAX_DATA), or a skip with the reason."""
    root = os.environ.get("PAPYRAX_DATA")
    if not root or not Path(root).is_dir():
        pytest.skip("PAPYRAX_DATA names no folder, so tests on real data are left out")
    return Path(root)
