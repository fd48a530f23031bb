import jax
import jax.numpy as jnp
import numpy as np

from papyrax.envs.scenes import worlds
from papyrax.envs.scenes.shading import shoot, trace, visible
from papyrax.methods.geometry.cameras import world_rays

draw = jax.jit(shoot, static_argnames="samples")


def test_specular_scene_shows_glossy_and_matte_spheres_with_exact_depth():
    world = worlds.specular()
    cam = worlds.orbit(3, (48, 48))[1]
    picture = draw(cam, world.bodies, world.look, samples=1)
    assert (picture.rgb >= 0).all() and (picture.rgb <= 1).all()
    glossy, matte = visible(picture, world.glossy), visible(picture, ~world.glossy)
    assert glossy.sum() > 40 and matte.sum() > 200
    origins, dirs = world_rays(cam)
    at = np.asarray(origins + jnp.where(jnp.isfinite(picture.distance), picture.distance, 0)[..., None] * dirs)
    on_floor = np.asarray(picture.body == 0)
    np.testing.assert_allclose(at[on_floor][:, 1], 0.45, atol=1e-4)


def test_gloss_depends_on_the_view_and_matte_does_not():
    world = worlds.specular()
    point = np.asarray(world.bodies.pose[:, :, 3])
    changes = []
    for body in (1, 2):  # glossy, matte
        colours = []
        for side in (-0.1, 0.9):  # not mirror images of each other: the surroundings are nearly symmetric
            target = point[body] + 0.3499 * np.asarray([0, -1.0, 0])
            eye = target + np.asarray([side, -2.0, 0.3])
            direction = (target - eye) / np.linalg.norm(target - eye)

            rgb, _, hit = trace(
                jnp.asarray([eye], jnp.float32), jnp.asarray([direction], jnp.float32), world.bodies, world.look
            )
            assert hit[0] == body
            colours.append(np.asarray(rgb[0]))
        changes.append(np.abs(colours[0] - colours[1]).max())
    assert changes[0] > 0.01 and changes[1] < 1e-4


def test_dynamic_scene_moves_only_what_is_labelled():
    a, b = worlds.dynamic(0.1), worlds.dynamic(0.3)
    moved = (np.asarray(a.bodies.pose) != np.asarray(b.bodies.pose)).any((1, 2)) | (
        np.asarray(a.bodies.size) != np.asarray(b.bodies.size)
    ).any(1)
    np.testing.assert_array_equal(moved, a.moving)


def test_room_surrounds_every_fisheye_ray():
    world = worlds.room()
    for cam in worlds.inside(3, (32, 32)):
        picture = draw(cam, world.bodies, world.look, samples=1)
        assert jnp.isfinite(picture.distance).all() and (picture.body >= 0).all()
        assert float(picture.distance.min()) > 0.05 and float(picture.rgb.std()) > 0.1
    points, colors = worlds.surface_points(world, 100)
    assert points.shape == colors.shape == (100, 3)
