"""Posed pictures of a scene: what every scene reader returns, pictures at a chosen size, splits, batches of views."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image, UnidentifiedImageError

from papyrax.methods.geometry.cameras import Camera, make_camera
from papyrax.train.errors import UserError


class SceneError(UserError, ValueError):
    """A scene's files are missing, broken, or of a kind that is not read; the message is one sentence."""


@dataclasses.dataclass(frozen=True)
class View:
    """One posed picture: camera at the file's size, the picture's path, and its time in [0, 1] where scenes move."""

    name: str
    camera: Camera
    path: Path
    time: float = 0.0


@dataclasses.dataclass(frozen=True)
class Scene:
    """Views sorted by name, and coloured points (colours in [0, 1]) where the source has them."""

    views: tuple[View, ...]
    points: np.ndarray
    colors: np.ndarray

    def __post_init__(self):
        if not self.views:
            raise SceneError("the scene has no cameras.")
        if self.points.shape != self.colors.shape or self.points.shape[1:] != (3,):
            raise SceneError(f"the scene's points and colors have shapes {self.points.shape} and {self.colors.shape}.")
        if not np.isfinite(self.points).all():
            raise SceneError(f"{(~np.isfinite(self.points)).any(1).sum()} of the scene's points are not finite.")


def resized(camera: Camera, wh: tuple[int, int]) -> Camera:
    """The camera of the picture scaled to wh, principal point included."""
    if camera.kind not in ("pinhole", "fisheye"):
        raise SceneError(f"the camera is {camera.kind}, only pinhole and fisheye pictures are resized.")
    scale = jnp.asarray([wh[0] / camera.wh[0], wh[1] / camera.wh[1]], camera.params.dtype)
    shift = 0.5 - camera.center
    focal, middle = camera.params[:2] * scale, (camera.params[2:4] + shift) * scale - shift
    params = jnp.concatenate([focal, middle, camera.params[4:]])
    return make_camera(camera.kind, wh, params, camera.R, camera.t, camera.center)


def load_picture(view: View, wh: tuple[int, int] | None = None, background: Sequence[float] = (0, 0, 0)) -> np.ndarray:
    """The picture as float32 (h, w, 3) in [0, 1], scaled by area to wh; transparency shows the background."""
    try:
        with Image.open(view.path) as file:
            size = file.size
            mode = "RGBA" if "A" in file.getbands() or "transparency" in file.info else "RGB"
            picture = np.asarray(file.convert(mode), np.float32) / 255
    except FileNotFoundError:
        raise SceneError(f"the picture {view.path} is missing.") from None
    except (UnidentifiedImageError, OSError) as error:
        raise SceneError(f"the picture {view.path} can't be read: {error}.") from None
    if size != tuple(view.camera.wh):
        raise SceneError(
            f"the picture {view.path} is {size[0]}x{size[1]}, its camera says {view.camera.wh[0]}x{view.camera.wh[1]}."
        )
    if picture.shape[2] == 4:
        picture = picture[..., :3] * picture[..., 3:] + np.asarray(background, np.float32) * (1 - picture[..., 3:])
    if wh is not None and wh != size:
        channels = [np.asarray(Image.fromarray(picture[..., i]).resize(wh, Image.Resampling.BOX)) for i in range(3)]
        picture = np.stack(channels, -1)
    return picture


def split(views: Sequence[View], every: int = 8) -> tuple[tuple[View, ...], tuple[View, ...]]:
    """(training, test) views: every `every`-th of the sorted views, the first included, tests."""
    if every < 2:
        raise ValueError(f"every is {every}, wanted at least 2.")
    train = tuple(v for i, v in enumerate(views) if i % every)
    return train, tuple(v for i, v in enumerate(views) if i % every == 0)


def extent(cameras: Sequence[Camera]) -> float:
    """1.1 times the largest distance of a camera from the mean camera, the unit of the positions' learning rate."""
    centers = np.stack([-np.asarray(c.R).T @ np.asarray(c.t) for c in cameras])
    return float(1.1 * np.linalg.norm(centers - centers.mean(0), axis=1).max())


def spacing(points: np.ndarray) -> np.ndarray:
    """Root of the mean squared distance of each point to its three nearest others."""
    from scipy.spatial import cKDTree

    if len(points) < 2:
        return np.ones(len(points), np.float32)
    distance, _ = cKDTree(points).query(points, k=min(4, len(points)))
    return np.sqrt((distance[:, 1:] ** 2).mean(1)).astype(np.float32)


def random_points(key, n: int, low: Sequence[float], high: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    """n uniform points of a box with the mid-grey of 8 bits, for scenes without points or with too few."""
    xyz = np.asarray(jax.random.uniform(key, (n, 3), minval=jnp.asarray(low), maxval=jnp.asarray(high)))
    return xyz, np.full((n, 3), 127 / 255, np.float32)


def stack_views(
    views: Sequence[View], wh: tuple[int, int] | None = None, background: Sequence[float] = (0, 0, 0)
) -> dict:
    """All views as one pytree: `camera` with leading view axis, `image` (v h w 3), `time` (v). Sizes must agree."""
    if not views:
        raise SceneError("there are no views to load.")
    cameras = [v.camera if wh is None else resized(v.camera, wh) for v in views]
    kinds = {(c.kind, c.wh, c.center) for c in cameras}
    if len(kinds) > 1:
        raise SceneError(f"the views have {len(kinds)} kinds or sizes of camera, wanted one: give wh to resize them.")
    images = np.stack([load_picture(v, wh, background) for v in views])
    times = np.asarray([v.time for v in views], np.float32)
    return {
        "camera": jax.tree.map(lambda *a: jnp.stack(a), *cameras),
        "image": jnp.asarray(images),
        "time": jnp.asarray(times),
    }


def view_batches(data: dict, size: int = 1, seed: int = 0) -> Callable[[int], dict]:
    """`batch(step)`: views in an order shuffled anew each round, a pure function of the step."""
    n = len(data["image"])
    if not 1 <= size <= n:
        raise ValueError(f"size is {size}, wanted between 1 and the {n} views.")

    def batch(step: int) -> dict:
        rounds = n // size
        order = np.random.default_rng([seed, step // rounds]).permutation(n)
        chosen = order[(step % rounds) * size : (step % rounds + 1) * size]
        return jax.tree.map(lambda a: a[chosen], data)

    return batch
