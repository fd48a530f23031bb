"""Certificates, definition checkers and the scaling inequality, against closed forms on balls."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from papyrax.methods.geometry import manifolds as M
from papyrax.methods.optimization.riemannian_frank_wolfe import certificates as C
from papyrax.methods.optimization.riemannian_frank_wolfe import definitions as D
from papyrax.methods.optimization.riemannian_frank_wolfe import oracles as O

pytestmark = [
    pytest.mark.proof("riemannian_frank_wolfe", "core"),
    pytest.mark.proof("riemannian_frank_wolfe", "proof"),
]

MANIFOLDS = {1: M.sphere(), 0: M.euclidean(), -1: M.hyperboloid()}
RADII = (0.3, 0.7, 1.0, 1.3)


def centre_of(k):
    return jnp.array([1.0, 0, 0, 0]) if k else jnp.array([0.5, -1.0, 2.0])


@functools.cache
def rsi(k):
    """Scaling-inequality infimum of balls of the four radii, one compilation for all."""
    man, centre = MANIFOLDS[k], centre_of(k)
    with jax.enable_x64():
        p = centre.astype(jnp.float64)

        def one(radius):
            lmo = lambda x, g: O.lmo_spaceform_ball(k, x, p, radius, g)  # noqa: E731
            return D.estimate_rsi(jax.random.key(0), man, D.ball_directions(man, p, radius), lmo, 4000)

        return np.asarray(jax.jit(lambda radii: jax.lax.map(one, radii))(jnp.asarray(RADII)))


def test_rsi_of_sphere_balls_is_half_the_cotangent():
    np.testing.assert_allclose(rsi(1), [1.616, 0.594, 0.321, 0.139], rtol=0.02)
    np.testing.assert_allclose(rsi(1), [C.alpha_ball(1, 1, r) for r in RADII], rtol=0.02)


def test_rsi_of_hyperbolic_balls_lies_between_certificate_and_curvature():
    found = rsi(-1)
    np.testing.assert_allclose(found, [1.660, 0.699, 0.477, 0.353], rtol=0.02)
    certified = np.array([C.alpha_ball(-1, -1, r) for r in RADII])
    np.testing.assert_allclose(certified, [1.642, 0.664, 0.436, 0.313], atol=6e-4)
    assert np.all(certified < found) and np.all(found < [0.51 / math.tanh(r) for r in RADII])


def test_rsi_of_flat_balls_is_one_over_the_diameter():
    np.testing.assert_allclose(rsi(0), [1 / (2 * r) for r in RADII], rtol=0.02)


@functools.cache
def checked(k, radius):
    """Smallest margins of the three checkers at several alphas, traced once."""
    man, centre = MANIFOLDS[k], centre_of(k)
    with jax.enable_x64():
        p = centre.astype(jnp.float64)
        margin, pairs, points = (
            D.ball_margin(man, p, radius),
            D.ball_pairs(man, p, radius),
            D.ball_points(man, p, radius),
        )

        def one(alpha):
            key = jax.random.key(1)
            return (
                D.check_geodesic(key, man, margin, pairs, alpha, 1500),
                D.check_riemannian(key, man, margin, points, pairs, alpha, 1500),
                D.check_geodesic(key, man, margin, pairs, alpha, 1500, distance=man.dist),
            )

        certified = C.alpha_ball(k, k, radius)
        # The curvature of the boundary sphere over two: no larger alpha can hold for close pairs.
        limit = {1: 0.5 / math.tan(radius), 0: 0.5 / radius, -1: 0.5 / math.tanh(radius)}[k]
        alphas = jnp.asarray([certified * (1 - 1e-6), limit * 1.1])
        return [np.asarray(v) for v in jax.jit(lambda a: jax.lax.map(one, a))(alphas)]


@pytest.mark.parametrize("k", MANIFOLDS)
def test_checkers_certify_balls_at_the_theorem_and_refute_beyond_the_boundary_curvature(k):
    geodesic, riemannian, by_distance = checked(k, 0.8)
    assert geodesic[0] > -1e-10 and geodesic[1] < -1e-6
    np.testing.assert_allclose(by_distance, geodesic, atol=1e-9)
    assert riemannian[1] < -1e-6
    if k == 0:
        assert riemannian[0] > -1e-10


def test_certificates_in_closed_form():
    assert C.alpha_ball(0, 0, 2.0) == pytest.approx(0.25)
    assert C.alpha_ball(1, 1, 0.7) == pytest.approx(1 / math.tan(0.7) / 2)
    assert C.alpha_ball(-1, -1, 0.7) == pytest.approx(1 / (1.4 * math.sqrt(0.7 / math.tanh(0.7))))
    assert C.alpha_ball_on(M.spd(), 1.0) == pytest.approx(C.alpha_ball(-0.5, 0.0, 1.0))
    assert C.alpha_sublevel(1.0, 1.0, 2.0, l_m=0.5) == pytest.approx(1 / (2 * math.sqrt(2 * 2 * 4)))
    assert C.hessian_bounds(-0.5, 0.0, 0.0) == (1.0, 1.0)
    assert C.linear_factor(1.0, 0.5, 1.0) == 0.75 and C.linear_factor(9.0, 9.0, 1.0) == 0.5
    np.testing.assert_allclose(C.gradient_bound(2.0, jnp.array([4.0])), [4.0])
    np.testing.assert_allclose(C.step_bound(*map(jnp.array, (1.0, 0.5, 1.0)), 1.0), 1 - 0.125)
    np.testing.assert_allclose(C.step_bound(*map(jnp.array, (1.0, 0.5, 0.5)), 1.0), 0.75)


def test_hessian_bounds_hold_for_the_squared_distance():
    with jax.enable_x64():
        for k in (1, -1):
            man, p = MANIFOLDS[k], centre_of(k).astype(jnp.float64)
            x = man.exp(p, jnp.array([0.0, 0.9, 0, 0]))
            e1 = man.log(x, p) / 0.9
            e2 = jnp.array([0.0, 0, 1.0, 0])

            def along(s, e, man=man, x=x, p=p):
                return man.dist(p, man.exp(x, s * e)) ** 2 / 2

            bend = jax.jit(jax.vmap(jax.grad(jax.grad(along)), (None, 0)))(0.0, jnp.stack([e1, e2])).tolist()
            delta, zeta = C.hessian_bounds(k, k, 0.9)
            assert sorted(bend) == pytest.approx(sorted([delta if k == 1 else 1.0, zeta if k == -1 else 1.0]), abs=1e-6)


def test_residual_is_zero_when_flat_and_cubic_when_curved():
    with jax.enable_x64():
        key = jax.random.key(3)
        for k, man in MANIFOLDS.items():
            x = centre_of(k).astype(jnp.float64)
            u, v = (man.project_tangent(x, jax.random.normal(s, x.shape, jnp.float64)) for s in jax.random.split(key))
            sizes = [float(jnp.linalg.norm(D.residual(man, x, h * u, h * v))) for h in (0.1, 0.05)]
            if k == 0:
                assert max(sizes) < 1e-14
            else:
                assert sizes[0] / sizes[1] == pytest.approx(8, rel=0.1)
                a, b = jnp.linalg.norm(u), jnp.linalg.norm(v)
                assert sizes[0] <= 1e-3 * float(a * a * b + a * b * b)


@pytest.mark.parametrize("k", [1, -1])
def test_approximate_scaling_inequality_holds_on_balls(k):
    with jax.enable_x64():
        man, p, radius = MANIFOLDS[k], centre_of(k).astype(jnp.float64), 0.8
        alpha = C.alpha_ball(k, k, radius)

        def one(key):
            x, w = D.ball_directions(man, p, radius)(key)
            v = O.lmo_spaceform_ball(k, x, p, radius, -w)
            return jnp.stack([D.approximate_rsi_slack(man, x, w, v, alpha, t) for t in (0.5, 0.9)])

        slack = jax.jit(jax.vmap(one))(jax.random.split(jax.random.key(4), 300))
        assert float(slack.min()) > -1e-9


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: C.alpha_ball(1, 1, 1.6), "for a convex ball"),
        (lambda: C.alpha_ball(0, 0, -1.0), "radius must be positive"),
        (lambda: C.hessian_bounds(1, 1, 4.0), "injectivity radius"),
        (lambda: C.hessian_bounds(1, 0, 1.0), "kmin must not be above"),
        (lambda: C.alpha_sublevel(2.0, 1.0, 1.0), "smoothness >= mu"),
        (lambda: D.approximate_rsi_slack(M.euclidean(), *[jnp.ones(2)] * 3, 1.0, 1.0), "t must lie"),
    ],
)
def test_bad_input_is_refused(call, words):
    with pytest.raises(ValueError, match=words):
        call()
