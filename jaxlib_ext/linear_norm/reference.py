"""Linear, normalisation over features, swish: the layer of value and policy networks, in plain jnp.

    h = x w + b
    layer: n = (h - mean(h)) / sqrt(var(h) + eps)      (biased variance; Ba, Kiros & Hinton 2016)
    rms:   n = h / sqrt(mean(h^2) + eps)               (Zhang & Sennrich 2019)
    none:  n = h
    y = swish(n * scale + bias),   swish(z) = z * sigmoid(z)

Products are accumulated and statistics are taken in float32 (or wider, when the input is).
"""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

Norm = Literal["layer", "rms", "none"]


def linear_norm_swish(
    x: Float[Array, "n i"],
    w: Float[Array, "i o"],
    b: Float[Array, "o"] | None,
    scale: Float[Array, "o"] | None,
    bias: Float[Array, "o"] | None,
    norm: Norm,
    eps: float,
) -> Float[Array, "n o"]:
    """See the module docstring; a parameter that is None is left out. The result has the dtype of x."""
    wide = jnp.promote_types(x.dtype, jnp.float32)
    h = jnp.matmul(x, w, preferred_element_type=wide)
    if b is not None:
        h = h + b.astype(wide)
    if norm == "layer":
        h = h - jnp.mean(h, axis=-1, keepdims=True)
    if norm != "none":
        h = h * jax.lax.rsqrt(jnp.mean(h * h, axis=-1, keepdims=True) + eps)
    if scale is not None:
        h = h * scale.astype(wide)
    if bias is not None:
        h = h + bias.astype(wide)
    return (h * jax.nn.sigmoid(h)).astype(x.dtype)
