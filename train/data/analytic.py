"""Writes the analytic scenes as real files: transforms json with PNGs, or the ScanNet++ layout with COLMAP text."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
from PIL import Image

from papyrax.envs.scenes import worlds
from papyrax.envs.scenes.shading import Picture, shoot, visible
from papyrax.methods.geometry.cameras import Camera
from papyrax.train.data.colmap import write_colmap
from papyrax.train.data.transforms import write_transforms

_shoot = jax.jit(shoot, static_argnames="samples")


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Numbers of training and test views and the pictures' size."""

    train: int = 24
    test: int = 8
    wh: tuple[int, int] = (96, 96)
    samples: int = 3


def _save(path: Path, rgb) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.round(np.clip(np.asarray(rgb), 0, 1) * 255).astype(np.uint8)).save(path)


def write_orbit_scene(folder: Path, kind: str, sizes: Sizes = Sizes()) -> None:
    """`specular` or `dynamic` as transforms_{train,test}.json, PNGs, and labels: `masks/<split>/<name>.png`.

    Masks are white where the body is glossy (specular) or moves (dynamic), black elsewhere.
    """
    if kind not in ("specular", "dynamic"):
        raise ValueError(f"kind is {kind!r}, wanted specular or dynamic.")
    folder = Path(folder)
    for part, n, offset in (("train", sizes.train, 0.0), ("test", sizes.test, 0.37)):
        cameras = worlds.orbit(n, sizes.wh, offset=offset)
        times = [i / max(n - 1, 1) for i in range(n)]
        names = [f"{part}/r_{i:03d}" for i in range(n)]
        for camera, time, name in zip(cameras, times, names):
            world = worlds.specular() if kind == "specular" else worlds.dynamic(time)
            picture: Picture = _shoot(camera, world.bodies, world.look, samples=sizes.samples)
            _save(folder / f"{name}.png", picture.rgb)
            labels = world.glossy if kind == "specular" else world.moving
            mask = np.asarray(visible(picture, labels), np.float32)
            _save(folder / "masks" / f"{name}.png", np.repeat(mask[..., None], 3, -1))
        write_transforms(
            folder / f"transforms_{part}.json", cameras, [f"./{n}" for n in names], times if kind == "dynamic" else None
        )


def write_room(folder: Path, sizes: Sizes = Sizes(), points: int = 2000) -> None:
    """The room through 180-degree fisheyes in the ScanNet++ layout; `dslr/train_test_lists.json` names the split."""
    dslr = Path(folder) / "dslr"
    world = worlds.room()
    cameras: list[Camera] = []
    names: list[str] = []
    lists: dict[str, Sequence[str]] = {}
    for part, n, offset in (("train", sizes.train, 0.0), ("test", sizes.test, 0.37)):
        some = worlds.inside(n, sizes.wh, offset=offset)
        lists[part] = [f"{part}_{i:03d}.JPG" for i in range(n)]
        for camera, name in zip(some, lists[part]):
            path = dslr / "resized_images" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            picture = np.asarray(_shoot(camera, world.bodies, world.look, samples=sizes.samples).rgb)
            Image.fromarray(np.round(picture * 255).astype(np.uint8)).save(path, quality=97, subsampling=0)
        cameras += some
        names += lists[part]
    xyz, colors = worlds.surface_points(world, points)
    write_colmap(dslr / "colmap", cameras, names, xyz, colors, binary=False)
    write_transforms(dslr / "nerfstudio/transforms.json", cameras, [f"../resized_images/{n}" for n in names])
    (dslr / "train_test_lists.json").write_text(json.dumps(lists))
