"""From the network's output to an action and a loss: a point, or a mixture of diagonal Gaussians.

Everything is in standardised action space. The mixture takes M (2 a) + M numbers: means, raw scales, logits, with
scale = softplus(raw) + 0.01, which keeps the density bounded.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from papyrax.methods.control.darp.config import Config

_FLOOR = 0.01


class Mixture(NamedTuple):
    """M diagonal Gaussians over actions."""

    logits: Float[Array, "b m"]
    mean: Float[Array, "b m a"]
    scale: Float[Array, "b m a"]


def head_size(a: int, cfg: Config) -> int:
    """Numbers that the head reads."""
    if cfg.head not in ("point", "gmm"):
        raise ValueError(f'head_size: cfg.head must be "point" or "gmm", got {cfg.head!r}.')
    return a if cfg.head == "point" else cfg.modes * (2 * a + 1)


def mixture(out: Float[Array, "b p"], modes: int) -> Mixture:
    """The mixture that M (2 a) + M numbers describe."""
    a, rest = divmod(out.shape[-1] - modes, 2 * modes)
    if rest or a < 1:
        raise ValueError(f"mixture: {modes} modes need M (2 a + 1) numbers, got {out.shape[-1]}.")
    mean, raw, logits = jnp.split(out, [modes * a, 2 * modes * a], axis=-1)
    shape = (*out.shape[:-1], modes, a)
    return Mixture(logits, mean.reshape(shape), jax.nn.softplus(raw.reshape(shape)) + _FLOOR)


def mixture_log_prob(mix: Mixture, u: Float[Array, "b a"]) -> Float[Array, " b"]:
    """Log density of standardised actions, in nats."""
    z = (u[:, None] - mix.mean) / mix.scale
    each = jnp.sum(-0.5 * jnp.square(z) - jnp.log(mix.scale) - 0.5 * math.log(2 * math.pi), axis=-1)
    return jax.nn.logsumexp(jax.nn.log_softmax(mix.logits) + each, axis=-1)


def mixture_sample(key: Key[Array, ""], mix: Mixture) -> Float[Array, "b a"]:
    """One draw from each mixture."""
    key_mode, key_noise = jax.random.split(key)
    mode = jax.random.categorical(key_mode, mix.logits)[:, None, None]
    mean, scale = (jnp.take_along_axis(v, mode, axis=1)[:, 0] for v in (mix.mean, mix.scale))
    return mean + scale * jax.random.normal(key_noise, mean.shape, mean.dtype)


def row_loss(out: Float[Array, "b p"], u: Float[Array, "b a"], cfg: Config) -> Float[Array, " b"]:
    """Loss of every row: squared error averaged over action dimensions, or minus the log density."""
    if cfg.head == "gmm":
        return -mixture_log_prob(mixture(out, cfg.modes), u)
    return jnp.mean(jnp.square(out - u), axis=-1)


def action(key: Key[Array, ""] | None, out: Float[Array, "b p"], cfg: Config) -> Float[Array, "b a"]:
    """Standardised action: the output itself, or a draw from its mixture."""
    if cfg.head == "point":
        return out
    if key is None:
        raise ValueError("act: the mixture head draws its action and needs a key, got None.")
    return mixture_sample(key, mixture(out, cfg.modes))
