"""Manifolds: round trips, isometries, gradients at coincident points, known values, float32 near the boundary."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from papyrax.methods.geometry import ball
from papyrax.methods.geometry import manifolds as M
from papyrax.methods.geometry.symmetric import sym_exp, sym_log, sym_sqrt

CASES = {
    "euclidean": (M.euclidean(), (5, 4)),
    "sphere": (M.sphere(), (5, 4)),
    "hyperboloid": (M.hyperboloid(), (5, 4)),
    "poincare": (M.poincare(0.7), (5, 4)),
    "spd": (M.spd(), (5, 3, 3)),
}


@functools.cache
def facts(name: str) -> dict[str, np.ndarray]:
    """Every quantity the tests below look at, from one compilation a manifold, in float64."""
    man, shape = CASES[name]

    def compute(key):
        k1, k2, k3 = jax.random.split(key, 3)
        x, y = man.random(k1, shape, jnp.float64), man.random(k2, shape, jnp.float64)
        v = man.project_tangent(x, jax.random.normal(k3, shape, jnp.float64))
        u = man.log(x, y)
        third = man.exp(x, u / 3)
        carried, across = man.transport(x, y, u), man.transport(x, y, v)
        gradient = man.egrad_to_rgrad(y, jax.grad(lambda b: jnp.sum(man.dist(x, b) ** 2) / 2)(y))
        tiny = man.exp(x, 1e-9 * v)
        _, pushed = jax.jvp(lambda b: man.log(x, b), (x,), (v,))
        weights = jnp.asarray([[0.5, 0.5, 0, 0, 0]], jnp.float64)
        middle = man.midpoint(x, weights)[0]
        return {
            "round_trip": man.exp(x, u) - y,
            "inverse_trip": man.log(x, man.exp(x, v / 4)) - v / 4,
            "norm": jnp.sqrt(man.inner(x, u, u)) - man.dist(x, y),
            "symmetry": man.dist(x, y) - man.dist(y, x),
            "triangle": man.dist(x, y) - man.dist(x, x[::-1]) - man.dist(x[::-1], y),
            "geodesic_speed": jnp.stack(
                [man.dist(x, third) - man.dist(x, y) / 3, man.dist(third, y) - man.dist(x, y) * 2 / 3]
            ),
            "carried": carried + man.log(y, x),
            "isometry": man.inner(y, across, carried) - man.inner(x, v, u),
            "transport_back": man.transport(y, x, across) - v,
            "tangent": man.project_tangent(y, across) - across,
            "gradient": gradient + man.log(y, x),
            "gradient_coincident": jax.grad(lambda b: jnp.sum(man.dist(x, b)))(x),
            "log_derivative_coincident": pushed - v,
            "tiny_distance": man.dist(x, tiny) - 1e-9 * jnp.sqrt(man.inner(x, v, v)),
            "pairwise": M.pairwise_dist(man, x, y) - jax.vmap(lambda a: man.dist(a, y))(x),
            "pairwise_exact": M.pairwise_dist(man, x, y, exact=True) - jax.vmap(lambda a: man.dist(a, y))(x),
            "double_exp": M.double_exp(man, x, u / 2, u / 2) - y,
            "midpoint": man.dist(x[0], middle) - man.dist(middle, x[1]),
            "projected": man.project_point(x) - x,
        }

    with jax.enable_x64():
        return jax.tree.map(np.asarray, jax.jit(compute)(jax.random.key(1)))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    "what",
    [
        "round_trip",
        "inverse_trip",
        "norm",
        "symmetry",
        "geodesic_speed",
        "carried",
        "isometry",
        "transport_back",
        "tangent",
        "gradient",
        "gradient_coincident",
        "log_derivative_coincident",
        "pairwise_exact",
        "double_exp",
        "projected",
    ],
)
def test_identity_holds_to_1e_8_in_float64(name, what):
    assert np.max(np.abs(facts(name)[what])) < 1e-8


@pytest.mark.parametrize("name", CASES)
def test_inequalities_and_close_points(name):
    f = facts(name)
    assert np.max(f["triangle"]) < 1e-12
    # A distance of 1e-9 is right to the rounding of the coordinates, 1e-15 times the conformal factors.
    assert np.max(np.abs(f["tiny_distance"])) < 1e-13 if name != "spd" else np.max(np.abs(f["tiny_distance"])) < 1e-12
    assert np.max(np.abs(f["pairwise"])) < 1e-6
    if name != "spd":  # the log-Euclidean mean of two matrices is not their geodesic midpoint
        assert abs(f["midpoint"]) < 1e-12


def test_known_values():
    with jax.enable_x64():
        e = jnp.eye(3)
        assert M.sphere().dist(e[0], e[1]) == pytest.approx(np.pi / 2, abs=1e-15)
        assert M.sphere().dist(e[0], -e[0]) == pytest.approx(np.pi, abs=1e-15)
        x = jnp.asarray([0.5, 0.0])
        assert M.poincare(1.0).dist(jnp.zeros(2), x) == pytest.approx(2 * np.arctanh(0.5), abs=1e-14)
        assert M.poincare(4.0).dist(jnp.zeros(2), x / 2) == pytest.approx(np.arctanh(0.5), abs=1e-14)
        assert M.spd().dist(jnp.eye(2), jnp.diag(jnp.asarray([np.e, 1.0]))) == pytest.approx(1.0, abs=1e-14)
        np.testing.assert_allclose(ball.mobius_add(x, jnp.asarray([0.0, 0.5]), 1.0), np.array([10, 6]) / 17, atol=1e-15)
        assert ball.dist(jnp.zeros(2), ball.exp0(x, 1.0), 1.0) == pytest.approx(1.0, abs=1e-14)


def test_ball_is_the_hyperboloid_and_gyromidpoint_is_its_centroid():
    with jax.enable_x64():
        man, c = M.poincare(0.7), 0.7
        x = man.random(jax.random.key(0), (6, 3), jnp.float64)
        w = jax.random.uniform(jax.random.key(1), (2, 6), jnp.float64)
        lifted = ball.to_hyperboloid(x, c)
        np.testing.assert_allclose(
            M.hyperboloid().dist(lifted[0], lifted[1:]), c**0.5 * man.dist(x[0], x[1:]), rtol=1e-12
        )
        np.testing.assert_allclose(ball.from_hyperboloid(lifted, c), x, atol=1e-14)
        centroid = ball.from_hyperboloid(M.hyperboloid().midpoint(lifted, w), c)
        np.testing.assert_allclose(man.midpoint(x, w), centroid, atol=1e-13)
        np.testing.assert_allclose(ball.mobius_add(-x[0], ball.mobius_add(x[0], x[1], c), c), x[1], atol=1e-14)
        np.testing.assert_allclose(ball.mobius_difference(x[0], x[1], c), ball.mobius_add(-x[0], x[1], c), atol=1e-14)
        np.testing.assert_allclose(ball.mobius_scale(2.0, x, c), ball.mobius_add(x, x, c), atol=1e-14)
        a = x[2]
        np.testing.assert_allclose(
            man.dist(ball.mobius_add(a, x[0], c), ball.mobius_add(a, x[1], c)), man.dist(x[0], x[1])
        )


def test_float32_stays_finite_and_inside_near_the_boundary():
    man = M.poincare(1.0)
    x = man.project_point(jnp.asarray([[3.0, 4.0], [-0.9999, 0.0], [0.6, -0.8]]))
    assert x.dtype == jnp.float32
    assert np.all(np.linalg.norm(x, axis=-1) <= 1 - 4e-3 + 1e-6)
    y = jnp.roll(x, 1, axis=0)

    def loss(a):
        far = man.exp(a, 50 * man.log(a, y))
        return jnp.sum(man.dist(a, y)) + jnp.sum(M.pairwise_dist(man, a, a)) + jnp.sum(far), far

    gradient, far = jax.jit(jax.grad(loss, has_aux=True))(x)
    assert np.all(np.isfinite(gradient)) and np.all(np.linalg.norm(far, axis=-1) <= 1 - 4e-3 + 1e-6)
    # Both ends lie in (0.99, 1): the distance is right to the rounding of 1 - |x|^2 = 8e-3, about 1e-5 relative.
    exact = 2 * np.arcsinh(np.linalg.norm(np.float64(x - y), axis=-1) / (1 - np.sum(np.float64(x) ** 2, -1)))
    np.testing.assert_allclose(man.dist(x, y), exact, rtol=1e-5)


def test_spd_gradients_at_repeated_eigenvalues_match_finite_differences():
    with jax.enable_x64():
        a = jnp.diag(jnp.asarray([2.0, 2.0, 3.0]))
        e = jnp.asarray([[0.3, -0.2, 0.1], [-0.2, 0.4, 0.5], [0.1, 0.5, -0.7]])
        h = 1e-5
        for f in (sym_exp, sym_log, sym_sqrt):
            _, tangent = jax.jvp(f, (a,), (e,))
            np.testing.assert_allclose(tangent, (f(a + h * e) - f(a - h * e)) / (2 * h), atol=1e-8)
            assert np.all(np.isfinite(jax.grad(lambda m, f=f: jnp.sum(f(m) * e))(a)))


def test_spd_distance_is_affine_invariant_and_midpoint_is_log_euclidean():
    with jax.enable_x64():
        man = M.spd()
        x, y = man.random(jax.random.key(2), (2, 3, 3), jnp.float64)
        g = jax.random.normal(jax.random.key(3), (3, 3), jnp.float64)
        np.testing.assert_allclose(man.dist(g @ x @ g.T, g @ y @ g.T), man.dist(x, y), rtol=1e-9)
        np.testing.assert_allclose(man.dist(jnp.linalg.inv(x), jnp.linalg.inv(y)), man.dist(x, y), rtol=1e-9)
        mean = man.midpoint(jnp.stack([x, y]), jnp.asarray([[1.0, 3.0]]))[0]
        np.testing.assert_allclose(sym_log(mean), (sym_log(x) + 3 * sym_log(y)) / 4, atol=1e-12)


def test_product_is_the_pythagorean_sum_of_its_factors():
    man = M.product(M.sphere(), M.poincare(1.0))
    x = man.random(jax.random.key(0), ((4, 3), (4, 2)))
    y = man.random(jax.random.key(1), ((4, 3), (4, 2)))
    parts = M.sphere().dist(x[0], y[0]), M.poincare(1.0).dist(x[1], y[1])
    np.testing.assert_allclose(man.dist(x, y), np.hypot(*parts), rtol=1e-6)
    u = man.log(x, y)
    np.testing.assert_allclose(man.inner(x, u, u), man.dist(x, y) ** 2, rtol=1e-4)
    for a, b in zip(man.exp(x, u), y, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    assert M.pairwise_dist(man, x, y).shape == (4, 4)
    assert man.curvature == (-1.0, 1.0) and M.product(M.sphere()).curvature == (1.0, 1.0)
    with pytest.raises(ValueError, match="tuples of 2"):
        man.dist(x[:1], y[:1])


@pytest.mark.parametrize("name", ["sphere", "poincare", "spd"])
def test_riemannian_adam_finds_a_point_and_stays_on_the_manifold(name):
    man, shape = CASES[name]
    target = man.random(jax.random.key(4), shape[1:])
    start = man.random(jax.random.key(5), shape[1:])
    optimiser = M.riemannian_adam(man, optax.cosine_decay_schedule(0.2, 80))

    def step(carry, _):
        x, state = carry
        grads = jax.grad(lambda p: man.dist(p, target) ** 2 / 2)(x)
        updates, state = optimiser.update(grads, state, x)
        x = optax.apply_updates(x, updates)
        return (x, state), man.dist(x, target)

    (x, state), dists = jax.jit(lambda x: jax.lax.scan(step, (x, optimiser.init(x)), length=80))(start)
    assert dists[-1] < 0.05 * man.dist(start, target)
    assert state.nu.shape == () and int(state.count) == 80
    M.check_point(man, x, tol=1e-5)


def test_euclidean_riemannian_adam_is_adam_with_one_second_moment_a_point():
    with jax.enable_x64():
        optimiser = M.riemannian_adam(M.euclidean(), 0.1, eps=1e-8)
        x = {"a": jnp.asarray([[1.0, 2.0], [3.0, 4.0]])}
        g = {"a": jnp.asarray([[3.0, 4.0], [0.0, 2.0]])}
        updates, _ = optimiser.update(g, optimiser.init(x), x)
        # First step: the unit gradient of each point times the rate.
        np.testing.assert_allclose(updates["a"], -0.1 * np.array([[0.6, 0.8], [0.0, 1.0]]), atol=1e-8)


def test_bad_input_is_refused_in_one_sentence():
    man = M.sphere()
    with pytest.raises(ValueError, match=r"sphere\.dist needs vectors of one width"):
        man.dist(jnp.ones(3), jnp.ones(4))
    with pytest.raises(ValueError, match="floating-point"):
        man.exp(jnp.array([1, 0]), jnp.array([0, 1]))
    with pytest.raises(ValueError, match=r"spd\.log needs square matrices"):
        M.spd().log(jnp.ones((2, 3)), jnp.ones((2, 3)))
    with pytest.raises(ValueError, match="curvature c > 0, got -1"):
        M.poincare(-1.0)
    with pytest.raises(ValueError, match="center must lie on the manifold sphere"):
        M.check_point(man, jnp.array([1.0, 1.0]), argument="center")
    with pytest.raises(ValueError, match="manifold spd"):
        M.check_point(M.spd(), jnp.array([[1.0, 0.5], [0.0, 1.0]]))
    with pytest.raises(ValueError, match="manifold spd"):
        M.check_point(M.spd(), jnp.diag(jnp.array([1.0, -1.0])))
    with pytest.raises(ValueError, match="NaN"):
        M.check_point(M.poincare(1.0), jnp.array([jnp.nan, 0.0]))
    with pytest.raises(ValueError, match="whose points are arrays"):
        M.riemannian_adam(M.product(man), 0.1)
    with pytest.raises(ValueError, match="at least one"):
        M.product()
    optimiser = M.riemannian_adam(man, 0.1)
    with pytest.raises(ValueError, match="needs params"):
        optimiser.update(jnp.ones(3), optimiser.init(jnp.ones(3)))
