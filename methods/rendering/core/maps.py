"""Maps read off a rendered image: expected depth and normals."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from papyrax.methods.geometry.cameras import Camera, camera_center, camera_rays


def expected_depth(depth: Float[Array, "h w"], alpha: Float[Array, "h w"]) -> Float[Array, "h w"]:
    """Accumulated depth over accumulated opacity: the mean depth of what a pixel sees."""
    return depth / jnp.maximum(alpha, 1e-10)


def normals_from_depth(depth: Float[Array, "h w"], cam: Camera) -> Float[Array, "h w 3"]:
    """World normals of the surface through the back-projected depth (camera z), stored as (n + 1) / 2.

    Central differences along x and y; the border has no neighbours and holds 0.5.
    """
    rays = camera_rays(cam)
    points = (rays / rays[..., 2:] * depth[..., None]) @ cam.R + camera_center(cam)
    along_x = points[1:-1, 2:] - points[1:-1, :-2]
    along_y = points[2:, 1:-1] - points[:-2, 1:-1]
    normal = jnp.cross(along_x, along_y)
    length2 = jnp.sum(normal * normal, -1, keepdims=True)
    normal = jnp.where(length2 > 0, normal * jnp.where(length2 > 0, length2, 1) ** -0.5, 0)
    return jnp.pad(0.5 * (normal + 1), ((1, 1), (1, 1), (0, 0)), constant_values=0.5)
