"""The affine map under every network. Kernels lie as in x out."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from papyrax.jaxlib_ext.quant_matmul import Packed, dequant_matmul
from papyrax.methods.nets.lora import Lora

__all__ = ["dense"]


def dense(
    x: Float[Array, "... i"], w: Float[Array, "i o"] | Lora | Packed, b: Float[Array, " o"] | None = None
) -> Float[Array, "... o"]:
    """``x @ w + b`` over the last axis.

    A `Packed` kernel is unpacked inside the product; a `Lora` kernel adds its low-rank path.

    Raises:
      ValueError: the last axis of ``x`` does not match the first of ``w``.
    """
    base = w.w if isinstance(w, Lora) else w
    if base.ndim != 2 or x.shape[-1] != base.shape[0]:
        raise ValueError(
            f"dense wants w of shape (in, out) with in = {x.shape[-1]}, the last axis of x, but w has shape {base.shape}."
        )
    if isinstance(base, Packed):
        y = dequant_matmul(x.reshape(-1, x.shape[-1]), base).reshape(*x.shape[:-1], -1)
    else:
        y = jnp.matmul(x, base)
    if isinstance(w, Lora):
        y = y + w.apply(x)
    return y if b is None else y + b
