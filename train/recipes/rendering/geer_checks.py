"""What can be counted without training: known values, rays that a box loses, areas and pairs of the three associations."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from papyrax.methods.geometry.cameras import Camera, beap_camera, camera_rays, equidistant, make_camera
from papyrax.methods.rendering.core.tiles import Grid
from papyrax.methods.rendering.geer import associate, frustum
from papyrax.methods.rendering.geer.protocol import training_camera
from papyrax.methods.rendering.geer.ray import ALPHA_MIN, camera_covariance, canonical, distance2, ray_opacity
from papyrax.methods.rendering.geer.render import RenderConfig, association_box, render
from papyrax.train.data.garden import read_garden
from papyrax.train.data.scenes import spacing
from papyrax.train.recipes.rendering.geer_arms import Trained
from papyrax.train.recipes.rendering.geer_worlds import Views
from papyrax.train.report import Number, Table

RELEASE_NEAR = 0.2
BOTH = ("pbf", "ut", "ewa")


def eye(wh=(8, 8), focal: float = 8.0) -> Camera:
    """A pinhole at the origin that looks along z."""
    return make_camera("pinhole", wh, jnp.asarray([focal, focal, wh[0] / 2, wh[1] / 2]))


def gaussian(position, sigma: float = 0.3, opacity: float = 0.9) -> dict[str, jax.Array]:
    """Parameters of one round white Gaussian."""
    return {
        "xyz": jnp.asarray([position], jnp.float32), "log_scale": jnp.log(jnp.full((1, 3), sigma)),
        "quat": jnp.asarray([[1.0, 0, 0, 0]]), "opacity_raw": jax.scipy.special.logit(jnp.asarray([opacity])),
        "sh": jnp.zeros((1, 16, 3)).at[:, 0].set(1.772454),
    }  # fmt: skip


def _cloud(count: int, seed: int) -> dict[str, jax.Array]:
    """Gaussians all around the camera, many so near that they cross z = 0 or hold the camera."""
    rng = np.random.default_rng(seed)
    params = {
        "xyz": 1.5 * rng.normal(size=(count, 3)),
        "log_scale": math.log(0.4) + 0.7 * rng.normal(size=(count, 3)),
        "quat": rng.normal(size=(count, 4)),
        "opacity_raw": 2 * rng.normal(size=count),
    }
    return {k: jnp.asarray(v, jnp.float32) for k, v in params.items()}


def lost_rays(count: int, rays: int = 500, seed: int = 0) -> dict[str, int]:
    """Visible pairs of ray and Gaussian (alpha >= 1/255, half line), and how many of them each association loses."""
    d = np.random.default_rng(seed + 1).normal(size=(rays, 3))
    d = jnp.asarray(d / np.linalg.norm(d, axis=1, keepdims=True), jnp.float32)
    size = min(count, 500)

    @jax.jit
    def one(params):
        matrix, c, opacity = canonical(params, eye())
        cov, axes = camera_covariance(params, eye()), jnp.linalg.inv(matrix)
        sigma = frustum.cutoff_sigma(opacity, "opacity")
        d2, along = distance2(matrix, c, d)
        visible = (opacity[:, None] * jnp.exp(-0.5 * d2) >= ALPHA_MIN) & (opacity >= ALPHA_MIN)[:, None]
        seen, tiles = visible & (along > 0), associate.tile_angles(d[:, None])
        out = {"visible": seen.sum()}
        for kind in BOTH:
            box, valid = association_box(cov, axes, c, sigma, kind)
            inside = associate.hits(tiles, box, valid).T
            out[kind] = (seen & ~inside).sum()
            if kind == "pbf":
                out["pbf, whole line"] = (visible & ~inside).sum()
        return out

    total: dict[str, int] = {}
    for start in range(0, count, size):
        part = one(_cloud(size, seed + start))
        total = {k: total.get(k, 0) + int(v) for k, v in part.items()}
    return total


def box_areas(count: int, seed: int = 7) -> dict[str, Any]:
    """Shares of Gaussians within 75 degrees whose frustum is no larger than UT's and the loose EWA box; mean area ratios."""
    rng = np.random.default_rng(seed)
    angle, turn = rng.uniform(0, math.radians(75), count), rng.uniform(0, 2 * math.pi, count)
    distance = rng.uniform(1, 6, count)
    unit = np.stack([np.sin(angle) * np.cos(turn), np.sin(angle) * np.sin(turn), np.cos(angle)], 1)
    params = {
        "xyz": jnp.asarray(distance[:, None] * unit, jnp.float32),
        "log_scale": jnp.asarray(np.log(0.04 * distance[:, None]) + 0.4 * rng.normal(size=(count, 3)), jnp.float32),
        "quat": jnp.asarray(rng.normal(size=(count, 4)), jnp.float32),
        "opacity_raw": jnp.zeros(count),
    }

    @jax.jit
    def areas(params):
        matrix, c, _ = canonical(params, eye())
        cov, sigma = camera_covariance(params, eye()), jnp.full(count, 3.0)
        out = {}
        for kind in BOTH:
            box, _ = association_box(cov, jnp.linalg.inv(matrix), c, sigma, kind)
            out[kind] = 4 * box.half[:, 0] * box.half[:, 1]
        ends, full = frustum.pbf_angle(cov, c, sigma)
        return out, (jnp.abs(ends) < 1.5).all(1) & ~full.any(1)

    area, front = jax.tree.map(np.asarray, areas(params))
    out = {f"{k} share": float((area["pbf"] <= area[k] * 1.0001)[front].mean()) for k in ("ut", "ewa")}
    return out | {f"{k} ratio": float((area["pbf"] / area[k])[front].mean()) for k in ("ut", "ewa")}


