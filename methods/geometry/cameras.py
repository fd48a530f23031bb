"""Cameras: each model is a field of rays and a projection, between world points and continuous pixel coordinates.

Axes: x right, y down, z forward; `R`, `t` map world to camera (x_cam = R x + t). A pixel (column j, row i) has its
centre at coordinates (j + center, i + center), so `center` is 0.5 or 0 by the convention of the data's source.

| kind | params | ray of (u, v) in the camera frame |
|---|---|---|
| pinhole | fx, fy, cx, cy | ((u - cx)/fx, (v - cy)/fy, 1) |
| fisheye | fx, fy, cx, cy, k1..k4 | unit, at an angle theta from the axis (Kannala-Brandt) |
| beap | theta0, phi0, step | (tan theta, tan phi, 1), theta = theta0 + step (u - center), phi likewise |
| panorama | none | unit: longitude along u, latitude along v, down positive |
| ortho | sx, sy, cx, cy | (0, 0, 1) from the origin ((u - cx)/sx, (v - cy)/sy, 0) |
| raymap | the h w 3 numbers of the map | the stored ray, interpolated |

The fisheye's radius is inverted by Newton's method and reaches past 180 degrees; k = 0 is the equidistant camera.
BEAP is the bipolar equiangular grid of 3DGEER (arXiv 2505.24053). A panorama's first and last column are the same
direction.
"""

import math

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float

PARAMS = {"pinhole": 4, "fisheye": 8, "beap": 3, "panorama": 0, "ortho": 4}
KINDS = (*PARAMS, "raymap")
NEWTON_STEPS = 20


@struct.dataclass
class Camera:
    """One camera: a pytree whose kind, size (width, height) and pixel-centre convention are static."""

    params: Float[Array, "p"]
    R: Float[Array, "3 3"]
    t: Float[Array, "3"]
    kind: str = struct.field(pytree_node=False)
    wh: tuple[int, int] = struct.field(pytree_node=False)
    center: float = struct.field(pytree_node=False, default=0.5)


def make_camera(
    kind: str,
    wh: tuple[int, int],
    params: Float[Array, "p"],
    R: Float[Array, "3 3"] | None = None,
    t: Float[Array, "3"] | None = None,
    center: float = 0.5,
) -> Camera:
    """A checked camera; the pose defaults to the identity. A raymap takes its rays (h, w, 3) as `params`."""
    if kind not in KINDS:
        raise ValueError(f"kind is {kind!r}, wanted one of {', '.join(KINDS)}.")
    if len(wh) != 2 or min(wh) < 1:
        raise ValueError(f"wh is {wh}, wanted a positive width and height.")
    params = jnp.asarray(params).reshape(-1)
    count = wh[0] * wh[1] * 3 if kind == "raymap" else PARAMS[kind]
    if params.size != count:
        raise ValueError(f"params has {params.size} numbers, a {kind} camera of {wh[0]}x{wh[1]} wants {count}.")
    dtype = params.dtype if params.size and jnp.issubdtype(params.dtype, jnp.floating) else jnp.float32
    R = jnp.eye(3, dtype=dtype) if R is None else jnp.asarray(R)
    t = jnp.zeros(3, dtype) if t is None else jnp.asarray(t)
    if R.shape != (3, 3) or t.shape != (3,):
        raise ValueError(f"the pose has shapes {R.shape} and {t.shape}, wanted (3, 3) and (3,).")
    return Camera(params.astype(dtype), R, t, kind, (int(wh[0]), int(wh[1])), float(center))


def pinhole_from_fov(wh: tuple[int, int], fov_x: float, R=None, t=None, center: float = 0.5) -> Camera:
    """Pinhole with square pixels, principal point in the middle, and a horizontal field of view in radians."""
    if not 0 < fov_x < math.pi:
        raise ValueError(f"fov_x is {fov_x}, a pinhole wants an angle between 0 and pi.")
    focal = wh[0] / (2 * math.tan(fov_x / 2))
    middle = (wh[0] / 2 - 0.5 + center, wh[1] / 2 - 0.5 + center)
    return make_camera("pinhole", wh, jnp.asarray([focal, focal, *middle]), R, t, center)


