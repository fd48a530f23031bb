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


def normalised(h: Array, norm: Norm, eps: float, features: int | None = None) -> tuple[Array, Array]:
    """(n, r) of rows of h; `features` is the true width where the rest of a row is zero padding."""
    width = h.shape[-1] if features is None else features
    inside = None if features is None else jax.lax.broadcasted_iota(jnp.int32, h.shape, 1) < width
    if norm == "layer":
        h = h - jnp.sum(h, axis=-1, keepdims=True) / width
        h = h if inside is None else jnp.where(inside, h, 0.0)
    if norm == "none":
        return h, jnp.ones((h.shape[0], 1), h.dtype)
    r = jax.lax.rsqrt(jnp.sum(h * h, axis=-1, keepdims=True) / width + eps)
    return h * r, r


def backward_rows(
    h: Array, dy: Array, scale: Array, bias: Array, norm: Norm, eps: float, features: int | None = None
) -> tuple[Array, Array, Array]:
    """(dh, dz, n) of rows: what the backward kernels do with rows of h = x w + b that they have computed again.

    With n the normalised row, r = 1/std (or 1/rms), z = n * scale + bias and s = sigmoid(z):
        dz = dy * s (1 + z (1 - s)),   dn = dz * scale,
        layer: dh = r (dn - mean(dn) - n mean(dn n)),   rms: dh = r (dn - n mean(dn n)),   none: dh = dn
    and the gradients of b, scale and bias are the sums of dh, dz n and dz over rows. Columns past `features` must hold
    zeros in h, dy, scale and bias.
    """
    width = h.shape[-1] if features is None else features
    n, r = normalised(h, norm, eps, features)
    z = n * scale + bias
    s = 1.0 / (1.0 + jnp.exp(-z))
    dz = dy * s * (1.0 + z * (1.0 - s))
    dn = dz * scale
    if norm == "none":
        return dn, dz, n
    dh = dn - n * (jnp.sum(dn * n, axis=-1, keepdims=True) / width)
    if norm == "layer":
        dh = dh - jnp.sum(dn, axis=-1, keepdims=True) / width
        if features is not None:
            dh = jnp.where(jax.lax.broadcasted_iota(jnp.int32, h.shape, 1) < width, dh, 0.0)
    return dh * r, dz, n
