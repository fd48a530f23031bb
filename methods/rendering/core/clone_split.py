"""The densifier of 3D Gaussian splatting with fixed shapes: clone small, split large, prune faint, reset opacities.

Rows whose averaged gradient statistic passes a threshold are cloned when small and split in two when large; the new
row goes to a free one, and what finds no free row is counted in `overflow`.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int, Key, PyTree

from papyrax.methods.geometry.rotations import quat_to_matrix


@dataclasses.dataclass(frozen=True)
class CloneSplitConfig:
    """Thresholds of 3DGS as 3DGEER sets them; `extent` is the scene's size in world units."""

    extent: float = 1.0
    start: int = 500
    stop: int = 15_000
    every: int = 300
    threshold: float = 2e-4
    clone_below: float = 0.01
    shrink: float = 1.6
    least_opacity: float = 0.005
    prune_from: int = 3_000
    largest_span: int = 20
    largest_scale: float = 0.1
    reset_every: int = 3_000
    reset_opacity: float = 0.01


@struct.dataclass
class GradientStatistics:
    """Sum of the per-view gradient statistic, how many views saw each primitive, and its largest span in tiles."""

    total: Float[Array, "p"]
    views: Float[Array, "p"]
    span: Int[Array, "p"]


def empty_statistics(p: int, dtype=jnp.float32) -> GradientStatistics:
    """Statistics of no view."""
    return GradientStatistics(jnp.zeros(p, dtype), jnp.zeros(p, dtype), jnp.zeros(p, jnp.int32))


def add_view(stats: GradientStatistics, value: Float[Array, "p"], span: Int[Array, "p"]) -> GradientStatistics:
    """Adds one view's statistic for the primitives with a positive span, that is those it saw."""
    seen = span > 0
    return GradientStatistics(
        stats.total + jnp.where(seen, value, 0), stats.views + seen, jnp.maximum(stats.span, span)
    )


def clone_split(
    key: Key[Array, ""],
    params: dict[str, Array],
    alive: Bool[Array, "p"],
    opt_state: PyTree,
    stats: GradientStatistics,
    step: Int[Array, ""],
    cfg: CloneSplitConfig,
) -> tuple[dict[str, Array], Bool[Array, "p"], PyTree, Int[Array, ""]]:
    """One event on Gaussians with `xyz`, `log_scale`, `quat` and `opacity_raw`. Returns the overflow count last.

    A clone keeps all values; the two halves of a split have their scales divided by cfg.shrink and lie at draws from
    the Gaussian. Moments are 0 in every new or split row.
    """
    cap = len(alive)
    scale = jnp.exp(params["log_scale"])
    largest = scale.max(-1)
    hot = alive & (stats.total / jnp.maximum(stats.views, 1) > cfg.threshold)
    small = largest <= cfg.clone_below * cfg.extent
    free = ~alive
    nth_hot, nth_free = jnp.cumsum(hot), jnp.cumsum(free)
    room = nth_free[-1]
    served = hot & (nth_hot <= room)
    overflow = jnp.maximum(nth_hot[-1] - room, 0)
    # Row r is filled when it is free and its number among free rows is at most the number of hot rows.
    hot_rows = jnp.argsort(~hot)
    filled = free & (nth_free <= nth_hot[-1])
    source = jnp.where(filled, hot_rows[jnp.clip(nth_free - 1, 0, cap - 1)], jnp.arange(cap))
    divided = served & ~small
    params = {name: leaf[source] for name, leaf in params.items()}
    divided = divided[source]
    normal = jax.random.normal(key, params["xyz"].shape, params["xyz"].dtype)
    shift = jnp.einsum("pij,pj->pi", quat_to_matrix(params["quat"]), scale[source] * normal)
    params["xyz"] = params["xyz"] + jnp.where(divided[:, None], shift, 0)
    params["log_scale"] = params["log_scale"] - jnp.where(divided[:, None], jnp.log(cfg.shrink), 0)
    alive = alive | filled
    opacity = jax.nn.sigmoid(params["opacity_raw"])
    faint = opacity < cfg.least_opacity
    huge = (stats.span[source] > cfg.largest_span) | (
        jnp.exp(params["log_scale"]).max(-1) > cfg.largest_scale * cfg.extent
    )
    alive = alive & ~faint & ~((step > cfg.prune_from) & huge)
    touched = filled | divided

    def clear(leaf):
        if not hasattr(leaf, "ndim") or leaf.ndim == 0 or leaf.shape[0] != cap:
            return leaf
        return jnp.where(touched.reshape(-1, *[1] * (leaf.ndim - 1)), 0, leaf)

    return params, alive, jax.tree.map(clear, opt_state), overflow.astype(jnp.int32)


def reset_opacity(params: dict[str, Array], cfg: CloneSplitConfig) -> dict[str, Array]:
    """Opacities brought down to at most cfg.reset_opacity, so that what the images do not need can be pruned."""
    limit = jax.scipy.special.logit(jnp.asarray(cfg.reset_opacity, params["opacity_raw"].dtype))
    return params | {"opacity_raw": jnp.minimum(params["opacity_raw"], limit)}
