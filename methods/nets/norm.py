"""Layer, root-mean-square and group normalisation over trailing feature axes.

Statistics are taken in at least float32 and the result returns in the dtype of the input. There is no default ``eps``:
published networks disagree (1e-6 in Flax, 1e-5 in torch) and parity hangs on it.

Sources: Ba, Kiros and Hinton 2016 (layer), Zhang and Sennrich 2019 (root mean square), Wu and He 2018 (group).
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

__all__ = ["group_norm", "layer_norm", "rms_norm"]


def _wide(x: Array) -> Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def rms_norm(x: Float[Array, "... d"], scale: Float[Array, " d"], eps: float) -> Float[Array, "... d"]:
    """``x / sqrt(mean(x**2) + eps) * scale``, the mean over the last axis."""
    wide = _wide(x)
    inverse = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    return (wide * inverse * scale).astype(x.dtype)


def layer_norm(
    x: Float[Array, "... d"], scale: Float[Array, " d"], bias: Float[Array, " d"], eps: float
) -> Float[Array, "... d"]:
    """``(x - mean) / sqrt(var + eps) * scale + bias``, mean and population variance over the last axis."""
    wide = _wide(x)
    centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
    inverse = jax.lax.rsqrt(jnp.mean(jnp.square(centred), axis=-1, keepdims=True) + eps)
    return (centred * inverse * scale + bias).astype(x.dtype)


def group_norm(
    x: Float[Array, "b *space c"],
    groups: int,
    eps: float,
    scale: Float[Array, " c"] | None = None,
    bias: Float[Array, " c"] | None = None,
) -> Float[Array, "b *space c"]:
    """Normalises every example over its space axes and over each of ``groups`` equal runs of channels.

    Raises:
      ValueError: ``groups`` does not divide the number of channels.
    """
    channels = x.shape[-1]
    if groups < 1 or channels % groups:
        raise ValueError(f"group_norm got groups = {groups}, which does not divide the {channels} channels of x.")
    wide = _wide(x).reshape(x.shape[0], -1, groups, channels // groups)
    centred = wide - jnp.mean(wide, axis=(1, 3), keepdims=True)
    inverse = jax.lax.rsqrt(jnp.mean(jnp.square(centred), axis=(1, 3), keepdims=True) + eps)
    y = (centred * inverse).reshape(x.shape)
    if scale is not None:
        y = y * scale
    if bias is not None:
        y = y + bias
    return y.astype(x.dtype)
