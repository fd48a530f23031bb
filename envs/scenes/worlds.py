"""Three deterministic scenes with what photographs cannot give: exact cameras, depths, and labels of every body.

`specular`: mirror-like and matte spheres over a checker. `dynamic`: spheres that move or blink beside still ones, at
times in [0, 1]. `room`: the inside of a textured box with spheres, for cameras of any width. y points down.
"""

import math

import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool

from papyrax.envs.scenes.shading import Look
from papyrax.methods.geometry.cameras import Camera, equidistant, pinhole_from_fov
from papyrax.methods.geometry.raycast import BOX, ELLIPSOID, PLANE, Bodies, make_bodies
from papyrax.methods.geometry.rotations import look_at

DOWN = jnp.asarray([[1.0, 0, 0], [0, 0, -1], [0, 1, 0]])
"""Turns a plane's z axis to world up (minus y)."""


@struct.dataclass
class World:
    """Bodies, their looks, and which of them are glossy or moving."""

    bodies: Bodies
    look: Look
    glossy: Bool[Array, "p"]
    moving: Bool[Array, "p"]


def _world(kinds, centres, sizes, rows, rotations=None, glossy=None, moving=None) -> World:
    n = len(kinds)
    look = Look(*(jnp.asarray([row[i] for row in rows], jnp.float32) for i in range(5)))
    turn = jnp.broadcast_to(jnp.eye(3), (n, 3, 3)) if rotations is None else rotations
    bodies = make_bodies(kinds, jnp.asarray(centres, jnp.float32), jnp.asarray(sizes, jnp.float32), turn)
    none = jnp.zeros(n, bool)
    return World(
        bodies, look, none if glossy is None else jnp.asarray(glossy), none if moving is None else jnp.asarray(moving)
    )


def _floor(kinds):
    return jnp.stack([DOWN if k == PLANE else jnp.eye(3) for k in kinds])


GREYS = ((0.85, 0.85, 0.85), (0.25, 0.25, 0.3))


def specular() -> World:
    """Six spheres on a checker: three mirror-like with glints, three matte with stripes."""
    kinds = [PLANE] + [ELLIPSOID] * 6
    centres, rows, glossy = [[0, 0.45, 0]], [(*GREYS, 2.0, 0.0, 0.0)], [False]
    colours = [(0.9, 0.3, 0.2), (0.2, 0.7, 0.3), (0.25, 0.35, 0.9), (0.9, 0.8, 0.2), (0.7, 0.3, 0.8), (0.2, 0.8, 0.8)]
    for i, colour in enumerate(colours):
        angle = 2 * math.pi * i / 6
        centres.append([0.85 * math.cos(angle), 0.1, 0.85 * math.sin(angle)])
        shiny = i % 2 == 0
        pale = tuple(0.5 + 0.5 * c for c in colour)
        rows.append((colour, pale, 0.0 if shiny else 1.5, 0.55 if shiny else 0.0, 0.8 if shiny else 0.0))
        glossy.append(shiny)
    sizes = [[1.6, 1.6, 0]] + [[0.35] * 3] * 6
    return _world(kinds, centres, sizes, rows, _floor(kinds), glossy=glossy)


def dynamic(time: float) -> World:
    """A sphere on a circle, one that rises and sinks, one that blinks (small for half of the time), three still ones."""
    kinds = [PLANE] + [ELLIPSOID] * 6
    turn = 2 * math.pi * time
    centres = [[0, 0.45, 0], [0.8 * math.cos(turn), 0.1, 0.8 * math.sin(turn)], [0, -0.45 + 0.35 * math.sin(turn), 0]]
    centres += [[-1.1, 0.15, -0.9], [1.1, 0.15, -0.9], [-1.1, 0.15, 0.9], [1.1, 0.15, 0.9]]
    blink = 0.28 if time % 0.5 < 0.25 else 0.02
    sizes = [[1.6, 1.6, 0], [0.3] * 3, [0.25] * 3, [blink] * 3, [0.3] * 3, [0.3] * 3, [0.3] * 3]
    colours = [(0.9, 0.3, 0.2), (0.2, 0.7, 0.3), (0.95, 0.85, 0.2), (0.25, 0.35, 0.9), (0.7, 0.3, 0.8), (0.2, 0.8, 0.8)]
    rows = [(*GREYS, 2.0, 0.0, 0.0)] + [(c, tuple(0.5 * v for v in c), 1.5, 0.0, 0.0) for c in colours]
    return _world(kinds, centres, sizes, rows, _floor(kinds), moving=[False, True, True, True, False, False, False])


