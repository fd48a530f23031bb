"""The speed of Beta splatting: beside gsplat's torch projection with a torch compositor, by stages, and on the garden."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from papyrax.methods.geometry.cameras import Camera, camera_center, make_camera
from papyrax.methods.geometry.rotations import look_at
from papyrax.methods.rendering.universal_beta_splatting import kernel, learn
from papyrax.methods.rendering.universal_beta_splatting.render import RenderConfig, render
from papyrax.train.bench import Bench, BenchTable
from papyrax.train.data.garden import read_garden
from papyrax.train.data.scenes import spacing

SIDE = 128


def primitives(count: int) -> tuple[dict[str, jax.Array], Camera]:
    """A cloud of six-dimensional kernels whose sizes shrink with their number as they do in training, and a camera."""
    rng = np.random.default_rng(0)
    size = 0.9 * count ** (-1 / 3)
    scale = np.concatenate([size * np.exp(0.3 * rng.normal(size=(count, 3))), rng.uniform(2, 4, (count, 3))], 1)
    params = {
        "xyz": rng.uniform(-1, 1, (count, 3)),
        "mean_q": 0.3 * rng.uniform(-1, 1, (count, 3)),
        "scale_raw": np.log(np.expm1(scale)),
        "l_tri": 0.05 * rng.normal(size=(count, 15)),
        "rgb": rng.uniform(size=(count, 3)),
        "opacity_raw": rng.normal(size=count),
        "b": 0.3 * rng.normal(size=(count, 4)),
    }
    R, t = look_at(jnp.asarray([0.5, -0.8, -3.2]), jnp.zeros(3), jnp.asarray([0.0, -1, 0]))
    camera = make_camera("pinhole", (SIDE, SIDE), jnp.asarray([1.2 * SIDE, 1.2 * SIDE, SIDE / 2, SIDE / 2]), R, t)
    return {k: jnp.asarray(v, jnp.float32) for k, v in params.items()}, camera


def settings(count: int) -> RenderConfig:
    """Capacities that hold every pair of that many primitives here."""
    return RenderConfig(tile=16, cap=max(256, count // 4), pairs=8 * count + 2048)


def _call(count: int, backward: bool) -> Callable[[], Any]:
    params, camera = primitives(count)
    alive, cfg, weight = jnp.ones(count, bool), settings(count), _weight()

    def image(params):
        out = render(params, alive, camera, None, jnp.zeros(3), cfg=cfg)
        return out["rgb"], out["overflow"]

    def graded(params):
        def value(params):
            rgb, overflow = image(params)
            return (rgb * weight).sum(), (rgb, overflow)

        return jax.grad(value, has_aux=True)(params)

    if backward:
        compiled = jax.jit(graded).lower(params).compile()

        def call():
            grads, (rgb, overflow) = compiled(params)
            return {"image": rgb, "overflow": overflow} | grads

        return call
    compiled = jax.jit(image).lower(params).compile()
    return lambda: dict(zip(("image", "overflow"), compiled(params)))


def _weight() -> jax.Array:
    return jnp.asarray(np.random.default_rng(1).normal(size=(SIDE, SIDE, 3)), jnp.float32)


def _inputs(backward: bool, own_lists: bool) -> Callable[[int], dict[str, Any]]:
    def inputs(count: int) -> dict[str, Any]:
        params, camera = primitives(count)
        fx, fy, cx, cy = np.asarray(camera.params)
        view = np.eye(4, dtype=np.float32)
        view[:3, :3], view[:3, 3] = camera.R, camera.t
        lens = np.asarray([[fx, 0, cx], [0, fy, cy], [0, 0, 1]], np.float32)
        more = {"width": SIDE, "height": SIDE, "tile": 16, "backward": backward, "own_lists": own_lists}
        return {k: np.asarray(v) for k, v in params.items()} | {"view": view, "K": lens, "weight": _weight()} | more

    return inputs


def _same(ours: dict[str, Any], theirs: dict[str, Any]) -> bool:
    """No pair lost, images within 1e-4, and gradients (where there are) within 1e-3 of their largest entry."""
    assert int(ours["overflow"]) == 0, f"{int(ours['overflow'])} pairs did not fit"
    np.testing.assert_allclose(ours["image"], theirs["image"], atol=1e-4)
    for name in set(theirs) - {"image"}:
        scale = float(np.abs(theirs[name]).max())
        np.testing.assert_allclose(ours[name], theirs[name], atol=1e-3 * max(scale, 1e-6), err_msg=name)
    return True


def bench(config: Any, bench: Bench) -> list[BenchTable]:
    """Forward, forward and backward, the peer's own tile lists, and our stages."""
    small = config.model.cap < 1000
    sizes = (128, 256, 512) if small else (1000, 4000, 16_000)
    repeats = 3 if small else 20
    tables = []
    for backward, name in ((False, "one view"), (True, "one view and its gradient")):
        tables.append(
            bench.compare(
                name,
                lambda size, backward=backward: _call(size, backward),
                bench.process("rendering", "gsplat_torch").on(_inputs(backward, own_lists=False)),
                sizes,
                repeats=repeats,
                same=_same,
                peer_name="gsplat (torch)",
                unit="primitives",
                note=f"{SIDE}x{SIDE}, tiles of 16; kernels of six dimensions; the peer: torch slice, gsplat's projection, "
                "vectorised tile lists, a torch compositor for each tile, autograd",
            )
        )
    tables.append(
        bench.compare(
            "one view, tile lists by gsplat's _isect_tiles",
            lambda size: _call(size, False),
            bench.process("rendering", "gsplat_torch").on(_inputs(False, own_lists=True)),
            sizes[:1],
            repeats=3,
            warm=1,
            same=_same,
            peer_name="gsplat (torch)",
            unit="primitives",
            note="its pure-torch lists loop over pairs in Python",
        )
    )
    tables.append(_stages(bench, sizes))
    return tables


