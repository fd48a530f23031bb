"""Camera paths: where they stand and what they look at."""

import numpy as np
import pytest

from papyrax.envs.scenes import worlds
from papyrax.train.errors import UserError
from papyrax.train.recipes.rendering import paths

pytestmark = [pytest.mark.proof("universal_beta_splatting", "run"), pytest.mark.proof("geer", "run")]


@pytest.fixture(scope="module")
def cameras():
    return worlds.orbit(6, (20, 10))


def centres(cameras):
    return np.stack([-np.asarray(c.R).T @ np.asarray(c.t) for c in cameras])


def test_the_focus_is_where_all_axes_meet(cameras):
    np.testing.assert_allclose(paths.focus(cameras), 0, atol=1e-5)
    ahead = [c.replace(R=cameras[0].R) for c in cameras]  # parallel axes meet nowhere: a point ahead is taken
    assert np.asarray(cameras[0].R)[2] @ (paths.focus(ahead) - centres(ahead).mean(0)) > 0


def test_an_orbit_goes_round_at_the_mean_height_and_looks_inside(cameras):
    flight = paths.path("orbit", cameras, 12)
    at = centres(flight)
    np.testing.assert_allclose(at[:, 1], at[0, 1], atol=1e-4)
    np.testing.assert_allclose(at[:, 1].mean(), centres(cameras)[:, 1].mean(), atol=1e-4)
    angle = np.sort(np.arctan2(at[:, 2], at[:, 0]))
    np.testing.assert_allclose(np.diff(angle), 2 * np.pi / 12, atol=1e-4)
    for camera, centre in zip(flight, at):
        forward = np.asarray(camera.R)[2]
        np.testing.assert_allclose(forward, -centre / np.linalg.norm(centre), atol=1e-4)
        assert camera.wh == (20, 10) and np.asarray(camera.R)[1, 1] > 0  # y of the picture points down


def test_an_arc_stays_between_the_outermost_cameras(cameras):
    angle = np.arctan2(*centres(cameras).T[[2, 0]])
    some = [c for c, a in zip(cameras, angle) if abs(a) < 2.0]
    span = np.arctan2(*centres(some).T[[2, 0]])
    at = centres(paths.path("arc", some, 16))
    got = np.arctan2(at[:, 2], at[:, 0])
    assert got.min() > span.min() - 0.3 and got.max() < span.max() + 0.3 and len(some) > 1
    np.testing.assert_allclose(at[1], at[-1], atol=1e-3)  # to and fro


def test_views_begins_and_ends_at_cameras_and_turn_stays_put(cameras):
    flight = centres(paths.path("views", cameras, 11))
    known = centres(cameras)
    for end in (flight[0], flight[-1]):
        assert np.linalg.norm(known - end, axis=1).min() < 1e-4
    turned = paths.path("turn", cameras, 8)
    np.testing.assert_allclose(centres(turned), known.mean(0)[None].repeat(8, 0), atol=1e-5)
    forward = np.stack([np.asarray(c.R)[2] for c in turned])
    np.testing.assert_allclose(forward.sum(0), 0, atol=1e-4)
    assert len(paths.path("views", cameras[:1], 3)) == 3


def test_points_alone_are_circled():
    points = np.random.default_rng(0).normal(size=(100, 3))
    around = paths.around_points(points)
    distance = np.linalg.norm(centres(around) - np.median(points, 0), axis=1)
    np.testing.assert_allclose(distance, distance[0], rtol=1e-4)
    assert distance[0] > np.quantile(np.linalg.norm(points, axis=1), 0.9)


def test_bad_paths_are_told(cameras):
    with pytest.raises(UserError, match="the path is 'circle', wanted one of orbit, arc, views, turn"):
        paths.path("circle", cameras, 3)
    with pytest.raises(UserError, match="0 frames"):
        paths.path("orbit", cameras, 0)
    with pytest.raises(UserError, match="no cameras"):
        paths.path("orbit", [], 3)
