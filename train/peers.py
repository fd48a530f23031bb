"""Peers: other people's code that we time ourselves beside, run as a second process in an environment of its own.

`.peers/<env>/bin/python scripts/peers/<script>.py` speaks JSON lines: `{"op": "prepare", "size": n, "inputs":
"file.npz"}`, `{"op": "run"}` -> `{"seconds", "cpu_seconds"}`, `{"op": "memory"}` -> `{"peak_mb"}` (one untimed call),
`{"op": "result"}` -> `{"result": "file.npz"}`, `{"op": "close"}`. The clock is the peer's own, so that neither the
pipe nor the copying counts. The peer's side of it is `scripts/peers/_serve.py`.
"""

import contextlib
import json
import os
import select
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from papyrax.train.errors import UserError

ROOT = Path(__file__).resolve().parent.parent
_THREADS = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
)


class PeerError(UserError):
    """A peer's environment is not built, or its process failed, ended or was too slow."""


class PeerProcess:
    """A peer's process; started by the first request, ended by `close` or at the end of a `with`.

    Args:
      env: the environment's name: the folder under `.peers/`, built by `make peers` from `scripts/peers/<env>.txt`.
      script: the name of a file in `scripts/peers/`, without `.py`.
      timeout: seconds that a single request may take.
      python, file: another interpreter, another script.

    Raises:
      PeerError: the environment or the script is not there.
    """

    def __init__(
        self,
        env: str,
        script: str,
        *,
        timeout: float = 600.0,
        python: Path | str | None = None,
        file: Path | None = None,
    ):
        self.env, self.script, self.timeout = env, script, timeout
        self.python = Path(python) if python is not None else ROOT / ".peers" / env / "bin" / "python"
        self.file = file or ROOT / "scripts" / "peers" / f"{script}.py"
        if not self.python.exists():
            raise PeerError(f"The environment {env!r} of the peer {script!r} is not built: run make peers.")
        if not self.file.is_file():
            raise PeerError(f"There is no peer {script!r} in scripts/peers.")
        self.versions: dict[str, str] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._buffer = b""

    def __enter__(self) -> "PeerProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def on(self, inputs: Callable[[Any], Mapping[str, Any]]) -> "RemotePeer":
        """This peer as an argument of `Bench.compare`; `inputs(size)` gives the arrays that it gets, by name."""
        return RemotePeer(self, inputs)

    def ask(self, op: str, **arguments: Any) -> dict[str, Any]:
        """Sends a request and waits for its answer.

        Raises:
          PeerError: the peer reports an error, ended, or took longer than `timeout` (it is then killed).
        """
        if self._process is None:
            self._start()
        process = self._process
        assert process is not None and process.stdin is not None
        try:
            process.stdin.write(json.dumps({"op": op, **arguments}).encode() + b"\n")
            process.stdin.flush()
        except OSError:
            self._fail(f"ended before it was asked to {op}")
        answer = json.loads(self._line(op))
        if "error" in answer:
            raise PeerError(f"The peer {self.script!r} could not {op}: {answer['error']}")
        return answer

    def close(self) -> None:
        """Asks the process to end and kills it after two seconds."""
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(OSError):
            assert process.stdin is not None
            process.stdin.write(b'{"op": "close"}\n')
            process.stdin.close()
        try:
            process.wait(2)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        assert process.stdout is not None
        process.stdout.close()
        self._errors.close()

    def _start(self) -> None:
        cores = str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())
        # the peer sees its own packages alone, and as many threads as this process may use cores
        environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV", "PYTHONHOME")}
        environment |= dict.fromkeys(_THREADS, cores) | {"PYTHONUNBUFFERED": "1"}
        self._errors = tempfile.TemporaryFile()
        self._buffer = b""
        self._process = subprocess.Popen(
            [str(self.python), str(self.file)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=environment,
            cwd=self.file.parent,
        )
        self.versions = self.ask("hello").get("versions", {})

    def _line(self, op: str) -> bytes:
        assert self._process is not None and self._process.stdout is not None
        out, limit = self._process.stdout.fileno(), time.monotonic() + self.timeout
        while b"\n" not in self._buffer:
            left = limit - time.monotonic()
            if left <= 0 or not select.select([out], [], [], left)[0]:
                self._fail(f"took longer than {self.timeout:g} s to {op}")
            data = os.read(out, 65536)
            if not data:
                self._fail(f"ended while it was asked to {op}")
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _fail(self, what: str) -> NoReturn:
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        self.close()
        raise PeerError(f"The peer {self.script!r} {what}" + (f": {lines[-1].strip().rstrip('.')}." if lines else "."))


class RemotePeer:
    """A peer's process with the inputs that it gets at each size."""

    def __init__(self, process: PeerProcess, inputs: Callable[[Any], Mapping[str, Any]]):
        self.process, self.inputs = process, inputs

    def prepare(self, size: Any) -> None:
        """Hands over the inputs of one size and lets the peer build what it needs."""
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "inputs.npz")
            arrays: dict[str, Any] = {name: np.asarray(value) for name, value in self.inputs(size).items()}
            np.savez(path, **arrays)
            self.process.ask("prepare", size=size, inputs=path)

    def run(self) -> dict[str, float]:
        """One timed call: `seconds`, `cpu_seconds`."""
        return self.process.ask("run")

    def result(self) -> dict[str, np.ndarray]:
        """The arrays that the last call gave."""
        path = self.process.ask("result")["result"]
        try:
            with np.load(path, allow_pickle=False) as arrays:
                return {name: arrays[name] for name in arrays.files}
        finally:
            os.unlink(path)
