"""A run: its folder, lock, key, mesh, progress, fits, figures and results. What a recipe may not make itself, it gets from here.

    runs/<system>/<stamp>/  config.json  metrics.jsonl  events.*  checkpoints/  once/  items.jsonl  figures/  report.md  report.json

Killing the process at any instant and starting it again on the same folder continues it to the same numbers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import io
import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from papyrax.train import loop
from papyrax.train.errors import Interrupted, RunFolderError
from papyrax.train.files import write_atomic
from papyrax.train.history import History
from papyrax.train.report import Figure, save_figure, save_film
from papyrax.train.sharding import make_mesh


class Bar:
    """A progress bar on a terminal; a line every half minute elsewhere."""

    def __init__(self, console: Console, label: str, total: int | None, done: int, quiet: bool):
        self._label, self._total, self._done, self._quiet, self._console = label, total, done, quiet, console
        self._first, self._begun, self._told, self._status = done, time.monotonic(), time.monotonic(), ""
        self._progress = None
        if console.is_terminal and not quiet:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[rate]}"),
                TimeRemainingColumn(),
                TextColumn("{task.fields[status]}"),
            )
            self._progress = Progress(*columns, console=console, transient=True)
            self._task = self._progress.add_task(label, total=total, completed=done, rate="", status="")

    def __enter__(self) -> Bar:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(self, *_) -> None:
        if self._progress is not None:
            self._progress.stop()

    def rate(self) -> float:
        """Steps a second of this process."""
        return (self._done - self._first) / max(time.monotonic() - self._begun, 1e-9)

    def advance(self, count: int) -> None:
        """Counts finished steps."""
        if self._done == self._first:
            self._begun = time.monotonic()
            self._first = self._done + count
        self._done += count
        rate = f"{self.rate():.3g}/s" if self._done > self._first else ""
        if self._progress is not None:
            self._progress.update(self._task, completed=self._done, rate=rate)
        elif not self._quiet and time.monotonic() - self._told > 30:
            self._told = time.monotonic()
            of = "" if self._total is None else f" of {self._total}"
            self._console.print(f"{self._label}: {self._done}{of}  {rate}  {self._status}".rstrip(), highlight=False)

    def update(self, status: str) -> None:
        """Shows a word beside the bar."""
        self._status = status
        if self._progress is not None:
            self._progress.update(self._task, status=status)


def _config_dict(config: Any) -> dict[str, Any]:
    return json.loads(json.dumps(dataclasses.asdict(config), default=str))


def _difference(old: Any, new: Any, path: str = "") -> str | None:
    if isinstance(old, dict) and isinstance(new, dict):
        for name in sorted(set(old) | set(new)):
            found = _difference(old.get(name), new.get(name), f"{path}.{name}" if path else name)
            if found:
                return found
        return None
    return None if old == new else f"{path} was {old!r} and is now {new!r}"


class Run:
    """See the module. Use as a context manager; it holds the folder's lock and the signal handlers.

    Args:
      folder: the run folder; made when absent.
      system, preset: names, kept in config.json.
      config: the recipe's frozen dataclass; needs an integer `seed`.
      mesh: default: all devices along `data`.
      profile: (first step, number of steps) of the first fit that get a profiler trace.
      quiet: no progress and no messages.

    Raises RunFolderError: the folder can't be written, another process holds it, or it was made by another configuration.
    """

    def __init__(
        self,
        folder: Path,
        *,
        system: str,
        preset: str,
        config: Any,
        mesh: jax.sharding.Mesh | None = None,
        profile: tuple[int, int] | None = None,
        frozen_files: dict[str, Any] | None = None,
        quiet: bool = False,
    ):
        self.dir = Path(folder)
        self.system, self.preset, self.config, self.quiet = system, preset, config, quiet
        self.key = jax.random.key(config.seed)
        self.mesh = make_mesh() if mesh is None else mesh
        self.leads = jax.process_index() == 0
        self.console = Console(stderr=True, quiet=quiet or not self.leads)
        self.fits_started: dict[str, int] = {}
        self.figures: list[Figure] = []
        self._began, self._wall_before = time.monotonic(), 0.0
        self._profile = profile
        self._signal = 0
        self._handlers: dict[int, Any] = {}
        self._lock = None
        self._events = None
        self._frozen_files: dict[str, Any] = dict(frozen_files or {})

    def __enter__(self) -> Run:
        try:
            self.dir.mkdir(parents=True, exist_ok=True)
            if self.leads:
                self._lock = open(self.dir / ".lock", "a+")
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = (self.dir / ".lock").read_text().strip()
            raise RunFolderError(
                f"{self.dir} is in use by another process ({holder or 'unknown'}); wait for it or choose another folder"
            ) from None
        except OSError as error:
            raise RunFolderError(f"{self.dir} can't be used as a run folder: {error.strerror or error}") from error
        try:
            self._open()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _open(self) -> None:
        if self._lock is not None:
            self._lock.truncate(0)
            self._lock.write(f"process {os.getpid()}")
            self._lock.flush()
            record = {"system": self.system, "preset": self.preset, "config": _config_dict(self.config)}
            path = self.dir / "config.json"
            if path.is_file():
                try:
                    before = json.loads(path.read_text())
                except ValueError:
                    raise RunFolderError(f"{path} is not readable JSON; this does not look like a run folder") from None
                for name in ("system", "config"):
                    difference = _difference(before.get(name), record[name], name)
                    if difference:
                        raise RunFolderError(
                            f"{self.dir} holds a run of another configuration: {difference}; choose another folder"
                        )
                self._frozen_files = before.get("frozen", {})
            else:
                write_atomic(path, json.dumps({**record, "frozen": self._frozen_files}, indent=1) + "\n")
        wall = self.dir / ".wall"
        self._wall_before = float(wall.read_text()) if wall.is_file() else 0.0
        for number in (signal.SIGINT, signal.SIGTERM):
            with contextlib.suppress(ValueError):  # not the main thread: signals stay with whoever owns them
                self._handlers[number] = signal.signal(number, self._on_signal)

    def __exit__(self, *_) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers = {}
        if self._events is not None:
            self._events.close()
            self._events = None
        if self._lock is not None:
            with contextlib.suppress(OSError, RunFolderError):
                write_atomic(self.dir / ".wall", f"{self.wall_seconds():.3f}")
            self._lock.close()
            self._lock = None

    def _on_signal(self, number: int, _frame: Any) -> None:
        if self._signal:
            raise KeyboardInterrupt(128 + number)
        self._signal = number
        self.say(f"{signal.Signals(number).name}: saving, then stopping (again to stop at once)")

    def stop_signal(self, step: int = 0) -> int:
        """The signal that asked this run to stop (0: none). Processes of one run agree on the step."""
        if jax.process_count() > 1:
            from jax.experimental import multihost_utils

            if step % 16 == 0:
                asked = int(np.max(multihost_utils.process_allgather(np.int32(self._signal))))
                return asked
            return 0
        return self._signal

    def check_stop(self) -> None:
        """Raises Interrupted when a signal has come; host stages call it between items."""
        if self._signal and jax.process_count() == 1:
            raise Interrupted(self._signal, "stopped between two items")

    def wall_seconds(self) -> float:
        """Wall time that this run has taken in all the processes that worked on it and ended (a killed one's is lost)."""
        return self._wall_before + time.monotonic() - self._began

    def fit(self, update: Callable, state: Any, batches: Any = None, **options: Any) -> loop.Fit:
        """`papyrax.train.loop.fit` on this run; see there for the arguments."""
        return loop.fit(self, update, state, batches, **options)

    def history(self, name: str) -> History:
        """The lines of the fit `name` in metrics.jsonl, also sent to TensorBoard."""

        def also(kind: str, step: int, values: dict[str, Any]) -> None:
            for metric, value in values.items():
                self._event(
                    f"{name}/{metric}" if kind == "train" else f"{name}/{kind}/{metric}", float(np.mean(value)), step
                )

        return History(self.dir / "metrics.jsonl", name, writes=self.leads, also=also if self.leads else None)

    def _event(self, tag: str, value: float, step: int) -> None:
        if self._events is None:
            from tensorboardX import SummaryWriter

            self._events = SummaryWriter(str(self.dir), flush_secs=10)
        self._events.add_scalar(tag, value, step)

    def log(self, name: str, step: int, metrics: dict[str, Any]) -> None:
        """One line in metrics.jsonl outside any fit."""
        if self.leads:
            line = {"fit": name, "kind": "log", "step": step, "time": round(time.time(), 3)}
            with open(self.dir / "metrics.jsonl", "a") as file:
                file.write(json.dumps(line | {k: np.asarray(v).tolist() for k, v in metrics.items()}) + "\n")

    def once(self, name: str, fn: Callable[[], Any]) -> Any:
        """The value of `fn()`, computed once a run folder: a pytree of dicts, lists, numbers, strings and arrays (returned as NumPy)."""
        path = self.dir / "once" / f"{re.sub(r'[^A-Za-z0-9_.-]', '__', name)}.npz"
        if path.is_file():
            return _unpack(path)
        self.check_stop()
        value = fn()
        if self.leads:
            arrays: list[np.ndarray] = []
            tree = _pack(value, arrays)
            buffer = io.BytesIO()
            np.savez_compressed(buffer, tree=np.asarray(json.dumps(tree)), **{f"a{i}": a for i, a in enumerate(arrays)})
            write_atomic(path, buffer.getvalue())
        kept: list[np.ndarray] = []
        return _build(json.loads(json.dumps(_pack(value, kept))), kept)

    def data(self, name: str) -> Path:
        """The folder of a data set. Raises MissingData, which says what is missing and where it comes from."""
        from papyrax.train.data.catalogue import need

        return need(name)

    def frozen_file(self, name: str, path: Path) -> None:
        """Names a file of frozen weights, with its SHA-256, in config.json."""
        digest = hashlib.sha256(Path(path).read_bytes()).hexdigest()
        if self._frozen_files.get(name, {}) == {"file": Path(path).name, "sha256": digest}:
            return
        if name in self._frozen_files:
            raise RunFolderError(f"{self.dir} was begun with other weights under {name!r}; choose another folder")
        self._frozen_files[name] = {"file": Path(path).name, "sha256": digest}
        if self.leads:
            record = json.loads((self.dir / "config.json").read_text())
            write_atomic(
                self.dir / "config.json", json.dumps({**record, "frozen": self._frozen_files}, indent=1) + "\n"
            )

    def figure(self, figure: Any, name: str, title: str, caption: str = "") -> Figure:
        """Saves a matplotlib figure as figures/<name>.png."""
        made = Figure(f"figures/{name}.png", title, caption)
        if self.leads:
            save_figure(figure, self.dir / made.path)
        self.figures.append(made)
        return made

    def film(self, frames: np.ndarray, name: str, title: str, caption: str = "", fps: int = 25) -> Figure:
        """Saves uint8 frames [t, h, w, 3] as figures/<name>.gif."""
        made = Figure(f"figures/{name}.gif", title, caption)
        if self.leads:
            save_film(frames, self.dir / made.path, fps)
        self.figures.append(made)
        return made

    def bar(self, label: str, total: int | None = None, done: int = 0) -> Bar:
        """A progress bar."""
        return Bar(self.console, label, total, done, self.quiet or not self.leads)

    def progress(self, items: Iterable[Any], label: str, total: int | None = None) -> Iterator[Any]:
        """Passes the items on, under a progress bar; stops between items on a signal."""
        if total is None and hasattr(items, "__len__"):
            total = len(items)  # type: ignore[arg-type]
        with self.bar(label, total) as bar:
            for item in items:
                self.check_stop()
                yield item
                bar.advance(1)

    @contextlib.contextmanager
    def profiling(self, step: int) -> Iterator[None]:
        """Traces the calls that `profile` asks for, into profile/ (for xprof or TensorBoard)."""
        if self._profile is not None and step >= self._profile[0]:
            count = self._profile[1]
            if not hasattr(self, "_trace_until"):
                jax.profiler.start_trace(str(self.dir / "profile"))
                self._trace_until = step + count
            yield
            if step + 1 >= self._trace_until:
                jax.profiler.stop_trace()
                self._profile = None
                self.say(f"profile written to {self.dir / 'profile'}")
            return
        yield

    def say(self, text: str) -> None:
        """One line for the person who watches."""
        self.console.print(text, highlight=False, markup=False)


def _pack(value: Any, arrays: list[np.ndarray]) -> Any:
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise TypeError(f"a key is {key!r}; run.once keeps dicts whose keys are strings")
        return {"d": {k: _pack(v, arrays) for k, v in value.items()}}
    if isinstance(value, (list, tuple)):
        return {"l": [_pack(v, arrays) for v in value]}
    if value is None or isinstance(value, (bool, int, float, str)):
        return {"v": value}
    if isinstance(value, (np.ndarray, np.generic, jax.Array)):
        arrays.append(np.asarray(value))
        return {"a": len(arrays) - 1}
    raise TypeError(
        f"a {type(value).__name__} can't be kept by run.once; wanted dicts, lists, numbers, strings and arrays"
    )


def _build(tree: Any, arrays: Any) -> Any:
    if "d" in tree:
        return {k: _build(v, arrays) for k, v in tree["d"].items()}
    if "l" in tree:
        return [_build(v, arrays) for v in tree["l"]]
    return arrays[tree["a"]] if "a" in tree else tree["v"]


def _unpack(path: Path) -> Any:
    with np.load(path, allow_pickle=False) as file:
        tree = json.loads(str(file["tree"]))
        count = len(file.files) - 1
        return _build(tree, [file[f"a{i}"] for i in range(count)])


def default_folder(root: Path, system: str) -> Path:
    """runs/<system>/<stamp>, a name not taken yet."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    folder, i = root / system / stamp, 1
    while folder.exists():
        folder, i = root / system / f"{stamp}-{i}", i + 1
    return folder
