"""Timing ourselves beside a peer: same inputs, both warm, alternating, medians, growth with size, memory, equal
results.

A recipe's `bench(config, bench) -> [BenchTable]` gets a `Bench`. `bench.compare` times two callables, or a callable
and a process in another environment (`papyrax.train.peers`); `bench.measure` times one; `Stages` splits one call into
its parts.
"""

import contextlib
import ctypes
import dataclasses
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import numpy as np

from papyrax.train.errors import UserError
from papyrax.train.peers import PeerProcess, RemotePeer
from papyrax.train.report import cell, environment

Call = Callable[[], Any]


@dataclasses.dataclass(frozen=True)
class BenchTable:
    """One benchmark: rows of numbers or strings, how they were taken (`note`), and what they say (`headline`)."""

    name: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    note: str = ""
    headline: str = ""

    def __post_init__(self):
        for i, row in enumerate(self.rows):
            if len(row) != len(self.columns):
                raise ValueError(f"rows[{i}] of {self.name!r} has {len(row)} cells, wanted {len(self.columns)}.")


@dataclasses.dataclass(frozen=True)
class Timing:
    """Repeated calls: wall seconds (median and quartiles), CPU seconds of all threads (median), memory that a call
    takes on top (MB, or None where the system cannot tell)."""

    seconds: float
    low: float
    high: float
    cpu_seconds: float
    peak_mb: float | None


class Bench:
    """Times things on a fixed number of cores. Use as a context manager: peers' processes end with it.

    Args:
      cores: how many of the usable cores to keep to (None: all). All threads of this process and all peers started
        inside keep to them.
      say: told what is being timed.
    """

    def __init__(self, cores: int | None = None, say: Callable[[str], None] = lambda _: None):
        usable = (
            sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
        )
        if cores is not None and not 1 <= cores <= len(usable):
            raise ValueError(f"cores must lie in [1, {len(usable)}], the usable cores here, got {cores}.")
        self._usable, self.cores, self.say = usable, cores or len(usable), say
        self._peers: list[PeerProcess] = []

    def __enter__(self) -> "Bench":
        _keep_to(self._usable[: self.cores])
        return self

    def __exit__(self, *_: object) -> None:
        for peer in self._peers:
            peer.close()
        _keep_to(self._usable)

    def process(self, env: str, script: str, **options: Any) -> PeerProcess:
        """A peer in another environment (see `PeerProcess`) that ends with this benchmark."""
        self._peers.append(PeerProcess(env, script, **options))
        return self._peers[-1]

    def measure(self, call: Call, *, repeats: int = 7, warm: int = 2) -> Timing:
        """Times a call by itself; its result is waited for."""
        return _measure([_Local(call)], repeats, warm)[0]

    def compare(
        self,
        name: str,
        ours: Callable[[Any], Call],
        peer: Callable[[Any], Call] | RemotePeer,
        sizes: Sequence[float],
        *,
        repeats: int = 7,
        warm: int = 2,
        same: Callable[[Any, Any], bool | None],
        peer_name: str = "peer",
        unit: str = "size",
        note: str = "",
    ) -> BenchTable:
        """Times ours beside a peer over sizes.

        Args:
          ours, peer: for a size the call to time, everything built; a call's result is waited for
            (`jax.block_until_ready`).
          sizes: increasing numbers; growth is fitted from three on.
          repeats: timed calls of each, alternating (ours, peer, ours, peer, …) after `warm` calls of each.
          same: told both results once a size, before anything is timed; it returns False or raises AssertionError if
            they differ. A remote peer's result is a dict of arrays.
          peer_name, unit, note: words for the table.

        Returns:
          a table with a row a size: wall seconds of both, their ratio (peer / ours: above one, we are ahead), the same
            ratio of CPU seconds
          (which a busy machine disturbs less), and the memory that a call takes on top. The headline gives the ratio
          at the greatest size and both growth exponents (seconds ~ size^e, least squares on logarithms).

        Raises:
          ValueError: no sizes, sizes that do not increase, or fewer than one repeat.
          UserError: results differ, or the peer failed.
        """
        if not sizes or any(b <= a for a, b in pairwise(sizes)) or sizes[0] <= 0:
            raise ValueError(f"sizes must be positive and increase, got {list(sizes)}.")
        if repeats < 1 or warm < 1:
            raise ValueError(f"repeats and warm must be at least 1, got {repeats} and {warm}.")
        rows, timings = [], []
        for size in sizes:
            self.say(f"{name}: {unit} {size}")
            sides = [_Local(ours(size)), _Remote(peer, size) if isinstance(peer, RemotePeer) else _Local(peer(size))]
            for side in sides:
                side.once()
            _same(same, sides[0].result(), sides[1].result(), name, f"{unit} {size}", peer_name)
            a, b = _measure(sides, repeats, warm - 1)
            timings.append((a, b))
            rows.append(
                [
                    size,
                    a.seconds,
                    b.seconds,
                    b.seconds / a.seconds,
                    _ratio(b.cpu_seconds, a.cpu_seconds),
                    a.peak_mb,
                    b.peak_mb,
                ]
            )
        columns = [unit, "ours (s)", f"{peer_name} (s)", "ratio", "CPU ratio", "ours (MB)", f"{peer_name} (MB)"]
        said = [f"{rows[-1][3]:.2f} times as fast as {peer_name} at {unit} {sizes[-1]}"]
        if len(sizes) >= 3:
            grown = [growth(sizes, [pair[i].seconds for pair in timings]) for i in (0, 1)]
            said.append(f"time grows as {unit}^{grown[0]:.2f} (ours) and {unit}^{grown[1]:.2f} ({peer_name})")
        versions = peer.process.versions if isinstance(peer, RemotePeer) else {}
        how = f"medians of {repeats} alternating calls after {warm} to warm up, on {self.cores} cores"
        against = f"{peer_name} with " + ", ".join(f"{k} {v}" for k, v in versions.items()) if versions else ""
        said_note = "; ".join(part for part in (how, against, note) if part)
        return BenchTable(name, columns, rows, said_note, "; ".join(said))


