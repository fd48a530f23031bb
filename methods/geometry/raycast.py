"""Exact ray hits on simple bodies and on height fields: the ground truth of the analytic scenes.

Each body lies in its own frame, `pose` = [A | a] maps body to world (x = A b + a, A a rotation):

| kind | code | size | surface in the body's frame | uv of a hit |
|---|---|---|---|---|
| ellipsoid | 0 | three radii | sum (b_i / size_i)^2 = 1 | longitude, latitude |
| box | 1 | three half sides | max abs(b_i / size_i) = 1 | the two other coordinates over their half sides |
| plane | 2 | half sides x, y (inf: endless), unused | z = 0 | x, y |
| cylinder | 3 | radius, unused, half height | x^2 + y^2 = r^2 with caps | angle, z |
| capsule | 4 | radius, unused, half height of the straight part | distance r from the segment on z | angle, z |

The nearest crossing in front of the origin counts, from outside or from inside, so a box is also a room.
"""

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

ELLIPSOID, BOX, PLANE, CYLINDER, CAPSULE = range(5)
START = 1e-6


@struct.dataclass
class Bodies:
    """A fixed number of bodies; see the module's table."""

    kind: Int[Array, "p"]
    pose: Float[Array, "p 3 4"]
    size: Float[Array, "p 3"]


@struct.dataclass
class Hit:
    """First hit of each ray: distance in units of the direction's length (inf when nothing is hit), outward unit
    normal in the world, index of the body (-1: none) and surface coordinates.
    """

    t: Float[Array, "r"]
    normal: Float[Array, "r 3"]
    body: Int[Array, "r"]
    uv: Float[Array, "r 2"]


def make_bodies(kind, center, size, rotation=None) -> Bodies:
    """Bodies from codes (p,), centres (p, 3), sizes (p, 3) and rotations (p, 3, 3), identity by default."""
    kind, center, size = jnp.asarray(kind, jnp.int32), jnp.asarray(center), jnp.asarray(size)
    if center.shape != (len(kind), 3) or size.shape != (len(kind), 3):
        raise ValueError(f"center and size have shapes {center.shape} and {size.shape}, wanted ({len(kind)}, 3) each.")
    if rotation is None:
        rotation = jnp.broadcast_to(jnp.eye(3, dtype=center.dtype), (len(kind), 3, 3))
    return Bodies(kind, jnp.concatenate([jnp.asarray(rotation), center[..., None]], -1), size)


def _roots(a, b, c):
    """Both roots of a t^2 + 2 b t + c = 0 in rising order, by the form that does not cancel; inf where none."""
    disc = b * b - a * c
    real = (disc >= 0) & (jnp.abs(a) > 1e-20)
    q = -(b + jnp.where(b >= 0, 1, -1) * jnp.sqrt(jnp.where(real, disc, 0)))
    first = q / jnp.where(real, a, 1)
    second = jnp.where(jnp.abs(q) > 1e-30, c / jnp.where(jnp.abs(q) > 1e-30, q, 1), first)
    low, high = jnp.minimum(first, second), jnp.maximum(first, second)
    return jnp.where(real, low, jnp.inf), jnp.where(real, high, jnp.inf)


def _nearest(candidates):
    """Smallest candidate in front of the origin, inf when there is none."""
    return jnp.stack([jnp.where((t > START) & ok, t, jnp.inf) for t, ok in candidates]).min(0)


def _divide(a, b):
    return a / jnp.where(jnp.abs(b) > 1e-30, b, 1e-30)


def _ellipsoid(o, d, size):
    o, d = o / size, d / size
    low, high = _roots((d * d).sum(-1), (o * d).sum(-1), (o * o).sum(-1) - 1)
    return _nearest([(low, True), (high, True)])


def _box(o, d, size):
    a, b = _divide(-size - o, d), _divide(size - o, d)
    # A ray parallel to a slab and outside of it never enters; inside of it that slab does not bound the ray.
    parallel = jnp.abs(d) <= 1e-30
    outside = parallel & (jnp.abs(o) > size)
    enter = jnp.where(parallel, -jnp.inf, jnp.minimum(a, b)).max(-1)
    leave = jnp.where(parallel, jnp.inf, jnp.maximum(a, b)).min(-1)
    met = (enter <= leave) & ~outside.any(-1)
    return _nearest([(enter, met), (leave, met)])


def _plane(o, d, size):
    t = _divide(-o[..., 2], d[..., 2])
    at = o + d * t[..., None]
    return _nearest([(t, (jnp.abs(at[..., :2]) <= size[..., :2]).all(-1) & (jnp.abs(d[..., 2]) > 1e-30))])


