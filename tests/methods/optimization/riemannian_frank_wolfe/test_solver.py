"""Frank-Wolfe runs: the theorem's per-step promise, headline rates, the role of the set, baselines, learner and optax."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from papyrax.methods.geometry import manifolds as M
from papyrax.methods.optimization.riemannian_frank_wolfe import certificates as C
from papyrax.methods.optimization.riemannian_frank_wolfe import learner as L
from papyrax.methods.optimization.riemannian_frank_wolfe import objectives as F
from papyrax.methods.optimization.riemannian_frank_wolfe import oracles as O
from papyrax.methods.optimization.riemannian_frank_wolfe import solver as R
from papyrax.methods.optimization.riemannian_frank_wolfe import spd_oracles as P

pytestmark = [
    pytest.mark.proof("riemannian_frank_wolfe", "core"),
    pytest.mark.proof("riemannian_frank_wolfe", "proof"),
]


def ball_run(k, f, x0, centre, radius, steps, smoothness, rule="short"):
    man = {1: M.sphere(), 0: M.euclidean(), -1: M.hyperboloid()}[k]
    lmo = lambda x, g: O.lmo_spaceform_ball(k, x, centre, radius, g)  # noqa: E731
    return R.rfw_run(x0, f, lmo, man, steps, rule, smoothness, lambda x: O.clamp_to_ball(man, x, centre, radius))


def tall(n=50):
    rng = np.random.default_rng(0)
    a = rng.normal(size=(2 * n, n)) / np.sqrt(2 * n)
    target = rng.normal(size=n)
    side = rng.normal(size=n)
    return a, target, side


@functools.cache
def sphere_case():
    """The tall-A problem on S^49 with its target one radian from the centre and R = 0.9."""
    a, target, side = tall()
    target /= np.linalg.norm(target)
    side -= side @ target * target
    centre = np.cos(1.0) * target + np.sin(1.0) * side / np.linalg.norm(side)
    with jax.enable_x64():
        a, target, centre = map(jnp.asarray, (a, target, centre))
        f, man = F.sphere_quadratic(a, target), M.sphere()
        smoothness = float(jnp.linalg.norm(a, 2) ** 2)
        safe = float(F.sphere_quadratic_smoothness(a, 1.9))

        @jax.jit
        def everything():
            runs = {rule: ball_run(1, f, centre, centre, 0.9, 200, smoothness, rule) for rule in R.STEP_RULES}
            projected = R.projected_gradient_run(centre, f, man, centre, 0.9, safe, 1500)
            free = R.gradient_descent_run(centre, f, man, safe, 300)
            return runs, projected, free

        runs, projected, free = jax.tree.map(np.asarray, everything())
    return runs, projected, free, (a, target, centre)


def test_headline_on_the_sphere():
    runs, (_, projected), _, (_, _, centre) = sphere_case()
    best = min(projected[-1], runs["short"][1].f[-1])
    h = {rule: infos.f - best for rule, (_, infos) in runs.items()}
    assert h["short"][199] <= 1e-8
    assert h["search"][199] <= 1e-8 and h["backtracking"][199] <= 1e-8
    # Open loop: O(1/t^2) here, far behind.
    assert 1e-6 < h["open"][160] < 1e-2
    x, infos = runs["short"]
    assert np.all(np.diff(infos.f) <= 1e-15)
    # a gap of some 1e-12 is an angle of its square root, some 1e-6
    assert np.arccos(x @ np.asarray(centre)) == pytest.approx(0.9, abs=1e-6)
    assert infos.grad_norm.min() > 0.02
    assert np.all(infos.gap >= h["short"] - 1e-14)


def test_projected_gradient_reaches_the_same_value_and_free_descent_goes_below():
    runs, (_, projected), (_, free), _ = sphere_case()
    assert abs(projected[-1] - runs["short"][1].f[-1]) < 1e-8
    assert free[-1] < projected[-1] - 1e-3


def test_theorem_holds_step_by_step_on_hyperbolic_space():
    with jax.enable_x64():
        man, radius = M.hyperboloid(), 1.0
        rng = np.random.default_rng(1)
        e = np.concatenate([[0], rng.normal(size=20)])
        centre = jnp.zeros(21).at[0].set(1)
        target = man.exp(centre, jnp.asarray(1.5 * e / np.linalg.norm(e)))
        side = np.concatenate([[0], rng.normal(size=20)])
        x0 = man.exp(centre, jnp.asarray(0.9 * side / np.linalg.norm(side)))
        smoothness = F.distance_smoothness(man, 2.5)
        _, infos = jax.jit(lambda x: ball_run(-1, F.squared_distance(man, target), x, centre, radius, 40, smoothness))(
            x0
        )
        infos = jax.tree.map(np.asarray, infos)
    h = infos.f - 0.125  # the nearest point of the ball lies at distance 1/2
    assert np.all(infos.gap >= h - 1e-12)
    promised = np.asarray(C.step_bound(h[:-1], infos.gap[:-1], infos.dist[:-1], smoothness))
    assert np.all(h[1:] <= promised + 1e-12)
    factor = C.linear_factor(C.alpha_ball(-1, -1, radius), 0.5, smoothness)
    assert np.all(h[1:] <= factor * h[:-1] + 1e-12)
    upper, lower = R.certificate(R.Info(*map(jnp.asarray, infos)))
    assert np.all(np.asarray(upper) >= h - 1e-6) and np.all(np.asarray(lower) <= 0.125 + 1e-6)


@functools.cache
def flat_case():
    """The same quadratic over the unit ball and over the box, both with the optimum outside."""
    a, target, _ = tall()
    inside = np.clip(target, -0.9, 0.9)
    inside[:5] = 1.5 * np.sign(inside[:5])
    with jax.enable_x64():
        a, far, near = map(jnp.asarray, (a, 3 * target / np.linalg.norm(target), inside))
        smoothness = float(jnp.linalg.norm(a, 2) ** 2)
        zero, one = jnp.zeros(50), jnp.ones(50)

        @jax.jit
        def both():
            on_ball = ball_run(0, F.flat_quadratic(a, far), zero, zero, 1.0, 200, smoothness)[1]
            box = lambda x, g: O.lmo_box(-one, one, g)  # noqa: E731
            on_box = R.rfw_run(zero, F.flat_quadratic(a, near), box, M.euclidean(), 2000, "short", smoothness)[1]

            def project(x, _):
                return jnp.clip(x - F.flat_quadratic(a, near)(x)[1] / smoothness, -1, 1), None

            x = jax.lax.scan(project, zero, length=3000)[0]
            return on_ball.f, on_box.f, F.flat_quadratic(a, near)(x)[0]

        return jax.tree.map(np.asarray, both())


def test_the_set_makes_the_rate_ball_against_box():
    on_ball, on_box, box_best = flat_case()
    h_ball, h_box = on_ball - on_ball[-1], on_box - box_best
    assert h_ball[80] < 1e-9
    assert h_box[400] > 1e-3 and h_box[80] / h_box[10] > 0.1
    slope = np.log(h_box[2000 - 1] / h_box[200]) / np.log(10)
    assert -2 < slope < -0.5


def test_larger_balls_converge_more_slowly_in_the_predicted_order():
    with jax.enable_x64():
        man, centre = M.sphere(), jnp.array([1.0, 0, 0, 0, 0])
        target = man.exp(centre, jnp.array([0, 1.5, 0, 0, 0]))
        side = jnp.array([0.0, 0, 1.0, 0, 0])
        f = F.squared_distance(man, target)
        run = jax.jit(lambda x, radius: ball_run(1, f, x, centre, radius, 12, 1.0)[1].f)
        factors = []
        for radius in (0.4, 0.8, 1.2):
            h = np.asarray(run(man.exp(centre, 0.9 * radius * side), radius)) - (1.5 - radius) ** 2 / 2
            assert np.all(h[1:] <= C.linear_factor(C.alpha_ball(1, 1, radius), 1.5 - radius, 1.0) * h[:-1] + 1e-13)
            factors.append((h[5] / h[1]) ** 0.25)
    assert factors[0] < factors[1] < factors[2] < 1


@pytest.fixture(scope="module")
def spd_runs():
    """Karcher means of eight 3 by 3 matrices over a ball and over an interval that both exclude the free mean."""
    man = M.spd()
    with jax.enable_x64():
        # The free mean leaves the interval in one direction only, so the optimum lies inside a face and not at a corner.
        stretch = jnp.diag(jnp.sqrt(jnp.array([3.0, 1.0, 0.7])))
        points = stretch @ man.random(jax.random.key(0), (8, 3, 3), jnp.float64) @ stretch
        weights = jnp.full(8, 1 / 8)
        centre = jnp.eye(3)
        arrays = {"points": points, "weights": weights, "centre": centre, "low": 0.4 * centre, "high": 1.2 * centre}
        smoothness = F.distance_smoothness(man, float(jnp.max(man.dist(centre, points)) + 0.8))

        def run(kind):
            config = L.Config("karcher", kind, radius=0.5, smoothness=smoothness, chunk=60)
            task = L.build(config, arrays)
            return R.rfw_run(centre, task.value_and_grad, task.lmo, man, 60, "short", smoothness, task.restore)

        @jax.jit
        def everything():
            task = L.build(L.Config("karcher", "ball", radius=0.5), arrays)
            projected = R.projected_gradient_run(centre, task.value_and_grad, man, centre, 0.5, smoothness, 300)
            return run("ball"), run("interval"), projected

        return jax.tree.map(np.asarray, everything()), smoothness


def test_karcher_mean_on_an_spd_ball(spd_runs):
    ((x, infos), _, (_, projected)), smoothness = spd_runs
    best = min(projected[-1], infos.f[-1])
    h = infos.f - best
    assert abs(projected[-1] - infos.f[-1]) < 1e-8
    assert np.all(infos.gap >= h - 1e-10)
    promised = np.asarray(C.step_bound(h[:-1], infos.gap[:-1], infos.dist[:-1], smoothness))
    assert np.all(h[1:] <= promised + 1e-10)
    assert float(M.spd().dist(jnp.eye(3), jnp.asarray(x))) <= 0.5 + 1e-5


def test_the_interval_is_slower_than_the_ball_on_spd(spd_runs):
    ((_, ball), (_, interval), _), _ = spd_runs
    assert np.all(np.diff(interval.f) <= 1e-9)
    assert ball.gap[-1] < 1e-6 < interval.gap[-1]


def test_free_energy_descends_to_its_minimiser_and_gradients_agree():
    with jax.enable_x64():
        man, h = M.spd(), jnp.array([[0.5, 0.2], [0.2, -0.3]])
        for statistics, start in (("fermi", 0.5), ("positive", 0.3)):
            f = F.free_energy(h, 1.0, statistics)
            best = F.free_energy_minimiser(h, 1.0, statistics)
            assert float(jnp.abs(f(best)[1]).max()) < 1e-12
            x = start * jnp.eye(2) + 0.05
            e = jnp.array([[1.0, -0.4], [-0.4, 0.3]])
            slope = (f(x + 1e-6 * e)[0] - f(x - 1e-6 * e)[0]) / 2e-6
            assert float(man.inner(x, f(x)[1], e)) == pytest.approx(float(slope), abs=1e-8)
        # A trust region around each iterate reaches the free minimum.
        lmo = lambda x, g: O.lmo_centred(man, x, 0.2, g)  # noqa: E731
        f = F.free_energy(h, 1.0, "fermi")
        run = jax.jit(lambda x: R.rfw_run(x, f, lmo, man, 80, "backtracking", 1.0))
        x, infos = run(0.5 * jnp.eye(2))
        assert float(infos.f[-1] - f(F.free_energy_minimiser(h, 1.0, "fermi"))[0]) < 1e-8


def test_learner_is_the_solver_and_optax_walks_the_same_path():
    with jax.enable_x64():
        runs, _, _, (a, target, centre) = sphere_case()
        smoothness = float(jnp.linalg.norm(a, 2) ** 2)
        config = L.Config("sphere", "ball", 0.9, "short", smoothness, chunk=5)
        arrays = {"a": a, "target": target, "centre": centre}
        state = L.init(jax.random.key(0), config, centre)
        step = jax.jit(L.update, static_argnums=2)
        for _ in range(2):
            state, metrics = step(state, None, config, frozen=arrays)
        expected = runs["short"][1]
        assert float(metrics["f"]) == pytest.approx(float(expected.f[9]), rel=1e-9)
        assert int(metrics["t"]) == 10 and float(metrics["least_grad_norm"]) > 0

        lmo = lambda x, g: O.lmo_spaceform_ball(1, x, centre, 0.9, g)  # noqa: E731
        tx = R.frank_wolfe(M.sphere(), lmo, smoothness=smoothness)

        @jax.jit
        def walk(x):
            def body(carry, _):
                x, s = carry
                g = {"point": a.T @ (a @ (x["point"] - target))}
                updates, s = tx.update(g, s, x)
                return (optax.apply_updates(x, updates), s), None

            return jax.lax.scan(body, ({"point": x}, tx.init(x)), length=10)[0][0]["point"]

        np.testing.assert_allclose(walk(centre), state.solver.x, atol=1e-9)


def test_iterates_rest_at_the_tolerance_and_at_an_optimal_vertex():
    with jax.enable_x64():
        f = F.flat_quadratic(jnp.eye(2), jnp.array([3.0, 0.0]))
        box = lambda x, g: O.lmo_box(-jnp.ones(2), jnp.ones(2), g)  # noqa: E731
        vertex = jnp.array([1.0, -1.0])
        x, infos = R.rfw_run(jnp.array([1.0, 1.0]), f, box, M.euclidean(), 3, "short", 1.0, tol=10.0)
        np.testing.assert_array_equal(x, [1.0, 1.0])
        x, infos = R.rfw_run(vertex, F.flat_quadratic(jnp.eye(2), 3 * vertex), box, M.euclidean(), 2, "open", 1.0)
        np.testing.assert_array_equal(x, vertex)
        assert float(infos.eta[0]) == 0


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: R.step_size("fast", M.euclidean(), None, *[jnp.ones(())] * 7), "step_rule must be"),
        (lambda: R.frank_wolfe(M.sphere(), None).update(jnp.ones(2), None), "needs params"),
        (lambda: L.build(L.Config("sphere", "box"), {"a": jnp.eye(2), "target": jnp.ones(2)}), "no oracle"),
        (lambda: F.free_energy(jnp.eye(2), 0.0), "temperature must be positive"),
        (lambda: F.free_energy(jnp.eye(2), 1.0, "bose"), "statistics must be"),
    ],
)
def test_bad_input_is_refused(call, words):
    with pytest.raises(ValueError, match=words):
        call()


def test_interval_bounds_are_checked():
    P.check_interval(jnp.eye(2), 2 * jnp.eye(2))


def test_backtracking_shortens_steps_that_leave_the_domain():
    """A long step at the edge of f's domain, where its value is NaN, is no step."""

    def beyond(x, g):
        return -10 * jnp.sign(g)

    def toward_the_edge(x):
        return -x[0] - 0.1 * jnp.log(1 - x[0]), jnp.asarray([-1 + 0.1 / (1 - x[0])])

    last, info = R.rfw_run(jnp.zeros(1), toward_the_edge, beyond, M.euclidean(), 60, "backtracking", 1.0)
    assert np.all(np.isfinite(info.f)) and np.all(np.isfinite(info.eta))
    np.testing.assert_allclose(last, [0.9], atol=1e-3)