def linearisation() -> tuple[float, float]:
    """Largest difference of alpha between exact rays and EWA: a far small Gaussian on the axis, one 75 degrees aside."""
    exact = RenderConfig(tile=16, cap=8, pairs=4000, cutoff="opacity", ray_side="half", near=0.05)
    ewa = dataclasses.replace(exact, weight="ewa", blur=0.0)
    angle = math.radians(75)
    lenses = [make_camera("pinhole", (200, 40), jnp.asarray([f, f, 20.0, 20.0])) for f in (800.0, 40.0)]
    cases = (
        (gaussian([0, 0, 20.0], 0.1), lenses[0]),
        (gaussian([2 * math.sin(angle), 0, 2 * math.cos(angle)], 0.15), lenses[1]),
    )
    found = []
    for params, cam in cases:
        a, b = (_draw(params, jnp.ones(1, bool), cam, cfg=cfg)["alpha"] for cfg in (exact, ewa))
        found.append(float(jnp.abs(a - b).max()))
    return found[0], found[1]


def _draw_plain(params, alive, cam, cfg):
    return render(params, alive, cam, jnp.zeros(3, params["xyz"].dtype), cfg=cfg)


_draw = jax.jit(_draw_plain, static_argnames="cfg")


def same_rays(count: int = 40, models: int = 3) -> float:
    """Largest difference between a camera's picture and that of a map of its own rays, in float64, over three models."""
    cfg = RenderConfig(tile=8, cap=count, pairs=4000, cutoff="opacity", ray_side="half", near=0.05)
    with jax.enable_x64():
        params = {k: v.astype(jnp.float64) for k, v in _cloud(count, 3).items()}
        params["sh"] = jnp.asarray(0.3 * np.random.default_rng(4).normal(size=(count, 16, 3)))
        cameras = [
            make_camera("pinhole", (24, 20), jnp.asarray([14.0, 15, 11, 11], jnp.float64)),
            beap_camera((2.4, 2.0), 0.1),
            equidistant((20, 20), math.radians(170)),
        ]
        worst = 0.0
        for cam in cameras[:models]:
            cam = jax.tree.map(lambda a: a.astype(jnp.float64), cam)
            rays = make_camera("raymap", cam.wh, camera_rays(cam), cam.R, cam.t)
            a, b = (_draw(params, jnp.ones(count, bool), k, cfg=cfg)["rgb"] for k in (cam, rays))
            worst = max(worst, float(jnp.abs(a - b).max()))
    return worst


def identities(count: int, whole: bool = True) -> dict[str, Any]:
    """Everything of this file that needs no data, as plain numbers; `whole` compares all three camera models."""
    one = gaussian([0.3, -0.2, 2.0], 0.25, 0.7)
    alpha = ray_opacity(*canonical(one, eye()), jnp.asarray([[0.0, 0, 1]]))
    ends, _ = frustum.pbf_angle(jnp.eye(3)[None] * 0.04, jnp.asarray([[0.0, 0, 2]]), jnp.full(1, 3.0))
    axis, aside = linearisation()
    return {
        "alpha": float(alpha[0, 0]), "tangent": float(jnp.tan(ends[0, 1])), "axis": axis, "aside": aside,
        "cameras": same_rays(models=3 if whole else 1), "rays": lost_rays(count), "areas": box_areas(min(count, 4000)),
    }  # fmt: skip