def _side(o, d, size):
    return _roots(
        (d[..., :2] ** 2).sum(-1), (o[..., :2] * d[..., :2]).sum(-1), (o[..., :2] ** 2).sum(-1) - size[..., 0] ** 2
    )


def _cylinder(o, d, size):
    r, h = size[..., 0], size[..., 2]
    candidates = []
    for t in _side(o, d, size):
        candidates.append((t, jnp.abs(o[..., 2] + d[..., 2] * jnp.where(jnp.isfinite(t), t, 0)) <= h))
    for cap in (-h, h):
        t = _divide(cap - o[..., 2], d[..., 2])
        at = o + d * t[..., None]
        candidates.append((t, ((at[..., :2] ** 2).sum(-1) <= r * r) & (jnp.abs(d[..., 2]) > 1e-30)))
    return _nearest(candidates)


def _capsule(o, d, size):
    r, h = size[..., 0], size[..., 2]
    candidates = []
    for t in _side(o, d, size):
        candidates.append((t, jnp.abs(o[..., 2] + d[..., 2] * jnp.where(jnp.isfinite(t), t, 0)) <= h))
    for sign in (-1, 1):
        moved = o.at[..., 2].add(-sign * h)
        for t in _roots((d * d).sum(-1), (moved * d).sum(-1), (moved * moved).sum(-1) - r * r):
            z = o[..., 2] + d[..., 2] * jnp.where(jnp.isfinite(t), t, 0)
            candidates.append((t, sign * z >= h))
    return _nearest(candidates)


def _surface(kind, at, size):
    """Outward normal and surface coordinates of a point on a body, in the body's frame."""
    x, y, z = at[..., 0], at[..., 1], at[..., 2]
    scaled = at / jnp.where(jnp.isfinite(size) & (size > 0), size, 1)
    axis = jnp.argmax(jnp.abs(scaled), -1)
    face = jax.nn.one_hot(axis, 3, dtype=at.dtype) * jnp.sign(scaled)
    angle = jnp.arctan2(y, x)
    radial = jnp.stack([x, y, jnp.zeros_like(z)], -1)
    on_cap = jnp.abs(z) >= size[..., 2] * (1 - 1e-6)
    flat = jnp.stack([jnp.zeros_like(z), jnp.zeros_like(z), jnp.sign(z)], -1)
    above = jnp.clip(z, -size[..., 2], size[..., 2])
    normals = jnp.stack(
        [
            scaled / jnp.where(size > 0, size, 1),
            face,
            jnp.broadcast_to(jnp.asarray([0, 0, 1], at.dtype), at.shape),
            # On a cap the side's distance to the axis is smaller than the radius.
            jnp.where((on_cap & ((x * x + y * y) < (size[..., 0] * (1 - 1e-6)) ** 2))[..., None], flat, radial),
            jnp.stack([x, y, z - above], -1),
        ]
    )
    others = jnp.stack([(axis + 1) % 3, (axis + 2) % 3], -1)
    around = jnp.stack([angle, z], -1)
    length = jnp.linalg.norm(scaled, axis=-1)
    latitude = jnp.arcsin(jnp.clip(scaled[..., 2] / jnp.where(length > 0, length, 1), -1, 1))
    coordinates = jnp.stack(
        [
            jnp.stack([jnp.arctan2(scaled[..., 1], scaled[..., 0]), latitude], -1),
            jnp.take_along_axis(scaled, others, -1),
            at[..., :2],
            around,
            around,
        ]
    )
    normal = jnp.take_along_axis(normals, kind[None, :, None], 0)[0]
    normal = normal / jnp.maximum(jnp.linalg.norm(normal, axis=-1, keepdims=True), 1e-30)
    return normal, jnp.take_along_axis(coordinates, kind[None, :, None], 0)[0]


def cast(origins: Float[Array, "r 3"], dirs: Float[Array, "r 3"], bodies: Bodies) -> Hit:
    """First hit of every ray among all bodies; see `Hit`. Cost and memory grow with rays times bodies."""
    rotation, shift = bodies.pose[..., :3], bodies.pose[..., 3]
    o = jnp.einsum("rpi,pij->rpj", origins[:, None] - shift, rotation)
    d = jnp.einsum("ri,pij->rpj", dirs, rotation)
    size = jnp.broadcast_to(bodies.size, o.shape)
    every = jnp.stack([f(o, d, size) for f in (_ellipsoid, _box, _plane, _cylinder, _capsule)])
    t = jnp.take_along_axis(every, jnp.broadcast_to(bodies.kind, every.shape[1:])[None], 0)[0]
    body = jnp.argmin(t, -1)
    first = jnp.take_along_axis(t, body[:, None], -1)[:, 0]
    hit = jnp.isfinite(first)
    rows = jnp.arange(len(first))
    at = o[rows, body] + d[rows, body] * jnp.where(hit, first, 0)[:, None]
    normal, uv = _surface(bodies.kind[body], at, bodies.size[body])
    normal = jnp.einsum("rij,rj->ri", rotation[body], normal)
    return Hit(
        first,
        jnp.where(hit[:, None], normal, 0),
        jnp.where(hit, body, -1).astype(jnp.int32),
        jnp.where(hit[:, None], uv, 0),
    )


