"""The peer's side of a benchmark: answers the requests of `papyrax.train.peers` (standard library and NumPy alone).

A peer's script defines `prepare(size, inputs) -> run`, where `inputs` maps names to arrays and `run()` does the timed
work and returns its result (an array, or a dict, list or tuple of arrays), and ends with `serve(prepare,
packages=("torch",))`. Imports and building belong into the script's top and into `prepare`. A result with
`block_until_ready` is waited for inside the timing.
"""

import ctypes
import importlib.metadata
import json
import os
import sys
import tempfile
import time

import numpy as np


def threads():
    """The number of threads that the peer may use."""
    return int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1))


def serve(prepare, packages=()):
    """Answers requests until `close` or the end of the input."""
    # what libraries print must not get between the answers
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    versions = {"python": sys.version.split()[0], **{name: importlib.metadata.version(name) for name in packages}}
    state = {}
    for line in sys.stdin:
        request = json.loads(line)
        if request["op"] == "close":
            break
        try:
            answer = _answer(request, prepare, state, versions)
        except Exception as error:
            text = " ".join(str(error).split()).rstrip(".")
            answer = {"error": f"{type(error).__name__}: {text}." if text else f"{type(error).__name__}."}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _answer(request, prepare, state, versions):
    op = request["op"]
    if op == "hello":
        return {"versions": versions}
    if op == "prepare":
        state.clear()
        with np.load(request["inputs"], allow_pickle=False) as arrays:
            inputs = {name: arrays[name] for name in arrays.files}
        state["run"] = prepare(request["size"], inputs)
        return {}
    if op == "run":
        state.pop("result", None)
        wall, cpu = time.perf_counter(), time.process_time()
        state["result"] = _finished(state["run"]())
        return {"seconds": time.perf_counter() - wall, "cpu_seconds": time.process_time() - cpu}
    if op == "memory":
        state.pop("result", None)
        base = _reset_peak()
        state["result"] = _finished(state["run"]())
        return {"peak_mb": None if base is None else max(_memory("VmHWM") - base, 0.0)}
    if op == "result":
        handle, path = tempfile.mkstemp(suffix=".npz")
        with os.fdopen(handle, "wb") as file:
            np.savez(file, **_named(state["result"]))
        return {"result": path}
    raise ValueError(f"unknown request {op!r}")


def _finished(value):
    if hasattr(value, "block_until_ready"):
        return value.block_until_ready()
    for part in value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ():
        _finished(part)
    return value


def _named(value):
    if isinstance(value, dict):
        return {str(name): np.asarray(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return {f"arr_{i}": np.asarray(part) for i, part in enumerate(value)}
    return {"arr_0": np.asarray(value)}


def _memory(field):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) / 1024 for line in file if line.startswith(field))


def _reset_peak():
    """Gives freed memory back and sets the peak to what is resident now, in MB; None where the system cannot."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
        return _memory("VmRSS")
    except (OSError, AttributeError):
        return None
