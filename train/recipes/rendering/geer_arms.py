"""Arms of GEER's experiment: what each differs in, how it trains, how it is scored in the space of the pictures."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from papyrax.methods.rendering.core.clone_split import CloneSplitConfig
from papyrax.methods.rendering.core.mcmc import McmcConfig
from papyrax.methods.rendering.geer import learn
from papyrax.methods.rendering.geer.protocol import scores, scores_of_beap, training_camera
from papyrax.methods.rendering.geer.render import RenderConfig, render
from papyrax.train.data import ply
from papyrax.train.data.scenes import view_batches
from papyrax.train.loop import Shard
from papyrax.train.recipes.rendering import geer_worlds, shared
from papyrax.train.recipes.rendering.geer_worlds import Views
from papyrax.train.recipes.rendering.shared import Posed
from papyrax.train.run import Run

SCORES = ("psnr", "psnr_central", "psnr_peripheral", "ssim")
ROWS = [(r"^(params|alive|opt/(mu|nu)|stats)(/|$)", PartitionSpec("fsdp"))]
"""Rows of Gaussians over the mesh axis `fsdp`."""


@dataclasses.dataclass(frozen=True)
class Arm:
    """One way to train: the space of the training pictures and what differs in renderer and densifier."""

    space: str = "beap"
    weight: str = "ray"
    association: str = "pbf"
    cutoff: str = "opacity"
    ray_side: str = "half"
    densifier: str = "mcmc"


ARMS = {
    "exact": Arm(),
    "EWA fisheye": Arm(space="fisheye", weight="ewa", association="ewa"),
    "UT boxes": Arm(association="ut"),
    "exact, equidistant": Arm(space="fisheye"),
    "exact, perspective": Arm(space="perspective"),
    "exact, perspective central": Arm(space="perspective_central"),
    "release rules": Arm(cutoff="sigma3", ray_side="release"),
    "clone and split": Arm(densifier="clone_split"),
}
"""The method (BEAP pictures, exact rays, frustum), FisheyeGS-like splats, 3DGUT-like boxes, the paper's training spaces, and
two ablations: the release's 3-sigma boxes and whole-line rays, and the densifier of 3DGS."""


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes of the experiment; a part with 0 steps or points is left out.

    Attributes:
        scene: a user's folder (COLMAP, transforms json, ScanNet++ layout); trains on it instead of everything else.
        images, side, every: of that folder: which pictures, longer side in pixels, every how many-th view tests.
        arms: names of ARMS to train in the room.
        views, test_views, fisheye: of the room: numbers of pictures and their side.
        step: BEAP angle of a pixel in radians.
        points, cap, pairs: Gaussians at the start and at most; capacity of all tile lists.
        steps: of each arm in the room.
        tile, tile_cap: side of a tile and capacity of its list.
        narrow_steps, narrow_views: trained through 60-degree pinholes, tested at 120.
        buddha_steps, buddha_side, buddha_step: real photographs, longer side, BEAP angle of a pixel.
        garden: real points of the association's comparison.
        film: frames of the flight through the room.
    """

    seed: int = 0
    scene: str = ""
    images: str = "images"
    side: int = 160
    every: int = 8
    arms: tuple[str, ...] = ("exact", "EWA fisheye", "UT boxes", "exact, equidistant", "exact, perspective")
    views: int = 24
    test_views: int = 8
    fisheye: int = 64
    step: float = 0.04
    points: int = 600
    cap: int = 900
    pairs: int = 130_000
    steps: int = 1200
    tile: int = 8
    tile_cap: int = 900
    sh_degree: int = 1
    narrow_steps: int = 600
    narrow_views: int = 48
    buddha_steps: int = 400
    buddha_side: int = 128
    buddha_step: float = 0.0115
    garden: int = 138_766
    film: int = 36
    evaluations: int = 4

    def __post_init__(self):
        for name in self.arms:
            if name not in ARMS:
                raise ValueError(f"arms holds {name!r}, wanted names of {', '.join(ARMS)}.")


def renderer(c: Config, arm: Arm) -> RenderConfig:
    """How an arm draws, in training and in tests."""
    return RenderConfig(
        tile=c.tile, cap=c.tile_cap, pairs=c.pairs, weight=arm.weight, association=arm.association, cutoff=arm.cutoff,
        ray_side=arm.ray_side, near=0.2 if arm.ray_side == "release" else 0.05,
    )  # fmt: skip


def model_config(c: Config, arm: Arm, extent: float, steps: int) -> learn.Config:
    """The learner of an arm. Short runs take the paper's rates times a power of how much shorter they are."""
    faster = min(4.0, (30_000 / max(steps, 1)) ** 0.4)
    event = max(1, min(100, steps // 12))
    window = {"start": event - 1, "stop": int(0.8 * steps), "every": event}
    return learn.Config(
        cap=c.cap,
        sh_degree=c.sh_degree,
        sh_every=max(1, min(1000, steps // 4)),
        render=renderer(c, arm),
        densifier=arm.densifier,
        mcmc=McmcConfig(**window, grow=50, noise_lr=5e5 / faster),
        clone_split=CloneSplitConfig(
            **window, extent=extent, prune_from=steps // 10, reset_every=max(1, min(3000, steps // 4))
        ),
        extent=extent,
        horizon=steps,
        rate_xyz=1.6e-4 * faster,
        rate_xyz_end=1.6e-6 * faster,
        rate_sh=2.5e-3 * faster,
        rate_opacity=0.025 * faster,
        rate_scale=5e-3 * faster,
        rate_quat=1e-3 * faster,
    )


@dataclasses.dataclass(frozen=True)
class Trained:
    """A trained arm: rows of Gaussians, what it needs to draw, histories, and the test views as it sees them.

    `test` holds `psnr`, `psnr_central`, `psnr_peripheral`, `ssim`, `overflow`, `pairs_per_tile` (v) and `rgb` (v h w 3).
    """

    params: dict[str, Any]
    alive: Any
    render: RenderConfig
    degree: int
    evals: dict[str, np.ndarray]
    metrics: dict[str, np.ndarray]
    test: dict[str, np.ndarray]
    seconds: float

    def mean(self, name: str) -> float:
        """Mean over the test views."""
        return float(np.mean(self.test[name]))

    def draw(self, cam) -> jax.Array:
        """A picture (h w 3) in [0, 1]."""
        return picture(self.params, self.alive, cam, self.render, self.degree)["rgb"]


def overflow(arm: Trained) -> int:
    """Most pairs of tile and Gaussian that did not fit, in training and in tests."""
    return int(max(arm.metrics["overflow"].max(), arm.test["overflow"].max()))


@functools.partial(jax.jit, static_argnames="cfg")
def picture(params, alive, cam, cfg: RenderConfig, degree) -> dict[str, jax.Array]:
    """`render` before black, colours clipped."""
    out = render(params, alive, cam, jnp.zeros(3), cfg=cfg, sh_degree=degree)
    return out | {"rgb": jnp.clip(out["rgb"], 0, 1)}


@functools.partial(jax.jit, static_argnames="cfg")
def tested(params, alive, views: Views, cfg: RenderConfig, degree) -> dict[str, jax.Array]:
    """Scores and pictures of all views, each drawn through its own camera."""

    def one(view):
        out = picture(params, alive, view["camera"], cfg, degree)
        kept = {k: out[k] for k in ("rgb", "overflow", "pairs_per_tile")}
        return scores(out["rgb"], view["image"], view["camera"], view["mask"]) | kept

    return jax.lax.map(one, {k: views[k] for k in ("camera", "image", "mask")})


def tested_in_beap(arm: Trained, views: Views, step: float) -> dict[str, np.ndarray]:
    """Scores by the paper's protocol: drawn in BEAP with the doubled field, render and truth mapped back alike."""
    like = training_camera(jax.tree.map(lambda a: a[0], views["camera"]), 2.0, step)
    out = _in_beap(arm.params, arm.alive, {k: views[k] for k in ("camera", "image")}, like, arm.render, arm.degree)
    return jax.tree.map(np.asarray, out)


@functools.partial(jax.jit, static_argnames="cfg")
def _in_beap(params, alive, views, like, cfg, degree):
    def one(view):
        beap = like.replace(R=view["camera"].R, t=view["camera"].t)
        rgb = picture(params, alive, beap, cfg, degree)["rgb"]
        return scores_of_beap(rgb, view["image"], beap, view["camera"])

    return jax.lax.map(one, views)


def fit(
    run: Run, c: Config, name: str, arm: Arm, posed: Posed, *, steps: int, extent: float, finer: Views | None = None
) -> Trained:
    """Trains an arm on the scene's views in the arm's space and scores it on the test views as they are.

    All arms of a scene start from the same points and see the views in the same order. `finer` holds the training views
    at a higher resolution, where there is one, for the spaces that resample.
    """
    config = model_config(c, arm, extent, steps)
    points, colors, gaps = shared.start(posed, min(c.points, c.cap), seed=c.seed)
    state = learn.init(jax.random.fold_in(run.key, 1), config, *(jnp.asarray(a) for a in (points, colors, gaps)))
    views = posed.train if finer is None or arm.space == "fisheye" else finer
    train = jax.tree.map(np.asarray, geer_worlds.in_space(views, arm.space, c.step))
    test = posed.test

    def scored(state):
        degree = jnp.minimum(state.step // config.sh_every, config.sh_degree)
        return tested(state.params, state.alive, test, config.render, degree)

    def evaluate(state):
        out = scored(state)
        return {k: jnp.mean(out[k]) for k in SCORES} | {"overflow": out["overflow"].max()}

    wide = run.mesh.size > 1 and arm.densifier != "clone_split" and c.cap % run.mesh.shape["fsdp"] == 0
    size = run.mesh.shape["data"] if wide and run.mesh.shape["data"] <= len(train["image"]) else 1
    wide = wide and size == run.mesh.shape["data"]
    update = functools.partial(learn.update, mesh=run.mesh) if wide else learn.update
    shard = Shard(ROWS, PartitionSpec("data")) if wide else Shard(batch=PartitionSpec())
    done = run.fit(
        update, state, view_batches(train, size, c.seed), name=name, steps=steps, config=config, evaluate=evaluate,
        eval_every=max(1, steps // c.evaluations), log_every=max(1, steps // 200), shard=shard, show="psnr",
    )  # fmt: skip
    final = jax.tree.map(np.asarray, done.state.params), np.asarray(done.state.alive)
    seen = run.once(f"test/{name}", lambda: jax.tree.map(np.asarray, scored(done.state)))
    degree = min(steps // config.sh_every, config.sh_degree)
    return Trained(*final, config.render, degree, done.evals, done.metrics, seen, done.seconds)


def keep(run: Run, name: str, arm: Trained, posed: Posed) -> Path:
    """Writes a trained model as models/<name>.ply, with its renderer and the training cameras beside it."""
    return shared.keep(
        run,
        name,
        lambda path: ply.write_gaussians(path, arm.params, arm.alive),
        posed,
        renderer=dataclasses.asdict(arm.render),
    )


def read_model(file: Path) -> shared.Model | None:
    """A model kept by a run, or any PLY of 3-D Gaussians; None when the file holds something else."""
    if "f_dc_0" not in ply.read_vertices(file):
        return None
    params, alive = ply.read_gaussians(file)
    more = shared.read_companion(file)
    kept = more.get("renderer", {"cutoff": "opacity", "ray_side": "half", "near": 0.01})

    @jax.jit
    def shown(camera, time):
        del time
        # Capacities that no view of this many Gaussians needs more of, within what memory allows.
        tiles = -(-camera.wh[0] // 16) * -(-camera.wh[1] // 16)
        room = {"tile": 16, "cap": min(len(alive), 4096), "pairs": min(16 * len(alive) + 64 * tiles, 2**23)}
        out = render(params, alive, camera, jnp.zeros(3), cfg=RenderConfig(**(kept | room)))
        return out["rgb"], out["overflow"]

    return shared.Model(shown, np.asarray(params["xyz"]), tuple(more.get("cameras", ())))
