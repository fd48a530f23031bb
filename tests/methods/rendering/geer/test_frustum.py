import jax
import jax.numpy as jnp
import numpy as np
import pytest

from papyrax.methods.geometry.cameras import beap_camera, camera_rays, equidistant, make_camera
from papyrax.methods.geometry.rotations import quat_to_matrix
from papyrax.methods.rendering.geer import associate, frustum
from papyrax.methods.rendering.geer.ray import camera_covariance, canonical, distance2, ray_opacity

pytestmark = [pytest.mark.proof("geer", "core"), pytest.mark.proof("geer", "proof")]
angle_jit = jax.jit(frustum.pbf_angle)


def gaussians(p=400, seed=0, spread=2.0, size=0.4, dtype=jnp.float32):
    """Centres all around the camera, many so near that they cross z = 0 or hold the camera."""
    rng = np.random.default_rng(seed)
    params = {
        "xyz": spread * rng.normal(size=(p, 3)),
        "log_scale": np.log(size) + 0.7 * rng.normal(size=(p, 3)),
        "quat": rng.normal(size=(p, 4)),
        "opacity_raw": 2 * rng.normal(size=p),
    }
    return {k: jnp.asarray(v, dtype) for k, v in params.items()}


def eye():
    return make_camera("pinhole", (8, 8), jnp.asarray([8.0, 8, 4, 4]))


def directions(n, seed=1):
    d = np.random.default_rng(seed).normal(size=(n, 3))
    return jnp.asarray(d / np.linalg.norm(d, axis=1, keepdims=True), jnp.float32)


def test_distance_is_the_point_line_distance_in_the_canonical_frame_and_the_known_value():
    one = {"xyz": jnp.asarray([[0.3, -0.2, 2.0]]), "log_scale": jnp.log(jnp.full((1, 3), 0.25)), "quat": jnp.asarray([[1.0, 0, 0, 0]]), "opacity_raw": jax.scipy.special.logit(jnp.asarray([0.7]))}  # fmt: skip
    matrix, c, opacity = canonical(one, eye())
    np.testing.assert_allclose(distance2(matrix, c, jnp.asarray([[0.0, 0, 1]]))[0], 2.08, rtol=1e-4)
    np.testing.assert_allclose(ray_opacity(matrix, c, opacity, jnp.asarray([[0.0, 0, 1]])), 0.24742, atol=2e-5)
    with jax.enable_x64():
        params = gaussians(50, dtype=jnp.float64)
        rays = directions(40).astype(jnp.float64)
        matrix, c, _ = canonical(params, eye())
        got, along = distance2(matrix, c, rays)
        p, u = np.einsum("pij,pj->pi", matrix, c), np.einsum("pij,rj->pri", matrix, rays)
        t = np.einsum("pri,pi->pr", u, p) / (u * u).sum(-1)
        foot = t[..., None] * u - p[:, None]
        np.testing.assert_allclose(got, (foot**2).sum(-1), rtol=1e-6, atol=1e-9)
        np.testing.assert_allclose(along, t, rtol=1e-9)
        np.testing.assert_allclose(distance2(matrix, c, 7.3 * rays)[0], got, rtol=1e-9)
        # The integral over canonical arc length, by quadrature.
        s = np.linspace(-12, 12, 4001)
        e = u[3, 5] / np.linalg.norm(u[3, 5])
        middle = t[3, 5] * np.linalg.norm(u[3, 5])
        density = np.exp(-0.5 * ((e * (s + middle)[:, None] - p[3]) ** 2).sum(1))
        np.testing.assert_allclose(np.trapezoid(density, s), np.sqrt(2 * np.pi) * np.exp(-0.5 * got[3, 5]), rtol=1e-6)


def test_common_rotations_and_thin_gaussians():
    params = gaussians(30, seed=2)
    rays = directions(20)
    with jax.enable_x64():
        thin = {k: v.astype(jnp.float64) for k, v in params.items()}
        thin["log_scale"] = jnp.log(jnp.asarray([[1.0, 1.0, 1e-4]])) + 0 * thin["log_scale"]
        exact = distance2(*canonical(thin, eye())[:2], rays.astype(jnp.float64))[0]
    narrow = params | {"log_scale": jnp.log(jnp.asarray([[1.0, 1.0, 1e-4]])) + 0 * params["log_scale"]}
    got = distance2(*canonical(narrow, eye())[:2], rays)[0]
    # The floor of 1e-7 in variance limits the aspect to 3,000; distances of 10^3 sigma keep four digits.
    assert float(jnp.median(jnp.abs(got - exact) / jnp.maximum(exact, 1))) < 1e-3
    turn = quat_to_matrix(jnp.asarray([0.3, -0.5, 0.2, 0.8]))
    turned = eye().replace(R=turn)
    a = distance2(*canonical(params, eye())[:2], rays)[0]
    b = distance2(*canonical(params, turned)[:2], rays @ turn.T)[0]
    np.testing.assert_allclose(a, b, rtol=2e-3, atol=2e-3)


