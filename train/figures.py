"""The common figures of reports, in one plain style: curves with bands over seeds, bars with intervals, scatter,
grids of pictures, heat maps.

Each function returns a matplotlib figure made without pyplot (no global state, no display); `run.figure` or
`report.save_figure` writes it.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure

# the Okabe-Ito colours: told apart by readers with any colour vision
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")

_STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.8,
    "axes.prop_cycle": matplotlib.cycler(color=COLORS),
    "lines.linewidth": 1.6,
    "legend.frameon": False,
    "image.interpolation": "nearest",
}


@contextlib.contextmanager
def style() -> Iterator[None]:
    """The reports' style as a context, for figures that no helper here draws."""
    with matplotlib.rc_context(_STYLE):
        yield


def curves(
    xs: Any,
    series: Mapping[str, Any],
    *,
    xlabel: str = "step",
    ylabel: str = "",
    title: str = "",
    band: str = "std",
    lines: Mapping[str, float] | None = None,
    logx: bool = False,
    logy: bool = False,
) -> Figure:
    """Mean over seeds as a line and its spread as a band.

    Args:
      xs: `[t]`, shared by all series, or a mapping label -> `[t]`.
      series: label -> `[seeds, t]` or `[t]`; NaN entries are left out of the mean.
      band: "std" (one standard deviation), "range" (least to greatest), or "none".
      lines: name -> height of a horizontal dashed line (a paper's number, an optimum).

    Raises:
      ValueError: a series is empty, its length differs from `xs`, or `band` is unknown.
    """
    if band not in ("std", "range", "none"):
        raise ValueError(f"band must be 'std', 'range' or 'none', got {band!r}.")
    with style():
        fig = Figure(figsize=(6, 3.6), layout="constrained")
        ax = fig.add_subplot()
        for i, (label, values) in enumerate(series.items()):
            y = np.atleast_2d(np.asarray(values, dtype=float))
            x = np.asarray(xs[label] if isinstance(xs, Mapping) else xs, dtype=float)
            if y.ndim != 2 or y.size == 0 or y.shape[1:] != x.shape:
                raise ValueError(f"series {label!r} must be [seeds, {len(x)}] like xs, got {list(y.shape)}.")
            color = COLORS[i % len(COLORS)]
            seen = ~np.isnan(y).all(0)
            x, y = x[seen], y[:, seen]
            mean = np.nanmean(y, 0)
            name = f"{label} ({len(y)} seeds)" if len(y) > 1 else label
            ax.plot(x, mean, label=name, color=color, marker="o" if len(x) < 3 else None)
            if len(y) > 1 and band != "none":
                std = np.nanstd(y, 0)
                low, high = (mean - std, mean + std) if band == "std" else (np.nanmin(y, 0), np.nanmax(y, 0))
                ax.fill_between(x, low, high, color=color, alpha=0.18, linewidth=0)
        for name, height in (lines or {}).items():
            ax.axhline(height, color="#555555", linestyle="--", linewidth=1)
            ax.annotate(
                name,
                (1, height),
                xycoords=("axes fraction", "data"),
                ha="right",
                va="bottom",
                fontsize=8,
                color="#555555",
            )
        _label(ax, xlabel, ylabel, title)
        if logx:
            ax.set_xscale("log")
        if logy:
            ax.set_yscale("log")
        if len(series) > 1 or any(np.ndim(v) > 1 for v in series.values()):
            ax.legend()
    return fig


def bars(
    labels: Sequence[str],
    groups: Mapping[str, Sequence[float]],
    *,
    errors: Mapping[str, Any] | None = None,
    ylabel: str = "",
    title: str = "",
) -> Figure:
    """Bars side by side: one cluster a label, one bar a group; `errors[group]` is `[labels]` (half-widths) or `[2,
    labels]` (down, up)."""
    errors = errors or {}
    with style():
        fig = Figure(figsize=(max(4.0, 0.5 * len(labels) * max(len(groups), 1) + 1.5), 3.4), layout="constrained")
        ax = fig.add_subplot()
        at, width = np.arange(len(labels)), 0.8 / max(len(groups), 1)
        for i, (name, heights) in enumerate(groups.items()):
            if len(heights) != len(labels):
                raise ValueError(f"group {name!r} has {len(heights)} heights, wanted {len(labels)}, one a label.")
            x = at + (i - (len(groups) - 1) / 2) * width
            ax.bar(
                x, heights, width * 0.92, label=name, yerr=errors.get(name), capsize=2, color=COLORS[i % len(COLORS)]
            )
        ax.set_xticks(at, labels, rotation=30 if max(map(len, labels), default=0) > 10 else 0)
        ax.grid(False, axis="x")
        _label(ax, "", ylabel, title)
        if len(groups) > 1:
            ax.legend()
    return fig