class Stages:
    """Times the parts of a repeated call.

    Example: `stages = Stages()`, then in each call `with stages("search") as done: hits = done(search(q))` (`done`
      waits for a result on the
    device), and in the end `stages.table("one query")`.
    """

    def __init__(self):
        self.seconds: dict[str, list[float]] = {}

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[Callable[[Any], Any]]:
        begun = time.perf_counter()
        yield jax.block_until_ready
        self.record(name, time.perf_counter() - begun)

    def record(self, name: str, seconds: float) -> None:
        """Adds a time that was taken elsewhere."""
        self.seconds.setdefault(name, []).append(float(seconds))

    def table(self, name: str, note: str = "", skip: int = 0) -> BenchTable:
        """Calls, p50, p95, total and share of each stage, leaving out the first `skip` calls (compilation).

        Raises:
          ValueError: nothing is left.
        """
        kept = {stage: times[skip:] for stage, times in self.seconds.items() if times[skip:]}
        if not kept:
            raise ValueError(f"no stage has more than skip = {skip} calls, wanted at least one.")
        total = sum(map(sum, kept.values()))
        rows = [
            [
                stage,
                len(times),
                *(float(np.percentile(times, p)) for p in (50, 95)),
                sum(times),
                sum(times) / max(total, 1e-12),
            ]
            for stage, times in kept.items()
        ]
        slowest = max(rows, key=lambda row: row[4])
        return BenchTable(
            name,
            ["stage", "calls", "p50 (s)", "p95 (s)", "total (s)", "share"],
            rows,
            note,
            f"{slowest[0]} takes {100 * slowest[5]:.0f} % of {cell(total)} s",
        )


def growth(sizes: Sequence[float], seconds: Sequence[float]) -> float:
    """The exponent e of seconds ~ size^e, by least squares on logarithms.

    Raises:
      ValueError: fewer than three sizes.
    """
    if len(sizes) < 3:
        raise ValueError(f"growth needs at least three sizes, got {len(sizes)}.")
    return float(np.polyfit(np.log(np.asarray(sizes, float)), np.log(np.asarray(seconds, float)), 1)[0])


