"""Lagrange multipliers trained by gradient descent in log space."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

__all__ = ["log_dual"]


def log_dual(log_lam: Float[Array, ""], slack: Float[Array, "*n"]) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """A multiplier ``lam = exp(log_lam)`` and the loss ``lam * mean(slack)`` that tunes it.

    ``slack`` is how far the constraint holds with room to spare, negative where it is broken; its gradient is stopped.
    Descent on ``log_lam`` has the gradient ``lam * mean(slack)``: the multiplier falls where there is room and rises
    where the constraint is broken, in proportion to itself, and stays positive. The returned ``lam`` carries its
    gradient; stop it where it weighs another loss.

    Sources: Haarnoja et al. 2018 (arXiv 1812.05905, equation 18) for a temperature; REPPO (arXiv 2507.11019) for a
    bound on KL.
    """
    lam = jnp.exp(log_lam)
    return lam, lam * jnp.mean(jax.lax.stop_gradient(slack))
