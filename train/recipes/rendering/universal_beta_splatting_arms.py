"""The arms of Universal Beta Splatting's experiment: which models, on which scenes, how large, and how one is trained."""

from __future__ import annotations

import dataclasses
import functools
import zlib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from papyrax.methods.geometry.cameras import Camera
from papyrax.methods.rendering.core.mcmc import McmcConfig
from papyrax.methods.rendering.universal_beta_splatting import learn
from papyrax.methods.rendering.universal_beta_splatting.render import RenderConfig, render
from papyrax.train.data import analytic
from papyrax.train.data.scenes import view_batches
from papyrax.train.loop import Fit, Shard
from papyrax.train.recipes.rendering import shared
from papyrax.train.run import Run

ARMS: dict[str, tuple[str, dict[str, Any]]] = {
    "specular/ubs6": ("specular", {"dims": 6}),
    "specular/matte3": ("specular", {"dims": 3, "learn_b": False}),
    "specular/frozen6": ("specular", {"dims": 6, "learn_b": False}),
    "dynamic/ubs7": ("dynamic", {"dims": 7}),
    "dynamic/ubs6": ("dynamic", {"dims": 6}),
    "buddha/ubs6": ("buddha", {"dims": 6}),
    "buddha/matte3": ("buddha", {"dims": 3, "learn_b": False}),
    "specular/exact": ("specular", {"dims": 6, "render.rotation": "exact"}),
    "specular/whitened": ("specular", {"dims": 6, "render.slice": "whitened"}),
    "specular/dbs3": ("specular", {"dims": 3, "lobes": 2}),
    "specular/gauss6": ("specular", {"dims": 6, "learn_b": False, "render.falloff": "gauss"}),
    "specular/paper_start": ("specular", {"dims": 6, "init_query": "paper"}),
    "dynamic/frozen7": ("dynamic", {"dims": 7, "learn_b": False}),
    "dynamic/gauss7": ("dynamic", {"dims": 7, "learn_b": False, "render.falloff": "gauss"}),
    "buddha/frozen6": ("buddha", {"dims": 6, "learn_b": False}),
    "buddha/dbs3": ("buddha", {"dims": 3, "lobes": 2}),
}
"""Each arm's scene, and what it changes in the model."""


@dataclasses.dataclass(frozen=True)
class Config:
    """Arms and their size; or, with `scene`, one model on a scene of one's own."""

    seed: int = 0
    scene: str = ""
    """A COLMAP folder, a transforms json, or a folder that holds one: trains `model` on it instead of the arms."""
    images: str = "images"
    """Folder of pictures beside a COLMAP model of one's own, such as images_4."""
    side: int = 0
    """Longer side in pixels that pictures of one's own are scaled to; 0 leaves them as they are."""
    arms: tuple[str, ...] = tuple(ARMS)[:9]
    """Names of ARMS."""
    seeds: int = 1
    steps: int = 1500
    points: int = 800
    """Primitives at the start."""
    evaluations: int = 6
    wh: tuple[int, int] = (96, 96)
    views: tuple[int, int] = (24, 8)
    """Training and test views of the analytic scenes."""
    buddha_wh: tuple[int, int] = (171, 96)
    film: int = 48
    """Frames of each film."""
    garden: bool = True
    """Also draws the 138,766 points of the garden at their cameras' full size, timed."""
    model: learn.Config = dataclasses.field(default_factory=lambda: SMALL)


SMALL = learn.Config(
    dims=6,
    cap=2000,
    init_query="wide",
    horizon=1500,
    regularise_from=100,
    regularise_to=1200,
    render=RenderConfig(tile=16, cap=512, pairs=16_384),
    mcmc=McmcConfig(start=100, stop=1200, every=50, grow=50, noise_lr=1e4),
)
_with = dataclasses.replace

PRESETS: dict[str, Config] = {
    "smoke": Config(
        arms=("specular/ubs6", "specular/matte3", "dynamic/ubs7"),
        steps=60,
        points=120,
        evaluations=2,
        wh=(32, 32),
        views=(6, 2),
        film=4,
        garden=False,
        model=_with(
            SMALL,
            cap=200,
            horizon=60,
            rate_rgb=1e-2,
            regularise_from=10,
            regularise_to=50,
            render=RenderConfig(tile=16, cap=160, pairs=2048),
            mcmc=McmcConfig(start=10, stop=50, every=20, grow=50, noise_lr=1e3),
        ),
    ),
    "cpu": Config(),
    "study": Config(
        arms=tuple(ARMS),
        seeds=2,
        steps=3000,
        points=1500,
        evaluations=10,
        model=_with(
            SMALL,
            cap=4000,
            horizon=3000,
            regularise_to=2400,
            render=RenderConfig(tile=16, cap=768, pairs=32_768),
            mcmc=_with(SMALL.mcmc, stop=2400),
        ),
    ),
    "paper": Config(
        steps=30_000,
        points=100_000,
        evaluations=30,
        wh=(800, 800),
        views=(100, 200),
        buddha_wh=(684, 385),
        film=120,
        model=learn.Config(
            cap=1_048_576, render=RenderConfig(tile=16, cap=2048, pairs=8_388_608), mcmc=McmcConfig(noise_lr=1e6)
        ),
    ),
}


