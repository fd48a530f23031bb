"""The photometric loss of 3D Gaussian splatting: 0.8 L1 + 0.2 (1 - SSIM), with or without a mask of valid pixels."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from papyrax.methods.metrics.image import ssim


def photometric(
    image: Float[Array, "h w c"],
    target: Float[Array, "h w c"],
    mask: Bool[Array, "h w"] | None = None,
    dssim: float = 0.2,
) -> Float[Array, ""]:
    """(1 - dssim) mean|image - target| + dssim (1 - SSIM), SSIM zero-padded on a data range of 1.

    The mask sets both images to 0 outside of it; means still run over all pixels, as the 3DGEER release does.
    """
    if image.shape != target.shape:
        raise ValueError(f"image has shape {image.shape}, its target {target.shape}.")
    if mask is not None:
        image, target = jnp.where(mask[..., None], image, 0), jnp.where(mask[..., None], target, 0)
    return (1 - dssim) * jnp.abs(image - target).mean() + dssim * (
        1 - ssim(image[None], target[None], data_range=1.0, pad="same")[0]
    )


def inverse_depth_l1(
    inverse: Float[Array, "h w"], target: Float[Array, "h w"], mask: Bool[Array, "h w"]
) -> Float[Array, ""]:
    """Mean absolute error of inverse depth over all pixels, those outside of the mask counting 0."""
    return jnp.where(mask, jnp.abs(inverse - target), 0).mean()
