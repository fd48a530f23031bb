"""Which Gaussians each tile must look at, from their angle boxes, for every camera.

`tile_angles` and `hits` compare angle intervals on the circle: general and exact for any rays, at P x tiles booleans.
`pixel_boxes` turns angle boxes into pixel boxes of a BEAP, pinhole or fisheye camera, for the sorted path of
`core.tiles.tile_lists`; a fisheye's box is curved, so its extremes are taken over the box's ends and, where an
interval straddles 0, over 0 as well, three candidates an edge.
"""

import functools
import math

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from papyrax.methods.geometry.cameras import Camera, fisheye_radius
from papyrax.methods.rendering.geer.frustum import AngleBox, wrap

PAD = 1e-5  # radians, the rounding of angles


def tile_angles(rays: Float[Array, "tiles px 3"]) -> AngleBox:
    """Intervals of theta and phi over each tile's rays, unwrapped about its middle ray.

    They cover the rays themselves, not the directions between them. A tile whose angles spread over more than pi on
    an axis, as around the directions where that angle is not defined, matches every Gaussian on it.
    """
    angle = jnp.arctan2(rays[..., :2], rays[..., 2:])
    centre = angle[:, rays.shape[1] // 2]
    offset = wrap(angle - centre[:, None])
    low, high = offset.min(1), offset.max(1)
    half = 0.5 * (high - low)
    return AngleBox(centre + 0.5 * (low + high), jnp.where(half > 0.5 * math.pi, math.pi, half))


def hits(tiles: AngleBox, boxes: AngleBox, shown: Bool[Array, "p"]) -> Bool[Array, "tiles p"]:
    """Tiles and shown Gaussians whose intervals meet on both axes."""
    meet = shown[None]
    for axis in (0, 1):
        apart = jnp.abs(wrap(tiles.middle[:, None, axis] - boxes.middle[None, :, axis]))
        meet = meet & (apart <= tiles.half[:, None, axis] + boxes.half[None, :, axis] + PAD)
    return meet


def in_front(boxes: AngleBox, limit: float = 0.5 * math.pi) -> tuple[Float[Array, "p 2"], Float[Array, "p 2"]]:
    """Ends of the part of each interval within [-limit, limit]; low > high where there is none.

    An interval narrower than pi meets the range in one piece, in one of three turns.
    """
    middle = wrap(boxes.middle)
    low, high = jnp.full_like(middle, jnp.inf), jnp.full_like(middle, -jnp.inf)
    for turn in (-2 * math.pi, 0.0, 2 * math.pi):
        a, b = middle + turn - boxes.half, middle + turn + boxes.half
        meets = (b >= -limit) & (a <= limit)
        low = jnp.where(meets, jnp.minimum(low, jnp.maximum(a, -limit)), low)
        high = jnp.where(meets, jnp.maximum(high, jnp.minimum(b, limit)), high)
    everything = boxes.half >= math.pi
    return jnp.where(everything, -limit, low), jnp.where(everything, limit, high)


def pixel_boxes(boxes: AngleBox, cam: Camera) -> Float[Array, "p 4"]:
    """(x0, y0, x1, y1) in pixel coordinates, padded against rounding (BEAP 0.01 px, pinhole and fisheye 1 px).

    A fisheye is refused here beyond 180 degrees, where a box is no longer a box of tangents: use `hits`.
    """
    p = cam.params
    if cam.kind == "beap":
        low, high = in_front(boxes)
        low, high = ((a - p[:2]) / p[2] + cam.center for a in (low, high))
        return jnp.concatenate([low - 0.01, high + 0.01], 1)
    if cam.kind not in ("pinhole", "fisheye"):
        raise ValueError(f"the camera is {cam.kind}, pixel boxes exist for beap, pinhole and fisheye.")
    low, high = in_front(boxes, 0.5 * math.pi - 1e-4)
    seen = (low <= high).all(1, keepdims=True)
    low, high = (jnp.tan(jnp.where(seen, a, 0)) for a in (low, high))
    if cam.kind == "pinhole":
        ends = [low * p[:2] + p[2:4] - 1, high * p[:2] + p[2:4] + 1]
        return jnp.where(seen, jnp.concatenate(ends, 1), jnp.nan)
    lows, highs = [], []
    for axis in (0, 1):
        other = 1 - axis
        across = [low[:, other], high[:, other], jnp.clip(0, low[:, other], high[:, other])]
        for end, pick, store in ((low[:, axis], jnp.minimum, lows), (high[:, axis], jnp.maximum, highs)):
            values = []
            for side in across:
                rho = jnp.hypot(end, side)
                tiny = rho < 1e-9
                scale = fisheye_radius(jnp.arctan(rho), p[4:]) / jnp.where(tiny, 1, rho)
                values.append(p[axis] * jnp.where(tiny, 1, scale) * end)
            store.append(functools.reduce(pick, values) + p[2 + axis])
    ends = [jnp.stack(lows, 1) - 1, jnp.stack(highs, 1) + 1]
    return jnp.where(seen, jnp.concatenate(ends, 1), jnp.nan)
