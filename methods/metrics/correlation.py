"""Correlation of two series: Pearson, Spearman with mid-ranks, Kendall's tau-b; ties honoured, padding masked, traced.

Each function works on the last axis, maps over all axes before it, and is NaN for a constant series, as scipy's are.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

# Rows of the sign matrix of Kendall's tau formed at once: memory stays at this many times the length.
_ROWS = 128


def pearson(
    x: Float[Array, "*b n"], y: Float[Array, "*b n"], valid: Bool[Array, "*b n"] | None = None
) -> Float[Array, "*b"]:
    """Product-moment correlation."""
    return _over_rows("pearson", _pearson, x, y, valid)


def spearman(
    x: Float[Array, "*b n"], y: Float[Array, "*b n"], valid: Bool[Array, "*b n"] | None = None
) -> Float[Array, "*b"]:
    """Pearson correlation of the ranks, equal values sharing the mean of their ranks."""

    def row(x, y, valid):
        return _pearson(midranks(x, valid), midranks(y, valid), valid)

    return _over_rows("spearman", row, x, y, valid)


def kendall(
    x: Float[Array, "*b n"], y: Float[Array, "*b n"], valid: Bool[Array, "*b n"] | None = None
) -> Float[Array, "*b"]:
    """Kendall's tau-b: (concordant - discordant) pairs over the geometric mean of the pairs untied in x and in y.

    All n^2 pairs are compared, a block of rows at a time.
    """
    return _over_rows("kendall", _kendall, x, y, valid)


def midranks(x: Float[Array, " n"], valid: Bool[Array, " n"] | None = None) -> Float[Array, " n"]:
    """Ranks from 1 among the valid entries, equal values sharing their mean rank; entries that do not count get 0."""
    valid = jnp.ones(x.shape, bool) if valid is None else valid
    ordered = jnp.sort(jnp.where(valid, x, jnp.inf))
    count = jnp.sum(valid)
    below = jnp.searchsorted(ordered, x, side="left")
    # an infinite value among the valid ones meets the padding at the end of the order
    upto = jnp.minimum(jnp.searchsorted(ordered, x, side="right"), count)
    return jnp.where(valid, (below + upto + 1) / 2, 0).astype(x.dtype)


def _pearson(x, y, valid):
    count = jnp.sum(valid)

    def centred(v):
        v = jnp.where(valid, v, 0)
        return jnp.where(valid, v - jnp.sum(v) / count, 0)

    x, y = centred(x), centred(y)
    # scaled before squaring, so that large or tiny values neither overflow nor vanish
    x, y = x / jnp.max(jnp.abs(x)), y / jnp.max(jnp.abs(y))
    r = jnp.sum(x * y) / (jnp.sqrt(jnp.sum(x * x)) * jnp.sqrt(jnp.sum(y * y)))
    return jnp.clip(r, -1, 1)


def _kendall(x, y, valid):
    def pairs(i):
        both = valid & valid[i]
        dx, dy = jnp.sign(x[i] - x), jnp.sign(y[i] - y)

        def total(v):
            return jnp.sum(jnp.where(both, v, 0))

        return total(dx * dy), total(dx * dx), total(dy * dy)

    same, in_x, in_y = jax.lax.map(pairs, jnp.arange(x.shape[0]), batch_size=min(_ROWS, x.shape[0]))
    return jnp.sum(same) / (jnp.sqrt(jnp.sum(in_x)) * jnp.sqrt(jnp.sum(in_y)))


def _over_rows(name: str, row: Callable, x: Array, y: Array, valid: Array | None) -> Array:
    valid = jnp.ones(x.shape, bool) if valid is None else valid
    if not x.shape == y.shape == valid.shape or x.ndim == 0 or x.shape[-1] < 2:
        raise ValueError(
            f"{name}: x, y and valid must share one shape with at least two entries on the last axis, "
            f"got {x.shape}, {y.shape} and {valid.shape}."
        )
    for _ in range(x.ndim - 1):
        row = jax.vmap(row)
    return row(x, y, valid)