def scatter(
    x: Any,
    y: Any,
    *,
    xlabel: str = "",
    ylabel: str = "",
    title: str = "",
    diagonal: bool = False,
    groups: Sequence[str] | None = None,
) -> Figure:
    """Points of `x: [n]` against `y: [n]` with Pearson's r in the title; `groups: [n]` colours them; `diagonal`
    draws y = x."""
    x, y = np.asarray(x, dtype=float).ravel(), np.asarray(y, dtype=float).ravel()
    if x.shape != y.shape:
        raise ValueError(f"x and y must have the same length, got {len(x)} and {len(y)}.")
    with style():
        fig = Figure(figsize=(4.4, 4), layout="constrained")
        ax = fig.add_subplot()
        names = [""] * len(x) if groups is None else list(groups)
        for i, name in enumerate(dict.fromkeys(names)):
            of = np.asarray([n == name for n in names])
            ax.scatter(x[of], y[of], s=12, alpha=0.7, linewidths=0, color=COLORS[i % len(COLORS)], label=name or None)
        if diagonal and len(x):
            ends = [min(x.min(), y.min()), max(x.max(), y.max())]
            ax.plot(ends, ends, color="#555555", linestyle="--", linewidth=1)
        if len(x) > 2 and x.std() > 0 and y.std() > 0:
            title = f"{title}  r = {np.corrcoef(x, y)[0, 1]:.3f}".strip()
        _label(ax, xlabel, ylabel, title)
        if groups is not None:
            ax.legend()
    return fig


def grid(images: Any, *, columns: int | None = None, titles: Sequence[str] | None = None, title: str = "") -> Figure:
    """Pictures in rows: `images` is a list or array of `[h, w]`, `[h, w, 3]` or `[h, w, 1]`; floats are taken in [0,
    1] and clipped."""
    images = list(images)
    if not images:
        raise ValueError("images must hold at least one picture, got none.")
    columns = min(columns or 8, len(images))
    rows = -(-len(images) // columns)
    with style():
        fig = Figure(
            figsize=(1.6 * columns, (1.9 if titles else 1.6) * rows + (0.3 if title else 0)), layout="constrained"
        )
        axes = fig.subplots(rows, columns, squeeze=False).ravel()
        for i, ax in enumerate(axes):
            ax.axis("off")
            if i < len(images):
                picture = np.asarray(images[i])
                picture = picture[..., 0] if picture.ndim == 3 and picture.shape[-1] == 1 else picture
                picture = picture if picture.dtype == np.uint8 else np.clip(picture.astype(float), 0, 1)
                ax.imshow(picture, cmap="gray", vmin=0, vmax=255 if picture.dtype == np.uint8 else 1)
                if titles:
                    ax.set_title(titles[i], fontsize=8)
        if title:
            fig.suptitle(title)
    return fig


def heat(
    values: Any,
    *,
    rows: Sequence[str] | None = None,
    columns: Sequence[str] | None = None,
    xlabel: str = "",
    ylabel: str = "",
    title: str = "",
    numbers: bool | None = None,
    center: float | None = None,
) -> Figure:
    """A matrix `[r, c]` as colours with a bar; cells carry their numbers when there are at most 120 (or as `numbers`
    says); `center` makes the scale diverge from that value."""
    values = np.asarray(values, dtype=float)
    if values.ndim != 2 or not values.size:
        raise ValueError(f"values must be a matrix with at least one cell, got shape {list(values.shape)}.")
    with style():
        fig = Figure(
            figsize=(min(10, 1.6 + 0.55 * values.shape[1]), min(9, 1.2 + 0.4 * values.shape[0])), layout="constrained"
        )
        ax = fig.add_subplot()
        limits: dict[str, Any] = {"cmap": "viridis"}
        if center is not None:
            reach = max(float(np.nanmax(np.abs(values - center))), 1e-12)
            limits = {"cmap": "RdBu_r", "vmin": center - reach, "vmax": center + reach}
        image = ax.imshow(values, aspect="auto", **limits)
        fig.colorbar(image, ax=ax, shrink=0.9)
        ax.grid(False)
        if rows is not None:
            ax.set_yticks(range(len(rows)), rows)
        if columns is not None:
            ax.set_xticks(range(len(columns)), columns, rotation=30 if max(map(len, columns), default=0) > 6 else 0)
        if numbers if numbers is not None else values.size <= 120:
            for r, c in np.ndindex(*values.shape):
                red, green, blue, _ = image.cmap(image.norm(values[r, c]))
                dark = 0.3 * red + 0.59 * green + 0.11 * blue < 0.5
                ax.text(
                    c,
                    r,
                    f"{values[r, c]:.3g}",
                    ha="center",
                    va="center",
                    fontsize=7,
                    color="white" if dark else "black",
                )
        _label(ax, xlabel, ylabel, title)
    return fig


def _label(ax: Any, xlabel: str, ylabel: str, title: str) -> None:
    ax.set_xlabel(xlabel)
    ax.set_ylabel(ylabel)
    if title:
        ax.set_title(title)