def test_known_frusta():
    cov, sigma = jnp.asarray([0.04 * np.eye(3)] * 3, jnp.float32), jnp.full(3, 3.0)
    c = jnp.asarray([[0.0, 0, 2], [1.5, 0, 2], [0.0, 0, 0.3]])
    ends, full = angle_jit(cov, c, sigma)
    np.testing.assert_allclose(jnp.tan(ends[0]), [-0.31449, 0.31449, -0.31449, 0.31449], atol=1e-4)
    centre = np.arctan2(1.5, 2)
    np.testing.assert_allclose(ends[1, 1] - centre, centre - ends[1, 0], atol=1e-5)
    assert not full[:2].any() and full[2].all()  # the camera lies inside the third
    tangent, valid = frustum.pbf_tan(cov, c, sigma)
    assert valid.tolist() == [True, True, False]
    np.testing.assert_allclose(jnp.tan(ends[:2]), tangent[:2], atol=1e-5)


def test_frusta_are_tight_about_the_sampled_surface_everywhere():
    with jax.enable_x64():
        params = gaussians(300, seed=4, dtype=jnp.float64)
        cov = camera_covariance(params, eye())
        c = params["xyz"]
        ends, full = angle_jit(cov, c, jnp.full(300, 3.0))
        low = np.linalg.cholesky(np.asarray(cov))
        # Points of the shadow's outline: the extreme angles lie on the 2-D ellipse in each axis' plane.
        t = np.linspace(0, 2 * np.pi, 20001)
        circle = np.stack([np.cos(t), np.sin(t)])
        seen = 0
        for i in range(300):
            for axis in (0, 1):
                plane = np.asarray(cov)[i][np.ix_([axis, 2], [axis, 2])]
                outline = np.asarray(c)[i, [axis, 2], None] + 3 * np.linalg.cholesky(plane) @ circle
                contains = np.asarray(c)[i, [axis, 2]] @ np.linalg.inv(9 * plane) @ np.asarray(c)[i, [axis, 2]] < 1
                assert bool(full[i, axis]) == bool(contains)
                if not contains:
                    seen += 1
                    centre = np.arctan2(c[i, axis], c[i, 2])
                    offset = np.arctan2(outline[0], outline[1]) - centre
                    offset = (offset + np.pi) % (2 * np.pi) - np.pi
                    got = np.asarray(ends[i, 2 * axis : 2 * axis + 2]) - centre
                    np.testing.assert_allclose(got, [offset.min(), offset.max()], atol=1e-3)
        assert seen > 200 and low.shape == (300, 3, 3)
        tangent, valid = frustum.pbf_tan(cov, c, jnp.full(300, 3.0))
        assert valid.sum() > 30
        np.testing.assert_allclose(jnp.arctan(tangent)[valid], ends[valid], atol=1e-7)


def test_no_visible_ray_lies_outside_the_opacity_box_at_any_angle():
    params = gaussians(2000, seed=5, spread=1.5)
    matrix, c, opacity = canonical(params, eye())
    cov = camera_covariance(params, eye())
    sigma = frustum.cutoff_sigma(opacity, "opacity")
    assert float(sigma.max()) <= 3.34
    box = frustum.angle_box(angle_jit(cov, c, sigma)[0])
    rays = directions(1000, 6)

    @jax.jit
    def count(matrix, c, opacity, box):
        d2, along = distance2(matrix, c, rays)
        visible = (opacity[:, None] * jnp.exp(-0.5 * d2) >= 1 / 255) & (opacity >= 1 / 255)[:, None]
        points = associate.tile_angles(rays[:, None])
        inside = associate.hits(points, box, jnp.ones(2000, bool)).T
        return (visible & (along > 0)).sum(), (visible & (along > 0) & ~inside).sum(), (visible & ~inside).sum()

    visible, lost, lost_line = count(matrix, c, opacity, box)
    assert visible > 50_000 and lost == 0
    assert lost_line > 0.01 * visible  # whole lines also meet mirror ghosts, which no box about the Gaussian holds


