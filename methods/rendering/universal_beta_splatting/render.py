"""From primitives to an image: slice, EWA projection, tile lists, Beta compositing, and the render modes.

The screen kernel of a primitive with 2-D covariance V is the ellipse s = d^T V^-1 d < 1 itself (one standard
deviation, not three), opacity o (1 - s)^beta with beta = 4 exp(b[0]); depth order is camera z.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from papyrax.methods.geometry.cameras import Camera, camera_center, pixel_grid
from papyrax.methods.rendering.core.compose import compose
from papyrax.methods.rendering.core.fence import fence
from papyrax.methods.rendering.core.maps import expected_depth, normals_from_depth
from papyrax.methods.rendering.core.tiles import Grid, tile_lists, to_tiles
from papyrax.methods.rendering.universal_beta_splatting.kernel import beta_of, slice_params
from papyrax.methods.rendering.universal_beta_splatting.spherical_beta import lobe_colour

MODES = ("RGB", "D", "ED", "A", "RGB+D", "RGB+ED", "N")


@dataclasses.dataclass(frozen=True)
class RenderConfig:
    """Static choices of the renderer.

    Attributes:
        tile, cap, pairs: side of a tile, capacity of one tile's list, and of all lists together.
        rotation: "first_order" (I + A), "second_order" or "exact".
        slice: "paper" or "whitened", see `kernel.slice_at`.
        falloff: "beta", or "gauss" for the 6DGS and 7DGS baselines' slice of opacity.
        near, far: depths outside of which primitives are culled.
        blur: added to the 2-D covariance, in pixels squared.
        antialiased: scales opacity by the square root of how much the blur enlarged the kernel.
        implementation: of `splat_raster`.
    """

    tile: int = 16
    cap: int = 256
    pairs: int = 65_536
    rotation: str = "first_order"
    slice: str = "paper"
    falloff: str = "beta"
    near: float = 0.01
    far: float = 1e10
    blur: float = 0.3
    antialiased: bool = False
    implementation: str = "auto"


def ewa_project(mean, cov, cam: Camera, *, near: float, far: float, blur: float) -> dict[str, Array]:
    """Screen ellipses of 3-D kernels under a pinhole camera, by the Jacobian of the projection at the mean.

    Args:
        mean: three (p,) arrays, world.
        cov: six (p,) arrays, the entries 00, 01, 02, 11, 12, 22.

    Returns:
        (p,) arrays: u, v (pixel coordinates), depth, the 2-D covariance c00, c01, c11 with blur, the conic A, B, C,
        radius (pixels, of the enclosing circle, rounded up), shrink (sqrt of the determinants' ratio) and valid.
        The Jacobian takes x/z and y/z clamped to 0.3 times the half field of view outside the image.
    """
    if cam.kind != "pinhole":
        raise ValueError(f"the camera is {cam.kind}, the EWA projection of Beta kernels wants a pinhole.")
    fx, fy, cx, cy = cam.params
    w, h = cam.wh
    r, t = cam.R, cam.t
    x, y, z = (sum(r[i, j] * mean[j] for j in range(3)) + t[i] for i in range(3))
    in_front = (z >= near) & (z <= far)
    safe = jnp.where(in_front, z, 1)
    full = ((cov[0], cov[1], cov[2]), (cov[1], cov[3], cov[4]), (cov[2], cov[4], cov[5]))
    half = [[sum(r[i, k] * full[k][j] for k in range(3)) for j in range(3)] for i in range(3)]
    in_cam = [[sum(half[i][k] * r[j, k] for k in range(3)) for j in range(3)] for i in range(3)]
    # cx counts pixel centres at 0.5 here, as the clamp is about the picture's edges.
    left, top = cx + 0.5 - cam.center, cy + 0.5 - cam.center
    tan_x, tan_y = 0.5 * w / fx, 0.5 * h / fy
    tx = jnp.clip(x / safe, -(left / fx + 0.3 * tan_x), (w - left) / fx + 0.3 * tan_x)
    ty = jnp.clip(y / safe, -(top / fy + 0.3 * tan_y), (h - top) / fy + 0.3 * tan_y)
    jx, jxz, jy, jyz = fx / safe, -fx * tx / safe, fy / safe, -fy * ty / safe
    a, b, c = in_cam[0], in_cam[1], in_cam[2]
    raw00 = jx * jx * a[0] + 2 * jx * jxz * a[2] + jxz * jxz * c[2]
    raw11 = jy * jy * b[1] + 2 * jy * jyz * b[2] + jyz * jyz * c[2]
    raw01 = jx * jy * a[1] + jx * jyz * a[2] + jxz * jy * b[2] + jxz * jyz * c[2]
    c00, c01, c11 = raw00 + blur, raw01, raw11 + blur
    det = c00 * c11 - c01 * c01
    valid = in_front & (det > 0)
    inverse = 1 / jnp.where(valid, det, 1)
    middle = 0.5 * (c00 + c11)
    largest = middle + jnp.sqrt(jnp.maximum(0.01, middle * middle - det))
    radius = jnp.ceil(jnp.sqrt(jnp.maximum(largest, 0)))
    u, v = fx * x / safe + cx, fy * y / safe + cy
    seen = (u + radius > 0) & (u - radius < w) & (v + radius > 0) & (v - radius < h)
    ratio = jnp.maximum(raw00 * raw11 - raw01 * raw01, 0) * inverse
    positive = ratio > 0
    return {
        "u": u, "v": v, "depth": z, "c00": c00, "c01": c01, "c11": c11,
        "A": c11 * inverse, "B": -c01 * inverse, "C": c00 * inverse,
        "radius": radius, "shrink": jnp.where(positive, jnp.sqrt(jnp.where(positive, ratio, 1)), 0),
        "valid": valid & seen,
    }  # fmt: skip


def render(
    params: dict[str, Array],
    alive: Bool[Array, "p"],
    cam: Camera,
    time: Float[Array, ""] | float | None,
    bg: Float[Array, "3"],
    *,
    cfg: RenderConfig,
    axis_name: str | tuple[str, ...] | None = None,
) -> dict[str, Array]:
    """One view: rgb (h w 3, not clipped), alpha and depth (h w, sum of alpha T z), and what the tiles held.

    `overflow` counts pairs of tile and primitive that did not fit (0: the image is complete), `pairs_per_tile` is
    their mean, `degenerate` counts primitives whose sliced covariance is not positive. With `axis_name` the rows of
    `params` are this device's share of the primitives; see `core.compose.compose`.
    """
    mean, cov, opacity = slice_params(
        params, camera_center(cam), time, rotation=cfg.rotation, mode=cfg.slice, falloff=cfg.falloff
    )
    mean, cov, opacity = fence((mean, cov, opacity), alive.any())
    flat = fence(ewa_project(mean, cov, cam, near=cfg.near, far=cfg.far, blur=cfg.blur), alive.any())
    if cfg.antialiased:
        opacity = opacity * flat["shrink"]
    # Below 1e-8 a primitive cannot change float32 transmittance.
    shown = alive & flat["valid"] & (opacity > 1e-8)
    features = [
        flat["u"],
        flat["v"],
        flat["A"],
        flat["B"],
        flat["C"],
        opacity,
        beta_of(params["b"][:, 0]),
        flat["depth"],
    ]
    prims = jnp.where(shown[:, None], jnp.stack(features, 1), 0)
    colours = lobe_colour(params, camera_center(cam)) if "lobes" in params else params["rgb"]
    grid = Grid(*cam.wh, cfg.tile)
    reach_u, reach_v = (jnp.sqrt(jnp.where(shown, flat[name], 0)) for name in ("c00", "c11"))
    u, v = prims[:, 0], prims[:, 1]
    boxes = jnp.stack([u - reach_u, v - reach_v, u + reach_u, v + reach_v], 1)
    boxes = jax.lax.stop_gradient(jnp.where(shown[:, None], boxes, jnp.nan))
    if axis_name is not None:
        prims, colours, boxes = (jax.lax.all_gather(a, axis_name, tiled=True) for a in (prims, colours, boxes))
    order = jax.lax.stop_gradient(prims[:, -1])
    lists = tile_lists(boxes, order, grid, cfg.cap, pairs=cfg.pairs, center=cam.center)
    colour, light, depth = compose(
        prims, colours, lists, to_tiles(pixel_grid(cam), grid), grid,
        weight="beta2d", alpha_min=0.0, alpha_max=0.999, t_stop=1e-4, implementation=cfg.implementation,
        axis_name=axis_name,
    )  # fmt: skip
    not_positive = (cov[0] <= 0) | (cov[0] * cov[3] - cov[1] ** 2 <= 0) | (_det(cov) <= 0)
    degenerate = (alive & not_positive).sum()
    return {
        "rgb": colour + light[..., None] * bg,
        "alpha": 1 - light,
        "depth": depth,
        "overflow": lists.overflow,
        "pairs_per_tile": lists.wanted.mean(),
        "degenerate": degenerate if axis_name is None else jax.lax.psum(degenerate, axis_name),
    }


def _det(c):
    return c[0] * (c[3] * c[5] - c[4] ** 2) - c[1] * (c[1] * c[5] - c[4] * c[2]) + c[2] * (c[1] * c[4] - c[3] * c[2])


def render_mode(image: dict[str, Array], cam: Camera, mode: str) -> Float[Array, "h w c"]:
    """A render as the channels of a mode: RGB, D (depth), ED (expected depth), A (alpha), RGB+D, RGB+ED, N (normals)."""
    if mode not in MODES:
        raise ValueError(f"mode is {mode!r}, wanted one of {', '.join(MODES)}.")
    expected = expected_depth(image["depth"], image["alpha"])
    parts = {
        "RGB": lambda: image["rgb"],
        "D": lambda: image["depth"][..., None],
        "ED": lambda: expected[..., None],
        "A": lambda: image["alpha"][..., None],
        "N": lambda: normals_from_depth(expected, cam),
    }
    return jnp.concatenate([parts[name]() for name in mode.split("+")], -1)


def band(values: Float[Array, "p"], alive: Bool[Array, "p"], low: float, high: float) -> Bool[Array, "p"]:
    """Primitives in use whose value lies between two quantiles (of those in use): a layer of the decomposed scene.

    The paper's layers take b[:, 0] (spatial), the mean of b[:, 1:4] (angular) or b[:, 4] (temporal) as values.
    """
    if not 0 <= low < high <= 1:
        raise ValueError(f"the band is {low} to {high}, wanted quantiles with 0 <= low < high <= 1.")
    known = jnp.where(alive, values, jnp.nan)
    lowest, highest = jnp.nanquantile(known, jnp.asarray([low, high]))
    return alive & (values >= lowest) & (values <= highest)
