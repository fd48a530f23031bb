"""Scalars as vectors of sines and cosines: diffusion times, noise levels, coordinates."""

import math
from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float, Num

__all__ = ["fourier_embed", "time_embed"]


def time_embed(
    t: Num[Array, "*b"], dim: int, *, order: Literal["sin_cos", "cos_sin"], max_period: float
) -> Float[Array, "*b dim"]:
    """Sines and cosines of ``t`` at ``dim // 2`` frequencies, geometric from 1 down to almost 1/max_period.

    Vaswani et al. 2017 (sines first) and the diffusion networks after it (either order).

    Raises:
      ValueError: an odd ``dim`` or an unknown ``order``.
    """
    if dim < 2 or dim % 2:
        raise ValueError(f"dim must be even and positive, because half of it are sines, but is {dim}.")
    if order not in ("sin_cos", "cos_sin"):
        raise ValueError(f'order must be "sin_cos" or "cos_sin", but is {order!r}.')
    half = dim // 2
    frequencies = jnp.exp(-math.log(max_period) / half * jnp.arange(half, dtype=jnp.float32))
    angles = t[..., None] * frequencies
    parts = (jnp.sin(angles), jnp.cos(angles))
    return jnp.concatenate(parts if order == "sin_cos" else parts[::-1], axis=-1)


def fourier_embed(x: Float[Array, "... i"], frequencies: Float[Array, "i f"]) -> Float[Array, "... two_f"]:
    """Cosines, then sines, of ``2 pi x @ frequencies``, which are drawn once (Tancik et al. 2020)."""
    if x.shape[-1] != frequencies.shape[0]:
        raise ValueError(
            f"frequencies must have {x.shape[-1]} rows, one a coordinate of x, but has shape {frequencies.shape}."
        )
    angles = 2.0 * jnp.pi * jnp.matmul(x, frequencies)
    return jnp.concatenate((jnp.cos(angles), jnp.sin(angles)), axis=-1)
