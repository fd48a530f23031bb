"""What the recipes of splatting share: a scene from a folder, where to start, scores, pictures, films, kept models.

posed = load("my_scene", side=400)                  # COLMAP folder, transforms json, or a folder of them
points, colors, gaps = start(posed, 1500, seed=0)
scores = jax.jit(functools.partial(score, draw))(state, posed.test)     # draw(state, camera, time) -> rgb
keep(run, "mine", write, posed)                     # models/mine.ply and models/mine.json
film(run, frames(draw_one, path("orbit", posed.cameras, 60)), …)
"""

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image

from papyrax.methods.geometry.cameras import Camera, make_camera
from papyrax.methods.metrics.image import psnr, ssim
from papyrax.train import figures
from papyrax.train.data.colmap import read_colmap
from papyrax.train.data.scenes import (
    SceneError,
    View,
    extent,
    random_points,
    resized,
    spacing,
    split,
    stack_views,
)
from papyrax.train.data.transforms import read_transforms
from papyrax.train.report import Table
from papyrax.train.run import Run


@dataclasses.dataclass(frozen=True)
class Posed:
    """A scene to train on.

    Attributes:
        train, test: stacked views as `stack_views` gives them: `camera`, `image`, `time`.
        names: of the test views.
        cameras: of the training views, one by one.
        points, colors: of the source, perhaps none.
        extent: 1.1 times the largest distance of a training camera from their mean.
    """

    train: dict[str, Any]
    test: dict[str, Any]
    names: tuple[str, ...]
    cameras: tuple[Camera, ...]
    points: np.ndarray
    colors: np.ndarray
    extent: float

    @property
    def wh(self) -> tuple[int, int]:
        """Width and height of the pictures."""
        return self.cameras[0].wh


def views(
    source: Path, *, images: str = "images", every: int = 8
) -> tuple[tuple[View, ...], tuple[View, ...], np.ndarray, np.ndarray]:
    """(training views, test views, points, colours) of a COLMAP folder, a transforms json, or a folder that holds one.

    A folder with transforms_train.json and transforms_test.json is split as they say; every other source tests on
    each `every`-th of its sorted views. `images` names the folder of pictures beside a COLMAP model; smaller copies
    (images_4) take their cameras along.
    """
    source = Path(source)
    if not source.exists():
        raise SceneError(f"the scene {source} is missing.")
    if source.is_file():
        if source.suffix != ".json":
            raise SceneError(f"the scene {source} is a {source.suffix or 'plain'} file, wanted a folder or a .json.")
        scene = read_transforms(source)
    elif (source / "transforms_train.json").is_file():
        train = read_transforms(source / "transforms_train.json")
        if (source / "transforms_test.json").is_file():
            test = read_transforms(source / "transforms_test.json")
            return train.views, test.views, train.points, train.colors
        scene = train
    elif (source / "transforms.json").is_file():
        scene = read_transforms(source / "transforms.json")
    else:
        scene = read_colmap(source, images=source / images)
    if len(scene.views) < 2:
        raise SceneError(
            f"the scene {source} has {len(scene.views)} view, wanted at least 2: one to train on, one to test."
        )
    train_views, test_views = split([_fitted(v) for v in scene.views], every)
    return train_views, test_views, scene.points, scene.colors


def _fitted(view: View) -> View:
    """The view with its camera at the picture's size, where the picture is a smaller copy of the same shape."""
    try:
        with Image.open(view.path) as file:
            size = file.size
    except OSError:
        return view  # the reader of pictures tells what is wrong with it
    w, h = view.camera.wh
    if size == (w, h) or abs(size[0] * h - size[1] * w) > max(w, h):
        return view
    return dataclasses.replace(view, camera=resized(view.camera, size))


def load(
    source: Path,
    *,
    side: int = 0,
    wh: tuple[int, int] | None = None,
    background: Sequence[float] = (0, 0, 0),
    images: str = "images",
    every: int = 8,
) -> Posed:
    """The scene of `views` with its pictures, scaled to `wh` or to `side` pixels on the longer side (0: as they are)."""
    train, test, points, colors = views(source, images=images, every=every)
    if wh is None:
        w, h = train[0].camera.wh
        scale = side / max(w, h) if side else 1.0
        wh = max(1, round(w * scale)), max(1, round(h * scale))
    # The moments of a scene's pictures span [0, 1] in each of its files.
    return Posed(
        train=stack_views(train, wh, background),
        test=stack_views(test, wh, background),
        names=tuple(v.name for v in test),
        cameras=tuple(resized(v.camera, wh) for v in train),
        points=points,
        colors=colors,
        extent=extent([v.camera for v in train]),
    )


def start(posed: Posed, count: int, *, seed: int, box: float = 1.3) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """`count` coloured points and their spacing: a draw from the scene's own; where it has fewer, random ones as well.

    Random points fill the box of the scene's points (5th to 95th percentile), or [-box, box]^3 where there are none.
    """
    rng = np.random.default_rng(seed)
    points, colors = posed.points, posed.colors
    if len(points) > count:
        chosen = np.sort(rng.choice(len(points), count, replace=False))
        points, colors = points[chosen], colors[chosen]
    elif len(points) < count:
        low, high = np.quantile(points, [0.05, 0.95], axis=0) if len(points) >= 8 else ([-box] * 3, [box] * 3)
        more, grey = random_points(jax.random.key(seed), count - len(points), low, high)
        points, colors = np.concatenate([points, more]), np.concatenate([colors, grey])
    return points.astype(np.float32), colors.astype(np.float32), spacing(points)


