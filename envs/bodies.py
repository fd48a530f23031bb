"""Rigid bodies drawn in software: MuJoCo models and Brax systems as films on machines without a display or a graphics
driver (host).

A shape is a set of points in its body's frame and a radius: what is drawn is the convex hull of the projected points,
swollen by the radius. That covers a ball (one point), a capsule (two points), boxes, cylinders, ellipsoids and meshes
(their corners). The projection is orthographic; shapes are painted from far to near.
"""

import dataclasses
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from papyrax.envs import draw

# MuJoCo's numbers for kinds of geometry (mjtGeom).
PLANE, SPHERE, CAPSULE, ELLIPSOID, CYLINDER, BOX, MESH = 0, 2, 3, 4, 5, 6, 7


@dataclasses.dataclass(frozen=True)
class Shapes:
    """What to draw: for each shape its points in the frame of its body (m), its radius (m), its body and its colour."""

    points: tuple[np.ndarray, ...]
    radius: Float[np.ndarray, "g"]
    body: Int[np.ndarray, "g"]
    color: Int[np.ndarray, "g 3"]
    floor: bool


def shapes_of(model: Any) -> Shapes:
    """The visible geometry of a MuJoCo model; body 0 is the world. Planes become the floor line, other unbounded kinds
    are left out.
    """
    points, radius, body, color, floor = [], [], [], [], False
    for g in range(model.ngeom):
        kind, size = int(model.geom_type[g]), np.asarray(model.geom_size[g])
        floor = floor or kind == PLANE
        if model.geom_rgba[g, 3] == 0:
            continue
        if kind == MESH:
            mesh = model.geom_dataid[g]
            first = model.mesh_vertadr[mesh]
            local, swell = model.mesh_vert[first : first + model.mesh_vertnum[mesh]], 0.0
        else:
            local, swell = _local_points(kind, size)
        if local is None:
            continue
        points.append(local @ quaternion_matrix(model.geom_quat[g]).T + model.geom_pos[g])
        radius.append(swell)
        body.append(int(model.geom_bodyid[g]))
        # As in MuJoCo, a material gives the colour unless the geom sets one of its own (other than the default grey).
        rgb, material = model.geom_rgba[g], model.geom_matid[g]
        if material >= 0 and np.allclose(rgb, (0.5, 0.5, 0.5, 1.0)):
            rgb = model.mat_rgba[material]
        color.append(np.round(255 * np.clip(rgb[:3], 0, 1)).astype(int))
    return Shapes(
        points=tuple(points),
        radius=np.array(radius),
        body=np.array(body, int),
        color=np.array(color, int).reshape(-1, 3),
        floor=floor,
    )


def draw_bodies(
    position: Float[np.ndarray, "b 3"],
    rotation: Float[np.ndarray, "b 3 3"],
    shapes: Shapes,
    *,
    size: tuple[int, int] = (240, 320),
    view: tuple[float, float] = (-90.0, 8.0),
    span: float | None = None,
    follow: bool = True,
) -> np.ndarray:
    """A picture of bodies.

    Args:
        position: where each body's frame is (m), body 0 the world.
        rotation: its rotation, columns are the body's axes.
        shapes: from `shapes_of`.
        size: height and width in pixels.
        view: direction of the camera as azimuth and elevation in degrees; (-90, 0) looks along +y, so that x is right
            and z is up.
        span: height of the picture in metres; by default large enough for every shape that moves.
        follow: keep the mean of the moving bodies in the middle; otherwise the world's origin.

    Returns:
        uint8 [h, w, 3].

    Raises:
        ValueError: the number of bodies is smaller than the shapes ask for.
    """
    position, rotation = np.asarray(position, float), np.asarray(rotation, float)
    if len(shapes.body) and shapes.body.max() >= len(position):
        raise ValueError(f"position has {len(position)} bodies, wanted at least {shapes.body.max() + 1}.")
    azimuth, elevation = np.deg2rad(view)
    away = np.array([np.cos(azimuth) * np.cos(elevation), np.sin(azimuth) * np.cos(elevation), np.sin(elevation)])
    right = np.array([-np.sin(azimuth), np.cos(azimuth), 0.0])
    up = np.cross(away, right)

    height, width = size
    middle = position[1:].mean(axis=0) if follow and len(position) > 1 else np.zeros(3)
    world = [p @ rotation[b].T + position[b] for p, b in zip(shapes.points, shapes.body)]
    if span is None:
        moving = [p for p, b in zip(world, shapes.body) if b > 0]
        reach = max((float(np.linalg.norm(p - middle, axis=1).max()) for p in moving), default=1.0)
        span = 2.4 * max(reach, 0.1)
    scale = height / span

    def pixels(points):
        offset = points - middle
        return np.stack([0.5 * width + scale * offset @ right, 0.55 * height - scale * offset @ up], axis=1)

    image, pen = draw.canvas(width, height)
    if shapes.floor:
        _draw_floor(pen, pixels, middle, 0.5 * width / scale, right)
    # Near shapes are drawn last; things of the world (rails, walls) before what moves at equal depth.
    order = sorted(range(len(world)), key=lambda g: (world[g].mean(axis=0) @ away, shapes.body[g] > 0))
    for g in order:
        _draw_shape(pen, pixels(world[g]), scale * shapes.radius[g], tuple(int(c) for c in shapes.color[g]))
    return draw.finish(image)


