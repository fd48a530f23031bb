import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from papyrax.methods.geometry import cameras as cams
from papyrax.methods.geometry.rotations import random_rotation

R = random_rotation(jax.random.key(3))
T = jnp.asarray([0.3, -0.2, 0.5])
DISTORTED = jnp.asarray([20.0, 21.0, 31.5, 24.2, 0.03, -0.006, 0.002, -0.0003])


resample = jax.jit(cams.resample)
project = jax.jit(cams.project)


def every_camera():
    fish = cams.make_camera("fisheye", (64, 48), DISTORTED, R, T, center=0.0)
    return {
        "pinhole": cams.make_camera("pinhole", (64, 48), jnp.asarray([50.0, 52.0, 33.0, 23.0]), R, T),
        "fisheye": fish,
        "equidistant 220 degrees": cams.equidistant((64, 64), math.radians(220), R, T),
        "beap": cams.beap_camera((2.6, 2.2), 0.05, R, T),
        "panorama": cams.make_camera("panorama", (64, 32), jnp.zeros(0), R, T),
        "raymap": cams.make_camera("raymap", (64, 48), cams.camera_rays(fish), R, T, center=0.0),
    }


@pytest.mark.parametrize("name", every_camera())
def test_projection_inverts_the_rays(name):
    cam = every_camera()[name]
    uv = cams.pixel_grid(cam)
    if name == "panorama":  # the two ends are one direction and the poles are points
        uv = uv[1:-1, 1:-1]
    uv = uv + (0.0 if name == "raymap" else 0.2)
    rays = cams.unproject(cam, uv)
    world = (rays * 3.0 - cam.t) @ cam.R
    got, valid = project(cam, world)
    assert valid.all()
    np.testing.assert_allclose(got, uv, atol=1e-3 if name == "raymap" else 1.5e-4)


def test_projection_is_exact_to_1e_4_pixels_in_float64():
    with jax.enable_x64():
        for kind, params in (("fisheye", DISTORTED), ("pinhole", jnp.asarray([50.0, 52.0, 33.0, 23.0]))):
            cam = cams.make_camera(kind, (64, 48), params.astype(jnp.float64))
            uv = cams.pixel_grid(cam)
            got, _ = cams.project_camera(cam, cams.unproject(cam, uv))
            np.testing.assert_allclose(got, uv, atol=1e-9)


def test_ray_lengths_are_as_documented():
    for name, cam in every_camera().items():
        rays = cams.camera_rays(cam)
        if name in ("pinhole", "beap"):
            assert (rays[..., 2] == 1).all()
        else:
            np.testing.assert_allclose(jnp.linalg.norm(rays, axis=-1), 1, atol=1e-5)
        origins, dirs = cams.world_rays(cam)
        np.testing.assert_allclose(origins[0, 0] @ cam.R.T + cam.t, 0, atol=1e-5)
        np.testing.assert_allclose(jnp.linalg.norm(dirs, axis=-1), 1, atol=1e-5)


def test_fisheye_sees_behind_itself_and_has_a_limit():
    cam = cams.equidistant((64, 64), math.radians(220), center=0.5)
    uv, valid = cams.project(cam, jnp.asarray([[1.0, 0, -0.2], [0.0, 0, -1.0], [0.0, 0, 1.0]]))
    assert valid.tolist() == [True, False, True]
    angle = math.pi / 2 + math.atan(0.2)
    np.testing.assert_allclose(uv[0], [32 + 64 / math.radians(220) * angle, 32], atol=1e-4)
    assert cams.camera_rays(cam)[0, 32, 2] < 0 and cams.half_fov(cam) > math.pi / 2
    folding = jnp.asarray([-0.2, 0.0, 0.0, 0.0])  # slope 1 - 0.6 t^2 is zero at 1.29
    assert abs(cams.fisheye_limit(folding) - math.sqrt(1 / 0.6)) < 2e-3
    bent = cams.make_camera("fisheye", (64, 64), jnp.asarray([20.0, 20, 32, 32, -0.2, 0, 0, 0]))
    assert not cams.project(bent, jnp.asarray([1.0, 0, 0.1]))[1]