def equidistant(wh: tuple[int, int], fov: float, R=None, t=None, center: float = 0.5) -> Camera:
    """Fisheye with k = 0 whose angle from the axis reaches fov / 2 (radians) at the edge of the shorter side."""
    if not 0 < fov < 2 * math.pi:
        raise ValueError(f"fov is {fov}, a fisheye wants an angle between 0 and 2 pi.")
    focal = min(wh) / fov
    middle = (wh[0] / 2 - 0.5 + center, wh[1] / 2 - 0.5 + center)
    return make_camera("fisheye", wh, jnp.asarray([focal, focal, *middle, 0, 0, 0, 0]), R, t, center)


def beap_camera(fov_xy: tuple[float, float], step: float, R=None, t=None) -> Camera:
    """BEAP grid of angles {+-(step/2 + k step)} below half of each field of view; pixel j holds theta0 + j step.

    The rays are (tan theta, tan phi, 1), so each field of view lies below pi.
    """
    if step <= 0:
        raise ValueError(f"step is {step}, wanted a positive angle in radians.")
    for fov in fov_xy:
        if not step < fov <= math.pi:
            raise ValueError(f"fov_xy has {fov}, BEAP wants angles above step = {step} and at most pi.")
    wh = tuple(2 * math.ceil((fov / 2 - step / 2) / step - 1e-9) for fov in fov_xy)
    start = [-(n / 2 - 0.5) * step for n in wh]
    return make_camera("beap", wh, jnp.asarray([*start, step]), R, t, 0.0)


def camera_center(cam: Camera) -> Float[Array, "3"]:
    """Position of the camera in the world."""
    return -cam.R.T @ cam.t


def pixel_grid(cam: Camera) -> Float[Array, "h w 2"]:
    """Coordinates (u, v) of all pixel centres."""
    w, h = cam.wh
    u = jnp.arange(w, dtype=cam.R.dtype) + cam.center
    v = jnp.arange(h, dtype=cam.R.dtype) + cam.center
    return jnp.stack(jnp.meshgrid(u, v, indexing="xy"), -1)


def fisheye_radius(theta: Float[Array, "*b"], k: Float[Array, "4"]) -> Float[Array, "*b"]:
    """Kannala-Brandt radius in focal lengths: theta (1 + k1 theta^2 + k2 theta^4 + k3 theta^6 + k4 theta^8)."""
    s = theta * theta
    return theta * (1 + s * (k[0] + s * (k[1] + s * (k[2] + s * k[3]))))


def fisheye_slope(theta: Float[Array, "*b"], k: Float[Array, "4"]) -> Float[Array, "*b"]:
    """Derivative of `fisheye_radius` by theta."""
    s = theta * theta
    return 1 + s * (3 * k[0] + s * (5 * k[1] + s * (7 * k[2] + s * 9 * k[3])))


def fisheye_limit(k: Float[Array, "4"], samples: int = 2048) -> Float[Array, ""]:
    """Largest angle (at most pi) up to which the radius grows, so that the model can be inverted."""
    theta = jnp.linspace(0, math.pi, samples, dtype=k.dtype)
    falling = fisheye_slope(theta, k) <= 0
    first = jnp.argmax(falling)
    return jnp.where(falling.any(), theta[jnp.maximum(first - 1, 0)], theta[-1])


