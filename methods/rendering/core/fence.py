"""A border that the compiler does not fuse across, so that each stage of a long elementwise chain is computed once."""

from typing import TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

T = TypeVar("T")


def fence(values: T, used: Bool[Array, ""]) -> T:
    """`values`, unchanged where `used` holds (some primitive is in use); what comes out otherwise means nothing.

    XLA computes a fused chain anew in every loop that reads it; the chain from parameters to screen ellipses, and its
    gradient, has dozens of readers. XLA's CPU compiler drops optimization barriers before it fuses, but keeps a
    conditional whose predicate it does not know.
    """

    def conditional(values, used):
        return jax.lax.cond(used, lambda v: v, lambda v: jax.tree.map(jnp.zeros_like, v), values)

    def barrier(values, used):
        return jax.lax.optimization_barrier(values)

    return jax.lax.platform_dependent(values, used, cpu=conditional, default=barrier)
