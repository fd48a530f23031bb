"""Initial values of kernels: torch's default for linear layers, and LeCun's."""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

__all__ = ["fan_in_uniform", "lecun_normal"]


def _fan_in(shape: Sequence[int], fan_in: int | None) -> int:
    fan_in = math.prod(shape[:-1]) if fan_in is None else fan_in
    if fan_in < 1:
        raise ValueError(f"fan_in must be at least 1, but shape {tuple(shape)} gives {fan_in}.")
    return fan_in


def fan_in_uniform(
    key: Key[Array, ""], shape: Sequence[int], fan_in: int | None = None, dtype=jnp.float32
) -> Float[Array, "..."]:
    """Uniform in ±1/sqrt(fan_in), what torch gives kernels *and biases* of a linear layer by default.

    ``fan_in`` is the product of all axes but the last when it is not given; a bias has to be told its layer's.
    """
    bound = 1.0 / math.sqrt(_fan_in(shape, fan_in))
    return jax.random.uniform(key, tuple(shape), dtype, -bound, bound)


def lecun_normal(
    key: Key[Array, ""], shape: Sequence[int], fan_in: int | None = None, dtype=jnp.float32
) -> Float[Array, "..."]:
    """Normal cut at two deviations and rescaled to variance 1/fan_in, the default of Flax (LeCun et al. 1998)."""
    # 0.8796… is the standard deviation of a unit normal restricted to [-2, 2].
    std = 1.0 / (0.87962566103423978 * math.sqrt(_fan_in(shape, fan_in)))
    return std * jax.random.truncated_normal(key, -2.0, 2.0, tuple(shape), dtype)
