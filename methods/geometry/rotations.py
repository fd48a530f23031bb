"""Rotations: quaternions, axis-angle vectors, skew matrices, random draws and camera poses that look at a point.

Quaternions are stored (w, x, y, z). Matrices act on column vectors. `so3_map` gives the three maps of a skew matrix
onto (or near) the rotation group that Universal Beta Splatting chooses from (arXiv 2510.03312, section on the
spatial-orthogonal Cholesky factor).
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

MAPS = ("first_order", "second_order", "exact")


def quat_to_matrix(quat: Float[Array, "*b 4"]) -> Float[Array, "*b 3 3"]:
    """Rotation matrix of a quaternion (w, x, y, z) of any positive length; it is normalised here.

    The zero quaternion has no rotation and maps to the identity, with zero gradient.
    """
    norm2 = jnp.sum(quat * quat, -1, keepdims=True)
    safe = jnp.where(norm2 > 0, norm2, 1)
    unit = jnp.where(norm2 > 0, quat * jax.lax.rsqrt(safe), jnp.asarray([1, 0, 0, 0], quat.dtype))
    w, x, y, z = jnp.moveaxis(unit, -1, 0)
    rows = (
        (1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)),
        (2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)),
        (2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)),
    )
    return jnp.stack([jnp.stack(row, -1) for row in rows], -2)


def matrix_to_quat(matrix: Float[Array, "*b 3 3"]) -> Float[Array, "*b 4"]:
    """Unit quaternion (w >= 0) of a rotation matrix: the largest of the four squared components is taken as pivot,
    so no case loses precision.
    """
    m = matrix
    d0, d1, d2 = m[..., 0, 0], m[..., 1, 1], m[..., 2, 2]
    x2, y2, z2 = m[..., 2, 1] - m[..., 1, 2], m[..., 0, 2] - m[..., 2, 0], m[..., 1, 0] - m[..., 0, 1]
    xy, xz, yz = m[..., 0, 1] + m[..., 1, 0], m[..., 0, 2] + m[..., 2, 0], m[..., 1, 2] + m[..., 2, 1]
    # Each row is the quaternion times four times one of its own components.
    candidates = jnp.stack(
        [
            jnp.stack([1 + d0 + d1 + d2, x2, y2, z2], -1),
            jnp.stack([x2, 1 + d0 - d1 - d2, xy, xz], -1),
            jnp.stack([y2, xy, 1 - d0 + d1 - d2, yz], -1),
            jnp.stack([z2, xz, yz, 1 - d0 - d1 + d2], -1),
        ],
        -2,
    )
    pivot = jnp.argmax(jnp.diagonal(candidates, axis1=-2, axis2=-1), -1)
    quat = jnp.take_along_axis(candidates, pivot[..., None, None], -2)[..., 0, :]
    quat = quat / jnp.linalg.norm(quat, axis=-1, keepdims=True)
    return jnp.where(quat[..., :1] < 0, -quat, quat)


def skew(v: Float[Array, "*b 3"]) -> Float[Array, "*b 3 3"]:
    """Matrix of the cross product: skew(v) @ u = v x u."""
    x, y, z = jnp.moveaxis(v, -1, 0)
    o = jnp.zeros_like(x)
    return jnp.stack([jnp.stack([o, -z, y], -1), jnp.stack([z, o, -x], -1), jnp.stack([-y, x, o], -1)], -2)


def rodrigues(v: Float[Array, "*b 3"]) -> Float[Array, "*b 3 3"]:
    """Rotation by |v| radians about v: the matrix exponential of skew(v), smooth and differentiable at v = 0."""
    return so3_map(skew(v), "exact")


def so3_map(a: Float[Array, "*b 3 3"], kind: str) -> Float[Array, "*b 3 3"]:
    """I + A ("first_order"), I + A + A^2/2 ("second_order") or exp(A) ("exact") of skew matrices A."""
    if kind not in MAPS:
        raise ValueError(f"kind is {kind!r}, wanted one of {', '.join(MAPS)}.")
    eye = jnp.eye(3, dtype=a.dtype)
    if kind == "first_order":
        return eye + a
    a2 = a @ a
    if kind == "second_order":
        return eye + a + 0.5 * a2
    theta2 = (a[..., 0, 1] ** 2 + a[..., 0, 2] ** 2 + a[..., 1, 2] ** 2)[..., None, None]
    small = theta2 < 1e-4
    safe = jnp.where(small, 1, theta2)
    theta = jnp.sqrt(safe)
    sinc = jnp.where(small, 1 - theta2 / 6 + theta2 * theta2 / 120, jnp.sin(theta) / theta)
    cosc = jnp.where(small, 0.5 - theta2 / 24 + theta2 * theta2 / 720, (1 - jnp.cos(theta)) / safe)
    return eye + sinc * a + cosc * a2


def random_rotation(key: Key[Array, ""], shape: tuple[int, ...] = (), dtype=jnp.float32) -> Float[Array, "*b 3 3"]:
    """Rotations drawn from the Haar measure: a normalised Gaussian quaternion."""
    return quat_to_matrix(jax.random.normal(key, (*shape, 4), dtype))


def look_at(
    eye: Float[Array, "3"], target: Float[Array, "3"], up: Float[Array, "3"]
) -> tuple[Float[Array, "3 3"], Float[Array, "3"]]:
    """World-to-camera pose (R, t) of a camera at `eye` that looks at `target`: x right, y down, z forward.

    `up` is the world direction that shall point up in the picture; it must not be parallel to the view direction.
    """
    forward = target - eye
    forward = forward / jnp.linalg.norm(forward)
    right = jnp.cross(forward, up)
    right = right / jnp.linalg.norm(right)
    rotation = jnp.stack([right, jnp.cross(forward, right), forward])
    return rotation, -rotation @ eye
