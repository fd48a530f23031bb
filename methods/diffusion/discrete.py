"""Diffusion with discrete noise levels: schedules, noising, the four things a network may predict, and DDIM.

Level i counts noise up: 0 is nearly clean, n - 1 nearly pure noise. With a = alpha_bar(level) the noisy sample is

    x_t = sqrt(a) x0 + sqrt(1 - a) eps                                              (Ho et al. 2020, eq. 4)

Predictions ("kinds"), each convertible to any other at a known level:

    eps       the noise
    x0        the clean sample
    v         sqrt(a) eps - sqrt(1 - a) x0                                          (Salimans and Ho 2022)
    velocity  x0 - eps, the velocity towards the data on the straight path t x0 + (1 - t) eps, on which the noisy sample
              lies once it is divided by sqrt(a) + sqrt(1 - a)

Schedules: "linear" betas from 1e-4 to 0.02 scaled by 1000/n (Ho et al. 2020), "cosine" (Nichol and Dhariwal 2021, eq. 17,
betas cut at 0.999), "scaled_linear" (square roots of beta evenly spaced from 0.00085 to 0.012, Rombach et al. 2022).
"""

from typing import Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

Kind = Literal["eps", "x0", "v", "velocity"]
KINDS = ("eps", "x0", "v", "velocity")


def alpha_bar(kind: Literal["linear", "cosine", "scaled_linear"], n: int) -> Float[Array, " n"]:
    """Share of signal variance left at each of n levels, strictly falling, in float32 (products taken in float64).

    Raises:
      ValueError: an unknown schedule or fewer than one level.
    """
    if n < 1:
        raise ValueError(f"alpha_bar: n must be at least 1 level, got {n}.")
    if kind == "linear":
        # below 20 levels the scaled end would pass 1, where nothing of the signal is left
        beta = np.minimum(np.linspace(1e-4, 0.02, n) * (1000 / n), 0.999)
    elif kind == "cosine":
        at = np.cos((np.arange(n + 1) / n + 0.008) / 1.008 * np.pi / 2) ** 2
        beta = np.minimum(1 - at[1:] / at[:-1], 0.999)
    elif kind == "scaled_linear":
        beta = np.linspace(0.00085**0.5, 0.012**0.5, n) ** 2
    else:
        raise ValueError(f'alpha_bar: kind must be "linear", "cosine" or "scaled_linear", got {kind!r}.')
    return jnp.asarray(np.cumprod(1 - beta), jnp.float32)


def add_noise(
    x0: Float[Array, "b ..."], eps: Float[Array, "b ..."], level: Int[Array, " b"], table: Float[Array, " n"]
) -> Float[Array, "b ..."]:
    """The noisy sample at `level`, table = alpha_bar(...)."""
    signal, noise = _scales(level, table, x0)
    return signal * x0 + noise * eps


def convert(
    x: Float[Array, "b ..."],
    pred: Float[Array, "b ..."],
    level: Int[Array, " b"],
    src: Kind,
    dst: Kind,
    table: Float[Array, " n"],
) -> Float[Array, "b ..."]:
    """The prediction `pred` of kind `src`, made at noisy sample x, expressed as kind `dst`.

    The two unknowns x0 and eps satisfy the noising equation and the definition of `src`, so every kind determines them.
    From "eps" at the noisiest levels and from "x0" at the cleanest the division by a small scale amplifies errors.

    Raises:
      ValueError: an unknown kind.
    """
    for name, kind in (("src", src), ("dst", dst)):
        if kind not in KINDS:
            raise ValueError(f"convert: {name} must be one of {', '.join(KINDS)}, got {kind!r}.")
    if src == dst:
        return pred
    signal, noise = _scales(level, table, x)
    if src == "x0":
        x0, eps = pred, (x - signal * pred) / noise
    elif src == "eps":
        x0, eps = (x - noise * pred) / signal, pred
    elif src == "v":
        x0, eps = signal * x - noise * pred, noise * x + signal * pred
    else:
        total = signal + noise
        x0, eps = (x + noise * pred) / total, (x - signal * pred) / total
    return {"x0": x0, "eps": eps, "v": signal * eps - noise * x0, "velocity": x0 - eps}[dst]


def ddim_step(
    x: Float[Array, "b ..."],
    eps: Float[Array, "b ..."],
    level: Int[Array, " b"],
    to: Int[Array, " b"],
    table: Float[Array, " n"],
    *,
    clip: float | None = None,
) -> Float[Array, "b ..."]:
    """One deterministic DDIM step (Song et al. 2021, eq. 12 with sigma 0) from `level` down to `to`; to = -1 is clean.

    With `clip` the clean estimate is cut to +-clip and the noise made consistent with it, which keeps samples of scaled
    data inside their range.
    """
    signal, noise = _scales(level, table, x)
    x0 = (x - noise * eps) / signal
    if clip is not None:
        x0 = jnp.clip(x0, -clip, clip)
        eps = (x - signal * x0) / noise
    signal, noise = _scales(to, table, x)
    return signal * x0 + noise * eps


def ddim_levels(n: int, steps: int) -> Int[Array, "steps 2"]:
    """Pairs (level, to) of a walk of `steps` evenly spaced levels from the noisiest used one down to clean (-1)."""
    if not 1 <= steps <= n:
        raise ValueError(f"ddim_levels: steps must lie in 1..{n}, the number of levels, got {steps}.")
    levels = (np.arange(steps)[::-1] + 1) * n // steps - 1
    return jnp.asarray(np.stack([levels, np.append(levels[1:], -1)], 1), jnp.int32)


def _scales(level, table, like):
    """sqrt(alpha_bar) and sqrt(1 - alpha_bar), shaped to multiply `like`; level -1 is clean."""
    a = jnp.where(level < 0, 1, table[jnp.maximum(level, 0)]).astype(like.dtype)
    a = a.reshape(a.shape + (1,) * (like.ndim - a.ndim))
    return jnp.sqrt(a), jnp.sqrt(1 - a)
