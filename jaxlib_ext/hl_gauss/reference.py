"""HL-Gauss: a scalar as a smoothed histogram, its decoding, and the cross-entropy against it, in plain jnp.

Source: "Stop Regressing: Training Value Functions via Classification for Scalable Deep RL" (Farebrother et al., 2024),
in the form of "Relative Entropy Pathwise Policy Optimization" (arXiv 2507.11019). With B bins on [vmin, vmax]:

    w = (vmax - vmin) / (B - 1),   edges g_j = vmin + (j - 1/2) w for j = 0..B,   sigma = sigma_ratio * w
    F_j = erf((g_j - x) / (sqrt(2) sigma)),   p_b = (F_{b+1} - F_b) / (F_B - F_0),   x = clip(value, vmin, vmax)
    decode(p) = sum_b p_b c_b,   c = linspace(vmin, vmax, B)

Everything is written in units of w (t = (x - vmin) / w, edge j at j - 1/2), which keeps float32 differences small.
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def check_range(bins: int, vmin: float, vmax: float, sigma_ratio: float) -> None:
    """Raises ValueError unless the bins and the range define a histogram."""
    if bins < 2:
        raise ValueError(f"bins must be at least 2, got {bins}.")
    if not (math.isfinite(vmin) and math.isfinite(vmax) and vmin < vmax):
        raise ValueError(f"vmin and vmax must be finite with vmin < vmax, got {vmin} and {vmax}.")
    if not sigma_ratio > 0:
        raise ValueError(f"sigma_ratio must be positive, got {sigma_ratio}.")


def position(value: Array, bins: int, vmin: float, vmax: float) -> Array:
    """The clipped value in units of bins, 0 at vmin and bins - 1 at vmax; its gradient is 0 at and beyond both ends."""
    t = (value - vmin) * ((bins - 1) / (vmax - vmin))
    return jnp.where(t <= 0, 0.0, jnp.where(t >= bins - 1, float(bins - 1), t)).astype(t.dtype)


def hl_gauss_encode(
    x: Float[Array, "*n"], bins: int, vmin: float, vmax: float, *, sigma_ratio: float = 0.75
) -> Float[Array, "*n bins"]:
    """Probabilities of the bins for each scalar: a Gaussian around it, integrated over the bins and renormalised.

    Args:
        x: scalars in the units of vmin and vmax; clipped to that range.
        bins: number of bins, centred on linspace(vmin, vmax, bins).
        sigma_ratio: standard deviation of the Gaussian in bin widths.

    Returns: rows that sum to 1, in the dtype of x (at least float32 inside).
    Raises: ValueError for fewer than two bins, an empty range, or sigma_ratio <= 0.
    Source: module docstring.
    """
    check_range(bins, vmin, vmax, sigma_ratio)
    wide = jnp.promote_types(x.dtype, jnp.float32)
    t = position(x.astype(wide), bins, vmin, vmax)
    cdf = jax.lax.erf((jnp.arange(bins + 1, dtype=wide) - 0.5 - t[..., None]) / (math.sqrt(2.0) * sigma_ratio))
    return ((cdf[..., 1:] - cdf[..., :-1]) / (cdf[..., -1:] - cdf[..., :1])).astype(x.dtype)


def hl_gauss_decode(probs: Float[Array, "*n bins"], vmin: float, vmax: float) -> Float[Array, "*n"]:
    """Expected value of a histogram over linspace(vmin, vmax, bins), in the units of vmin and vmax.

    Decoding an encoded scalar is exact in the inside of the range and biased inwards within about two bins of its ends.
    Raises: ValueError for fewer than two bins or an empty range.
    """
    bins = probs.shape[-1]
    check_range(bins, vmin, vmax, 1.0)
    wide = jnp.promote_types(probs.dtype, jnp.float32)
    # sums of bin numbers, then one affine map: less rounding than sums of large centres
    mean_bin = jnp.sum(probs.astype(wide) * jnp.arange(bins, dtype=wide), axis=-1)
    total = jnp.sum(probs.astype(wide), axis=-1)
    return (vmin * total + mean_bin * ((vmax - vmin) / (bins - 1))).astype(probs.dtype)


def cross_entropy(
    logits: Float[Array, "n b"], value: Float[Array, "n"], vmin: float, vmax: float, sigma_ratio: float
) -> Float[Array, "n"]:
    """-sum_b p_b(value) log softmax(logits)_b in nats, in at least float32."""
    wide = jnp.promote_types(jnp.promote_types(logits.dtype, value.dtype), jnp.float32)
    target = hl_gauss_encode(value.astype(wide), logits.shape[-1], vmin, vmax, sigma_ratio=sigma_ratio)
    return -jnp.sum(target * jax.nn.log_softmax(logits.astype(wide), axis=-1), axis=-1)


def forward(logits: Array, value: Array, vmin: float, vmax: float, sigma_ratio: float) -> tuple[Array, Array]:
    """(loss, lse): the cross-entropy and the log-sum-exp of the logits, which is all that `backward` needs to be
    kept.
    """
    wide = jnp.promote_types(jnp.promote_types(logits.dtype, value.dtype), jnp.float32)
    lse = jax.nn.logsumexp(logits.astype(wide), axis=-1)
    target = hl_gauss_encode(value.astype(wide), logits.shape[-1], vmin, vmax, sigma_ratio=sigma_ratio)
    return -jnp.sum(target * (logits.astype(wide) - lse[:, None]), axis=-1), lse


def backward(
    logits: Array, value: Array, lse: Array, g: Array, vmin: float, vmax: float, sigma_ratio: float
) -> tuple[Array, Array]:
    """Gradients of sum(g * loss) by the formulas, with the histogram computed again.

    d logits = g (softmax(logits) - p). With t = (value - vmin) / w and F'_j = dF_j/dt,
    d value = -g / w sum_b (logits_b - lse) [F'_{b+1} - F'_b - p_b (F'_B - F'_0)] / (F_B - F_0) inside the range, 0
    outside.
    """
    bins = logits.shape[-1]
    wide = lse.dtype
    t = position(value.astype(wide), bins, vmin, vmax)
    u = (jnp.arange(bins + 1, dtype=wide) - 0.5 - t[:, None]) / (math.sqrt(2.0) * sigma_ratio)
    cdf = jax.lax.erf(u)
    slope = -2.0 / math.sqrt(math.pi) / (math.sqrt(2.0) * sigma_ratio) * jnp.exp(-u * u)
    total = cdf[:, -1:] - cdf[:, :1]
    p = (cdf[:, 1:] - cdf[:, :-1]) / total
    dp = (slope[:, 1:] - slope[:, :-1] - p * (slope[:, -1:] - slope[:, :1])) / total
    centred = logits.astype(wide) - lse[:, None]
    d_logits = g[:, None] * (jnp.exp(centred) - p)
    inside = (t > 0) & (t < bins - 1)
    d_value = jnp.where(inside, -g * ((bins - 1) / (vmax - vmin)) * jnp.sum(dp * centred, axis=-1), 0.0)
    return d_logits.astype(logits.dtype), d_value.astype(value.dtype)
