"""Camera paths through a scene: about what its cameras look at, along them, or turning on the spot.

`orbit` is a whole circle about the point the cameras look at, at their mean distance and height; `arc` swings to and
fro over the angles that the cameras span, for photographs from one side; `views` passes the cameras one after the
other; `turn` stays amid the cameras and looks around, for rooms. y of every camera points down.
"""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from papyrax.methods.geometry.cameras import Camera, pinhole_from_fov
from papyrax.methods.geometry.rotations import look_at
from papyrax.train.errors import UserError

PATHS = ("orbit", "arc", "views", "turn")


def _poses(cameras: Sequence[Camera]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Centres, forward axes and up axes of cameras, (n, 3) each."""
    R = np.stack([np.asarray(c.R, np.float64) for c in cameras])
    t = np.stack([np.asarray(c.t, np.float64) for c in cameras])
    return -np.einsum("nji,nj->ni", R, t), R[:, 2], -R[:, 1]


def _unit(v: np.ndarray) -> np.ndarray:
    return v / np.maximum(np.linalg.norm(v, axis=-1, keepdims=True), 1e-12)


def focus(cameras: Sequence[Camera]) -> np.ndarray:
    """The point nearest to all optical axes; for axes that are almost parallel, a point ahead of their middle."""
    centres, forward, _ = _poses(cameras)
    across = np.eye(3) - forward[:, :, None] * forward[:, None, :]
    system = across.sum(0)
    if np.linalg.cond(system) > 1e4:
        reach = max(float(np.linalg.norm(centres - centres.mean(0), axis=1).max()), 1.0)
        return centres.mean(0) + 2 * reach * _unit(forward.mean(0))
    return np.linalg.solve(system, np.einsum("nij,nj->i", across, centres))


def upright(cameras: Sequence[Camera]) -> np.ndarray:
    """The world's up: across all horizontal axes of the pictures, as when cameras are held level; else their mean up."""
    _, _, ups = _poses(cameras)
    right = np.stack([np.asarray(c.R, np.float64)[0] for c in cameras])
    values, vectors = np.linalg.eigh(right.T @ right)
    mean = ups.mean(0)
    if values[1] < 0.05 * values[2] or abs(vectors[:, 0] @ _unit(mean)) < 0.5:
        return _unit(mean)
    return vectors[:, 0] * np.sign(vectors[:, 0] @ mean)


def _frame(up: np.ndarray, towards: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Two unit axes of the plane across `up`; the first as near to `towards` as can be."""
    first = towards - (towards @ up) * up
    if np.linalg.norm(first) < 1e-6:
        first = np.cross(up, [1.0, 0, 0] if abs(up[0]) < 0.9 else [0, 1.0, 0])
    first = _unit(first)
    return first, np.cross(up, first)


def _look(like: Camera, eyes: np.ndarray, targets: np.ndarray, ups: np.ndarray) -> list[Camera]:
    R, t = jax.jit(jax.vmap(look_at))(*(jnp.asarray(a, jnp.float32) for a in (eyes, targets, ups)))
    return [like.replace(R=r, t=s) for r, s in zip(R, t)]


def path(kind: str, cameras: Sequence[Camera], frames: int) -> list[Camera]:
    """`frames` cameras of a path through the scene that `cameras` see, with the lens of the first of them.

    Raises UserError: an unknown kind, no frames, no cameras.
    """
    if kind not in PATHS:
        raise UserError(f"the path is {kind!r}, wanted one of {', '.join(PATHS)}")
    if frames < 1:
        raise UserError(f"a path of {frames} frames was asked for, wanted at least 1")
    if not cameras:
        raise UserError("there are no cameras to lay a path along")
    centres, forward, ups = _poses(cameras)
    up, middle = upright(cameras), focus(cameras)
    share = np.arange(frames) / frames
    if kind == "turn":
        a, b = _frame(up, forward[0])
        angle = 2 * math.pi * share[:, None]
        eyes = np.broadcast_to(centres.mean(0), (frames, 3))
        return _look(cameras[0], eyes, eyes + np.cos(angle) * a + np.sin(angle) * b, np.broadcast_to(up, (frames, 3)))
    out = centres - middle
    height = out @ up
    a, b = _frame(up, out[0])
    azimuth = np.arctan2(out @ b, out @ a)
    if kind == "views":
        order = np.argsort(azimuth)
        at = np.arange(frames) / max(frames - 1, 1) * (len(order) - 1)
        low = np.minimum(at.astype(int), max(len(order) - 2, 0))
        high, part = np.minimum(low + 1, len(order) - 1), (at - low)[:, None]
        part = part * part * (3 - 2 * part)
        eyes, ahead, above = ((1 - part) * v[order[low]] + part * v[order[high]] for v in (centres, forward, ups))
        return _look(cameras[0], eyes, eyes + _unit(ahead), _unit(above))
    flat = float(np.linalg.norm(out - height[:, None] * up, axis=1).mean())
    angle = 2 * math.pi * share
    if kind == "arc":
        ordered = np.sort(azimuth)
        gaps = np.diff(np.append(ordered, ordered[0] + 2 * math.pi))
        widest = int(np.argmax(gaps))
        if gaps[widest] > math.pi / 3:
            start, span = ordered[(widest + 1) % len(ordered)], 2 * math.pi - gaps[widest]
            angle = start + span * (0.5 - 0.5 * np.cos(2 * math.pi * share))
    eyes = middle + height.mean() * up + flat * (np.cos(angle)[:, None] * a + np.sin(angle)[:, None] * b)
    return _look(cameras[0], eyes, np.broadcast_to(middle, eyes.shape), np.broadcast_to(up, eyes.shape))


def around_points(points: np.ndarray, wh: tuple[int, int] = (400, 300), fov: float = 0.8) -> list[Camera]:
    """Cameras on a circle about points, for a model without cameras of its own; y points down."""
    middle = np.median(points, 0)
    reach = float(np.quantile(np.linalg.norm(points - middle, axis=1), 0.9))
    angle = 2 * math.pi * np.arange(8) / 8
    eyes = middle + 2.2 * max(reach, 1e-3) * np.stack([np.cos(angle), np.full(8, -0.35), np.sin(angle)], 1)
    up = np.broadcast_to(np.asarray([0.0, -1, 0]), eyes.shape)
    return _look(pinhole_from_fov(wh, fov), eyes, np.broadcast_to(middle, eyes.shape), up)
