"""Running mean and variance of vectors, merged exactly in any order (Chan, Golub and LeVeque 1979).

The record keeps the sum of squared deviations, not the variance, so that either number of degrees of freedom can be
read off.
"""

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

__all__ = [
    "Moments",
    "moments_add",
    "moments_init",
    "moments_merge",
    "moments_psum",
    "moments_std",
    "standardize",
]


@flax.struct.dataclass
class Moments:
    """Number of rows seen, their mean, and the sum of their squared deviations from it."""

    count: Float[Array, ""]
    mean: Float[Array, " d"]
    m2: Float[Array, " d"]


def moments_init(d: int, dtype=jnp.float32) -> Moments:
    """Nothing seen: count 0. `standardize` then leaves its input as it is (mean 0, spread 1)."""
    return Moments(jnp.zeros((), dtype), jnp.zeros(d, dtype), jnp.zeros(d, dtype))


def moments_merge(a: Moments, b: Moments) -> Moments:
    """The moments of both sets of rows together."""
    count = a.count + b.count
    delta = b.mean - a.mean
    weight = b.count / jnp.maximum(count, 1)
    return Moments(count, a.mean + delta * weight, a.m2 + b.m2 + jnp.square(delta) * a.count * weight)


def moments_add(m: Moments, x: Float[Array, "*n d"], valid: Bool[Array, "*n"] | None = None) -> Moments:
    """Takes in the rows of ``x``, all of them or those that are ``valid``.

    Raises:
      ValueError: rows of another width than the moments.
    """
    d = m.mean.shape[-1]
    if x.shape[-1] != d:
        raise ValueError(f"x must have rows of {d} numbers, like the moments, but has shape {x.shape}.")
    rows = x.reshape(-1, d)
    if valid is None:
        count = jnp.asarray(rows.shape[0], m.count.dtype)
        mean = jnp.mean(rows, axis=0)
        m2 = jnp.sum(jnp.square(rows - mean), axis=0)
    else:
        if valid.shape != x.shape[:-1]:
            raise ValueError(f"valid must have shape {x.shape[:-1]}, one flag a row of x, but has {valid.shape}.")
        flags = valid.reshape(-1, 1)
        count = jnp.sum(flags, dtype=m.count.dtype)
        mean = jnp.sum(jnp.where(flags, rows, 0), axis=0) / jnp.maximum(count, 1)
        m2 = jnp.sum(jnp.where(flags, jnp.square(rows - mean), 0), axis=0)
    return moments_merge(m, Moments(count, mean, m2))


def moments_psum(m: Moments, axis_name: str) -> Moments:
    """The moments of the rows of all devices along ``axis_name`` together, the same on each."""
    count = jax.lax.psum(m.count, axis_name)
    mean = jax.lax.psum(m.mean * m.count, axis_name) / jnp.maximum(count, 1)
    m2 = jax.lax.psum(m.m2 + m.count * jnp.square(m.mean - mean), axis_name)
    return Moments(count, mean, m2)


def moments_std(m: Moments, *, ddof: int, eps: float) -> Float[Array, " d"]:
    """``sqrt(m2 / (count - ddof) + eps)``; 1 while too few rows are seen, and 1 where that root is 0."""
    known = m.count > ddof
    variance = jnp.where(known, m.m2 / jnp.where(known, m.count - ddof, 1), 1.0)
    std = jnp.sqrt(variance + eps)
    return jnp.where(std > 0, std, 1.0)


def standardize(m: Moments, x: Float[Array, "... d"], *, ddof: int, eps: float) -> Float[Array, "... d"]:
    """``(x - mean) / moments_std``, not clipped."""
    return (x - m.mean) / moments_std(m, ddof=ddof, eps=eps)