def identity_numbers(found: dict[str, Any]) -> list[Number]:
    """Section 9's identities and properties as numbers with targets."""
    rays, areas = found["rays"], found["areas"]
    counted = f"of {int(rays['visible']):,} visible pairs"
    return [
        Number(
            "known value: alpha of a Gaussian beside the axis", found["alpha"], paper=0.24742, target="0.24742 +- 2e-5",
            met=abs(found["alpha"] - 0.24742) < 2e-5,
        ),
        Number(
            "known value: tangent of a frustum", found["tangent"], paper=0.31449, target="0.31449 +- 1e-4",
            met=abs(found["tangent"] - 0.31449) < 1e-4,
        ),
        Number("largest difference between camera models at the same rays", found["cameras"], target="<= 1e-6", note="float64"),
        Number("visible rays that the frustum loses", int(rays["pbf"]), target="== 0", note=counted),
        Number("visible rays that UT boxes lose, share", rays["ut"] / rays["visible"], target="> 0", note=counted),
        Number("visible rays that EWA boxes lose, share", rays["ewa"] / rays["visible"], target="> 0", note=counted),
        Number("share of Gaussians whose frustum is no larger than UT's box", areas["ut share"], paper=0.998, target=">= 0.95"),
        Number("share of Gaussians whose frustum is no larger than EWA's box", areas["ewa share"], paper=0.993, target=">= 0.95"),
        Number("area of the frustum over that of UT's box, mean", areas["ut ratio"], note=f"EWA: {areas['ewa ratio']:.3f}"),
        Number("exact against EWA, far on the axis", found["axis"], target="<= 1e-3", unit="alpha"),
        Number("exact against EWA, 75 degrees aside", found["aside"], target=">= 0.05", unit="alpha", note="they must differ"),
    ]  # fmt: skip


def garden_gaussians(folder, count: int, seed: int = 0) -> tuple[dict[str, np.ndarray], Camera]:
    """Gaussians on real points and a camera pose amid them.

    The sizes are the points' spacing times a log-normal factor an axis, since points have no shape of their own.
    """
    points, _, cameras = read_garden(folder)
    rng = np.random.default_rng(seed)
    if count < len(points):
        points = points[np.sort(rng.choice(len(points), count, replace=False))]
    sizes = np.log(np.maximum(spacing(points), 1e-6))[:, None] + 0.5 * rng.normal(size=(len(points), 3))
    params = {
        "xyz": points,
        "log_scale": sizes,
        "quat": rng.normal(size=(len(points), 4)),
        "opacity_raw": np.zeros(len(points)),
    }
    return {k: np.asarray(v, np.float32) for k, v in params.items()}, cameras[0]


def boxes_of(params, cam: Camera, kind: str, sigma: float = 3.0) -> jax.Array:
    """Pixel boxes of all Gaussians in front of the release's near plane, NaN for the others."""
    matrix, c, _ = canonical(params, cam)
    cov = camera_covariance(params, cam)
    axes = jnp.linalg.inv(matrix) if kind == "ut" else None
    box, valid = association_box(cov, axes, c, jnp.full(len(c), sigma), kind)
    shown = valid & (c[:, 2] > RELEASE_NEAR)
    return jnp.where(shown[:, None], associate.pixel_boxes(box, cam), jnp.nan)


_boxes = jax.jit(boxes_of, static_argnames="kind")


