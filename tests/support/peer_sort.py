"""A peer that sorts with NumPy, for tests of the mechanism; `size` picks its misbehaviour: -1 raises, -2 ends, -3
sleeps."""

import os
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts" / "peers"))
from _serve import serve, threads


def prepare(size, inputs):
    print("libraries print what they like")
    if size == -1:
        raise ValueError("no such\nsize.")
    if size == -2:
        print("out of memory", file=sys.stderr, flush=True)
        os._exit(1)
    if size == -3:
        time.sleep(60)
    values = inputs["values"]
    return lambda: {"sorted": np.sort(values), "threads": np.int64(threads())}


if __name__ == "__main__":
    serve(prepare, packages=("numpy",))
