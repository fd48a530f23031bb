"""What the learned shape numbers say: layers of a scene by bands of b, and b as a classifier of glossy and moving bodies.

A primitive belongs to a body of the analytic scene when its centre lies in or near it (for what moves: at the
primitive's own mean time). Primitives that are hardly visible, and those near no body or near two, are left out.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from papyrax.envs.scenes import worlds
from papyrax.methods.geometry.cameras import Camera
from papyrax.methods.geometry.raycast import PLANE
from papyrax.methods.metrics.classification import auroc
from papyrax.methods.rendering.universal_beta_splatting import kernel, learn
from papyrax.methods.rendering.universal_beta_splatting.render import band, render
from papyrax.train import figures
from papyrax.train.data.scenes import load_picture

NEAR = 1.15
"""Reach of a sphere about its centre, in radii."""
VISIBLE = 0.05
"""Least opacity of a primitive that is counted."""


def shape_numbers(params: dict[str, Any]) -> dict[str, jax.Array]:
    """`spatial` b[0], `angular` mean b[1:4], `temporal` b[4] of every primitive, as far as its dimensions go."""
    b = params["b"]
    out = {"spatial": b[:, 0]}
    if b.shape[1] > 1:
        out["angular"] = b[:, 1:4].mean(1)
    if b.shape[1] > 4:
        out["temporal"] = b[:, 4]
    return out


def bodies_at(kind: str, time: float) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(centres, radii, labels, is_plane) of the bodies of `specular` (label: glossy) or `dynamic` (label: moving)."""
    world = worlds.specular() if kind == "specular" else worlds.dynamic(time)
    label = world.glossy if kind == "specular" else world.moving
    bodies = world.bodies
    centres = np.asarray(bodies.pose[:, :, 3])
    return centres, np.asarray(bodies.size[:, 0]), np.asarray(label), np.asarray(bodies.kind) == PLANE


def labels(kind: str, params: dict[str, Any], alive: Any) -> tuple[np.ndarray, np.ndarray]:
    """(label, counted) of every primitive: on a glossy sphere or a matte one; on something moving or something still."""
    xyz = np.asarray(params["xyz"])
    visible = np.asarray(alive) & (np.asarray(kernel.opacity_of(params["opacity_raw"])) > VISIBLE)
    if kind == "specular":
        times, which = [0.0], np.zeros(len(xyz), int)
    else:
        times = np.linspace(0, 1, 33)
        which = np.clip(np.round(np.asarray(params["mean_q"])[:, 3] * 32), 0, 32).astype(int)
    label, counted = np.zeros(len(xyz), bool), np.zeros(len(xyz), bool)
    for i, time in enumerate(times):
        here = (which == i) & visible
        centres, radii, marks, planes = bodies_at(kind, float(time))
        distance = np.linalg.norm(xyz[:, None] - centres[None], axis=2)
        inside = (distance < NEAR * radii) & ~planes
        if kind == "dynamic":  # the floor stands still
            floor = np.flatnonzero(planes)
            inside[:, floor] = np.abs(xyz[:, 1:2] - centres[floor, 1]) < 0.05
            inside[:, floor] &= np.abs(xyz[:, [0]]) < 1.6
        yes, no = (inside & marks).any(1), (inside & ~marks).any(1)
        label |= here & yes
        counted |= here & (yes ^ no)
    return label, counted


def classifier(kind: str, params: dict[str, Any], alive: Any) -> dict[str, Any]:
    """Area under the curve of b_dir for glossy, or of b_time for moving, and how many primitives of each were counted."""
    value = shape_numbers(params)["angular" if kind == "specular" else "temporal"]
    label, counted = labels(kind, params, alive)
    positive, negative = int((label & counted).sum()), int((~label & counted).sum())
    if not positive or not negative:
        return {"auc": float("nan"), "positive": positive, "negative": negative}
    area = auroc(value[None], jnp.asarray(label)[None], jnp.asarray(counted)[None])[0]
    return {"auc": float(area), "positive": positive, "negative": negative}


