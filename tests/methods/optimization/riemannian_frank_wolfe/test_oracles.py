"""Oracles against scans of the boundary, closed forms, embeddings and edge cases."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from papyrax.methods.geometry import ball
from papyrax.methods.geometry import manifolds as M
from papyrax.methods.geometry.symmetric import sym_exp, sym_log
from papyrax.methods.optimization.riemannian_frank_wolfe import definitions as D
from papyrax.methods.optimization.riemannian_frank_wolfe import oracles as O
from papyrax.methods.optimization.riemannian_frank_wolfe import spd_oracles as P

pytestmark = [
    pytest.mark.proof("riemannian_frank_wolfe", "core"),
    pytest.mark.proof("riemannian_frank_wolfe", "proof"),
]
MANIFOLDS = {1: M.sphere(), -1: M.hyperboloid()}
RADIUS = 0.9


def boundary_scan(man, p, x, g, key, n=2001):
    """<g, Log_x v> over the whole boundary circle of a 2-dimensional ball."""
    k1, k2 = jax.random.split(key)
    e1, e2 = D._random_unit(k1, man, p), D._random_unit(k2, man, p)
    e2 = D._unit(man, p, e2 - man.inner(p, e1, e2) * e1)
    angle = jnp.linspace(0, 2 * jnp.pi, n)[:, None]
    v = man.exp(p, RADIUS * (jnp.cos(angle) * e1 + jnp.sin(angle) * e2))
    return man.inner(x, g, man.log(x, v))


@pytest.mark.parametrize("k", MANIFOLDS)
def test_ball_oracle_beats_a_scan_of_the_boundary(k):
    man = MANIFOLDS[k]
    with jax.enable_x64():

        def one(key):
            k1, k2, k3, k4 = jax.random.split(key, 4)
            p = man.random(k1, (3,), jnp.float64)
            x = man.exp(p, RADIUS * jax.random.uniform(k2, (), jnp.float64) * D._random_unit(k3, man, p))
            g = D._random_unit(k4, man, x)
            v = O.lmo_spaceform_ball(k, x, p, RADIUS, g)
            return man.inner(x, g, man.log(x, v)) - boundary_scan(man, p, x, g, k1).min(), man.dist(v, p)

        gap, reach = jax.jit(jax.vmap(one))(jax.random.split(jax.random.key(0), 100))
        # A scan of 2001 points misses the minimum by at most (2 pi / 4000)^2 / 2 times the curvature of the objective.
        assert -1e-5 < float(gap.min()) and float(gap.max()) < 1e-10
        np.testing.assert_allclose(reach, RADIUS, rtol=1e-12)


def test_flat_ball_is_the_closed_form_and_other_flat_oracles_are_vertices():
    with jax.enable_x64():
        p, g = jnp.array([1.0, 2.0, 3.0]), jnp.array([0.0, 3.0, -4.0])
        np.testing.assert_array_equal(O.lmo_spaceform_ball(0, p, p, 2.0, g), p - 2.0 * g / 5)
        np.testing.assert_array_equal(O.lmo_l1_ball(p, 2.0, g), [1, 2, 5])
        np.testing.assert_array_equal(O.lmo_box(-jnp.ones(3), jnp.ones(3), g), [1, -1, 1])
        np.testing.assert_array_equal(O.lmo_simplex(2.0, g), [0, 0, 2])
        np.testing.assert_array_equal(O.lmo_spaceform_ball(0, p, p, 2.0, 0 * g), p)


@pytest.mark.parametrize("k", MANIFOLDS)
def test_answer_does_not_depend_on_the_dimension(k):
    man = MANIFOLDS[k]
    with jax.enable_x64():
        p = man.random(jax.random.key(1), (3,), jnp.float64)
        x = man.exp(p, 0.5 * D._random_unit(jax.random.key(2), man, p))
        g = D._random_unit(jax.random.key(3), man, x)
        wide = lambda a: jnp.concatenate([a, jnp.zeros(497)])  # noqa: E731
        small = O.lmo_spaceform_ball(k, x, p, RADIUS, g)
        np.testing.assert_allclose(O.lmo_spaceform_ball(k, wide(x), wide(p), RADIUS, wide(g))[:3], small, atol=1e-12)
        if k == -1:  # the Poincare oracle is the same point in other coordinates
            xb, pb = ball.from_hyperboloid(x, 1.0), ball.from_hyperboloid(p, 1.0)
            _, gb = jax.jvp(lambda z: ball.from_hyperboloid(z, 1.0), (x,), (g,))
            found = ball.to_hyperboloid(O.lmo_poincare_ball(1.0, xb, pb, RADIUS, gb), 1.0)
            np.testing.assert_allclose(found, small, atol=1e-10)
            np.testing.assert_array_equal(O.lmo_poincare_ball(1.0, xb, pb, RADIUS, 0 * gb), xb)


@pytest.mark.parametrize("k", MANIFOLDS)
def test_edge_cases(k):
    man = MANIFOLDS[k]
    with jax.enable_x64():
        p = jnp.array([1.0, 0.0, 0.0])
        e = jnp.array([0.0, 1.0, 0.0])
        f = jnp.array([0.0, 0.0, 1.0])
        lmo = jax.jit(lambda x, g: O.lmo_spaceform_ball(k, x, p, RADIUS, g))
        # At the centre: straight against g.
        np.testing.assert_allclose(lmo(p, f), man.exp(p, -RADIUS * f), atol=1e-12)
        # No gradient: stay.
        x = man.exp(p, 0.5 * e)
        np.testing.assert_array_equal(lmo(x, 0 * e), x)
        # On the boundary with the step wanted outward: stay, gap 0.
        edge = man.exp(p, RADIUS * e)
        outward = -man.log(edge, p)
        np.testing.assert_allclose(lmo(edge, -outward), edge, atol=1e-9)
        # Straight through the centre: the opposite end of the diameter.
        np.testing.assert_allclose(lmo(edge, outward), man.exp(p, -RADIUS * e), atol=1e-9)
        # Trust region: any manifold, closed form.
        np.testing.assert_allclose(O.lmo_centred(man, x, 0.3, f), man.exp(x, -0.3 * f), atol=1e-12)
        assert float(man.dist(O.clamp_to_ball(man, man.exp(p, 1.2 * e), p, RADIUS), edge)) < 1e-12


def test_float32_oracle_is_right_to_float32():
    man, p = M.sphere(), jnp.array([1.0, 0.0, 0.0])
    x = man.exp(p, jnp.array([0.0, 0.5, 0.0]))
    g = man.project_tangent(x, jnp.array([0.1, 0.4, -0.6]))
    v = O.lmo_spaceform_ball(1, x, p, RADIUS, g)
    assert v.dtype == jnp.float32
    with jax.enable_x64():
        exact = O.lmo_spaceform_ball(
            1, *(jnp.asarray(a, jnp.float64) for a in (x, p)), RADIUS, jnp.asarray(g, jnp.float64)
        )
    # The optimum is flat in the angle: its place is known to the square root of the rounding at worst.
    np.testing.assert_allclose(v, exact, atol=2e-4)


@pytest.fixture(scope="module")
def spd_cases():
    """Thirty random 2 by 2 problems solved over a ball and over an interval, beside a scan of the ball's boundary."""
    man = M.spd()
    with jax.enable_x64():

        def one(key):
            k1, k2, k3, k4, k5 = jax.random.split(key, 5)
            p = man.random(k1, (2, 2), jnp.float64)
            x = man.exp(p, RADIUS * jax.random.uniform(k2, (), jnp.float64) * D._random_unit(k3, man, p))
            g = D._random_unit(k4, man, x)
            value = lambda v: man.inner(x, g, man.log(x, v))  # noqa: E731
            v = P.lmo_spd_ball(x, p, RADIUS, g)
            scan = jax.vmap(lambda k: value(man.exp(p, RADIUS * D._random_unit(k, man, p))))(jax.random.split(k5, 3000))
            low, high = 0.5 * x, 1.4 * x + 0.3 * jnp.eye(2)
            square = x @ x

            def both(g):
                return P.spd_interval_oracle_published(x, low, high, g), P.lmo_spd_interval(x, low, high, g)

            published, polished = jax.vmap(both)(jnp.stack([g, square, -square]))
            ends = jnp.abs(polished[1] - low).max(), jnp.abs(polished[2] - high).max()
            published, polished = published[0], polished[0]
            return {
                "excess": value(v) - scan.min(),
                "residual": P.spd_ball_residual(x, p, g, v),
                "reach": man.dist(p, v) - RADIUS,
                "gain": value(published) - value(polished),
                "inside": jnp.minimum(P.interval_margin(low, high, polished), P.interval_margin(low, high, published)),
                "exact": P.spd_interval_is_exact(x, low, high, g),
                "exact_definite": P.spd_interval_is_exact(x, low, high, square),
                "ends": jnp.stack(ends),
            }

        return jax.tree.map(np.asarray, jax.jit(jax.vmap(one))(jax.random.split(jax.random.key(5), 30)))


