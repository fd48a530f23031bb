"""What a run says in the end: numbers beside the baseline's and the paper's, tables, figures, one honest verdict.

`write` puts `report.md` (to read) and `report.json` (to compute with) into a run folder; `read` gets the report
back; `publish` merges the numbers into `results/SYSTEM.json`, which is committed and therefore never holds a path or
a name of the machine. The HTML page over all runs is `papyrax.train.page`, the drawing of common figures
`papyrax.train.figures`.
"""

import contextlib
import dataclasses
import fcntl
import importlib.metadata
import json
import math
import os
import platform
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from papyrax.train.files import write_atomic

_TARGET = re.compile(r"^\s*(>=|<=|>|<|==|=)\s*([-+]?[0-9]*\.?[0-9]+(?:[eE][-+]?[0-9]+)?)\s*(%?)\s*$")
_WORDS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


@dataclasses.dataclass(frozen=True)
class Number:
    """One claim in figures: ours, the baseline's from the same run, the paper's.

    `spread` is the half-width or standard deviation over seeds (the note says which); `target` is a bound such as
    `">= 168"`, from which `met` is worked out when it is not given.
    """

    name: str
    ours: float | int | None
    baseline: float | int | None = None
    paper: float | int | str | None = None
    unit: str = ""
    target: str = ""
    met: bool | None = None
    spread: float | None = None
    note: str = ""

    @property
    def reached(self) -> bool | None:
        """`met` if it was given, else ours against `target`; None when there is nothing to compare."""
        if self.met is not None:
            return bool(self.met)
        match = _TARGET.match(self.target)
        if not match or self.ours is None:
            return None
        sign, bound, ours = match[1], float(match[2]), float(self.ours)
        if sign in ("=", "=="):
            return ours == bound
        return {">=": ours >= bound, "<=": ours <= bound, ">": ours > bound, "<": ours < bound}[sign]


@dataclasses.dataclass(frozen=True)
class Table:
    """A titled table; every row has one cell a column (numbers, strings, booleans or None)."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    note: str = ""

    def __post_init__(self):
        for i, row in enumerate(self.rows):
            if len(row) != len(self.columns):
                raise ValueError(f"rows[{i}] of table {self.title!r} has {len(row)} cells, wanted {len(self.columns)}.")


@dataclasses.dataclass(frozen=True)
class Figure:
    """A picture or film on disk."""

    path: Path | str
    title: str
    caption: str = ""


@dataclasses.dataclass(frozen=True)
class Report:
    """A run's result. `shown`: did the paper's claim show at this scale (None: not tested here); `verdict` says why
    or why not."""

    claim: str
    shown: bool | None
    verdict: str
    numbers: Sequence[Number]
    tables: Sequence[Table] = ()
    figures: Sequence[Figure] = ()
    notes: Sequence[str] = ()


def environment() -> dict[str, Any]:
    """Versions and the plain facts of this machine that a number depends on; nothing that names the machine.

    Returns a dict with `python`, `papyrax`, `jax`, `jaxlib`, `numpy`, `platform` (such as "Linux x86_64"), `cores`
    (usable by this process), and, if JAX has been started, `devices` (such as "1 x cpu").
    """
    versions: dict[str, Any] = {"python": platform.python_version()}
    for package in ("papyrax", "jax", "jaxlib", "numpy"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    versions["platform"] = f"{platform.system()} {platform.machine()}"
    affinity = getattr(os, "sched_getaffinity", None)
    versions["cores"] = len(affinity(0)) if affinity else os.cpu_count()
    if "jax" in sys.modules:
        import jax

        devices = jax.devices()
        versions["devices"] = f"{len(devices)} x {devices[0].device_kind}"
    return versions


def plain(value: Any) -> Any:
    """JSON values of numbers, arrays, dataclasses, paths and nested containers; NaN and infinities become the words
    "nan", "inf", "-inf"."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, str | bool | int) or value is None:
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Path):
        return value.as_posix()
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(v) for v in (sorted(value) if isinstance(value, set | frozenset) else value)]
    if hasattr(value, "__array__"):
        return plain(np.asarray(value).tolist())
    return str(value)


