"""3DGEER's protocol: the field of view of training and test images, pictures in BEAP, and scores by field.

Training images are fisheye or pinhole pictures resampled along a BEAP grid, with a mask of the pixels that the picture
covers. Scores are taken in the picture's own space: a BEAP render and the truth, resampled to BEAP likewise, are both
mapped back before they are compared, so that resampling blurs both alike.
"""

import math

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from papyrax.methods.geometry.cameras import Camera, beap_camera, camera_rays, resample
from papyrax.methods.metrics.image import psnr, ssim


def training_camera(cam: Camera, fov_factor: float, step: float) -> Camera:
    """The BEAP camera of a picture: half fields min(w / (2 fx) fov_factor, pi / 2) and the same in y, same pose.

    The release trains with factor 1.3 and step 0.002 and tests with 2.0 and 0.0015.
    """
    if cam.kind not in ("pinhole", "fisheye"):
        raise ValueError(f"the camera is {cam.kind}, BEAP images are made of pinhole and fisheye pictures.")
    fov = [2 * min(n / (2 * float(f)) * fov_factor, math.pi / 2) for n, f in zip(cam.wh, cam.params[:2])]
    return beap_camera((fov[0], fov[1]), step, cam.R, cam.t)


def to_beap(
    image: Float[Array, "h w c"], cam: Camera, beap: Camera
) -> tuple[Float[Array, "h2 w2 c"], Bool[Array, "h2 w2"]]:
    """The picture along the BEAP rays, mirrored beyond its border, and the mask of rays that fall on it."""
    return resample(image, cam, beap)


def axis_angle(cam: Camera) -> Float[Array, "h w"]:
    """Angle of every pixel's ray from the optical axis, in radians."""
    rays = camera_rays(cam)
    return jnp.arctan2(jnp.linalg.norm(rays[..., :2], axis=-1), rays[..., 2])


def field_split(cam: Camera, valid: Bool[Array, "h w"] | None = None) -> tuple[Bool[Array, "h w"], Bool[Array, "h w"]]:
    """(central, peripheral) pixels: rays within half of the half field of view of the axis, and the others.

    The half field of view is the largest angle of the valid pixels, so a fisheye's circle of 180 degrees is cut at 45.
    """
    angle = axis_angle(cam)
    valid = jnp.ones(angle.shape, bool) if valid is None else valid
    central = valid & (angle <= 0.5 * jnp.where(valid, angle, 0).max())
    return central, valid & ~central


def scores(
    image: Float[Array, "h w 3"], target: Float[Array, "h w 3"], cam: Camera, mask: Bool[Array, "h w"] | None = None
) -> dict[str, Float[Array, ""]]:
    """PSNR over all valid pixels, over the central and the peripheral ones (pooled squared error), and SSIM."""
    valid = jnp.ones(image.shape[:2], bool) if mask is None else mask
    image = jnp.clip(image, 0, 1)[None]
    central, peripheral = field_split(cam, valid)
    part = {"psnr": valid, "psnr_central": central, "psnr_peripheral": peripheral}
    out = {name: psnr(image, target[None], data_range=1.0, mask=pixels[None])[0] for name, pixels in part.items()}
    out["ssim"] = ssim(image, target[None], data_range=1.0, pad="same", mask=valid[None])[0]
    return out


def scores_of_beap(
    rendered: Float[Array, "h2 w2 3"], target: Float[Array, "h w 3"], beap: Camera, cam: Camera
) -> dict[str, Float[Array, ""]]:
    """`scores` of a BEAP render against a picture, both mapped back from BEAP to the picture's camera."""
    there, covered = to_beap(target, cam, beap)
    back, seen = resample(jnp.clip(rendered, 0, 1), beap, cam)
    truth, _ = resample(there, beap, cam)
    known, _ = resample(covered.astype(target.dtype), beap, cam)
    return scores(back, truth, cam, seen & (known > 0.999))