def test_spd_ball_oracle_beats_random_boundary_points_and_is_stationary(spd_cases):
    assert spd_cases["excess"].max() < 1e-10
    assert spd_cases["residual"].max() < 1e-5
    assert np.abs(spd_cases["reach"]).max() < 1e-10


def test_spd_interval_polish_gains_only_where_the_formula_is_not_exact(spd_cases):
    c = spd_cases
    assert c["gain"].min() > -1e-9 and c["gain"].max() > 1e-3
    assert c["inside"].min() > -1e-10
    assert np.all(c["gain"][c["exact"]] < 1e-8) and np.all(c["exact_definite"])
    # A definite gradient is answered by an end of the interval.
    assert c["ends"].max() < 1e-9


def test_spd_ball_closed_form_when_centre_and_gradient_commute():
    with jax.enable_x64():
        x, p = jnp.eye(3), jnp.diag(jnp.array([0.5, 1.0, 3.0]))
        g = jnp.diag(jnp.array([1.0, -2.0, 2.0]))
        assert bool(P.spd_ball_is_closed_form(x, p, g))
        expected = sym_exp(sym_log(p) - 0.9 * g / 3)
        np.testing.assert_allclose(P.lmo_spd_ball(x, p, 0.9, g), expected, atol=1e-8)
        assert not bool(P.spd_ball_is_closed_form(x, p, jnp.ones((3, 3))))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: O.lmo_spaceform_ball(2, *[jnp.ones(3)] * 2, 1.0, jnp.ones(3)), "k must be"),
        (lambda: O.lmo_spaceform_ball(1, *[jnp.ones(3)] * 2, 1.6, jnp.ones(3)), "below pi/2"),
        (lambda: P.check_interval(jnp.eye(2), jnp.eye(2)), "positive definite"),
        (lambda: P.check_interval(jnp.array([[1.0, 0.5], [0.0, 1.0]]), jnp.eye(2)), "low must be symmetric"),
        (lambda: P.check_interval(jnp.ones(2), jnp.eye(2)), "square matrix"),
    ],
)
def test_bad_input_is_refused(call, words):
    with pytest.raises(ValueError, match=words):
        call()