def test_pbf_is_smaller_than_ut_and_loose_ewa_and_they_miss_rays():
    rng = np.random.default_rng(7)
    p = 1500
    angle, turn = rng.uniform(0, np.radians(75), p), rng.uniform(0, 2 * np.pi, p)
    distance = rng.uniform(1, 6, p)
    unit = np.stack([np.sin(angle) * np.cos(turn), np.sin(angle) * np.sin(turn), np.cos(angle)], 1)
    params = {
        "xyz": jnp.asarray(distance[:, None] * unit, jnp.float32),
        "log_scale": jnp.asarray(np.log(0.04 * distance[:, None]) + 0.4 * rng.normal(size=(p, 3)), jnp.float32),
        "quat": jnp.asarray(rng.normal(size=(p, 4)), jnp.float32),
        "opacity_raw": jnp.zeros(p),
    }
    matrix, c, _ = canonical(params, eye())
    cov, sigma = camera_covariance(params, eye()), jnp.full(p, 3.0)
    exact, full = angle_jit(cov, c, sigma)
    assert not full.any()
    tangents, ok = frustum.ewa_tan(cov, c, sigma)
    ewa = jnp.arctan(tangents)
    ut, _ = frustum.ut_angle(jnp.linalg.inv(matrix), c, sigma)
    area = lambda e: (e[:, 1] - e[:, 0]) * (e[:, 3] - e[:, 2])  # noqa: E731
    front = ok & (exact[:, jnp.asarray([0, 2])] > -1.5).all(1) & (exact[:, jnp.asarray([1, 3])] < 1.5).all(1)
    for other in (ewa, ut):
        assert ((area(exact) <= area(other) * 1.0001)[front]).mean() >= 0.95
    tight = jnp.arctan(frustum.ewa_tan(cov, c, sigma, tight=True)[0])
    misses = (tight[:, 0] > exact[:, 0] + 1e-4) | (tight[:, 1] < exact[:, 1] - 1e-4)
    assert misses[front].mean() > 0.5


def test_boxes_reach_every_visible_tile_of_every_camera():
    params = gaussians(500, seed=8, spread=1.5, size=0.2)
    cameras = {
        "beap": beap_camera((3.0, 2.4), 0.05),
        "pinhole": make_camera("pinhole", (40, 30), jnp.asarray([14.0, 15.0, 21.0, 14.0])),
        "fisheye": make_camera("fisheye", (40, 40), jnp.asarray([15.0, 14.0, 20, 20, 0.05, -0.01, 0, 0])),
        "fisheye 250": equidistant((48, 48), np.radians(250)),
    }
    for name, cam in cameras.items():
        rays = camera_rays(cam)
        matrix, c, opacity = canonical(params, cam)
        sigma = frustum.cutoff_sigma(opacity, "opacity")
        boxes = frustum.angle_box(angle_jit(camera_covariance(params, cam), c, sigma)[0])
        d2, along = distance2(matrix, c, rays.reshape(-1, 3))
        visible = (opacity[:, None] * jnp.exp(-0.5 * d2) >= 1 / 255) & (along > 0)
        visible = np.asarray(visible.reshape(500, *rays.shape[:2]))
        points = associate.tile_angles(rays.reshape(-1, 1, 3))
        met = associate.hits(points, boxes, jnp.ones(500, bool)).T.reshape(visible.shape)
        assert visible.sum() > 2000 and not (visible & ~np.asarray(met)).any(), name
        if name == "fisheye 250":
            with pytest.raises(ValueError, match="pixel boxes exist"):
                associate.pixel_boxes(boxes, make_camera("panorama", (4, 4), jnp.zeros(0)))
            continue
        if name == "fisheye":  # the curved box holds for rays with z > 0
            visible = visible & np.asarray(rays[..., 2] > 0.02)
        box = np.asarray(associate.pixel_boxes(boxes, cam))
        j, i = np.arange(cam.wh[0]) + cam.center, np.arange(cam.wh[1]) + cam.center
        inside = (j >= box[:, :1]) & (j <= box[:, 2:3]), (i >= box[:, 1:2]) & (i <= box[:, 3:4])
        inside = inside[0][:, None, :] & inside[1][:, :, None]
        assert not (visible & ~inside).any(), name


def test_bad_names_are_told_plainly():
    with pytest.raises(ValueError, match="cutoff is 'three'"):
        frustum.cutoff_sigma(jnp.ones(2), "three")