def _stages(bench: Bench, sizes: tuple[int, ...]) -> BenchTable:
    """Where the time of a view goes, and the arithmetic of its pairs."""
    rows = []
    for count in sizes:
        params, camera = primitives(count)
        alive, cfg = jnp.ones(count, bool), settings(count)

        def sliced(params, camera=camera):
            return kernel.slice_params(params, camera_center(camera), None, rotation="first_order", mode="paper")

        def whole(params, camera=camera, alive=alive, cfg=cfg):
            return render(params, alive, camera, None, jnp.zeros(3), cfg=cfg)

        seconds = []
        for f in (sliced, whole):
            compiled = jax.jit(f).lower(params).compile()
            seconds.append(bench.measure(lambda compiled=compiled, params=params: compiled(params), repeats=7).seconds)
        tiles = (SIDE // cfg.tile) ** 2
        pairs = float(whole(params)["pairs_per_tile"]) * tiles * cfg.tile**2
        rows.append([count, seconds[0], seconds[1], pairs, 27 * pairs / seconds[1] / 1e9])
    return BenchTable(
        "stages of one view",
        ["primitives", "slice (s)", "view (s)", "pairs of pixel and primitive", "GFLOP/s"],
        rows,
        "27 operations a pair (25 and 2 transcendentals); pairs behind an opaque front are counted though they are skipped",
        f"{rows[-1][4]:.1f} GFLOP/s at {rows[-1][0]} primitives",
    )


def garden(folder: Path) -> dict[str, Any]:
    """One view of the garden's points as round kernels at the camera's full size: picture, seconds, pairs, overflow."""
    points, colors, cameras = read_garden(folder)
    gaps = np.minimum(spacing(points), 0.05)
    params, alive = learn.init_params(
        jax.random.key(0), jnp.asarray(points), jnp.asarray(colors), jnp.asarray(1.5 * gaps), 3, len(points)
    )
    params = params | {"opacity_raw": jnp.full(len(points), 2.0)}
    cfg = RenderConfig(tile=16, cap=4096, pairs=2**20)
    compiled = (
        jax.jit(lambda p, a, c: render(p, a, c, None, jnp.ones(3), cfg=cfg)).lower(params, alive, cameras[0]).compile()
    )
    out = jax.block_until_ready(compiled(params, alive, cameras[0]))
    taken = []
    for _ in range(3):
        begun = time.perf_counter()
        jax.block_until_ready(compiled(params, alive, cameras[0]))
        taken.append(time.perf_counter() - begun)
    tiles = -(-cameras[0].wh[0] // 16) * -(-cameras[0].wh[1] // 16)
    return {
        "rgb": np.asarray(jnp.clip(out["rgb"], 0, 1)),
        "seconds": float(np.median(taken)),
        "pairs": int(float(out["pairs_per_tile"]) * tiles),
        "overflow": int(out["overflow"]),
    }
