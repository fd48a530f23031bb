"""Shading of ray-cast bodies: checkers and stripes, one sun, a sky with a gradient, one mirror bounce."""

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float

from papyrax.methods.geometry.cameras import Camera, world_rays
from papyrax.methods.geometry.raycast import Bodies, cast

SUN = (0.4, -0.8, -0.45)
"""Direction towards the sun; y points down."""


@struct.dataclass
class Look:
    """How each body looks.

    Attributes:
        colour, second: the two colours of its pattern.
        cells: pattern cells in units of the surface coordinates (per radian on spheres); 0 is plain.
        mirror: share of the mirrored surroundings, 0 matte.
        shine: strength of the sun's glint.
    """

    colour: Float[Array, "p 3"]
    second: Float[Array, "p 3"]
    cells: Float[Array, "p"]
    mirror: Float[Array, "p"]
    shine: Float[Array, "p"]


@struct.dataclass
class Picture:
    """What a camera sees: colours in [0, 1], distance along the unit ray (inf: sky), body index (-1: sky)."""

    rgb: Float[Array, "h w 3"]
    distance: Float[Array, "h w"]
    body: Array


def sky(dirs: Float[Array, "r 3"]) -> Float[Array, "r 3"]:
    """A bright horizon under a blue zenith; y points down."""
    up = jnp.clip(0.5 - 0.5 * dirs[:, 1:2], 0, 1)
    return (1 - up) * jnp.asarray([0.95, 0.9, 0.8]) + up * jnp.asarray([0.25, 0.45, 0.85])


def _surface(hit, look: Look, dirs):
    body = jnp.maximum(hit.body, 0)
    cells = look.cells[body]
    parity = jnp.floor(hit.uv * cells[:, None] + 1e-4).sum(1) % 2
    base = jnp.where(((parity == 1) & (cells > 0))[:, None], look.second[body], look.colour[body])
    sun = jnp.asarray(SUN) / jnp.linalg.norm(jnp.asarray(SUN))
    # Seen from inside (a room) the surface faces the viewer.
    normal = hit.normal * -jnp.sign((hit.normal * dirs).sum(1, keepdims=True))
    lit = 0.45 + 0.55 * jnp.maximum(normal @ sun, 0)
    mirrored = dirs - 2 * (dirs * normal).sum(1, keepdims=True) * normal
    glint = look.shine[body] * jnp.maximum(mirrored @ sun, 0) ** 40
    return base * lit[:, None] + glint[:, None], mirrored, normal, look.mirror[body]


def trace(origins: Float[Array, "r 3"], dirs: Float[Array, "r 3"], bodies: Bodies, look: Look):
    """(colour, distance, body) of unit rays, with one bounce off mirrors."""
    hit = cast(origins, dirs, bodies)
    colour, mirrored, normal, share = _surface(hit, look, dirs)
    seen = hit.body >= 0
    start = origins + jnp.where(seen, hit.t, 0)[:, None] * dirs + 1e-3 * normal
    second = cast(start, mirrored, bodies)
    other, *_ = _surface(second, look, mirrored)
    other = jnp.where((second.body >= 0)[:, None], other, sky(mirrored))
    colour = (1 - share[:, None]) * colour + share[:, None] * other
    return jnp.clip(jnp.where(seen[:, None], colour, sky(dirs)), 0, 1), hit.t, hit.body


def shoot(cam: Camera, bodies: Bodies, look: Look, samples: int = 3) -> Picture:
    """The camera's picture, averaged over samples x samples points of each pixel; distance and body at its centre."""
    origins, dirs = world_rays(cam)
    shape = dirs.shape[:2]
    _, distance, body = trace(origins.reshape(-1, 3), dirs.reshape(-1, 3), bodies, look)
    total = jnp.zeros((*shape, 3), dirs.dtype)
    for i in range(samples):
        for j in range(samples):
            shift = jnp.asarray([(j + 0.5) / samples - 0.5, (i + 0.5) / samples - 0.5])
            o, d = _shifted(cam, shift)
            colour, _, _ = trace(o.reshape(-1, 3), d.reshape(-1, 3), bodies, look)
            total = total + colour.reshape(total.shape)
    return Picture(total / samples**2, distance.reshape(shape), body.reshape(shape))


def _shifted(cam: Camera, shift):
    """Rays through points shifted by a fraction of a pixel: moving the principal point does it for every model."""
    if cam.kind in ("pinhole", "fisheye", "ortho"):
        params = cam.params.at[2:4].add(-shift)
    elif cam.kind == "beap":
        params = cam.params.at[:2].add(shift * cam.params[2])
    else:
        return world_rays(cam)
    return world_rays(cam.replace(params=params))


def visible(picture: Picture, labels: Bool[Array, "p"]) -> Bool[Array, "h w"]:
    """Pixels whose body is labelled."""
    return (picture.body >= 0) & labels[jnp.maximum(picture.body, 0)]
