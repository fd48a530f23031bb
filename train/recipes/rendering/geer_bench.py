"""GEER timed: beside plain torch on the same image, exact against projected weights, PBF against UT and EWA, by stages."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from papyrax.methods.geometry.cameras import beap_camera, camera_rays, make_camera
from papyrax.methods.rendering.core.compose import compose
from papyrax.methods.rendering.core.tiles import Grid, tile_lists, to_tiles
from papyrax.methods.rendering.geer.ray import ALPHA_MAX, ALPHA_MIN, canonical
from papyrax.methods.rendering.geer.render import RenderConfig, render
from papyrax.train.bench import Bench, BenchTable, Stages
from papyrax.train.data.catalogue import need
from papyrax.train.recipes.rendering import geer_checks
from papyrax.train.report import cell

TILE = 16


def scene(size: float, wh: tuple[int, int], seed: int = 0) -> dict[str, np.ndarray]:
    """`size` Gaussians of plain colour before a camera at the origin; they shrink as they grow in number."""
    n, rng = int(size), np.random.default_rng(seed)
    return {
        "xyz": (rng.uniform(-1, 1, (n, 3)) * [1.6, 1.2, 1.0] + [0, 0, 3]).astype(np.float32),
        "log_scale": (np.log(0.9 * n ** (-1 / 3)) - 1 + 0.4 * rng.normal(size=(n, 3))).astype(np.float32),
        "quat": rng.normal(size=(n, 4)).astype(np.float32),
        "opacity_raw": rng.normal(size=n).astype(np.float32),
        "sh": rng.normal(size=(n, 1, 3)).astype(np.float32),
        "lens": np.asarray([0.9 * wh[0], 0.9 * wh[0], wh[0] / 2, wh[1] / 2], np.float32),
        "weight": rng.normal(size=(wh[1], wh[0], 3)).astype(np.float32),
    }


def settings(given: dict[str, np.ndarray], wh: tuple[int, int], **changes) -> tuple[dict, object, RenderConfig]:
    """(params, camera, renderer) with capacities that hold all pairs."""
    params = {k: jnp.asarray(given[k]) for k in ("xyz", "log_scale", "quat", "opacity_raw", "sh")}
    cam = make_camera("pinhole", wh, jnp.asarray(given["lens"]))
    kind = "ewa" if changes.get("weight") == "ewa" else "pbf"
    counts = geer_checks.tile_counts(np.asarray(geer_checks.boxes_of(params, cam, kind, 3.4)), Grid(*wh, TILE), 0.5)
    cap, pairs = (-(-int(1.3 * n + 64) // 64) * 64 for n in (counts.max(), counts.sum()))
    cfg = RenderConfig(tile=TILE, cap=cap, pairs=pairs, cutoff="opacity", ray_side="half", near=0.01, **changes)
    return params, cam, cfg


def _calls(wh, **changes):
    """`forward(size)` and `train(size)`: calls that draw, and that draw and give the gradient."""

    @functools.partial(jax.jit, static_argnames="cfg")
    def draw(params, cam, cfg):
        out = render(params, jnp.ones(len(params["xyz"]), bool), cam, jnp.zeros(3), cfg=cfg)
        return {"rgb": out["rgb"], "overflow": out["overflow"]}

    @functools.partial(jax.jit, static_argnames="cfg")
    def gradient(params, cam, weight, cfg):
        def loss(params):
            out = draw(params, cam, cfg)
            return (out["rgb"] * weight).sum(), out

        grads, out = jax.grad(loss, has_aux=True)(params)
        return out | {"by_xyz": grads["xyz"], "by_scale": grads["log_scale"], "by_sh": grads["sh"]}

    def forward(size):
        params, cam, cfg = settings(scene(size, wh), wh, **changes)
        return lambda: draw(params, cam, cfg)

    def train(size):
        given = scene(size, wh)
        params, cam, cfg = settings(given, wh, **changes)
        weight = jnp.asarray(given["weight"])
        return lambda: gradient(params, cam, weight, cfg)

    return forward, train


def same(ours, theirs):
    """Equal pictures, and gradients within a hundredth; a pair at alpha = 1/255 may fall on either side."""
    assert int(ours["overflow"]) == 0, "pairs did not fit"
    error = np.abs(np.asarray(ours["rgb"]) - theirs["rgb"])
    assert np.quantile(error, 0.98) < 2e-4 and error.max() < 2e-2, f"pictures differ by up to {error.max():.4f}"
    for name in ("by_xyz", "by_scale", "by_sh"):
        if name in theirs:
            a, b = np.asarray(ours[name]), theirs[name]
            off = np.linalg.norm(a - b) / np.linalg.norm(b)
            assert off < 0.01, f"{name} differs by {off:.4f}"


def _association(bench: Bench, sizes, step: float) -> BenchTable:
    """Boxes and sorted tile lists of real points in a 180-degree BEAP picture, each kind with room for its own pairs."""
    folder, rows = need("garden_points"), []
    for size in sizes:
        given, like = geer_checks.garden_gaussians(folder, size)
        params = jax.tree.map(jnp.asarray, given)
        cam = beap_camera((jnp.pi, jnp.pi), step, like.R, like.t)
        grid, found = Grid(*cam.wh, TILE), {}
        for kind in geer_checks.BOTH:
            bench.say(f"association: {kind}, {size} Gaussians")
            counts = geer_checks.tile_counts(np.asarray(geer_checks.boxes_of(params, cam, kind)), grid, cam.center)
            # `tile_lists` widens boxes by a thousandth of a pixel against rounding.
            pairs, cap = int(1.02 * counts.sum()) + 64, int(1.05 * counts.max()) + 64

            @jax.jit
            def lists(params, kind=kind, pairs=pairs, cap=cap, cam=cam, grid=grid):
                boxes = geer_checks.boxes_of(params, cam, kind)
                distance = jnp.linalg.norm(params["xyz"] @ cam.R.T + cam.t, axis=1)
                return tile_lists(boxes, distance, grid, cap, pairs=pairs, center=cam.center)

            call = functools.partial(lists, params)
            assert int(call().overflow) == 0, f"{kind} lists overflow"
            found[kind] = counts.mean(), bench.measure(call).seconds
        rows.append([size, *(v for kind in geer_checks.BOTH for v in found[kind]), found["ut"][1] / found["pbf"][1], found["ewa"][1] / found["pbf"][1]])  # fmt: skip
    columns = ["Gaussians"] + [f"{k} {what}" for k in ("PBF", "UT", "EWA") for what in ("pairs a tile", "(s)")]
    said = f"association by frustum is {rows[-1][-2]:.2f} times as fast as by UT and {rows[-1][-1]:.2f} times as by EWA boxes"
    note = "real points, BEAP picture of 180 degrees, boxes and sorted lists; medians of 7 calls"
    return BenchTable(
        "association", [*columns, "UT / PBF", "EWA / PBF"], rows, note, f"{said} at {sizes[-1]} Gaussians"
    )


def _stages(bench: Bench, size: int, wh: tuple[int, int], calls: int) -> BenchTable:
    """A picture cut into preprocessing, binning with sorting, compositing; and the whole with its gradient."""
    given = scene(size, wh)
    params, cam, cfg = settings(given, wh)
    grid, rays = Grid(*wh, TILE), camera_rays(cam)
    pixels = to_tiles(rays / jnp.linalg.norm(rays, axis=-1, keepdims=True), grid)

    @jax.jit
    def preprocess(params):
        matrix, c, opacity = canonical(params, cam)
        distance = jnp.linalg.norm(c, axis=1)
        p = jnp.einsum("pij,pj->pi", matrix, c)
        prims = jnp.concatenate([matrix.reshape(-1, 9), p, opacity[:, None], 1 / distance[:, None]], 1)
        colours = jnp.maximum(0.5 + 0.28209479 * params["sh"][:, 0], 0)
        return prims, colours, geer_checks.boxes_of(params, cam, "pbf", 3.33), distance

    @jax.jit
    def lists(boxes, distance):
        return tile_lists(boxes, distance, grid, cfg.cap, pairs=cfg.pairs)

    @jax.jit
    def draw(prims, colours, found):
        options = {"weight": "gauss_ray_half", "alpha_min": ALPHA_MIN, "alpha_max": ALPHA_MAX, "near": cfg.near}
        return compose(prims, colours, found, pixels, grid, **options)

    gradient = _calls(wh)[1](size)
    stages = Stages()
    for _ in range(calls + 1):
        with stages("preprocess") as done:
            prims, colours, boxes, distance = done(preprocess(params))
        with stages("bin and sort") as done:
            found = done(lists(boxes, distance))
        with stages("render") as done:
            done(draw(prims, colours, found))
        with stages("whole step with gradient") as done:
            done(gradient())
    note = f"{size} Gaussians, {wh[0]}x{wh[1]}, mean pairs a tile {cell(float(found.wanted.mean()))}"
    return stages.table("stages of a picture", note, skip=1)


def bench(config, bench: Bench) -> list[BenchTable]:
    """The timing tables; the smoke preset takes small sizes."""
    small = config.steps < 100
    wh = (32, 24) if small else (128, 96)
    sizes = (20, 40, 80) if small else (1000, 2000, 4000)
    growing = (20, 40, 80) if small else (1000, 4000, 16_000)
    repeats = 2 if small else 20
    forward, train = _calls(wh)
    flat_forward, flat_train = _calls(wh, weight="ewa")
    torch = bench.process("torch", "geer_torch")
    remote = lambda mode: torch.on(lambda size: scene(size, wh) | {"train": np.asarray(mode == "train")})  # noqa: E731
    options = {"unit": "Gaussians", "repeats": repeats, "note": f"{wh[0]}x{wh[1]}"}
    plain = {"same": same, "peer_name": "torch", **options}
    flat = {
        "same": lambda a, b: int(a["overflow"]) == 0 == int(b["overflow"]),
        "peer_name": "EWA",
        **options,
        "repeats": min(repeats, 7),
    }
    return [
        bench.compare("exact rays, forward", forward, remote("forward"), sizes, **plain),
        bench.compare("exact rays, forward and backward", train, remote("train"), sizes, **plain),
        bench.compare("exact against projected weights, forward", forward, flat_forward, growing, **flat),
        bench.compare("exact against projected weights, forward and backward", train, flat_train, growing, **flat),
        _association(bench, (500, 1000, 2000) if small else (10_000, 40_000, 138_766), 0.1 if small else 0.02),
        _stages(bench, sizes[-1], wh, calls=2 if small else 10),
    ]