def write(report: Report, folder: Path | str, meta: Mapping[str, Any]) -> None:
    """Writes `report.md` and `report.json` into a run folder, each in one step.

    Args:
      report: the report; figure paths may be absolute or relative to `folder`, and are stored relative to it.
      folder: the run folder.
      meta: `system`, `preset`, `seed`, `wall_s` (seconds); `versions` is filled by `environment()` when absent;
        further keys are kept.
    """
    folder = Path(folder)
    meta = {"versions": environment(), **meta}
    figures = [dataclasses.replace(f, path=_relative(f.path, folder)) for f in report.figures]
    report = dataclasses.replace(report, figures=figures)
    write_atomic(
        folder / "report.json",
        json.dumps({"meta": plain(meta), "report": plain(report)}, indent=1, allow_nan=False) + "\n",
    )
    write_atomic(folder / "report.md", markdown(report, meta))


def read(folder: Path | str) -> tuple[Report, dict[str, Any]]:
    """The report of a run folder and its meta.

    Raises:
      FileNotFoundError: the folder has no report yet.
      ValueError: the file is not a report.
    """
    path = Path(folder) / "report.json"
    if not path.exists():
        raise FileNotFoundError(f"{Path(folder)} holds no report.json: the run has not ended yet.")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        body = data["report"]
        parts: dict[str, Any] = {
            "numbers": [Number(**_unworded(n)) for n in body["numbers"]],
            "tables": [Table(**t) for t in body["tables"]],
            "figures": [Figure(**f) for f in body["figures"]],
        }
        return Report(**(body | parts)), data["meta"]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a report ({error}).") from error


def publish(report: Report, system: str, preset: str, results_dir: Path | str, meta: Mapping[str, Any]) -> Path:
    """Merges a report's numbers into `results_dir/SYSTEM.json` under `["runs"][preset]`, leaving everything else
    there as it is.

    Figures and notes stay in the run folder: the committed file holds claim, verdict, numbers, tables, seed,
    versions, wall time, cores.
    """
    versions = dict(meta.get("versions") or environment())
    entry = {
        "preset": preset,
        "seed": meta.get("seed"),
        "claim": report.claim,
        "shown": report.shown,
        "verdict": report.verdict,
        "numbers": [{**plain(n), "met": n.reached} for n in report.numbers],
        "tables": plain(report.tables),
        "wall_s": None if meta.get("wall_s") is None else round(float(meta["wall_s"]), 1),
        "machine": {"cores": versions.pop("cores", None), "devices": versions.pop("devices", None)},
        "versions": versions,
    }
    return merge(Path(results_dir), system, ("runs", preset), entry)


def merge(results_dir: Path, system: str, where: Sequence[str], value: Any) -> Path:
    """Sets one entry of `results_dir/SYSTEM.json`, creating file and nesting; two processes at once do not lose each
    other's entry."""
    results_dir.mkdir(parents=True, exist_ok=True)
    path = results_dir / f"{system}.json"
    with _locked(results_dir):
        try:
            data = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        except json.JSONDecodeError as error:
            raise ValueError(f"{path} is not JSON ({error}), so nothing was merged into it.") from error
        data["system"] = system
        inner = data
        for key in where[:-1]:
            inner = inner.setdefault(key, {})
        inner[where[-1]] = plain(value)
        write_atomic(path, json.dumps(data, indent=1, sort_keys=True, allow_nan=False) + "\n")
    return path


def markdown(report: Report, meta: Mapping[str, Any]) -> str:
    """The text of `report.md`."""
    title = f"{meta.get('system', 'run')} ({meta['preset']})" if meta.get("preset") else str(meta.get("system", "run"))
    shown = {True: "shown at this scale", False: "not shown at this scale", None: "not tested here"}[report.shown]
    out = [f"# {title}", "", f"**Claim.** {report.claim}", "", f"**Result: {shown}.** {report.verdict}", ""]
    if report.numbers:
        columns = ["number", "ours", "baseline", "paper", "target", "met", "note"]
        out += _table(columns, [number_cells(n) for n in report.numbers])
    for table in report.tables:
        out += [f"## {table.title}", "", *_table(table.columns, [[cell(v) for v in row] for row in table.rows])]
        out += [table.note, ""] if table.note else []
    for figure in report.figures:
        path = Path(figure.path).as_posix()
        out += [
            f"## {figure.title}",
            "",
            f"![{figure.title}]({path})" if _is_picture(path) else f"[{figure.title}]({path})",
            "",
        ]
        out += [figure.caption, ""] if figure.caption else []
    if report.notes:
        out += ["## Notes", "", *[f"- {note}" for note in report.notes], ""]
    out += [
        "## Run",
        "",
        f"- preset: {meta.get('preset', '–')}",
        f"- seed: {meta.get('seed', '–')}",
        f"- wall time: {duration(meta.get('wall_s'))}",
    ]
    out += [f"- {name}: {value}" for name, value in (meta.get("versions") or {}).items() if value is not None]
    return "\n".join(out) + "\n"


