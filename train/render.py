"""Rendering of a saved run or of a PLY file along a path: what `papyrax render` does.

A recipe takes part with `read_model(file) -> Model | None`: a model to draw, or None when the PLY holds another kind.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from papyrax.methods.catalog import CATALOG
from papyrax.train import recipe as recipes
from papyrax.train.data.scenes import resized
from papyrax.train.errors import UserError
from papyrax.train.recipes.rendering import paths
from papyrax.train.recipes.rendering.shared import Model, frames
from papyrax.train.report import save_film


@dataclasses.dataclass(frozen=True)
class Order:
    """What to render, and where to.

    Attributes:
        source: a run folder or a PLY file.
        model: name of a model in the run folder's models/, when it holds several.
        path: one of `paths.PATHS`.
        frames: how many pictures.
        size: WIDTHxHEIGHT, or nothing for that of the cameras.
        out: a file ending in .gif, or a folder for numbered PNGs.
        fps: pictures a second of the GIF.
        time: START:END in [0, 1], the times of the first and last frame where the model moves.
    """

    source: Path
    model: str = ""
    path: str = "orbit"
    frames: int = 60
    size: str = ""
    out: Path = Path("render.gif")
    fps: float = 20.0
    time: str = "0:1"


def find(source: Path, name: str = "") -> Path:
    """The PLY file that `source` (a file, a run folder) and a model's name mean. Raises UserError."""
    if source.is_file():
        if source.suffix.lower() != ".ply":
            raise UserError(f"{source} is not a .ply file; wanted one, or a run folder")
        return source
    if not source.is_dir():
        raise UserError(f"{source} is missing; wanted a run folder or a .ply file")
    known = {p.stem: p for p in sorted((source / "models").glob("*.ply"))}
    if not known:
        raise UserError(f"{source} holds no trained model: there is no .ply file in its folder models")
    if name:
        if name not in known:
            raise UserError(f"{source} has no model {name!r}; it has {', '.join(known)}")
        return known[name]
    config = source / "config.json"
    if len(known) > 1 and config.is_file():
        # the first arm in the configuration's order is the run's own method
        arms = [a.replace("/", "_") for a in json.loads(config.read_text()).get("config", {}).get("arms", [])]
        return next((known[a] for a in arms if a in known), next(iter(known.values())))
    return next(iter(known.values()))


def read(file: Path) -> Model:
    """The model in a PLY file, by the first recipe that knows its columns. Raises UserError."""
    for row in CATALOG:
        if row.field != "rendering":
            continue
        try:
            recipe = recipes.load(row)
        except UserError:
            continue
        model = recipe.read_model(file) if hasattr(recipe, "read_model") else None
        if model is not None:
            return model
    raise UserError(f"{file} is a PLY file of neither Beta kernels nor Gaussians")


def _size(text: str) -> tuple[int, int] | None:
    if not text:
        return None
    match = re.fullmatch(r"(\d+)x(\d+)", text)
    if not match or min(int(match[1]), int(match[2])) < 1:
        raise UserError(f"--size is {text!r}; wanted WIDTHxHEIGHT, such as 400x300")
    return int(match[1]), int(match[2])


def _times(text: str, count: int) -> np.ndarray:
    try:
        start, end = (float(part) for part in text.split(":"))
    except ValueError:
        raise UserError(f"--time is {text!r}; wanted START:END, such as 0:1") from None
    if not (0 <= start <= 1 and 0 <= end <= 1):
        raise UserError(f"--time is {text!r}; wanted two numbers between 0 and 1")
    return np.linspace(start, end, count)


def execute(order: Order, say: Callable[[str], None] = lambda _: None) -> Path:
    """Renders and returns what was written. Raises UserError, before anything is drawn, for an order that can't be met."""
    size, times = _size(order.size), _times(order.time, max(order.frames, 1))
    if not 0 < order.fps <= 50:
        raise UserError(f"--fps is {order.fps:g}; wanted a number above 0 and at most 50")
    gif = order.out.suffix.lower() == ".gif"
    if not gif and order.out.suffix:
        raise UserError(f"--out is {order.out}; wanted a name ending in .gif, or a folder for PNGs")
    if (not gif and order.out.is_file()) or (gif and order.out.is_dir()):
        raise UserError(f"--out is {order.out}, which is {'a folder' if gif else 'a file'} already")
    file = find(order.source, order.model)
    model = read(file)
    cameras: list[Any] = list(model.cameras) or paths.around_points(model.points)
    if size is not None:
        cameras = [resized(c, size) if c.kind in ("pinhole", "fisheye") else c for c in cameras]
    flight = paths.path(order.path, cameras, order.frames)
    w, h = flight[0].wh
    say(f"{file}: {len(model.points):,} primitives, {order.frames} frames of {w}x{h} along {order.path}")
    lost: list[int] = []

    def draw(camera, time):
        rgb, overflow = model.draw(camera, time)
        lost.append(int(overflow))
        return rgb

    pictures = frames(draw, flight, list(times))
    if max(lost) > 0:
        say(
            f"{max(lost)} pairs of tile and primitive did not fit into the tiles' lists of a frame, so pictures lack them"
        )
    try:
        if gif:
            save_film(pictures, order.out, order.fps)
        else:
            order.out.mkdir(parents=True, exist_ok=True)
            for i, picture in enumerate(pictures):
                Image.fromarray(picture).save(order.out / f"{i:04d}.png")
    except OSError as error:
        raise UserError(f"{order.out} can't be written: {error.strerror or error}") from error
    return order.out
