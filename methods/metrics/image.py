"""Image quality: PSNR, SSIM (Wang et al. 2004) and multi-scale SSIM (Wang et al. 2003).

SSIM: 11x11 Gaussian window of sigma 1.5, C1 = (0.01 L)^2, C2 = (0.03 L)^2 with L the data range, variances as
E[x^2] - mu^2. `pad` "same" pads with zeros and keeps the picture's size (3D Gaussian splatting's loss); "valid" keeps
the windows that lie wholly inside (the original's measure).
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

WINDOW, SIGMA = 11, 1.5
MS_WEIGHTS = (0.0448, 0.2856, 0.3001, 0.2363, 0.1333)


def psnr(
    x: Float[Array, "b h w c"],
    y: Float[Array, "b h w c"],
    *,
    data_range: float,
    mask: Bool[Array, "b h w"] | None = None,
) -> Float[Array, "b"]:
    """Peak signal-to-noise ratio in decibels of each image, over the pixels of `mask`; inf for equal images."""
    _check(x, y, data_range, mask)
    error = jnp.mean((x - y) ** 2, -1)
    if mask is None:
        mse = jnp.mean(error, (1, 2))
    else:
        mse = jnp.sum(jnp.where(mask, error, 0), (1, 2)) / jnp.maximum(mask.sum((1, 2)), 1)
    return 10 * jnp.log10(data_range**2 / mse)


def ssim_map(
    x: Float[Array, "b h w c"], y: Float[Array, "b h w c"], *, data_range: float, pad: str
) -> tuple[Float[Array, "b h2 w2 c"], Float[Array, "b h2 w2 c"]]:
    """SSIM of every window, and its contrast-structure factor alone (as multi-scale SSIM needs)."""
    if pad not in ("same", "valid"):
        raise ValueError(f"pad is {pad!r}, wanted 'same' or 'valid'.")
    if pad == "valid" and min(x.shape[1:3]) < WINDOW:
        raise ValueError(
            f"the images are {x.shape[2]}x{x.shape[1]}, pad 'valid' wants at least {WINDOW} pixels a side."
        )
    c1, c2 = (0.01 * data_range) ** 2, (0.03 * data_range) ** 2
    mx, my, xx, yy, xy = (_blur(a, pad) for a in (x, y, x * x, y * y, x * y))
    contrast = (2 * (xy - mx * my) + c2) / (xx - mx * mx + yy - my * my + c2)
    return contrast * (2 * mx * my + c1) / (mx * mx + my * my + c1), contrast


def ssim(
    x: Float[Array, "b h w c"],
    y: Float[Array, "b h w c"],
    *,
    data_range: float,
    pad: str,
    mask: Bool[Array, "b h w"] | None = None,
) -> Float[Array, "b"]:
    """Mean SSIM of each image over windows and channels.

    With a mask, both images are set to 0 outside of it and the mean runs over windows whose centre lies inside.
    """
    _check(x, y, data_range, mask)
    if mask is not None:
        x, y = jnp.where(mask[..., None], x, 0), jnp.where(mask[..., None], y, 0)
    value, _ = ssim_map(x, y, data_range=data_range, pad=pad)
    value = value.mean(-1)
    if mask is None:
        return value.mean((1, 2))
    if pad == "valid":
        edge = WINDOW // 2
        mask = mask[:, edge:-edge, edge:-edge]
    return jnp.sum(jnp.where(mask, value, 0), (1, 2)) / jnp.maximum(mask.sum((1, 2)), 1)


def ms_ssim(
    x: Float[Array, "b h w c"],
    y: Float[Array, "b h w c"],
    *,
    data_range: float,
    pad: str,
    mask: Bool[Array, "b h w"] | None = None,
    weights: Sequence[float] = MS_WEIGHTS,
) -> Float[Array, "b"]:
    """Multi-scale SSIM: contrast-structure at each scale and SSIM at the last, to the powers `weights`.

    Between scales the images are averaged over 2x2 pixels (a mask keeps the cells it covers wholly). Negative means
    are clipped at 0. `weights` sets the number of scales; VisCoder2's judge takes three.
    """
    _check(x, y, data_range, mask)
    least = (WINDOW if pad == "valid" else 1) * 2 ** (len(weights) - 1)
    if min(x.shape[1:3]) < least:
        raise ValueError(
            f"the images are {x.shape[2]}x{x.shape[1]}, "
            f"{len(weights)} scales with pad {pad!r} want {least} pixels a side."
        )
    result = jnp.ones(x.shape[0], x.dtype)
    edge = WINDOW // 2 if pad == "valid" else 0
    for scale, weight in enumerate(weights):
        if mask is not None:
            x, y = jnp.where(mask[..., None], x, 0), jnp.where(mask[..., None], y, 0)
        full, contrast = ssim_map(x, y, data_range=data_range, pad=pad)
        value = (full if scale == len(weights) - 1 else contrast).mean(-1)
        inside = jnp.ones(value.shape, bool)
        if mask is not None:
            inside = mask[:, edge : mask.shape[1] - edge, edge : mask.shape[2] - edge]
        mean = jnp.sum(jnp.where(inside, value, 0), (1, 2)) / jnp.maximum(inside.sum((1, 2)), 1)
        result = result * jnp.maximum(mean, 0) ** weight
        x, y = _halve(x), _halve(y)
        mask = None if mask is None else _halve(mask.astype(x.dtype)[..., None])[..., 0] == 1
    return result


def _check(x, y, data_range, mask):
    if x.ndim != 4 or x.shape != y.shape:
        raise ValueError(f"the images have shapes {x.shape} and {y.shape}, wanted equal ones of (b, h, w, c).")
    if not data_range > 0:
        raise ValueError(f"data_range is {data_range}, wanted the positive span of pixel values, such as 1 or 255.")
    if mask is not None and mask.shape != x.shape[:3]:
        raise ValueError(f"mask has shape {mask.shape}, wanted {x.shape[:3]}.")


def _taps(dtype):
    offset = jnp.arange(WINDOW, dtype=dtype) - WINDOW // 2
    taps = jnp.exp(-0.5 * (offset / SIGMA) ** 2)
    return taps / taps.sum()


@jax.custom_vjp
def _blur_same(a):
    taps, edge = _taps(a.dtype), WINDOW // 2
    for axis in (1, 2):
        widths = [(0, 0)] * 4
        widths[axis] = (edge, edge)
        padded = jnp.pad(a, widths)
        shifted = (jax.lax.slice_in_dim(padded, i, i + a.shape[axis], axis=axis) for i in range(WINDOW))
        a = sum(tap * part for tap, part in zip(taps, shifted))
    return a


# The zero-padded blur is its own transpose; saying so replaces 22 padded sums in the backward pass by one blur.
_blur_same.defvjp(lambda a: (_blur_same(a), None), lambda _, g: (_blur_same(g),))


def _blur(a, pad):
    blurred = _blur_same(a)
    edge = WINDOW // 2
    return blurred if pad == "same" else blurred[:, edge:-edge, edge:-edge]


def _halve(a):
    h, w = a.shape[1] // 2 * 2, a.shape[2] // 2 * 2
    a = a[:, :h, :w]
    return 0.25 * (a[:, ::2, ::2] + a[:, 1::2, ::2] + a[:, ::2, 1::2] + a[:, 1::2, 1::2])