def check(config: Config) -> None:
    """Raises ValueError for an unknown arm or impossible sizes."""
    for name in config.arms:
        if name not in ARMS:
            raise ValueError(f"arms holds {name!r}, wanted names of {', '.join(ARMS)}")
    if not config.arms and not config.scene:
        raise ValueError("arms is empty, wanted at least one name, or a scene")
    for name in ("steps", "points", "evaluations", "seeds", "film"):
        if getattr(config, name) < 1:
            raise ValueError(f"{name} is {getattr(config, name)}, wanted at least 1")
    if config.points > config.model.cap:
        raise ValueError(f"points is {config.points}, wanted at most model.cap, which is {config.model.cap}")
    if config.scene and not Path(config.scene).exists():
        raise ValueError(f"the scene {config.scene} is missing")


def open_scene(run: Run, config: Config, name: str) -> shared.Posed:
    """A scene of the arms. Analytic ones are written into the run folder in the real format, then read back."""
    if name == "buddha":
        return shared.load(run.data("buddha_head"), wh=config.buddha_wh, every=4)
    folder = run.dir / "scenes" / name
    if not (folder / "transforms_test.json").is_file():  # the last file that is written
        sizes = analytic.Sizes(train=config.views[0], test=config.views[1], wh=config.wh)
        analytic.write_orbit_scene(folder, name, sizes)
    return shared.load(folder)


def corner_colour(images: Any) -> tuple[float, float, float]:
    """Mean colour of the four corners of all pictures: a constant background where a sky is seen."""
    corners = np.asarray(images)[:, [0, 0, -1, -1], [0, -1, 0, -1]]
    red, green, blue = (round(float(v), 4) for v in corners.mean((0, 1)))
    return red, green, blue


def changed(model: learn.Config, changes: dict[str, Any]) -> learn.Config:
    """The model with an arm's changes; `render.x` names a field of the renderer."""
    inner = {k.split(".")[1]: v for k, v in changes.items() if "." in k}
    outer = {k: v for k, v in changes.items() if "." not in k}
    return _with(model, **outer, render=_with(model.render, **inner))


def draw(model: learn.Config, state: learn.State, camera: Camera, time: Any) -> jax.Array:
    """Colours of one view of a trained state."""
    return render(state.params, state.alive, camera, time, jnp.asarray(model.background), cfg=model.render)["rgb"]


def placement(mesh: Mesh, batch: int = 1) -> tuple[learn.Split | None, Shard]:
    """How a step spreads over a mesh: views over `data` where they divide, primitives and tiles over the other axes."""
    if mesh.size == 1:
        return None, Shard(batch=PartitionSpec())
    views = ("data",) if batch % mesh.shape["data"] == 0 else ()
    rows = tuple(a for a in mesh.axis_names if a not in views)
    split = learn.Split(mesh, views, rows)
    row = PartitionSpec(rows)
    return split, Shard(state=(("params|alive|opt/(mu|nu)", row),), batch=PartitionSpec(views))


@dataclasses.dataclass
class Trained:
    """One arm and seed: its model, scene, fit and scores of training and test views."""

    model: learn.Config
    posed: shared.Posed
    fit: Fit
    train: dict[str, np.ndarray]
    test: dict[str, np.ndarray]

    @property
    def state(self) -> learn.State:
        """The trained state."""
        return self.fit.state


def train(run: Run, config: Config, name: str, model: learn.Config, posed: shared.Posed, seed: int) -> Trained:
    """Trains one model on one scene, then scores all its views."""
    points, colors, gaps = shared.start(posed, config.points, seed=config.seed + seed)
    key = jax.random.fold_in(jax.random.fold_in(run.key, seed), zlib.crc32(name.split("/")[0].encode()) % 2**31)
    parts = int(np.prod(list(run.mesh.shape.values())))
    model = _with(model, cap=-(-model.cap // parts) * parts)
    state = learn.init(key, model, jnp.asarray(points), jnp.asarray(colors), jnp.asarray(gaps))
    split, shard = placement(run.mesh)
    # Training and test views are scored by one program, since a program takes longer to compile than to run here.
    scores = jax.jit(functools.partial(shared.score, functools.partial(draw, model)))
    both = jax.tree.map(lambda a, b: jnp.concatenate([a, b]), posed.train, posed.test)
    count = len(posed.train["image"])

    def evaluate(state: learn.State) -> dict[str, Any]:
        psnr = scores(state, both)["psnr"]
        return {"train_psnr": psnr[:count].mean(), "test_psnr": psnr[count:].mean()}

    def halves(state: learn.State) -> dict[str, Any]:
        found = scores(state, both)
        return {"train": {k: v[:count] for k, v in found.items()}, "test": {k: v[count:] for k, v in found.items()}}

    fit = run.fit(
        functools.partial(learn.update, split=split) if split else learn.update,
        state,
        view_batches(jax.tree.map(np.asarray, posed.train), 1, seed=config.seed + seed),
        name=f"{name}/seed{seed}",
        steps=config.steps,
        config=model,
        evaluate=evaluate,
        eval_every=max(1, config.steps // config.evaluations),
        log_every=max(1, config.steps // 200),
        shard=shard,
        show="psnr",
    )
    kept = run.once(f"scores/{name}/seed{seed}", lambda: halves(fit.state))
    return Trained(model, posed, fit, kept["train"], kept["test"])
