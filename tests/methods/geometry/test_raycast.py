import jax
import jax.numpy as jnp
import numpy as np
import pytest

from papyrax.methods.geometry import raycast
from papyrax.methods.geometry.rotations import random_rotation

KINDS = [raycast.ELLIPSOID, raycast.BOX, raycast.PLANE, raycast.CYLINDER, raycast.CAPSULE]
SIZES = jnp.asarray([[0.5, 0.7, 0.9], [0.6, 0.4, 0.8], [1.0, 0.7, 0.0], [0.4, 0.0, 0.7], [0.4, 0.0, 0.6]])


def distance(kind, p, size):
    """Signed (or for the plane absolute) measure that is zero exactly on the surface, in the body's frame."""
    if kind == raycast.ELLIPSOID:
        return np.sqrt((p**2 / size**2).sum(-1)) - 1
    if kind == raycast.BOX:
        return np.abs(p / size).max(-1) - 1
    if kind == raycast.PLANE:
        return p[..., 2]
    radial = np.hypot(p[..., 0], p[..., 1])
    if kind == raycast.CYLINDER:
        return np.maximum(radial / size[0], np.abs(p[..., 2]) / size[2]) - 1
    return np.sqrt(radial**2 + np.maximum(np.abs(p[..., 2]) - size[2], 0) ** 2) - size[0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("inside", [False, True])
def test_first_hit_agrees_with_marching(kind, inside):
    with jax.enable_x64():
        keys = jax.random.split(jax.random.key(kind), 3)
        rotation = random_rotation(keys[0], dtype=jnp.float64)
        center = jnp.asarray([[0.2, -0.1, 0.3]])
        size = SIZES[kind].astype(jnp.float64)
        bodies = raycast.make_bodies([kind], center, size[None], rotation[None])
        origins = center + (0.02 if inside else 3.0) * jax.random.normal(keys[1], (400, 3), jnp.float64)
        dirs = jax.random.normal(keys[2], (400, 3), jnp.float64)
        if not inside:
            dirs = center - origins + 0.4 * dirs
        dirs = dirs / jnp.linalg.norm(dirs, axis=-1, keepdims=True)
        hit = jax.jit(raycast.cast)(origins, dirs, bodies)
        steps = np.linspace(1e-4, 14, 7001)
        path = (
            np.asarray(origins)[:, None] + steps[:, None] * np.asarray(dirs)[:, None] - np.asarray(center)
        ) @ np.asarray(rotation)
        value = distance(kind, path, np.asarray(size))
        flips = np.sign(value[:, 1:]) != np.sign(value[:, :-1])
        if kind == raycast.PLANE:
            flips &= (np.abs(path[:, 1:, :2]) <= np.asarray(size)[:2]).all(-1)
        first = np.where(flips.any(1), steps[flips.argmax(1)], np.inf)
        found = np.isfinite(np.asarray(hit.t))
        # Marching at 2e-3 misses grazing chords, so the few disagreements must be grazing ones.
        agree = found == np.isfinite(first)
        assert agree.mean() > 0.98
        both = found & np.isfinite(first)
        assert both.sum() > 100
        assert (np.abs(np.asarray(hit.t)[both] - first[both]) < 5e-3).mean() > 0.98
        at = (np.asarray(origins + hit.t[:, None] * dirs)[found] - np.asarray(center)) @ np.asarray(rotation)
        np.testing.assert_allclose(distance(kind, at, np.asarray(size)), 0, atol=1e-9)
        facing = np.asarray((hit.normal * dirs).sum(-1))
        if kind != raycast.PLANE:  # a plane has no inside, and a few of the far origins lie inside the body
            within = distance(kind, path[:, 0], np.asarray(size)) < 0
            assert (facing[found & within] > 0).all() and (facing[found & ~within] < 1e-9).all()


def test_nearest_body_wins_and_misses_are_marked():
    bodies = raycast.make_bodies(
        [0, 1], jnp.asarray([[0.0, 0, 5], [0.0, 0, 3]]), jnp.asarray([[1.0, 1, 1], [0.5, 0.5, 0.5]])
    )
    dirs = jnp.asarray([[0.0, 0, 1], [0.0, 0.16, 1], [0.0, 0, -1]])
    hit = jax.jit(raycast.cast)(jnp.zeros((3, 3)), dirs, bodies)
    assert hit.body.tolist() == [1, 1, -1] and hit.t[0] == 2.5 and jnp.isinf(hit.t[2])
    np.testing.assert_allclose(hit.normal[0], [0, 0, -1], atol=1e-6)
    gradient = jax.grad(
        lambda z: raycast.cast(jnp.zeros((1, 3)), dirs[:1], bodies.replace(pose=bodies.pose.at[1, 2, 3].set(z))).t[0]
    )
    np.testing.assert_allclose(gradient(3.0), 1, atol=1e-6)
    with pytest.raises(ValueError, match="center and size"):
        raycast.make_bodies([0], jnp.zeros((2, 3)), jnp.zeros((1, 3)))


def test_heights_are_hit_exactly():
    with jax.enable_x64():
        keys = jax.random.split(jax.random.key(5), 3)
        grid = jax.random.uniform(keys[0], (7, 9), jnp.float64) * 1.5
        origins = jnp.concatenate(
            [jax.random.uniform(keys[1], (200, 2), jnp.float64) * jnp.asarray([8, 6]), jnp.full((200, 1), 4.0)], -1
        )
        dirs = jax.random.normal(keys[2], (200, 3), jnp.float64)
        dirs = dirs.at[:, 2].set(-jnp.abs(dirs[:, 2]))
        dirs = dirs.at[0].set(jnp.asarray([0.0, 0, -1.0]))
        t = np.asarray(jax.jit(raycast.cast_heights)(origins, dirs, grid))

        def height(xy):
            x, y = np.clip(xy[..., 0], 0, 8), np.clip(xy[..., 1], 0, 6)
            j, i = np.minimum(x.astype(int), 7), np.minimum(y.astype(int), 5)
            u, v, g = x - j, y - i, np.asarray(grid)
            return (
                g[i, j] * (1 - u) * (1 - v)
                + g[i, j + 1] * u * (1 - v)
                + g[i + 1, j] * (1 - u) * v
                + g[i + 1, j + 1] * u * v
            )

        steps = np.linspace(0, 40, 20001)
        path = np.asarray(origins)[:, None] + steps[:, None] * np.asarray(dirs)[:, None]
        inside = (path[..., :2] >= 0).all(-1) & (path[..., :2] <= [8, 6]).all(-1)
        below = (path[..., 2] <= height(path)) & inside
        first = np.where(below.any(1), steps[below.argmax(1)], np.inf)
        found = np.isfinite(t)
        assert found[0] and (found == np.isfinite(first)).mean() > 0.98 and found.sum() > 40
        both = found & np.isfinite(first)
        assert (np.abs(t[both] - first[both]) < 5e-3).mean() > 0.98
        at = np.asarray(origins + jnp.where(found, t, 0)[:, None] * dirs)[found]
        np.testing.assert_allclose(at[:, 2], height(at), atol=1e-8)
