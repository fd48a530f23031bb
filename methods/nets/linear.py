"""The affine map under every network. Kernels lie as in x out."""

import jax.numpy as jnp
from jaxtyping import Array, Float

__all__ = ["dense"]


def dense(
    x: Float[Array, "... i"], w: Float[Array, "i o"], b: Float[Array, " o"] | None = None
) -> Float[Array, "... o"]:
    """``x @ w + b`` over the last axis.

    Raises:
      ValueError: the last axis of ``x`` does not match the first of ``w``.
    """
    if w.ndim != 2 or x.shape[-1] != w.shape[0]:
        raise ValueError(
            f"dense wants w of shape (in, out) with in = {x.shape[-1]}, the last axis of x, but w has shape {w.shape}."
        )
    y = jnp.matmul(x, w)
    return y if b is None else y + b
