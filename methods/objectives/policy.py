"""The clipped surrogate of proximal policy optimisation (Schulman et al. 2017, arXiv 1707.06347, equation 7)."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

__all__ = ["clip_loss", "normalize_adv"]


def clip_loss(
    logp: Float[Array, "*n"],
    logp_old: Float[Array, "*n"],
    adv: Float[Array, "*n"],
    *,
    low: float,
    high: float,
    log_ratio_max: float | None = None,
) -> Float[Array, "*n"]:
    """``-min(rho adv, clip(rho, 1 - low, 1 + high) adv)`` an entry, with the ratio ``rho = exp(logp - logp_old)``.

    ``log_ratio_max`` cuts the log ratio from above, without gradient there, where the new policy may hold far more of
    an entry than the old one did and the ratio would overflow.

    Raises:
      ValueError: shapes differ, or a bound is not positive.
    """
    if not logp.shape == logp_old.shape == adv.shape:
        raise ValueError(
            f"logp, logp_old and adv must have one shape, but have {logp.shape}, {logp_old.shape} and {adv.shape}."
        )
    if not (0 < low <= 1 and high > 0):
        raise ValueError(f"low must lie in (0, 1] and high above 0, but they are {low} and {high}.")
    log_ratio = logp - logp_old
    ratio = jnp.exp(log_ratio if log_ratio_max is None else jnp.minimum(log_ratio, log_ratio_max))
    return -jnp.minimum(ratio * adv, jnp.clip(ratio, 1 - low, 1 + high) * adv)


def normalize_adv(adv: Float[Array, "*n"], *, eps: float = 1e-8, axis_name: str | None = None) -> Float[Array, "*n"]:
    """``(adv - mean) / (std + eps)`` over all entries, on every device along ``axis_name`` too."""

    def mean(x):
        here = jnp.mean(x)
        return here if axis_name is None else jax.lax.pmean(here, axis_name)

    centred = adv - mean(adv)
    return centred / (jnp.sqrt(mean(jnp.square(centred))) + eps)