def number_cells(n: Number) -> list[str]:
    """The row of a number: name with unit, ours with spread, baseline, paper, target, met, note."""
    name = f"{n.name} ({n.unit})" if n.unit else n.name
    ours = cell(n.ours) + (f" ± {cell(n.spread)}" if n.spread is not None else "")
    return [name, ours, cell(n.baseline), cell(n.paper), n.target or "–", cell(n.reached), n.note]


def cell(value: Any) -> str:
    """A table cell: four significant digits for floats, yes/no, an en dash for None."""
    if isinstance(value, bool | np.bool_):
        return "yes" if value else "no"
    if value is None:
        return "–"
    if hasattr(value, "__array__") and np.ndim(value) == 0:
        value = np.asarray(value).item()
    if isinstance(value, float):
        if not math.isfinite(value):
            return str(value)
        if value == 0 or 1e-3 <= abs(value) < 1e5:
            return f"{value:.4g}" if abs(value) < 1e4 else f"{value:.0f}"
        return f"{value:.3e}"
    return str(value)


def duration(seconds: float | None) -> str:
    """Seconds as "12.3 s", "4 min 05 s" or "1 h 02 min"."""
    if seconds is None:
        return "–"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def save_figure(fig: Any, path: Path | str, *, dpi: int = 120) -> Path:
    """Writes a matplotlib figure (made with or without pyplot) as a PNG, without a display, and closes it."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    FigureCanvasAgg(fig).print_figure(part, format="png", dpi=dpi, bbox_inches="tight", facecolor="white")
    os.replace(part, path)
    if "matplotlib.pyplot" in sys.modules:
        sys.modules["matplotlib.pyplot"].close(fig)
    fig.clear()
    return path


def save_film(frames: np.ndarray, path: Path | str, fps: float = 25) -> Path:
    """Writes frames as an endless GIF with one palette for all frames (no flicker).

    Args:
      frames: uint8 `[t, h, w, 3]`.
      path: the file, ending in `.gif`.
      fps: frames a second, at most 50 (a GIF counts in hundredths of a second, and viewers slow down below two).

    Raises:
      ValueError: wrong shape or dtype, no frame, or fps out of (0, 50].
    """
    from PIL import Image

    frames = np.asarray(frames)
    if frames.ndim != 4 or frames.shape[-1] != 3 or frames.dtype != np.uint8 or not frames.size:
        raise ValueError(f"frames must be uint8 [t, h, w, 3] with t >= 1, got {frames.dtype} {list(frames.shape)}.")
    if not 0 < fps <= 50:
        raise ValueError(f"fps must lie in (0, 50], got {fps}.")
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # the palette comes from a strip of frames spread over the film, so that late colours are in it
    pick = np.linspace(0, len(frames) - 1, min(len(frames), 16)).round().astype(int)
    palette = Image.fromarray(np.concatenate(frames[pick], 0)).quantize(256, dither=Image.Dither.NONE)
    images = [Image.fromarray(f).quantize(palette=palette, dither=Image.Dither.NONE) for f in frames]
    part = path.with_name(f".{path.name}.part")
    images[0].save(part, format="GIF", save_all=True, append_images=images[1:], duration=round(100 / fps) * 10, loop=0)
    os.replace(part, path)
    return path


def _unworded(number: Mapping[str, Any]) -> dict[str, Any]:
    """A number's fields with "nan", "inf" and "-inf" as the values that they stand for."""
    numeric = ("ours", "baseline", "paper", "spread")
    return {k: _WORDS.get(v, v) if k in numeric and isinstance(v, str) else v for k, v in number.items()}


def _relative(path: Path | str, folder: Path) -> str:
    path = Path(path)
    return Path(os.path.relpath(path, folder)).as_posix() if path.is_absolute() else path.as_posix()


def _is_picture(path: str) -> bool:
    return path.lower().endswith((".png", ".gif", ".jpg", ".jpeg", ".svg", ".webp"))


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(str(c).replace("|", "\\|").replace("\n", " ") for c in cells) + " |"

    return [line(columns), line(["---"] * len(columns)), *[line(row) for row in rows], ""]


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
