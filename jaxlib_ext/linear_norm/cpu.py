"""Linear, normalisation, swish for a CPU: the meaning of `reference`, with its gradient by hand and fewer passes.

- The mean over features is linear in x: with weights and bias centred over their outputs, h = x w + b is centred
  already. That moves the subtraction, and its transpose in the backward pass, from [n, o] to [i, o].
- Sums over rows and over columns are products with ones: XLA adds the numbers of a row one after the other there, in
  order, while its matrix product uses all lanes.
- The product x w is kept, normalised, for the backward pass; sigmoids are computed again.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from papyrax.jaxlib_ext.linear_norm import reference


def linear_norm_swish(
    x: Float[Array, "n i"],
    w: Float[Array, "i o"],
    b: Float[Array, "o"],
    scale: Float[Array, "o"],
    bias: Float[Array, "o"],
    norm: reference.Norm,
    eps: float,
) -> Float[Array, "n o"]:
    """As `reference.linear_norm_swish`; arrays that are not all float32 go there."""
    if any(a.dtype != jnp.float32 for a in (x, w, b, scale, bias)):
        return reference.linear_norm_swish(x, w, b, scale, bias, norm, eps)
    return _plain(norm, eps, x, w, b, scale, bias)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _plain(norm: reference.Norm, eps: float, x, w, b, scale, bias) -> Array:
    return _forward(norm, eps, x, w, b, scale, bias)[0]


def _forward(norm, eps, x, w, b, scale, bias):
    if norm == "layer":
        w, b = w - jnp.mean(w, axis=1, keepdims=True), b - jnp.mean(b)
    n, r = jnp.matmul(x, w) + b, None
    if norm != "none":
        r = jax.lax.rsqrt(_row_mean(n * n) + eps)
        n = n * r
    z = n * scale + bias
    return z * jax.nn.sigmoid(z), (x, w, n, r, scale, bias)


def _backward(norm, eps, kept, dy):
    x, w, n, r, scale, bias = kept
    z = n * scale + bias
    s = jax.nn.sigmoid(z)
    dz = dy * (s + z * s * (1 - s))
    dh = dz * scale
    if norm != "none":
        dh = r * (dh - n * _row_mean(dh * n))
    dw, db = jnp.matmul(x.T, dh), _column_sum(dh)
    if norm == "layer":
        dw, db = dw - jnp.mean(dw, axis=1, keepdims=True), db - jnp.mean(db)
    return jnp.matmul(dh, w.T), dw, db, _column_sum(dz * n), _column_sum(dz)


_plain.defvjp(_forward, _backward)


def _row_mean(z):
    return jnp.matmul(z, jnp.full((z.shape[1], 1), 1 / z.shape[1], z.dtype))


def _column_sum(z):
    return jnp.matmul(jnp.ones((1, z.shape[0]), z.dtype), z)[0]