def tile_counts(boxes: np.ndarray, grid: Grid, center: float) -> np.ndarray:
    """How many boxes hold a pixel centre of each tile, (rows, columns)."""
    low, high = np.ceil(boxes[:, :2] - center), np.floor(boxes[:, 2:] - center)
    limit = np.asarray([grid.width - 1, grid.height - 1])
    with np.errstate(invalid="ignore"):
        kept = ((high >= low) & (high >= 0) & (low <= limit)).all(1)
    low, high = (np.clip(a[kept], 0, limit).astype(int) // grid.size for a in (low, high))
    rows, columns = grid.shape
    out = np.zeros((rows + 1, columns + 1), int)
    for (x, y), sign in (((low[:, 0], low[:, 1]), 1), ((high[:, 0] + 1, low[:, 1]), -1)):
        np.add.at(out, (y, x), sign)
        np.add.at(out, (high[:, 1] + 1, x), -sign)
    return out.cumsum(0).cumsum(1)[:-1, :-1]


def association_maps(folder, count: int, step: float = 0.02, tile: int = 16) -> dict[str, np.ndarray]:
    """Pairs in each tile of a 180-degree BEAP picture amid real points, by PBF, UT and EWA."""
    params, like = garden_gaussians(folder, count)
    cam = beap_camera((math.pi, math.pi), step, like.R, like.t)
    grid = Grid(*cam.wh, tile)
    return {kind: tile_counts(np.asarray(_boxes(params, cam, kind)), grid, cam.center) for kind in BOTH}


def associations(arm: Trained, views: Views, step: float) -> dict[str, dict[str, float]]:
    """A trained model drawn in BEAP with each association: pairs a tile, and the difference from PBF's picture."""
    like = training_camera(jax.tree.map(lambda a: a[0], views["camera"]), 2.0, step)
    room = min(len(arm.alive), 4 * arm.render.cap)
    pairs = min(Grid(*like.wh, arm.render.tile).count * room, 2**24)
    # The release's rule gives all three the same Gaussians; beside and behind the camera only the frustum has boxes.
    cfg = dataclasses.replace(arm.render, cap=room, pairs=pairs, ray_side="release", near=RELEASE_NEAR)
    out: dict[str, dict[str, float]] = {}
    base = None
    for kind in BOTH:
        drawn = _in_beap(
            arm.params, arm.alive, views["camera"], like, dataclasses.replace(cfg, association=kind), arm.degree
        )
        drawn = jax.tree.map(np.asarray, drawn)
        base = drawn["rgb"] if base is None else base
        error = np.abs(drawn["rgb"] - base)
        out[kind] = {
            "pairs a tile": float(drawn["pairs_per_tile"].mean()),
            "mean difference": float(error.mean()),
            "largest difference": float(error.max()),
            "pixels within 1e-3": float((error.max(-1) <= 1e-3).mean()),
        }
    return out


def _in_beap_plain(params, alive, cameras, like, cfg, degree):
    def one(cam):
        out = render(params, alive, like.replace(R=cam.R, t=cam.t), jnp.zeros(3), cfg=cfg, sh_degree=degree)
        return {k: out[k] for k in ("rgb", "pairs_per_tile")}

    return jax.lax.map(one, cameras)


_in_beap = jax.jit(_in_beap_plain, static_argnames="cfg")


def association_numbers(
    maps: dict[str, np.ndarray], own: dict[str, dict[str, float]]
) -> tuple[list[Number], list[Table]]:
    """Pairs a tile of PBF, UT and EWA, on real points and on the trained room."""
    numbers, rows = [], []
    if maps:
        mean = {k: float(v.mean()) for k, v in maps.items()}
        numbers.append(
            Number(
                "pairs a tile, real points at 180 degrees: frustum", mean["pbf"], mean["ewa"], 475,
                target="PBF < UT < EWA", met=mean["pbf"] < mean["ut"] < mean["ewa"],
                note=f"UT {mean['ut']:.1f}; baseline: EWA; the paper: 3 to 5 times fewer, on its scenes",
            )
        )  # fmt: skip
        rows += [["garden points", k, mean[k], mean[k] / mean["pbf"], None, None] for k in BOTH]
    pairs = {k: v["pairs a tile"] for k, v in own.items()}
    numbers += [
        Number(
            "pairs a tile, trained room: frustum", pairs["pbf"], pairs["ewa"], target="PBF < UT < EWA",
            met=pairs["pbf"] < pairs["ut"] < pairs["ewa"], note=f"UT {pairs['ut']:.1f}; baseline: EWA",
        ),
        Number(
            "same picture whatever the association: mean difference from the frustum's, UT",
            own["ut"]["mean difference"], target="<= 1e-3",
            note=f"EWA {own['ewa']['mean difference']:.2e}; largest: UT {own['ut']['largest difference']:.3f}, EWA "
            f"{own['ewa']['largest difference']:.3f}, where those boxes lose visible rays",
        ),
    ]  # fmt: skip
    rows += [
        [
            "trained room",
            k,
            v["pairs a tile"],
            v["pairs a tile"] / pairs["pbf"],
            v["mean difference"],
            v["pixels within 1e-3"],
        ]
        for k, v in own.items()
    ]
    columns = ["scene", "association", "pairs a tile", "over PBF", "mean difference", "pixels within 1e-3"]
    return numbers, [
        Table("Association", columns, rows, "pairs before any alpha test, Gaussians in front of the near plane")
    ]
