"""Kernel-agnostic Markov-chain densification with fixed shapes (3DGS-MCMC; Deformable Beta Splatting's opacity rule).

Primitives live in `cap` rows, `alive` says which are in use. Dead rows become copies of live ones drawn in proportion
to opacity, then the number of rows in use grows. A source drawn n times and its n copies all get opacity
1 - (1 - o)^(1 / (n + 1)), so that together they let the same light through: for small opacities this alone preserves
the rendered distribution, whatever the kernel.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Key, PyTree


@dataclasses.dataclass(frozen=True)
class McmcConfig:
    """When and how to densify.

    Attributes:
        start, stop, every: densify when start < step < stop and step is a multiple of every.
        grow: rows gained at each event, in thousandths of those in use.
        dead_opacity: rows at or below it are dead; raise it when the starting points are sparse.
        noise_lr: strength of the exploration noise.
    """

    start: int = 500
    stop: int = 25_000
    every: int = 100
    grow: int = 20
    dead_opacity: float = 0.005
    noise_lr: float = 1e6


def due(step: Array, cfg: McmcConfig) -> Bool[Array, ""]:
    """Whether this step densifies."""
    return (step > cfg.start) & (step < cfg.stop) & (step % cfg.every == 0)


def split_opacity(o: Float[Array, "*b"], copies: Float[Array, "*b"], least: float) -> Float[Array, "*b"]:
    """Opacity of each of copies + 1 primitives that together are as opaque as one of opacity o."""
    eps = jnp.finfo(o.dtype).eps
    share = -jnp.expm1(jnp.log1p(-jnp.minimum(o, 1 - eps)) / (copies + 1))
    return jnp.clip(share, least, 1 - eps)


def draw(key: Key[Array, ""], weight: Float[Array, "p"], n: int) -> Array:
    """n indices with replacement in proportion to weight, by the inverse of the cumulative sum."""
    cumulative = jnp.cumsum(weight)
    u = jax.random.uniform(key, (n,), weight.dtype) * cumulative[-1]
    return jnp.minimum(jnp.searchsorted(cumulative, u, side="right"), len(weight) - 1)


def mcmc_densify(
    key: Key[Array, ""], params: dict[str, Array], alive: Bool[Array, "p"], opt_state: PyTree, cfg: McmcConfig
) -> tuple[dict[str, Array], Bool[Array, "p"], PyTree]:
    """One event: relocate the dead, then grow by cfg.grow thousandths up to the number of rows.

    `params` has a row a primitive in every leaf and `opacity_raw` before the sigmoid. Leaves of `opt_state` with
    as many rows (moments) are set to 0 at the sources and at grown rows; others pass through.
    """
    relocate_key, grow_key = jax.random.split(key)
    cap = len(alive)
    opacity = jax.nn.sigmoid(params["opacity_raw"])
    live = alive & (opacity > cfg.dead_opacity)
    dead = alive & ~live
    params, opt_state = _copy(relocate_key, params, opt_state, live, dead, dead.sum(), cfg)
    used = alive.sum()
    extra = jnp.where(live.any(), jnp.minimum(used * cfg.grow // 1000, cap - used), 0)
    fresh = ~alive & (jnp.cumsum(~alive) <= extra)
    params, opt_state = _copy(grow_key, params, opt_state, alive, fresh, extra, cfg, clear_targets=True)
    return params, alive | fresh, opt_state


def _copy(key, params, opt_state, sources, targets, count, cfg, clear_targets=False):
    """Fills the `count` rows of `targets` with copies of rows of `sources`, splitting opacities."""
    cap = len(sources)
    opacity = jnp.where(sources, jax.nn.sigmoid(params["opacity_raw"]), 0)
    count = jnp.where(opacity.sum() > 0, count, 0)
    drawn = draw(key, opacity, cap)
    place = jnp.cumsum(targets) - 1  # which draw fills a target row
    taken = targets & (place < count)
    source = jnp.where(taken, drawn[jnp.clip(place, 0, cap - 1)], jnp.arange(cap))
    times = jnp.zeros(cap, opacity.dtype).at[jnp.where(taken, source, cap)].add(1, mode="drop")
    split = split_opacity(opacity, times, cfg.dead_opacity)
    changed = (times > 0) | taken
    raw = jnp.where(changed, jax.scipy.special.logit(split[source]), params["opacity_raw"])
    params = {name: leaf[source] for name, leaf in params.items()} | {"opacity_raw": raw}
    cleared = (times > 0) | (taken & clear_targets)

    def clear(leaf):
        if not hasattr(leaf, "ndim") or leaf.ndim == 0 or leaf.shape[0] != cap:
            return leaf
        return jnp.where(cleared.reshape(-1, *[1] * (leaf.ndim - 1)), 0, leaf)

    return params, jax.tree.map(clear, opt_state)


def exploration_noise(
    key: Key[Array, ""],
    xyz: Float[Array, "p 3"],
    covariance: Float[Array, "p 3 3"],
    opacity: Float[Array, "p"],
    scale: Float[Array, ""] | float,
) -> Float[Array, "p 3"]:
    """Positions moved by covariance @ normal (1 - o)^100 scale: faint primitives wander, opaque ones stay."""
    noise = jax.random.normal(key, xyz.shape, xyz.dtype) * ((1 - opacity) ** 100 * scale)[:, None]
    return xyz + jnp.einsum("pij,pj->pi", covariance, noise)
