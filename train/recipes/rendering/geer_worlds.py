"""What GEER's experiment looks at: the fisheye room in the ScanNet++ layout, narrow and wide pinholes in it, a user's scene.

Views are stacked pytrees as `stack_views` gives them (`camera`, `image`, `time`) with a `mask` of the pixels that count.
A fisheye counts to 90 degrees from its axis, so that all training spaces see the same half sphere.
"""

import dataclasses
import functools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from papyrax.envs.scenes import worlds
from papyrax.envs.scenes.shading import shoot
from papyrax.methods.geometry.cameras import Camera, pinhole_from_fov, resample
from papyrax.methods.rendering.geer.protocol import axis_angle, training_camera
from papyrax.train.data import analytic
from papyrax.train.data.colmap import read_scannetpp
from papyrax.train.data.scenes import SceneError, View, extent, resized, split, stack_views
from papyrax.train.recipes.rendering import shared
from papyrax.train.recipes.rendering.shared import Posed

SPACES = ("fisheye", "beap", "perspective", "perspective_central")
FOV_FACTOR = 1.3
"""Half fields of BEAP training images over those of the picture, as the release trains."""
WIDE, CENTRAL = math.radians(150), math.radians(90)
"""Fields of view of the two perspective training spaces."""

Views = dict[str, Any]
_shoot = jax.jit(shoot, static_argnames="samples")


def room(folder: Path, train: int, test: int, side: int, points: int, finer: int = 2) -> tuple[Posed, Views]:
    """The analytic room through 180-degree fisheyes, written as files in the ScanNet++ layout and read back.

    Returns the scene with pictures of `side` pixels, and the training views at the files' size, `finer` times as many
    a side, from which other training spaces are sampled. Both have masks.
    """
    if not (folder / "dslr" / "train_test_lists.json").is_file():  # the last file to be written
        analytic.write_room(folder, analytic.Sizes(train, test, (finer * side, finer * side), 2), points)
    return with_mask(scannetpp(folder, side)), masked(scannetpp(folder).train)


def scannetpp(folder: Path, side: int = 0, every: int = 8) -> Posed:
    """A scene in the ScanNet++ layout, split as its lists say, or else every `every`-th view for testing."""
    scene = read_scannetpp(folder)
    lists = Path(folder) / "dslr" / "train_test_lists.json"
    if lists.is_file():
        try:
            content = json.loads(lists.read_text())
            named: dict[str, set[str]] = {part: set(content[part]) for part in ("train", "test")}
        except (ValueError, KeyError, TypeError):
            raise SceneError(f"{lists} does not name the pictures of train and test.") from None
        train, test = (tuple(v for v in scene.views if v.name in named[part]) for part in ("train", "test"))
    else:
        train, test = split(scene.views, every)
    if not train or not test:
        raise SceneError(f"{folder} has {len(train)} training and {len(test)} test views, wanted at least one of each.")
    return _posed(train, test, side, scene.points, scene.colors)


def _posed(train: Sequence[View], test: Sequence[View], side: int, points: np.ndarray, colors: np.ndarray) -> Posed:
    w, h = train[0].camera.wh
    scale = side / max(w, h) if side else 1.0
    wh = max(1, round(w * scale)), max(1, round(h * scale))
    cameras = tuple(resized(v.camera, wh) for v in train)
    names = tuple(v.name for v in test)
    return Posed(stack_views(train, wh), stack_views(test, wh), names, cameras, points, colors, extent(cameras))


def own(folder: Path, side: int, images: str, every: int) -> Posed:
    """A user's scene: the ScanNet++ layout, or what `shared.load` reads."""
    if (Path(folder) / "dslr").is_dir():
        return scannetpp(folder, side, every)
    return shared.load(folder, side=side, images=images, every=every)


def masked(views: Views) -> Views:
    """The views with the mask of pixels that count."""
    return views | {"mask": jax.jit(jax.vmap(lambda cam: axis_angle(cam) <= math.pi / 2))(views["camera"])}


def with_mask(posed: Posed) -> Posed:
    """The scene with masks in its training and test views."""
    return dataclasses.replace(posed, train=masked(posed.train), test=masked(posed.test))


def in_space(views: Views, space: str, step: float) -> Views:
    """The views resampled into a training space of SPACES, masks included; all views have the first one's lens.

    "beap" is the paper's; the perspective spaces have as many pixels as the BEAP image with that `step` has.
    """
    if space not in SPACES:
        raise ValueError(f"space is {space!r}, wanted one of {', '.join(SPACES)}.")
    if space == "fisheye":
        return views
    first = jax.tree.map(lambda a: a[0], views["camera"])
    like = training_camera(first, FOV_FACTOR, step)
    if space != "beap":
        like = pinhole_from_fov(like.wh, WIDE if space == "perspective" else CENTRAL)
    camera, image, mask = _resampled({k: views[k] for k in ("camera", "image", "mask")}, like)
    return views | {"camera": camera, "image": image, "mask": mask}


@jax.jit
def _resampled(views, like):
    def one(view):
        cam = like.replace(R=view["camera"].R, t=view["camera"].t)
        known = view["mask"].astype(view["image"].dtype)[..., None]
        both = jnp.concatenate([view["image"], known], -1)
        # Four rays a pixel: one alone would sample the finer picture with gaps.
        parts = [resample(both, view["camera"], _moved(cam, x, y)) for x in (-0.25, 0.25) for y in (-0.25, 0.25)]
        mean = sum(part for part, _ in parts) / 4
        seen = functools.reduce(jnp.logical_and, [inside for _, inside in parts])
        return cam, mean[..., :3], seen & (mean[..., 3] > 0.999)

    return jax.lax.map(one, views)


def _moved(cam: Camera, x: float, y: float) -> Camera:
    """The BEAP or pinhole camera whose pixel centres lie (x, y) pixels farther."""
    shift = jnp.asarray([x, y])
    if cam.kind == "beap":
        return cam.replace(params=cam.params.at[:2].add(shift * cam.params[2]))
    return cam.replace(params=cam.params.at[2:4].add(-shift))


def pinholes(n: int, fov: float, side: int, *, offset: float = 0.0) -> Views:
    """Pictures of the room through n pinholes of the field of view `fov` (radians), ray-cast at once."""
    cameras = [pinhole_from_fov((side, side), fov, c.R, c.t) for c in worlds.inside(n, (side, side), offset=offset)]
    world = worlds.room()
    images = [_shoot(cam, world.bodies, world.look, samples=3).rgb for cam in cameras]
    return {
        "camera": jax.tree.map(lambda *a: jnp.stack(a), *cameras),
        "image": jnp.stack(images),
        "time": jnp.zeros(n),
        "mask": jnp.ones((n, side, side), bool),
    }


def room_start(train: Views, test: Views, points: int) -> Posed:
    """The room with other views than its fisheyes, started from the same points."""
    xyz, colors = worlds.surface_points(worlds.room(), points)
    cameras = tuple(jax.tree.map(lambda a: a[i], train["camera"]) for i in range(len(train["image"])))  # noqa: B023
    names = tuple(f"view {i}" for i in range(len(test["image"])))
    return Posed(train, test, names, cameras, xyz, colors, extent(cameras))


def seen_by(cam: Camera) -> np.ndarray:
    """The room's true picture (h w 3)."""
    world = worlds.room()
    return np.asarray(_shoot(cam, world.bodies, world.look, samples=2).rgb)
