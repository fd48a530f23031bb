"""Figures of GEER's report: fisheye pictures with their bands, errors by angle, pairs by tile, the camera amid Gaussians."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Circle

from papyrax.methods.geometry.cameras import Camera, equidistant
from papyrax.methods.rendering.geer.protocol import axis_angle, field_split
from papyrax.methods.rendering.geer.render import RenderConfig, render
from papyrax.train import figures
from papyrax.train.recipes.rendering import shared
from papyrax.train.recipes.rendering.geer_checks import gaussian
from papyrax.train.recipes.rendering.geer_worlds import Views

NAMES = {"pbf": "PBF (ours)", "ut": "UT", "ewa": "EWA"}


def first_camera(views: Views, index: int = 0) -> Camera:
    """One of the stacked cameras."""
    return jax.tree.map(lambda a: a[index], views["camera"])


def fisheye(views: Views, arms: Mapping[str, np.ndarray], rows: Sequence[int], error: Sequence[str]) -> Figure:
    """Test views beside the truth with error maps; a ring marks where the peripheral band begins."""
    mask = np.asarray(views["mask"])[list(rows)][..., None]

    def clean(images):
        return np.where(mask, np.asarray(images)[list(rows)], 1.0)

    pictures = {name: clean(images) for name, images in arms.items()}
    figure = shared.comparison(clean(views["image"]), pictures, [f"view {i}" for i in rows], error=error)
    cam = first_camera(views)
    if cam.kind == "fisheye":
        central, _ = field_split(cam, jnp.asarray(mask[0, ..., 0]))
        half = float(jnp.where(central, axis_angle(cam), 0).max())
        center = [float(v) - cam.center for v in cam.params[2:4]]
        for ax in figure.axes:
            if ax.images and ax.get_title(loc="center") is not None and ax.get_label() != "<colorbar>":
                ax.add_patch(
                    Circle(
                        center, half * float(cam.params[0]), fill=False, color="white", linewidth=0.8, linestyle="--"
                    )
                )
    return figure


def by_angle(views: Views, arms: Mapping[str, np.ndarray], bins: int = 9) -> Figure:
    """PSNR of pixels by the angle of their ray from the axis, pooled over the test views."""
    angle, mask = np.degrees(np.asarray(axis_angle(first_camera(views)))), np.asarray(views["mask"])
    edges = np.linspace(0, angle[mask[0]].max() + 1e-3, bins + 1)
    series = {}
    for name, images in arms.items():
        error = ((np.asarray(images) - np.asarray(views["image"])) ** 2).mean(-1)
        pooled = []
        for low, high in itertools.pairwise(edges):
            band = mask & (angle >= low) & (angle < high)
            pooled.append(error[band].mean() if band.any() else np.nan)
        series[name] = -10 * np.log10(np.maximum(pooled, 1e-10))
    return figures.curves(
        0.5 * (edges[1:] + edges[:-1]), series, xlabel="angle from the axis (degrees)", ylabel="PSNR (dB)",
        title="Test views by angle",
    )  # fmt: skip


def learning(arms: Mapping[str, Any]) -> Figure:
    """Test PSNR over training."""
    return figures.curves(
        {name: arm.evals["step"] for name, arm in arms.items()},
        {name: arm.evals["psnr"] for name, arm in arms.items()},
        ylabel="test PSNR (dB)", title="Learning curves",
    )  # fmt: skip


def pairs(maps: Mapping[str, np.ndarray], title: str) -> Figure:
    """Pairs in every tile by association, one colour scale, logarithmic."""
    from matplotlib.colors import LogNorm

    low = max(1, min(int(m.min()) for m in maps.values()))
    norm = LogNorm(low, max(int(m.max()) for m in maps.values()))
    with figures.style():
        figure = Figure(figsize=(3.1 * len(maps) + 0.6, 3.3), layout="constrained")
        axes = figure.subplots(1, len(maps), squeeze=False)[0]
        shown = None
        for ax, (kind, values) in zip(axes, maps.items()):
            shown = ax.imshow(np.maximum(values, low), norm=norm, cmap="viridis")
            ax.set(xticks=[], yticks=[], title=f"{NAMES[kind]}: {values.mean():.0f} a tile")
            ax.grid(False)
        figure.colorbar(shown, ax=list(axes), shrink=0.85, label="pairs in a tile")
        figure.suptitle(title, fontsize=10)
    return figure


CASES = {
    "in front": ([0.3, 0.0, 1.0], 0.15, math.pi),
    "across z = 0": ([0.45, 0.0, 0.05], 0.2, math.pi),
    "camera inside": ([0.1, 0.0, 0.1], 0.3, math.pi),
    "beside the camera": ([0.6, 0.0, -0.05], 0.12, math.pi * 230 / 180),
    "behind, 260 degrees": ([0.5, 0.0, -0.3], 0.12, math.pi * 260 / 180),
}
"""Position of a Gaussian before a fisheye at the origin, its sigma, and the camera's field of view."""

RULES = {
    "frustum, half line": {"association": "pbf", "ray_side": "half"},
    "frustum, share in front": {"association": "pbf", "ray_side": "erf"},
    "frustum, release": {"association": "pbf", "ray_side": "release", "near": 0.2},
    "UT boxes, half line": {"association": "ut", "ray_side": "half"},
    "EWA boxes, half line": {"association": "ewa", "ray_side": "half"},
    "EWA splat": {"weight": "ewa", "ray_side": "half"},
}


@functools.partial(jax.jit, static_argnames="cfg")
def _opacity(params, cam, cfg):
    return render(params, jnp.ones(1, bool), cam, jnp.zeros(3), cfg=cfg)["alpha"]


def camera_amid(side: int = 48, rules: Sequence[str] = tuple(RULES)) -> Figure:
    """Opacity pictures of one Gaussian around the camera, by rule; dark where a rule loses what the rays meet."""
    base = RenderConfig(tile=4, cap=4, pairs=4000, cutoff="opacity", near=0.0)
    with figures.style():
        figure = Figure(figsize=(1.5 * len(CASES) + 0.4, 1.55 * len(rules) + 0.3), layout="constrained")
        axes = figure.subplots(len(rules), len(CASES), squeeze=False)
        for row, rule in zip(axes, rules):
            for ax, (case, (position, sigma, fov)) in zip(row, CASES.items()):
                cam = equidistant((side, side), fov)
                image = np.array(_opacity(gaussian(position, sigma), cam, dataclasses.replace(base, **RULES[rule])))
                image[np.asarray(axis_angle(cam)) > fov / 2] = np.nan
                ax.imshow(image, cmap="gray", vmin=0, vmax=1)
                ax.set(xticks=[], yticks=[])
                ax.grid(False)
                for edge in ax.spines.values():
                    edge.set_visible(False)
                if row is axes[0]:
                    ax.set_title(case, fontsize=8)
            row[0].set_ylabel(rule, fontsize=7)
    return figure


def film(truth: Sequence[np.ndarray], arms: Sequence[Sequence[np.ndarray]], scale: int) -> np.ndarray:
    """uint8 frames, truth and arms side by side, enlarged by whole pixels."""
    rows = [
        np.concatenate([np.clip(np.asarray(p), 0, 1) for p in parts], 1) for parts in zip(truth, *arms, strict=True)
    ]
    frames = np.round(np.stack(rows) * 255).astype(np.uint8)
    return frames.repeat(scale, 1).repeat(scale, 2)
