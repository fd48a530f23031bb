"""The canonical frame of a Gaussian and its exact integral along a ray.

With centre c in the camera frame and widened scales s~ = sqrt(s^2 + 1e-7), M = diag(1/s~) (R_cw R(q))^T maps the
camera frame to one in which the Gaussian is isotropic. With p = M c and d_u = M d for a ray d of any positive length,

    D^2 = |d_u x p|^2 / |d_u|^2,        alpha = min(0.99, o_c exp(-D^2 / 2))

since along the ray |u(t)|^2 = D^2 + (t - t*)^2 |d_u|^2 with t* = d_u . p / |d_u|^2, and the integral over canonical
arc length is sqrt(2 pi) exp(-D^2 / 2). o_c = o prod s_i / s~_i keeps the mass of thin Gaussians.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from papyrax.methods.geometry.cameras import Camera
from papyrax.methods.geometry.rotations import quat_to_matrix

FLOOR = 1e-7
ALPHA_MIN, ALPHA_MAX = 1 / 255, 0.99


def canonical(
    params: dict[str, Array], cam: Camera
) -> tuple[Float[Array, "p 3 3"], Float[Array, "p 3"], Float[Array, "p"]]:
    """(M, c, o_c) of every Gaussian: camera-to-canonical matrix, centre in the camera frame, compensated opacity.

    `params` has `xyz`, `log_scale`, `quat` (w, x, y, z) and `opacity_raw`. M is (p 3 3); p = M c.
    """
    c = params["xyz"] @ cam.R.T + cam.t
    scale = jnp.exp(params["log_scale"])
    wide = jnp.sqrt(scale * scale + FLOOR)
    axes = cam.R @ quat_to_matrix(params["quat"])
    matrix = axes.mT / wide[:, :, None]
    return matrix, c, jax.nn.sigmoid(params["opacity_raw"]) * jnp.prod(scale / wide, -1)


def camera_covariance(params: dict[str, Array], cam: Camera) -> Float[Array, "p 3 3"]:
    """Sigma_c = R_cw R diag(s~^2) R^T R_cw^T, the covariance in the camera frame."""
    scale = jnp.exp(params["log_scale"])
    half = (cam.R @ quat_to_matrix(params["quat"])) * jnp.sqrt(scale * scale + FLOOR)[:, None, :]
    return jnp.einsum("pik,pjk->pij", half, half)


def distance2(
    matrix: Float[Array, "p 3 3"], c: Float[Array, "p 3"], rays: Float[Array, "r 3"]
) -> tuple[Float[Array, "p r"], Float[Array, "p r"]]:
    """D^2 and t* of every Gaussian and ray, by the cross product with the normalised direction.

    The compositor computes the same from |p - (p . e) e|^2; this form is the definition that it is tested against.
    """
    p = jnp.einsum("pij,pj->pi", matrix, c)[:, None]
    u = jnp.einsum("pij,rj->pri", matrix, rays)
    length = jnp.linalg.norm(u, axis=-1, keepdims=True)
    e = u / length
    cross = jnp.cross(e, p)
    return jnp.sum(cross * cross, -1), jnp.sum(e * p, -1) / length[..., 0]


def ray_opacity(
    matrix: Float[Array, "p 3 3"], c: Float[Array, "p 3"], opacity: Float[Array, "p"], rays: Float[Array, "r 3"]
) -> Float[Array, "p r"]:
    """o_c exp(-D^2 / 2) of every Gaussian and ray, uncapped."""
    return opacity[:, None] * jnp.exp(-0.5 * distance2(matrix, c, rays)[0])