def cast_heights(
    origins: Float[Array, "r 3"], dirs: Float[Array, "r 3"], grid: Float[Array, "h w"]
) -> Float[Array, "r"]:
    """Distance along each ray to the surface z = grid, bilinear between samples at integer (x = column, y = row).

    Inf where the ray leaves the field's square without touching it. The ray is walked cell by cell (h + w + 2 cells
    at most); in a cell the height along the ray is a quadratic, whose first root is exact.
    """
    h, w = grid.shape
    if min(h, w) < 2:
        raise ValueError(f"grid has shape {grid.shape}, a height field wants at least 2 by 2 samples.")
    limits = jnp.asarray([w - 1, h - 1], origins.dtype)
    o, d = origins[:, :2], dirs[:, :2]
    a, b = _divide(-o, d), _divide(limits - o, d)
    parallel = jnp.abs(d) <= 1e-30
    outside = (parallel & ((o < 0) | (o > limits))).any(-1)
    enter = jnp.maximum(jnp.where(parallel, -jnp.inf, jnp.minimum(a, b)).max(-1), 0)
    leave = jnp.where(parallel, jnp.inf, jnp.maximum(a, b)).min(-1)
    leave = jnp.where(outside, -jnp.inf, leave)
    step_sign = jnp.where(d >= 0, 1, -1)

    def cell_at(t):
        at = o + d * t[:, None]
        return jnp.clip(jnp.floor(at + 1e-6 * step_sign), 0, limits - 1)

    def body(_, state):
        t, cell, found = state
        edge = cell + (d >= 0)
        cross = jnp.where(parallel, jnp.inf, _divide(edge - o, d))
        end = jnp.minimum(jnp.minimum(cross[:, 0], cross[:, 1]), leave)
        # A vertical ray stays in one cell for ever; its end is taken where it surely has crossed all heights.
        far = jnp.where(
            jnp.isfinite(end), end, t + _divide(2 * jnp.ptp(grid) + jnp.abs(origins[:, 2]) + 1e3, jnp.abs(dirs[:, 2]))
        )
        j, i = cell[:, 0].astype(int), cell[:, 1].astype(int)
        g00, g01, g10, g11 = grid[i, j], grid[i, j + 1], grid[i + 1, j], grid[i + 1, j + 1]
        gx, gy, gxy = g01 - g00, g10 - g00, g11 - g01 - g10 + g00
        u = o + d * t[:, None] - cell
        c0 = origins[:, 2] + dirs[:, 2] * t - (g00 + gx * u[:, 0] + gy * u[:, 1] + gxy * u[:, 0] * u[:, 1])
        c1 = dirs[:, 2] - (gx * d[:, 0] + gy * d[:, 1] + gxy * (u[:, 0] * d[:, 1] + u[:, 1] * d[:, 0]))
        c2 = -gxy * d[:, 0] * d[:, 1]
        low, high = _roots(c2, 0.5 * c1, c0)
        line = _divide(-c0, c1)
        length = far - t
        flat = jnp.abs(c2) * length < 1e-6 * jnp.abs(c1)
        options = jnp.stack([jnp.where(flat, line, low), jnp.where(flat, line, high)])
        good = (options >= -1e-6 * (1 + length)) & (options <= length * (1 + 1e-6) + 1e-9)
        root = jnp.where(good, options, jnp.inf).min(0)
        found = jnp.where(jnp.isinf(found) & (t <= leave), t + root, found)
        advance = cross <= end[:, None]
        cell = cell + jnp.where(advance, step_sign, 0)
        stop = (cell < 0).any(-1) | (cell > limits - 1).any(-1) | ~jnp.isfinite(end)
        return jnp.where(stop, jnp.inf, end), jnp.clip(cell, 0, limits - 1), found

    start = jnp.where(enter <= leave, enter, jnp.inf)
    found = jnp.full(len(o), jnp.inf, origins.dtype)
    safe = jnp.where(jnp.isfinite(start), start, 0)
    state = (jnp.where(jnp.isfinite(start), safe, jnp.inf), cell_at(safe), found)
    return jax.lax.fori_loop(0, h + w + 2, body, state)[2]
