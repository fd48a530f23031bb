"""From Gaussians to an image: exact ray weights or EWA splats, three associations, one compositor.

Depth order is the distance |c| of a Gaussian's centre from the camera, ties by index.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from papyrax.methods.geometry.cameras import Camera, camera_center, camera_rays, pixel_grid, project_camera
from papyrax.methods.rendering.core.compose import compose
from papyrax.methods.rendering.core.harmonics import sh_colour
from papyrax.methods.rendering.core.tiles import Grid, hit_lists, tile_lists, to_tiles
from papyrax.methods.rendering.geer import associate, frustum
from papyrax.methods.rendering.geer.ray import ALPHA_MAX, ALPHA_MIN, camera_covariance, canonical

SIDES = {"release": "gauss_ray", "half": "gauss_ray_half", "erf": "gauss_ray_erf"}
BOXED = ("beap", "pinhole")


@dataclasses.dataclass(frozen=True)
class RenderConfig:
    """Static choices of the renderer.

    Attributes:
        tile, cap, pairs: side of a tile, capacity of one tile's list, and of all lists on the sorted path.
        weight: "ray" (exact) or "ewa" (splats by the Jacobian of the camera's own projection at the centre: 3DGS on a
            pinhole, FisheyeGS-like on a fisheye).
        association: "pbf", "ewa" or "ut"; with weight "ewa" the splat's own box is used.
        cutoff: "sigma3" or "opacity", see `frustum.cutoff_sigma`.
        ray_side: "release" integrates the whole line and culls Gaussians with c_z <= near; "half" counts a pair only
            where the nearest point of the ray lies farther than near, so that nothing behind the camera shows and
            Gaussians beside it do; "erf" also weighs by the share of the integral in front, for a camera inside a Gaussian.
        near: world units.
        path: "auto" takes the sorted path for BEAP and pinhole and the incidence of angles else; "angles" always.
        blur: of EWA splats, in pixels squared.
        implementation: of `splat_raster`.
    """

    tile: int = 16
    cap: int = 512
    pairs: int = 131_072
    weight: str = "ray"
    association: str = "pbf"
    cutoff: str = "sigma3"
    ray_side: str = "release"
    near: float = 0.2
    path: str = "auto"
    blur: float = 0.3
    implementation: str = "auto"

    def __post_init__(self):
        for name, known in (
            ("weight", ("ray", "ewa")), ("association", frustum.KINDS), ("ray_side", SIDES), ("path", ("auto", "angles"))
        ):  # fmt: skip
            if getattr(self, name) not in known:
                raise ValueError(f"{name} is {getattr(self, name)!r}, wanted one of {', '.join(known)}.")


def shown_gaussians(cov, c, opacity, sigma, alive, cfg: RenderConfig) -> Bool[Array, "p"]:
    """Gaussians that may reach a ray: in use, visible at all, and in front as `ray_side` means it."""
    shown = alive & (opacity >= ALPHA_MIN)
    if cfg.ray_side == "release":
        return shown & (c[:, 2] > cfg.near)
    # The trace bounds the largest variance.
    reach = jnp.linalg.norm(c, axis=1) + sigma * jnp.sqrt(jnp.trace(cov, axis1=1, axis2=2))
    return shown & (reach > cfg.near)


def association_box(cov, axes, c, sigma, kind: str) -> tuple[frustum.AngleBox, Bool[Array, "p"]]:
    """Angle box of every Gaussian by PBF, EWA or UT, and where it is defined."""
    if kind == "pbf":
        ends, _ = frustum.pbf_angle(cov, c, sigma)
        return frustum.angle_box(ends), jnp.ones(len(c), bool)
    if kind == "ewa":
        tangents, valid = frustum.ewa_tan(cov, c, sigma)
        return frustum.angle_box(jnp.arctan(tangents)), valid
    ends, valid = frustum.ut_angle(axes, c, sigma)
    return frustum.angle_box(ends), valid


def ewa_splats(cov, c, cam: Camera, blur: float):
    """Pixel position (p 2), conic (p 3), reach of one sigma (p) and validity of splats by the camera's Jacobian.

    A pinhole's Jacobian is taken no farther outside of the picture than 0.15 of its width, as 3DGS does.
    """
    uv, valid = project_camera(cam, c)
    at = jnp.where(valid[:, None], c, 1.0)
    if cam.kind == "pinhole":
        size = jnp.asarray(cam.wh, c.dtype)
        low, high = (-0.15 * size - cam.params[2:4], 1.15 * size - cam.params[2:4])
        tangent = jnp.clip(at[:, :2] / at[:, 2:], low / cam.params[:2], high / cam.params[:2])
        at = jnp.concatenate([tangent * at[:, 2:], at[:, 2:]], 1)
    jacobian = jax.vmap(jax.jacfwd(lambda point: project_camera(cam, point)[0]))(at)
    flat = jacobian @ cov @ jacobian.mT + blur * jnp.eye(2, dtype=c.dtype)
    a, b, d = flat[:, 0, 0], flat[:, 0, 1], flat[:, 1, 1]
    det = a * d - b * b
    valid = valid & (det > 0)
    inverse = 1 / jnp.where(valid, det, 1)
    largest = 0.5 * (a + d) + jnp.sqrt(jnp.maximum(0.25 * (a - d) ** 2 + b * b, 0))
    conic = jnp.stack([d * inverse, -b * inverse, a * inverse], 1)
    return uv, conic, jnp.sqrt(largest), valid


def render(
    params: dict[str, Array],
    alive: Bool[Array, "p"],
    cam: Camera,
    bg: Float[Array, "3"],
    *,
    cfg: RenderConfig,
    sh_degree: Int[Array, ""] | int = 3,
    probe: Float[Array, "p 3"] | None = None,
    axis_name: str | None = None,
) -> dict[str, Array]:
    """One view: rgb (h w 3, not clipped), alpha, inv_depth (sum of alpha T / |c|), and what the tiles held.

    `overflow` counts pairs of tile and Gaussian that did not fit, `pairs_per_tile` is the mean before any alpha test,
    `span` (p) is the root of the number of tiles each Gaussian was listed in, rounded up. `probe` collects absolute
    gradients (see `splat_raster`; columns by p for rays, the first two by the mean for EWA).
    """
    matrix, c, opacity = canonical(params, cam)
    fixed = jax.lax.stop_gradient
    cov = camera_covariance(params, cam)
    sigma = frustum.cutoff_sigma(fixed(opacity), cfg.cutoff)
    shown = shown_gaussians(fixed(cov), fixed(c), fixed(opacity), sigma, alive, cfg)
    offset = params["xyz"] - camera_center(cam)
    distance = jnp.sqrt(jnp.maximum(jnp.sum(offset * offset, -1), 1e-12))
    colours = sh_colour(params["sh"], offset / distance[:, None], sh_degree)
    grid = Grid(*cam.wh, cfg.tile)
    rays = camera_rays(cam)
    rays = rays / jnp.linalg.norm(rays, axis=-1, keepdims=True)
    sorted_path = cfg.weight == "ewa" or (cfg.path == "auto" and cam.kind in BOXED)
    if cfg.weight == "ewa":
        opacity = jax.nn.sigmoid(params["opacity_raw"])
        uv, conic, reach, valid = ewa_splats(cov, c, cam, cfg.blur)
        shown = shown & valid
        weight, pixels, kept = "gauss_ewa", pixel_grid(cam), 2
        features = [uv, conic, opacity[:, None], 1 / distance[:, None]]
        reach = (sigma * reach)[:, None]
        boxes = jnp.concatenate([uv - reach, uv + reach], 1)
    else:
        weight, pixels, kept = SIDES[cfg.ray_side], rays, 3
        p = jnp.einsum("pij,pj->pi", matrix, c)
        features = [matrix.reshape(-1, 9), p, opacity[:, None], 1 / distance[:, None]]
        axes = jnp.linalg.inv(fixed(matrix)) if cfg.association == "ut" else None
        angles, valid = association_box(fixed(cov), axes, fixed(c), sigma, cfg.association)
        shown = shown & valid
        boxes = associate.pixel_boxes(angles, cam) if sorted_path else jnp.concatenate([angles.middle, angles.half], 1)
    prims = jnp.where(shown[:, None], jnp.concatenate(features, 1), 0)
    boxes = fixed(jnp.where(shown[:, None], boxes, jnp.nan))
    order = fixed(jnp.where(shown, distance, jnp.inf))
    if axis_name is not None:
        prims, colours, boxes, order = (
            jax.lax.all_gather(a, axis_name, tiled=True) for a in (prims, colours, boxes, order)
        )
    if sorted_path:
        lists = tile_lists(boxes, order, grid, cfg.cap, pairs=cfg.pairs, center=cam.center)
    else:
        tiles = associate.tile_angles(to_tiles(rays, grid))
        # NaN boxes of hidden Gaussians meet nothing.
        met = associate.hits(tiles, frustum.AngleBox(boxes[:, :2], boxes[:, 2:]), jnp.isfinite(order))
        lists = hit_lists(met, order, cfg.cap)
    colour, light, depth = compose(
        prims, colours, lists, to_tiles(pixels, grid), grid,
        weight=weight, alpha_min=ALPHA_MIN, alpha_max=ALPHA_MAX, t_stop=1e-4,
        near=cfg.near if cfg.ray_side == "half" else 0.0, probe=None if probe is None else probe[:, :kept],
        implementation=cfg.implementation, axis_name=axis_name,
    )  # fmt: skip
    out = {
        "rgb": colour + light[..., None] * bg,
        "alpha": 1 - light,
        "inv_depth": depth,
        "overflow": lists.overflow,
        "pairs_per_tile": lists.wanted.mean(),
    }
    if probe is not None:
        live = jnp.arange(cfg.cap)[None] < lists.counts[:, None]
        listed = jnp.zeros(len(prims)).at[jnp.where(live, lists.index, len(prims))].add(1, mode="drop")
        out["span"] = jnp.ceil(jnp.sqrt(listed)).astype(jnp.int32)
    return out


def gradient_statistic(by_probe: Float[Array, "p 3"], params: dict[str, Array], cam: Camera) -> Float[Array, "p"]:
    """3DGEER's densification statistic of one view: 0.3 (|c|^2 + 1) |M^T v|, v the probe's summed |dL/dp|."""
    matrix, c, _ = canonical(params, cam)
    pulled = jnp.einsum("pji,pj->pi", matrix, by_probe)
    return 0.3 * (jnp.sum(c * c, -1) + 1) * jnp.linalg.norm(pulled, axis=-1)
