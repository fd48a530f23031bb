"""The policies of REPPO: Gaussians squashed by tanh, and categorical ones; densities, samples, divergences.

A squashed action is ``a = tanh(u)``, ``u ~ N(mean, std²)`` an axis, so

    log pi(a) = sum_d [ log N(u; mean, std) - 2 (log 2 - u - softplus(-2 u)) ]

Actions are stored clipped to ±0.999 and scored at the clipped value; samples for a divergence are clipped to
±(1 - 1e-4). Noise is an argument, standard normal, so that a sample split over devices stays the same sample.
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

__all__ = [
    "ACTION_CLIP",
    "categorical_entropy",
    "categorical_kl",
    "clip_action",
    "gaussian_kl",
    "gaussian_logp",
    "kl_estimate",
    "squash_correction",
    "tanh_logp",
    "tanh_sample",
]

ACTION_CLIP = 0.999
_KL_CLIP = math.atanh(1 - 1e-4)
_HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)


def clip_action(action: Float[Array, "*n d"]) -> Float[Array, "*n d"]:
    """The action as the world gets it and as it is stored: within ±0.999, where atanh is finite."""
    return jnp.clip(action, -ACTION_CLIP, ACTION_CLIP)


def gaussian_logp(u: Float[Array, "*n d"], mean: Float[Array, "*n d"], std: Float[Array, "*n d"]) -> Float[Array, "*n"]:
    """Log density of independent normals, summed over the axes, in nats."""
    z = (u - mean) / std
    return -jnp.sum(0.5 * jnp.square(z) + jnp.log(std) + _HALF_LOG_2PI, axis=-1)


def squash_correction(u: Float[Array, "*n d"]) -> Float[Array, "*n"]:
    """``log |det d tanh(u) / du|``, stable for large ``u``."""
    return jnp.sum(2 * (math.log(2) - u - jax.nn.softplus(-2 * u)), axis=-1)


def tanh_sample(
    noise: Float[Array, "*n d"], mean: Float[Array, "*n d"], std: Float[Array, "*n d"]
) -> tuple[Float[Array, "*n d"], Float[Array, "*n"]]:
    """Reparameterised action ``tanh(mean + std noise)`` and its log density; both carry gradients."""
    u = mean + std * noise
    logp = -jnp.sum(0.5 * jnp.square(noise) + jnp.log(std) + _HALF_LOG_2PI, axis=-1)
    return jnp.tanh(u), logp - squash_correction(u)


def tanh_logp(
    mean: Float[Array, "*n d"], std: Float[Array, "*n d"], action: Float[Array, "*n d"]
) -> Float[Array, "*n"]:
    """Log density of a given action inside (-1, 1); NaN or infinite on the border and beyond, so clip before."""
    u = jnp.arctanh(action)
    return gaussian_logp(u, mean, std) - squash_correction(u)


def kl_estimate(
    noise: Float[Array, "m *n d"],
    mean_old: Float[Array, "*n d"],
    std_old: Float[Array, "*n d"],
    mean: Float[Array, "*n d"],
    std: Float[Array, "*n d"],
) -> Float[Array, "*n"]:
    """Monte-Carlo ``KL(old || new)``: mean over m actions of the old policy of ``log pi_old - log pi``, in nats.

    Samples are clipped to ±(1 - 1e-4) and both densities scored there, so equal policies give exactly 0; with few
    samples it may be negative. The gradient runs through ``mean`` and ``std`` only if the old ones are constants.

    The squashing terms of the two densities cancel, and what is left is quadratic in the sample: its first two moments
    about the old mean are all that is needed, so no [m, n, d] array is differentiated.
    """
    # Flat, because loops over a short last axis do not vectorise on a CPU.
    flat = mean_old.reshape(-1)
    delta = jnp.clip(flat + std_old.reshape(-1) * noise.reshape(noise.shape[0], -1), -_KL_CLIP, _KL_CLIP) - flat
    first, second = (jnp.mean(x, axis=0).reshape(mean_old.shape) for x in (delta, jnp.square(delta)))
    inverse, inverse_old = 1 / std, 1 / std_old
    shift = mean_old - mean
    # Factored differences, because x² - y² of equal numbers need not be 0 after fused multiply-adds.
    spread = second * (inverse - inverse_old) * (inverse + inverse_old)
    moved = shift * (2 * first + shift) * jnp.square(inverse)
    return jnp.sum(jnp.log(std) - jnp.log(std_old) + 0.5 * (spread + moved), axis=-1)


def gaussian_kl(
    mean_old: Float[Array, "*n d"],
    std_old: Float[Array, "*n d"],
    mean: Float[Array, "*n d"],
    std: Float[Array, "*n d"],
) -> Float[Array, "*n"]:
    """Closed-form ``KL(old || new)`` in nats, of the Gaussians and so of the squashed policies too."""
    ratio, shift = std_old / std, (mean_old - mean) / std
    return jnp.sum(0.5 * (jnp.square(ratio) + jnp.square(shift) - 1) - jnp.log(ratio), axis=-1)


def categorical_entropy(log_probs: Float[Array, "*n a"]) -> Float[Array, "*n"]:
    """Entropy in nats of normalised log probabilities."""
    return -jnp.sum(jnp.exp(log_probs) * log_probs, axis=-1)


def categorical_kl(log_probs_old: Float[Array, "*n a"], log_probs: Float[Array, "*n a"]) -> Float[Array, "*n"]:
    """Exact ``KL(old || new)`` in nats of normalised log probabilities."""
    return jnp.sum(jnp.exp(log_probs_old) * (log_probs_old - log_probs), axis=-1)
