"""Where a fit's batches come from: nothing, a pure function of the step, a grain iterator, or a function that reads the present State.

A background thread fetches and places the next batches while the device works. Each batch travels with the iterator state that follows it,
so a checkpoint holds the state after the last batch that was used, not after the last that was fetched.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import queue
import threading
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from papyrax.train.errors import UserError


@dataclasses.dataclass(frozen=True)
class WithState:
    """Batches that depend on the present State (host rollouts, mining): `fn(step, state) -> batch`; nothing is fetched ahead."""

    fn: Callable[[int, Any], Any]


class Source:
    """Hands out stacked batches one call at a time; `position()` goes into checkpoints and `seek` takes it back.

    Args:
      batches: None, `fn(step) -> pytree` (every process returns the same global batch), a grain dataset, loader or iterator (each process
        loads its own part), or WithState.
      place: puts a host batch on the devices; gets (batch, is_local).
      scan: batches stacked for one call of the device (a leading axis), 0 for none.
      depth: how many calls to fetch ahead.
    """

    def __init__(self, batches: Any, *, start: int, place: Callable[[Any, bool], Any], scan: int = 0, depth: int = 2):
        self._place, self._scan, self._depth, self._step = place, scan, depth, start
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._after: Any = None
        self._iterator = None
        if (
            batches is None
            or isinstance(batches, WithState)
            or (callable(batches) and not hasattr(batches, "__iter__"))
        ):
            self._fn = batches
        else:
            self._fn = None
            self._iterator = iter(batches)
            if not (hasattr(self._iterator, "get_state") and hasattr(self._iterator, "set_state")):
                raise UserError(
                    f"batches is a {type(batches).__name__} whose iterator has no get_state and set_state; wanted a grain dataset, a function of the step, or None"
                )

    def seek(self, position: Any) -> None:
        """Goes back to what `position()` returned, before the first batch is taken."""
        if self._iterator is not None and position is not None:
            self._iterator.set_state(_decode(position))
            self._after = position

    def position(self) -> Any:
        """JSON value: the iterator's state after the last batch handed out (None where the step says it all)."""
        return self._after

    def take(self, count: int, state: Any = None) -> Any:
        """The next `count` batches, placed (stacked along a leading axis when `scan` is above 0). Raises StopIteration at the data's end."""
        if self._fn is None and self._iterator is None:
            return None
        if isinstance(self._fn, WithState):
            batch = self._join([self._fn.fn(self._step + i, state) for i in range(count)])
            self._step += count
            return self._place(batch, False)
        if self._thread is None:
            self._queue: queue.Queue = queue.Queue(maxsize=self._depth)
            self._wanted: queue.Queue = queue.Queue()
            self._thread = threading.Thread(target=self._work, daemon=True)
            self._thread.start()
            for _ in range(self._depth):
                self._wanted.put(count)
        kind, value, after, size = self._queue.get()
        if kind == "error":
            raise value
        if size != count:
            raise UserError(
                f"the loop asked for {count} batches at once after asking for {size}; the count has to stay the same"
            )
        self._wanted.put(count)
        self._after = after
        return value

    def close(self) -> None:
        """Ends the background thread."""
        self._stop.set()
        if self._thread is not None:
            self._wanted.put(None)
            while self._thread.is_alive():
                try:
                    self._queue.get_nowait()
                except queue.Empty:
                    self._thread.join(timeout=0.01)

    def _work(self) -> None:
        step = self._step
        while not self._stop.is_set():
            count = self._wanted.get()
            if count is None:
                return
            try:
                if self._iterator is None:
                    assert callable(self._fn)
                    batch, after = self._join([self._fn(step + i) for i in range(count)]), None
                else:
                    batch = self._join([next(self._iterator) for _ in range(count)])
                    after = _encode(self._iterator.get_state())
                step += count
                self._queue.put(("batch", self._place(batch, self._iterator is not None), after, count))
            except BaseException as error:
                self._queue.put(("error", error, None, count))
                return

    def _join(self, batches: list[Any]) -> Any:
        if not self._scan:
            return batches[0]
        return jax.tree.map(lambda *leaves: np.stack([np.asarray(leaf) for leaf in leaves]), *batches)


def _encode(state: Any) -> Any:
    if isinstance(state, bytes):
        return {"bytes": base64.b64encode(state).decode()}
    return {"json": json.loads(json.dumps(state))}


def _decode(position: Any) -> Any:
    return base64.b64decode(position["bytes"]) if "bytes" in position else position["json"]