def fisheye_angle(radius: Float[Array, "*b"], k: Float[Array, "4"]) -> Float[Array, "*b"]:
    """Angle of a Kannala-Brandt radius: Newton's method, kept in the interval where the model grows.

    Radii beyond the model's range give the limit angle. The gradient is that of the implicit function.
    """
    limit = fisheye_limit(jax.lax.stop_gradient(k))

    def solve(r, k):
        def step(_, state):
            theta, low, high = state
            error = fisheye_radius(theta, k) - r
            low, high = jnp.where(error < 0, theta, low), jnp.where(error < 0, high, theta)
            slope = fisheye_slope(theta, k)
            guess = theta - error / jnp.where(jnp.abs(slope) > 1e-6, slope, 1e-6)
            # A Newton step out of the bracket is replaced by a bisection, so that strong distortion converges too.
            return jnp.where((guess >= low) & (guess <= high), guess, 0.5 * (low + high)), low, high

        top = jnp.broadcast_to(limit.astype(r.dtype), r.shape)
        start = (jnp.clip(r, 0, top), jnp.zeros_like(r), top)
        return jax.lax.fori_loop(0, NEWTON_STEPS, step, start)[0]

    theta = jax.lax.stop_gradient(solve(jax.lax.stop_gradient(radius), jax.lax.stop_gradient(k)))
    slope = jax.lax.stop_gradient(fisheye_slope(theta, k))
    error = radius - fisheye_radius(theta, k)
    reachable = jax.lax.stop_gradient((radius <= fisheye_radius(limit, k)) & (slope > 1e-6))
    # One more Newton step, written so that it carries the derivative of the implicit function in radius and k.
    return theta + jnp.where(reachable, error / jnp.where(reachable, slope, 1), 0)


def unproject(cam: Camera, uv: Float[Array, "*b 2"]) -> Float[Array, "*b 3"]:
    """Ray in the camera frame through pixel coordinates (u, v): z = 1 for pinhole, BEAP and ortho, else unit."""
    p = cam.params
    u, v = uv[..., 0], uv[..., 1]
    one = jnp.ones_like(u)
    if cam.kind == "pinhole":
        return jnp.stack([(u - p[2]) / p[0], (v - p[3]) / p[1], one], -1)
    if cam.kind == "ortho":
        return jnp.stack([0 * one, 0 * one, one], -1)
    if cam.kind == "beap":
        theta, phi = p[0] + p[2] * (u - cam.center), p[1] + p[2] * (v - cam.center)
        return jnp.stack([jnp.tan(theta), jnp.tan(phi), one], -1)
    if cam.kind == "fisheye":
        m = jnp.stack([(u - p[2]) / p[0], (v - p[3]) / p[1]], -1)
        radius2 = jnp.sum(m * m, -1)
        tiny = radius2 < 1e-18
        radius = jnp.sqrt(jnp.where(tiny, 1, radius2))
        theta = fisheye_angle(jnp.where(tiny, 0, radius), p[4:])
        side = jnp.where(tiny, 1, jnp.sin(theta) / radius)  # sin(theta)/r -> 1 on the axis
        return jnp.concatenate([m * side[..., None], jnp.cos(theta)[..., None]], -1)
    if cam.kind == "panorama":
        w, h = cam.wh
        lon = ((u - cam.center) / (w - 1) - 0.5) * 2 * math.pi
        lat = ((v - cam.center) / (h - 1) - 0.5) * math.pi
        return jnp.stack([jnp.cos(lat) * jnp.sin(lon), jnp.sin(lat), jnp.cos(lat) * jnp.cos(lon)], -1)
    rays, _ = sample(p.reshape(cam.wh[1], cam.wh[0], 3), uv - cam.center)
    return rays / jnp.linalg.norm(rays, axis=-1, keepdims=True)


def camera_rays(cam: Camera) -> Float[Array, "h w 3"]:
    """Ray of every pixel in the camera frame; see `unproject` for its length. A raymap's rays are as stored."""
    if cam.kind == "raymap":
        return cam.params.reshape(cam.wh[1], cam.wh[0], 3)
    return unproject(cam, pixel_grid(cam))


def world_rays(cam: Camera) -> tuple[Float[Array, "h w 3"], Float[Array, "h w 3"]]:
    """Origins and unit directions of every pixel's ray in the world."""
    rays = camera_rays(cam)
    dirs = (rays / jnp.linalg.norm(rays, axis=-1, keepdims=True)) @ cam.R
    origins = jnp.broadcast_to(camera_center(cam), dirs.shape)
    if cam.kind == "ortho":
        offset = (pixel_grid(cam) - cam.params[2:4]) / cam.params[:2]
        origins = origins + offset @ cam.R[:2]
    return origins, dirs