def room() -> World:
    """The inside of a box of 4 x 2.4 x 4 with checkered walls, five spheres and a smaller box in it."""
    kinds = [BOX] + [ELLIPSOID] * 5 + [BOX]
    centres = [[0, 0, 0], [1.2, 0.8, 0.9], [-1.3, 0.7, 1.1], [1.1, 0.6, -1.3], [-1.2, 0.3, -1.2], [0.2, -0.8, 1.4]]
    centres.append([-0.1, 0.9, -1.5])
    sizes = [[2, 1.2, 2], [0.4] * 3, [0.5] * 3, [0.45] * 3, [0.35] * 3, [0.3] * 3, [0.3, 0.3, 0.25]]
    colours = [(0.9, 0.3, 0.2), (0.2, 0.7, 0.3), (0.25, 0.35, 0.9), (0.9, 0.8, 0.2), (0.7, 0.3, 0.8), (0.2, 0.8, 0.8)]
    rows = [((0.85, 0.8, 0.7), (0.35, 0.4, 0.5), 3.0, 0.0, 0.0)]
    rows += [(c, tuple(0.45 * v for v in c), 2.0, 0.0, 0.2) for c in colours]
    return _world(kinds, centres, sizes, rows)


def orbit(n: int, wh: tuple[int, int], *, fov: float = 0.75, radius: float = 3.4, offset: float = 0.0) -> list[Camera]:
    """n pinhole cameras on an upper spiral about the origin, turned by `offset` of a step."""
    cameras = []
    for i in range(n):
        share = (i + offset) / n
        angle, height = 2 * math.pi * share * 1.618 * 3, 0.7 + 1.2 * (share * 7 % 1)
        flat = math.sqrt(radius**2 - height**2)
        eye = jnp.asarray([flat * math.cos(angle), -height, flat * math.sin(angle)], jnp.float32)
        cameras.append(pinhole_from_fov(wh, fov, *look_at(eye, jnp.zeros(3), jnp.asarray([0.0, -1, 0]))))
    return cameras


def inside(n: int, wh: tuple[int, int], *, fov: float = math.pi, offset: float = 0.0) -> list[Camera]:
    """n equidistant fisheye cameras in the middle of the room, looking around."""
    cameras = []
    for i in range(n):
        share = (i + offset) / n
        angle = 2 * math.pi * share * 1.618 * 2
        eye = np.asarray(
            [0.45 * math.cos(2.4 * angle), 0.25 * math.sin(3.1 * angle) - 0.1, 0.45 * math.sin(2.4 * angle)]
        )
        target = eye + [math.cos(angle), 0.3 * math.sin(5 * angle), math.sin(angle)]
        pose = look_at(*(jnp.asarray(a, jnp.float32) for a in (eye, target)), jnp.asarray([0.0, -1, 0]))
        cameras.append(equidistant(wh, fov, *pose, center=0.0))
    return cameras


def surface_points(world: World, n: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """n points on the bodies' surfaces seen from inside the scene's middle, with mid-grey colours, as a rough start."""
    from papyrax.methods.geometry.raycast import cast

    rng = np.random.default_rng(seed)
    origins = rng.uniform(-0.3, 0.3, (4 * n, 3)) + [0, -0.6, 0]
    dirs = rng.normal(size=(4 * n, 3))
    dirs /= np.linalg.norm(dirs, axis=1, keepdims=True)
    hit = cast(jnp.asarray(origins, jnp.float32), jnp.asarray(dirs, jnp.float32), world.bodies)
    points = origins + np.where(np.isfinite(hit.t), hit.t, 0)[:, None] * dirs
    points = points[np.isfinite(np.asarray(hit.t))][:n].astype(np.float32)
    return points, np.full_like(points, 127 / 255)
