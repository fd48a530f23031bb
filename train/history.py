"""metrics.jsonl: one line a logged step, shared by the fits of a run, cut back to the checkpoint when a run goes on."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np


def _plain(value: Any) -> Any:
    array = np.asarray(value)
    return array.item() if array.ndim == 0 else array.tolist()


class History:
    """The lines of one fit. `mark()` goes into a checkpoint; `rewind(mark)` drops what was written after it."""

    def __init__(
        self,
        path: Path,
        name: str,
        *,
        writes: bool = True,
        also: Callable[[str, int, dict[str, Any]], None] | None = None,
    ):
        self._path, self._name, self._writes, self._also = path, name, writes, also
        self._rows: list[tuple[str, int, dict[str, Any]]] = []
        self._file = None

    def rewind(self, mark: int | None) -> None:
        """Keeps this fit's first `mark` lines (None: none of them) and every line of other fits."""
        keep, kept = 0 if mark is None else mark, []
        self._rows = []
        if self._path.is_file():
            for line in self._path.read_text().splitlines():
                try:
                    row = json.loads(line)
                except ValueError:
                    continue  # the line that was being written when the process died
                if row["fit"] == self._name:
                    if len(self._rows) >= keep:
                        continue
                    values = {k: v for k, v in row.items() if k not in ("fit", "kind", "step", "time")}
                    self._rows.append((row["kind"], row["step"], values))
                kept.append(line)
            if self._writes:
                temporary = self._path.with_suffix(".part")
                temporary.write_text("".join(line + "\n" for line in kept))
                temporary.replace(self._path)
        if self._writes:
            self._file = open(self._path, "a", buffering=1)

    def mark(self) -> int:
        """How many lines this fit has; everything up to here is on disk."""
        if self._file is not None:
            self._file.flush()
        return len(self._rows)

    def add(self, step: int, values: dict[str, Any], kind: str = "train") -> None:
        """Appends one line."""
        values = {k: _plain(v) for k, v in values.items()}
        self._rows.append((kind, step, values))
        if self._file is not None:
            self._file.write(
                json.dumps({"fit": self._name, "kind": kind, "step": step, "time": round(time.time(), 3), **values})
                + "\n"
            )
        if self._also is not None:
            self._also(kind, step, values)

    def columns(self, kind: str) -> dict[str, np.ndarray]:
        """{step, metric…}: arrays over the lines of one kind (metrics that every line has)."""
        rows = [(step, values) for k, step, values in self._rows if k == kind]
        if not rows:
            return {"step": np.zeros(0, np.int64)}
        names = set(rows[0][1]).intersection(*(values for _, values in rows))
        return {"step": np.asarray([s for s, _ in rows])} | {
            n: np.asarray([v[n] for _, v in rows]) for n in sorted(names)
        }