def project(cam: Camera, x: Float[Array, "*b 3"]) -> tuple[Float[Array, "*b 2"], Bool[Array, "*b"]]:
    """Pixel coordinates of world points, and whether the model can image them (inside the picture or not)."""
    return project_camera(cam, x @ cam.R.T + cam.t)


def project_camera(cam: Camera, c: Float[Array, "*b 3"]) -> tuple[Float[Array, "*b 2"], Bool[Array, "*b"]]:
    """`project` for points in the camera frame. Where the second value is false the coordinates mean nothing."""
    p = cam.params
    x, y, z = c[..., 0], c[..., 1], c[..., 2]
    if cam.kind == "pinhole":
        valid = z > 1e-9
        depth = jnp.where(valid, z, 1)
        return jnp.stack([p[0] * x / depth + p[2], p[1] * y / depth + p[3]], -1), valid
    if cam.kind == "ortho":
        return jnp.stack([p[0] * x + p[2], p[1] * y + p[3]], -1), jnp.ones(x.shape, bool)
    if cam.kind == "beap":
        angles = jnp.stack([jnp.arctan2(x, z), jnp.arctan2(y, z)], -1)
        return (angles - p[:2]) / p[2] + cam.center, z > 1e-9
    if cam.kind == "fisheye":
        rho2 = x * x + y * y
        on_axis = rho2 <= 1e-24 * z * z + 1e-37
        rho = jnp.sqrt(jnp.where(on_axis, 1, rho2))
        theta = jnp.arctan2(jnp.where(on_axis, 0, rho), z)
        # r/rho -> 1/z on the axis in front of the camera; behind it the direction is not defined.
        scale = jnp.where(on_axis, 1 / jnp.where(z == 0, 1, z), fisheye_radius(theta, p[4:]) / rho)
        valid = (theta <= fisheye_limit(jax.lax.stop_gradient(p[4:]))) & ~(on_axis & (z <= 0))
        return jnp.stack([p[0] * scale * x + p[2], p[1] * scale * y + p[3]], -1), valid
    length = jnp.linalg.norm(c, axis=-1)
    valid = length > 1e-12
    unit = c / jnp.where(valid, length, 1)[..., None]
    if cam.kind == "panorama":
        w, h = cam.wh
        u = (jnp.arctan2(unit[..., 0], unit[..., 2]) / (2 * math.pi) + 0.5) * (w - 1)
        v = (jnp.arcsin(jnp.clip(unit[..., 1], -1, 1)) / math.pi + 0.5) * (h - 1)
        return jnp.stack([u, v], -1) + cam.center, valid
    return _project_raymap(cam, unit, valid)


