"""Baselines without training: they read the action off the expert rows.

Retrieve-and-play takes the action of the nearest state, nearest sequence that of the candidate whose history is nearest;
both keep rows at distance 0. Locally weighted regression (Atkeson et al. 1997; details our choice) fits, for every query,
a ridge regression from the differences to DARP's K neighbours to their standardised actions, with Gaussian weights whose
width is the distance to the farthest neighbour, and predicts the intercept.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from papyrax.methods.control.darp import retrieval
from papyrax.methods.control.darp.config import Config
from papyrax.methods.control.darp.demos import Demos, Scalers

RIDGE = 1e-3


def retrieve_and_play(
    demos: Demos, scalers: Scalers, hist: Float[Array, "b h o"], valid: Int[Array, " b"], cfg: Config
) -> Float[Array, "b a"]:
    """Action of the nearest expert state."""
    idx = _rows(demos, scalers, hist[:, -1:], jnp.ones_like(valid), cfg, k=1, lookback=1, ratio=1.0)
    return demos.act[idx[:, 0]]


def nearest_sequence(
    demos: Demos, scalers: Scalers, hist: Float[Array, "b h o"], valid: Int[Array, " b"], cfg: Config
) -> Float[Array, "b a"]:
    """Action of the one among the k candidates whose history is nearest."""
    idx = _rows(demos, scalers, hist, valid, cfg, k=cfg.k, lookback=cfg.lookback, ratio=cfg.ratio)
    return demos.act[idx[:, 0]]


def lwr(
    demos: Demos,
    scalers: Scalers,
    hist: Float[Array, "b h o"],
    valid: Int[Array, " b"],
    cfg: Config,
    ridge: float = RIDGE,
) -> Float[Array, "b a"]:
    """Locally weighted linear regression over DARP's neighbours; ridge on the slopes, none on the intercept."""
    idx = retrieval.retrieve(
        demos,
        scalers,
        hist,
        valid,
        metric=cfg.metric,
        weights=cfg.weights,
        rotation=cfg.rotation,
        **retrieval.search_of(cfg),
    )
    delta = scalers.obs(demos.obs)[idx] - scalers.obs(hist[:, -1])[:, None]
    return scalers.raw_act(lwr_fit(delta, scalers.act(demos.act)[idx], ridge))


def lwr_fit(delta: Float[Array, "b k o"], u: Float[Array, "b k a"], ridge: float = RIDGE) -> Float[Array, "b a"]:
    """Intercepts of the weighted regressions of u on delta."""
    square = jnp.sum(jnp.square(delta), axis=-1)
    far = jnp.max(square, axis=-1, keepdims=True)
    weight = jnp.exp(-0.5 * square / jnp.where(far > 0, far, 1))
    x = jnp.concatenate([jnp.ones_like(delta[..., :1]), delta], axis=-1)
    penalty = ridge * jnp.eye(x.shape[-1], dtype=x.dtype).at[0, 0].set(0)
    gram = jnp.einsum("bk,bki,bkj->bij", weight, x, x) + penalty
    target = jnp.einsum("bk,bki,bka->bia", weight, x, u)
    return jnp.linalg.solve(gram, target)[:, 0]


def _rows(demos, scalers, hist, valid, cfg, *, k, lookback, ratio):
    return retrieval.retrieve(
        demos,
        scalers,
        hist,
        valid,
        k=k,
        lookback=lookback,
        decay=cfg.decay,
        ratio=ratio,
        metric=cfg.metric,
        normalise=cfg.normalise,
        weights=cfg.weights,
        rotation=cfg.rotation,
        keep_equal=True,
    )