def quaternion_matrix(q: Float[np.ndarray, "*b 4"]) -> Float[np.ndarray, "*b 3 3"]:
    """Rotation matrices of unit quaternions (w, x, y, z)."""
    w, x, y, z = np.moveaxis(np.asarray(q, float), -1, 0)
    rows = [
        [1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)],
        [2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)],
        [2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)],
    ]
    return np.stack([np.stack(row, axis=-1) for row in rows], axis=-2)


def convex_hull(points: Float[np.ndarray, "n 2"]) -> Float[np.ndarray, "h 2"]:
    """Corners of the convex hull in order (Andrew's monotone chain)."""
    ordered = sorted({(float(x), float(y)) for x, y in points})
    if len(ordered) < 3:
        return np.array(ordered)

    def half(sequence):
        chain: list[tuple[float, float]] = []
        for p in sequence:
            while len(chain) >= 2:
                (ax, ay), (bx, by) = chain[-2], chain[-1]
                if (bx - ax) * (p[1] - ay) - (by - ay) * (p[0] - ax) > 0:
                    break
                chain.pop()
            chain.append(p)
        return chain[:-1]

    return np.array(half(ordered) + half(reversed(ordered)))


def _local_points(kind: int, size: np.ndarray) -> tuple[np.ndarray | None, float]:
    """Points and radius of a shape in its own frame, or (None, 0) where it cannot be drawn."""
    turn = np.linspace(0, 2 * np.pi, 24, endpoint=False)
    if kind == SPHERE:
        return np.zeros((1, 3)), float(size[0])
    if kind == CAPSULE:
        return np.array([[0, 0, -size[1]], [0, 0, size[1]]]), float(size[0])
    if kind == CYLINDER:
        ring = np.stack([size[0] * np.cos(turn), size[0] * np.sin(turn)], axis=1)
        return np.concatenate([np.c_[ring, np.full(24, z)] for z in (-size[1], size[1])]), 0.0
    if kind == BOX:
        corners = np.stack(np.meshgrid([-1, 1], [-1, 1], [-1, 1]), axis=-1).reshape(-1, 3)
        return corners * size, 0.0
    if kind == ELLIPSOID:
        polar = np.linspace(0, np.pi, 13)[:, None]
        flat = np.cos(polar) * np.ones_like(turn)
        ball = np.stack([np.sin(polar) * np.cos(turn), np.sin(polar) * np.sin(turn), flat], axis=-1).reshape(-1, 3)
        return ball * size, 0.0
    return None, 0.0


def _draw_shape(pen, corners: np.ndarray, radius: float, color: tuple[int, int, int]) -> None:
    """The convex hull of the corners, swollen by the radius, with a darker edge."""
    edge = draw.mix(color, draw.INK, 0.5)
    if len(corners) == 1:
        draw.disc(pen, corners[0], max(radius, 1.0), fill=color, outline=edge)
    elif len(corners) == 2:
        draw.line(pen, corners, edge, width=max(2 * radius, 2.0))
        draw.line(pen, corners, color, width=max(2 * radius - 2, 1.0))
    else:
        draw.polygon(pen, convex_hull(corners), fill=color, outline=edge)


def _draw_floor(pen, pixels, middle: np.ndarray, half: float, right: np.ndarray) -> None:
    """The plane z = 0 as a line across the picture, with a mark each half metre so that motion shows."""
    along = right / np.linalg.norm(right)
    center = np.array([middle[0], middle[1], 0.0])
    draw.line(pen, pixels(np.stack([center - 2 * half * along, center + 2 * half * along])), draw.FAINT, width=2)
    start = center @ along
    for mark in np.arange(np.ceil((start - half) / 0.5) * 0.5, start + half, 0.5):
        x, y = pixels((center + (mark - start) * along)[None])[0]
        draw.line(pen, [(x, y), (x, y + 6)], draw.FAINT, width=2)
