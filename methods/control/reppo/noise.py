"""Standard normals for the minibatches: the random bits of Threefry-2x32 (Salmon et al., SC 2011), all 20 rounds in one
elementwise expression.

JAX's own lowering for a CPU loops over the rounds and writes the words to memory after each; in one expression they stay
in registers. Both words of a block are used. The streams differ from those of `jax.random.normal`, their law does not.
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key, UInt32

__all__ = ["normals", "threefry"]

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA


def threefry(
    key: tuple[UInt32[Array, ""], UInt32[Array, ""]], x: UInt32[Array, "*n"], y: UInt32[Array, "*n"]
) -> tuple[UInt32[Array, "*n"], UInt32[Array, "*n"]]:
    """The blocks (x, y) enciphered under a key of two words."""
    words = (*key, key[0] ^ key[1] ^ jnp.uint32(_PARITY))
    x, y = x + words[0], y + words[1]
    for group in range(5):
        for turn in _ROTATIONS[group % 2]:
            x = x + y
            y = x ^ ((y << turn) | (y >> (32 - turn)))
        x, y = x + words[(group + 1) % 3], y + words[(group + 2) % 3] + jnp.uint32(group + 1)
    return x, y


def normals(key: Key[Array, ""], shape: tuple[int, ...]) -> Float[Array, "..."]:
    """Independent standard normals, float32, at most 5.4 in size; keys of another kind than Threefry go to JAX."""
    if jax.random.key_impl(key) != "threefry2x32":
        return jax.random.normal(key, shape)
    count = math.prod(shape)
    half = (count + 1) // 2
    data = jax.random.key_data(key)
    first = jnp.arange(half, dtype=jnp.uint32)
    bits = jnp.concatenate(threefry((data[0], data[1]), first, first + jnp.uint32(half)))[:count]
    # 24 bits, moved half a step off the ends of (-1, 1), where the inverse is infinite.
    uniform = (bits >> 8).astype(jnp.int32).astype(jnp.float32) * 2.0**-23 + (2.0**-24 - 1.0)
    return (math.sqrt(2.0) * jax.lax.erf_inv(uniform)).reshape(shape)