def test_fisheye_angle_carries_the_implicit_gradient():
    with jax.enable_x64():
        k, r = DISTORTED[4:].astype(jnp.float64), jnp.asarray(1.1, jnp.float64)
        slope = jax.grad(cams.fisheye_angle)(r, k)
        h = 1e-6
        np.testing.assert_allclose(
            slope, (cams.fisheye_angle(r + h, k) - cams.fisheye_angle(r - h, k)) / (2 * h), rtol=1e-6
        )
        by_k = jax.grad(cams.fisheye_angle, 1)(r, k)
        moved = k.at[0].add(h), k.at[0].add(-h)
        want = (cams.fisheye_angle(r, moved[0]) - cams.fisheye_angle(r, moved[1])) / (2 * h)
        np.testing.assert_allclose(by_k[0], want, rtol=1e-5)
    on_axis = jax.jacobian(
        lambda x: cams.project(every_camera()["fisheye"].replace(R=jnp.eye(3), t=jnp.zeros(3)), x)[0]
    )
    np.testing.assert_allclose(on_axis(jnp.asarray([0.0, 0, 2.0])), [[10, 0, 0], [0, 10.5, 0]], atol=1e-4)


def test_ortho_and_beap_conventions():
    ortho = cams.make_camera("ortho", (8, 6), jnp.asarray([2.0, 2.0, 4.0, 3.0]), R, T)
    origins, dirs = cams.world_rays(ortho)
    uv, valid = cams.project(ortho, origins + 2.5 * dirs)
    np.testing.assert_allclose(uv, cams.pixel_grid(ortho), atol=1e-5)
    assert valid.all()
    beap = cams.beap_camera((2.0, 1.5), 0.1)
    assert beap.wh == (20, 14)  # angles +-0.05 .. +-0.95 and +-0.05 .. +-0.65 lie below half of each field
    np.testing.assert_allclose(beap.params, [-0.95, -0.65, 0.1], atol=1e-6)
    rays = cams.camera_rays(beap)
    np.testing.assert_allclose(jnp.arctan2(rays[..., 0], rays[..., 2])[0, 0], -0.95, atol=1e-6)
    panorama = cams.camera_rays(cams.make_camera("panorama", (9, 5), jnp.zeros(0)))
    np.testing.assert_allclose(panorama[2, 0], panorama[2, -1], atol=1e-6)
    np.testing.assert_allclose(panorama[2, 4], [0, 0, 1], atol=1e-6)
    np.testing.assert_allclose(panorama[0, 3], [0, -1, 0], atol=1e-6)


def test_resampling_keeps_a_constant_and_round_trips_a_smooth_image():
    fish = cams.make_camera("fisheye", (96, 72), jnp.asarray([30.0, 30, 47.5, 35.5, 0.02, -0.004, 0, 0]), center=0.0)
    beap = cams.beap_camera((2.9, 2.4), 0.02)
    constant, mask = resample(jnp.full((72, 96, 3), 0.7), fish, beap)
    assert mask.mean() > 0.5 and (jnp.abs(constant - 0.7) < 1e-6)[mask].all()
    x, y = jnp.meshgrid(jnp.linspace(0, 6, 96), jnp.linspace(0, 4, 72))
    smooth = jnp.stack([jnp.sin(x) * 0.5 + 0.5, jnp.cos(y) * 0.5 + 0.5], -1)
    there, _ = resample(smooth, fish, beap)
    back, seen = resample(there, beap, fish)
    error = jnp.where(seen[..., None], back - smooth, 0)[4:-4, 4:-4]
    assert -10 * jnp.log10((error**2).sum() / (2 * seen[4:-4, 4:-4].sum())) > 35


def test_bad_cameras_are_told_plainly():
    with pytest.raises(ValueError, match="kind is 'omni'"):
        cams.make_camera("omni", (4, 4), jnp.zeros(4))
    with pytest.raises(ValueError, match="params has 3 numbers, a pinhole camera of 4x4 wants 4"):
        cams.make_camera("pinhole", (4, 4), jnp.zeros(3))
    with pytest.raises(ValueError, match="image has size"):
        cams.resample(jnp.zeros((3, 4)), cams.beap_camera((1.0, 1.0), 0.1), cams.beap_camera((1.0, 1.0), 0.1))
    with pytest.raises(ValueError, match="fov_xy has 4"):
        cams.beap_camera((4.0, 1.0), 0.1)