def _project_raymap(cam, unit, valid):
    """Nearest stored ray by angle, then Newton steps on the interpolated map; false when the map has no such ray."""
    w, h = cam.wh
    rays = cam.params.reshape(h, w, 3)
    rays = rays / jnp.linalg.norm(rays, axis=-1, keepdims=True)
    flat = rays.reshape(-1, 3)
    points = unit.reshape(-1, 3)
    nearest = jax.lax.map(lambda d: jnp.argmax(flat @ d), points, batch_size=256)
    uv = jnp.stack([nearest % w, nearest // w], -1).astype(unit.dtype)
    anchor = jnp.clip(jnp.floor(uv), 0, jnp.asarray([max(w - 2, 0), max(h - 2, 0)]))
    for _ in range(4):
        ray, _ = sample(rays, uv)
        j, i = anchor[:, 0].astype(int), anchor[:, 1].astype(int)
        du = rays[i, jnp.minimum(j + 1, w - 1)] - rays[i, j]
        dv = rays[jnp.minimum(i + 1, h - 1), j] - rays[i, j]
        error = points - ray
        a, b, d = (du * du).sum(-1), (du * dv).sum(-1), (dv * dv).sum(-1)
        e, f = (du * error).sum(-1), (dv * error).sum(-1)
        det = jnp.maximum(a * d - b * b, 1e-20)
        step = jnp.stack([(d * e - b * f) / det, (a * f - b * e) / det], -1)
        uv = jnp.clip(uv + jnp.clip(step, -1.5, 1.5), -0.5, jnp.asarray([w - 0.5, h - 0.5]))
        anchor = jnp.clip(jnp.floor(uv), 0, jnp.asarray([max(w - 2, 0), max(h - 2, 0)]))
    miss = jnp.linalg.norm(points - sample(rays, uv)[0], axis=-1)
    spacing = jnp.sqrt(jnp.maximum(a, d))
    return (uv + cam.center).reshape(*unit.shape[:-1], 2), valid & (miss < spacing).reshape(valid.shape)


def in_image(cam: Camera, uv: Float[Array, "*b 2"]) -> Bool[Array, "*b"]:
    """Whether coordinates lie on the picture's pixels (half a pixel beyond the outermost centres)."""
    j = uv - cam.center
    return (j >= -0.5).all(-1) & (j[..., 0] <= cam.wh[0] - 0.5) & (j[..., 1] <= cam.wh[1] - 0.5)


def half_fov(cam: Camera) -> Float[Array, ""]:
    """Largest angle in radians between the optical axis and a pixel's ray."""
    rays = camera_rays(cam)
    return jnp.arctan2(jnp.linalg.norm(rays[..., :2], axis=-1), rays[..., 2]).max()


def sample(image: Float[Array, "h w *c"], index: Float[Array, "*b 2"]) -> tuple[Float[Array, "..."], Bool[Array, "*b"]]:
    """Bilinear samples at (column, row) index coordinates, mirrored at the outermost pixels.

    The second value tells which samples lie between pixel centres or at most half a pixel outside of them.
    """
    h, w = image.shape[:2]
    inside = (index >= -0.5).all(-1) & (index[..., 0] <= w - 0.5) & (index[..., 1] <= h - 0.5)

    def mirror(i, n):
        if n == 1:
            return jnp.zeros_like(i)
        i = jnp.abs(i) % (2 * n - 2)
        return jnp.where(i >= n, 2 * n - 2 - i, i)

    base = jnp.floor(index)
    frac = index - base
    j, i = base[..., 0].astype(jnp.int32), base[..., 1].astype(jnp.int32)
    extra = (1,) * (image.ndim - 2)
    fx = frac[..., 0].reshape(*frac.shape[:-1], *extra)
    fy = frac[..., 1].reshape(*frac.shape[:-1], *extra)
    j0, j1, i0, i1 = mirror(j, w), mirror(j + 1, w), mirror(i, h), mirror(i + 1, h)
    top = image[i0, j0] * (1 - fx) + image[i0, j1] * fx
    bottom = image[i1, j0] * (1 - fx) + image[i1, j1] * fx
    return top * (1 - fy) + bottom * fy, inside


def resample(
    image: Float[Array, "h w *c"], src: Camera, dst: Camera
) -> tuple[Float[Array, "h2 w2 *c"], Bool[Array, "h2 w2"]]:
    """The picture that camera `dst` would take from the position of `src`: bilinear samples along dst's rays.

    The mask is true where the ray falls on `src`'s pixels. Only rotations between the two are honoured, since a
    picture without depth cannot be moved.
    """
    if image.shape[:2] != (src.wh[1], src.wh[0]):
        raise ValueError(f"image has size {image.shape[:2]}, its camera says {(src.wh[1], src.wh[0])}.")
    rays = camera_rays(dst) @ (src.R @ dst.R.T).T
    uv, valid = project_camera(src, rays)
    uv = jnp.where(valid[..., None], uv, -1e4)
    index = jnp.clip(uv - src.center, -2.0 * max(src.wh), 3.0 * max(src.wh))
    samples, inside = sample(image, index)
    return samples, inside & valid