def score(draw: Callable[[Any, Camera, Any], jax.Array], state: Any, data: Mapping[str, Any]) -> dict[str, jax.Array]:
    """`psnr`, `ssim` (v,) and the clipped pictures `rgb` (v h w 3) of views that `draw(state, camera, time)` renders.

    `data` may hold a `mask` (v h w) of the pixels that count.
    """
    mask = data.get("mask")

    def one(view):
        camera, time = view
        return jnp.clip(draw(state, camera, time), 0, 1)

    rgb = jax.lax.map(one, (data["camera"], data["time"]))
    truth = data["image"]
    return {
        "psnr": psnr(rgb, truth, data_range=1.0, mask=mask),
        "ssim": ssim(rgb, truth, data_range=1.0, pad="same", mask=mask),
        "rgb": rgb,
    }


def scores_table(title: str, rows: Mapping[str, Mapping[str, Any]], note: str = "") -> Table:
    """One row an arm; columns are the keys of the first row's mapping, in order."""
    columns = list(next(iter(rows.values())))
    return Table(
        title, ["arm", *columns], [[label, *(row.get(c) for c in columns)] for label, row in rows.items()], note
    )


def comparison(
    truth: Any, pictures: Mapping[str, Any], names: Sequence[str], *, reach: float = 0.3, error: Sequence[str] = ()
) -> Any:
    """A figure of test views: the truth, each arm's picture, and its error map (mean over channels, one scale).

    Args:
        truth: (v h w 3) in [0, 1].
        pictures: label to (v h w 3).
        error: labels that get an error map; all by default.
        reach: the error at the top of the colour scale.
    """
    from matplotlib.figure import Figure

    truth = np.asarray(truth)
    columns: list[tuple[str, Any, bool]] = [("truth", truth, False)]
    for label, images in pictures.items():
        images = np.clip(np.asarray(images), 0, 1)
        columns.append((label, images, False))
        if label in (error or pictures):
            columns.append((f"{label}: error", np.abs(images - truth).mean(-1), True))
    v, h, w = truth.shape[:3]
    with figures.style():
        width = 1.9 * len(columns) + 0.6
        figure = Figure(figsize=(width, v * 1.9 * h / w + 0.4), layout="constrained")
        axes = figure.subplots(v, len(columns), squeeze=False)
        shown = None
        for i in range(v):
            for j, (title, images, heat) in enumerate(columns):
                ax = axes[i, j]
                if heat:
                    shown = ax.imshow(images[i], cmap="magma", vmin=0, vmax=reach)
                else:
                    ax.imshow(images[i])
                ax.set(xticks=[], yticks=[])
                ax.grid(False)
                for side in ax.spines.values():
                    side.set_visible(False)
                if i == 0:
                    ax.set_title(title, fontsize=8)
            axes[i, 0].set_ylabel(names[i], fontsize=7)
        if shown is not None:
            figure.colorbar(shown, ax=list(axes[:, -1]), shrink=0.8, label="mean absolute error")
    return figure


def frames(
    draw: Callable[[Camera, Any], Any], cameras: Sequence[Camera], times: Sequence[float] | None = None
) -> np.ndarray:
    """uint8 pictures (t h w 3) along a path; `draw(camera, time)` gives rgb in [0, 1]."""
    times = [0.0] * len(cameras) if times is None else times
    out = [np.clip(np.asarray(draw(c, jnp.float32(t))), 0, 1) for c, t in zip(cameras, times, strict=True)]
    return np.round(np.stack(out) * 255).astype(np.uint8)


def keep(run: Run, name: str, write: Callable[[Path], None], posed: Posed, **more: Any) -> Path:
    """Writes a trained model as `models/<name>.ply` and, beside it, the training cameras and `more` JSON values."""
    path = run.dir / "models" / f"{name}.ply"
    if run.leads:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path)
        content = {"cameras": [_plain(c) for c in posed.cameras], "times": np.asarray(posed.train["time"]).tolist()}
        path.with_suffix(".json").write_text(json.dumps({**content, **more}, indent=1))
    return path


def _plain(camera: Camera) -> dict[str, Any]:
    numbers = {k: np.asarray(getattr(camera, k), np.float64).tolist() for k in ("params", "R", "t")}
    return {"kind": camera.kind, "wh": list(camera.wh), "center": camera.center, **numbers}


def read_companion(path: Path) -> dict[str, Any]:
    """What `keep` wrote beside a PLY, with `cameras` as Camera objects; {} when there is no such file."""
    path = Path(path).with_suffix(".json")
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text())
        cameras = [
            make_camera(
                c["kind"], tuple(c["wh"]), *(jnp.asarray(c[k], jnp.float32) for k in ("params", "R", "t")), c["center"]
            )
            for c in content["cameras"]
        ]
    except (ValueError, KeyError, TypeError) as error:
        raise SceneError(
            f"{path} does not hold the cameras of a kept model ({' '.join(str(error).split())})."
        ) from None
    return {**content, "cameras": cameras}


@dataclasses.dataclass(frozen=True)
class Model:
    """A trained model to render.

    Attributes:
        draw: `(camera, time) -> (rgb (h w 3), overflow)`; overflow counts pairs of tile and primitive that did not fit.
        points: where its primitives lie.
        cameras: those it was trained with, perhaps none.
        moving: whether time matters.
    """

    draw: Callable[[Camera, Any], tuple[Any, Any]]
    points: np.ndarray
    cameras: tuple[Camera, ...]
    moving: bool = False
