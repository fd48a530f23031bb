"""A run folder: lock, configuration, once, stop between items, refusals."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from papyrax.train.errors import Interrupted, RunFolderError
from papyrax.train.run import Run, default_folder
from tests.support.learners import Config


def open_run(folder, config=Config()):
    return Run(folder, system="toy", preset="smoke", config=config, quiet=True)


def test_a_second_process_is_refused(tmp_path):
    code = (
        "import sys\n"
        "from papyrax.train.run import Run\n"
        "from papyrax.train.errors import UserError\n"
        "from tests.support.learners import Config\n"
        "try:\n"
        "    Run(sys.argv[1], system='toy', preset='smoke', config=Config(), quiet=True).__enter__()\n"
        "except UserError as error:\n"
        "    print(error); sys.exit(error.exit_code)\n"
    )
    with open_run(tmp_path):
        done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 2 and "in use by another process" in done.stdout
    assert f"process {os.getpid()}" in done.stdout
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True).returncode == 0


def test_another_configuration_is_refused(tmp_path):
    with open_run(tmp_path):
        pass
    with pytest.raises(RunFolderError, match=r"config.rate was 0.05 and is now 0.5"):
        open_run(tmp_path, dataclasses.replace(Config(), rate=0.5)).__enter__()
    with open_run(tmp_path):  # the refused process let go of the lock
        pass


def test_an_unusable_folder_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFolderError, match="can't be used as a run folder"):
        open_run(tmp_path / "file" / "run").__enter__()
    with pytest.raises(RunFolderError, match="can't be used as a run folder"):
        open_run("/proc/papyrax").__enter__()


def test_a_broken_config_file_is_told(tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(RunFolderError, match="not readable JSON"):
        open_run(tmp_path).__enter__()


def test_once_keeps_values(tmp_path):
    value = {"a": np.arange(6.0).reshape(2, 3), "b": [1, "two", None, True], "c": {"d": jnp.float32(2.5)}}
    calls = []

    def fn():
        calls.append(1)
        return value

    for _ in range(2):
        with open_run(tmp_path) as run:
            found = run.once("stage/one", fn)
        np.testing.assert_array_equal(found["a"], value["a"])
        assert found["b"] == value["b"] and found["c"]["d"] == 2.5 and found["c"]["d"].dtype == np.float32
    assert len(calls) == 1
    with open_run(tmp_path) as run, pytest.raises(TypeError, match="a set can't be kept"):
        run.once("bad", lambda: {1, 2})


def test_progress_stops_between_items(tmp_path):
    done, before = [], signal.getsignal(signal.SIGINT)
    with pytest.raises(Interrupted), open_run(tmp_path) as run:
        for i in run.progress(range(10), "items"):
            done.append(i)
            if i == 3:
                os.kill(os.getpid(), signal.SIGINT)
    assert done == [0, 1, 2, 3]
    assert signal.getsignal(signal.SIGINT) is before


def test_frozen_files_are_named_by_hash(tmp_path):
    weights = tmp_path / "weights.bin"
    weights.write_bytes(b"1")
    with open_run(tmp_path / "run") as run:
        run.frozen_file("encoder", weights)
    record = json.loads((tmp_path / "run" / "config.json").read_text())
    assert record["frozen"]["encoder"]["file"] == "weights.bin" and len(record["frozen"]["encoder"]["sha256"]) == 64
    weights.write_bytes(b"2")
    with open_run(tmp_path / "run") as run, pytest.raises(RunFolderError, match="other weights"):
        run.frozen_file("encoder", weights)


def test_default_folders_do_not_collide(tmp_path):
    first = default_folder(tmp_path, "toy")
    first.mkdir(parents=True)
    assert default_folder(tmp_path, "toy") != first


def test_a_second_signal_stops_at_once_with_its_own_exit_code(tmp_path):
    with (
        pytest.raises(KeyboardInterrupt) as stopped,
        Run(tmp_path, system="toy", preset="smoke", config=Config(), quiet=True),
    ):
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
    assert stopped.value.args == (143,)