def draw_layers(model: learn.Config, state: learn.State, camera: Camera, time: float) -> dict[str, np.ndarray]:
    """Pictures by name: the view, `NAME low` and `NAME high` (the halves of each shape number), `NAME map` (its mean).

    The map holds the composited shape number over the composited opacity, NaN where hardly anything is.
    """
    bg = jnp.asarray(model.background)

    @jax.jit
    def shown(params, alive, bg):
        out = render(params, alive, camera, time, bg, cfg=model.render)
        return out["rgb"], out["alpha"]

    params, alive = state.params, state.alive
    visible = alive & (kernel.opacity_of(params["opacity_raw"]) > VISIBLE)
    out = {"view": np.asarray(shown(params, alive, bg)[0])}
    for name, value in shape_numbers(params).items():
        for half, low, high in (("low", 0.0, 0.5), ("high", 0.5, 1.0)):
            out[f"{name} {half}"] = np.asarray(shown(params, band(value, visible, low, high), jnp.ones(3))[0])
        mixed, alpha = shown(params | {"rgb": jnp.repeat(value[:, None], 3, 1)}, alive, jnp.zeros(3))
        out[f"{name} map"] = np.where(
            np.asarray(alpha) > 0.3, np.asarray(mixed[..., 0] / jnp.maximum(alpha, 1e-6)), np.nan
        )
    return out


def layers_figure(rows: dict[str, tuple[dict[str, np.ndarray], np.ndarray, np.ndarray | None]]) -> Any:
    """A row for each (scene: shape number): truth, render, low half, high half, map of b, and the true mask.

    `rows` maps "scene: NAME" to (pictures of `draw_layers`, truth, mask or None).
    """
    from matplotlib.figure import Figure

    titles = ("truth", "render", "low half of b", "high half of b", "map of b", "true bodies")
    with figures.style():
        figure = Figure(figsize=(12.5, 2.15 * len(rows) + 0.3), layout="constrained")
        axes = figure.subplots(len(rows), len(titles), squeeze=False)
        for row, (label, (pictures, truth, mask)) in zip(axes, rows.items()):
            name = label.split(": ")[1]
            shown = (truth, pictures["view"], pictures[f"{name} low"], pictures[f"{name} high"])
            for ax, image in zip(row, shown):
                ax.imshow(np.clip(image, 0, 1))
            values = pictures[f"{name} map"]
            known = values[np.isfinite(values)]
            low, high = np.quantile(known, [0.02, 0.98]) if known.size else (0, 1)
            heat = row[4].imshow(values, cmap="viridis", vmin=low, vmax=max(high, low + 1e-6))
            figure.colorbar(heat, ax=row[4], shrink=0.8)
            if mask is not None:
                row[5].imshow(mask, cmap="gray", vmin=0, vmax=1)
            row[0].set_ylabel(label.replace(": ", "\n"), fontsize=8)
            for ax in row:
                ax.set(xticks=[], yticks=[])
                ax.grid(False)
                for side in ax.spines.values():
                    side.set_visible(False)
        for ax, title in zip(axes[0], titles):
            ax.set_title(title, fontsize=9)
    return figure


def mask_of(folder: Any, name: str, camera: Camera) -> np.ndarray:
    """The mask (h w, 0 or 1) of a test view of an analytic scene in the run folder."""
    from papyrax.train.data.scenes import View

    file = folder / "masks" / f"{name.removeprefix('./')}.png"
    return (load_picture(View(name, camera, file))[..., 0] > 0.5).astype(np.float32)


def curves_figure(scenes: dict[str, dict[str, tuple[np.ndarray, np.ndarray]]]) -> Any:
    """Test PSNR over steps, a panel a scene; arms map to (steps [t], psnr [seeds, t])."""
    from matplotlib.figure import Figure

    with figures.style():
        figure = Figure(figsize=(4.2 * len(scenes), 3.2), layout="constrained")
        for ax, (scene, arms) in zip(figure.subplots(1, len(scenes), squeeze=False)[0], scenes.items()):
            for color, (label, (steps, values)) in zip(figures.COLORS * 3, arms.items()):
                ax.plot(steps, values.mean(0), label=label, color=color, marker="o" if len(steps) < 3 else None)
                if len(values) > 1:
                    ax.fill_between(steps, values.min(0), values.max(0), color=color, alpha=0.18, linewidth=0)
            ax.set(title=scene, xlabel="step", ylabel="test PSNR (dB)")
            ax.legend(fontsize=7)
    return figure