def execute(recipe: ModuleType, config: Any, say: Callable[[str], None] = lambda _: None) -> list[BenchTable]:
    """Runs a recipe's benchmarks on all usable cores."""
    with Bench(say=say) as bench:
        return list(recipe.bench(config, bench))


def record(tables: Sequence[BenchTable], preset: str) -> dict[str, Any]:
    """What `results/SYSTEM.json` keeps of benchmarks: preset, tables, versions, cores."""
    versions = environment()
    machine = {"cores": versions.pop("cores", None), "devices": versions.pop("devices", None)}
    return {
        "preset": preset,
        "tables": [dataclasses.asdict(t) for t in tables],
        "versions": versions,
        "machine": machine,
    }


def show(tables: Sequence[BenchTable]) -> None:
    """Prints the tables."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    for bench in tables:
        table = Table(title=bench.name, caption=bench.note or None)
        for i, column in enumerate(bench.columns):
            table.add_column(column, justify="left" if i == 0 else "right")
        for row in bench.rows:
            table.add_row(*map(cell, row))
        console.print(table)
        if bench.headline:
            console.print(bench.headline + "\n", highlight=False, markup=False)


class _Local:
    """A call in this process."""

    def __init__(self, call: Call):
        self._call, self._last = call, None

    def once(self) -> tuple[float, float]:
        self._last = None
        wall, cpu = time.perf_counter(), time.process_time()
        self._last = jax.block_until_ready(self._call())
        return time.perf_counter() - wall, time.process_time() - cpu

    def peak(self) -> float | None:
        self._last = None
        base = _reset_peak()
        self._last = jax.block_until_ready(self._call())
        return None if base is None else max(_memory("VmHWM") - base, 0.0)

    def result(self) -> Any:
        return self._last


class _Remote:
    """A call in a peer's process."""

    def __init__(self, peer: RemotePeer, size: Any):
        self._peer = peer
        peer.prepare(size)

    def once(self) -> tuple[float, float]:
        taken = self._peer.run()
        return taken["seconds"], taken["cpu_seconds"]

    def peak(self) -> float | None:
        return self._peer.process.ask("memory")["peak_mb"]

    def result(self) -> Any:
        return self._peer.result()


def _measure(sides: Sequence[_Local | _Remote], repeats: int, warm: int) -> list[Timing]:
    for _ in range(warm):
        for side in sides:
            side.once()
    taken: list[list[tuple[float, float]]] = [[] for _ in sides]
    for _ in range(repeats):
        for side, into in zip(sides, taken):
            into.append(side.once())
    out = []
    for side, times in zip(sides, taken):
        low, middle, high = (float(np.percentile([t[0] for t in times], p)) for p in (25, 50, 75))
        # memory takes a call of its own: giving freed pages back first would slow a timed one down
        out.append(Timing(middle, low, high, float(np.median([t[1] for t in times])), side.peak()))
    return out


def _same(
    same: Callable[[Any, Any], bool | None], ours: Any, theirs: Any, name: str, where: str, peer_name: str
) -> None:
    try:
        equal, why = same(ours, theirs), ""
    except AssertionError as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        equal, why = False, f" ({'; '.join(lines[:3])})" if lines else ""
    if equal is False:
        raise UserError(f"{name}: our result and that of {peer_name} differ at {where}{why}.")


def _ratio(a: float, b: float) -> float:
    return a / b if b > 0 else math.nan


def _keep_to(cores: Sequence[int]) -> None:
    """Lets all present threads of this process, and those to come, run on these cores alone."""
    if not hasattr(os, "sched_setaffinity"):
        return
    tasks = Path("/proc/self/task")
    for task in [int(path.name) for path in tasks.iterdir()] if tasks.is_dir() else [0]:
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(task, cores)
    os.sched_setaffinity(0, cores)


def _memory(field: str) -> float:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) / 1024 for line in file if line.startswith(field))


def _reset_peak() -> float | None:
    """Gives freed memory back and sets the peak to what is resident now, in MB; None where the system cannot."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
        return _memory("VmRSS")
    except (OSError, AttributeError):
        return None
