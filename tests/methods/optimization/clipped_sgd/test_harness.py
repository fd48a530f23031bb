"""Objectives, monitors, baselines and the findings of the paper and its pilots at small size."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from papyrax.methods.optimization.clipped_sgd import harness as H
from papyrax.methods.optimization.clipped_sgd import objectives as O
from papyrax.methods.optimization.clipped_sgd import schedule as S
from papyrax.methods.optimization.clipped_sgd.noise import Noise

pytestmark = pytest.mark.proof("clipped_sgd", "proof")

DIM, RADIUS, STEPS = 100, 10.0, 2000
MARKS = (100, 300, 1000, 2000)


@functools.cache
def quadratic_runs(preset, tail, alpha, scale, kind, runs=60, method="clipped", damped=True):
    s = S.preset(preset, alpha=alpha, smoothness=1.0, radius=RADIUS, sigma=scale * DIM**0.5)
    s = dataclasses.replace(s, damped=damped)
    problem = O.quadratic(DIM, Noise(kind, tail, scale))
    x0 = jnp.full((DIM,), RADIUS / DIM**0.5)
    one = functools.partial(H.run, x0=x0, problem=problem, schedule=s, record_at=MARKS, method=method)
    return s, jax.tree.map(np.asarray, jax.jit(jax.vmap(one))(jax.random.split(jax.random.key(7), runs)))


def q(values, level):
    return np.quantile(values[:, -1], level)


def test_headline_last_iterate_wins_under_theory_steps():
    _, t = quadratic_runs("log1", 2.001, 2.0, 0.1, "pareto_one_sided")
    assert q(t.f_last, 0.95) <= 0.1
    assert q(t.f_average, 0.95) >= 2


def test_average_wins_once_steps_are_large():
    _, t = quadratic_runs("no_log", 2.001, 2.0, 0.1, "pareto_one_sided")
    assert q(t.f_average, 0.95) < q(t.f_last, 0.95) < 0.2


def test_clipping_cuts_the_tail_that_plain_sgd_has():
    _, clipped = quadratic_runs("no_log", 1.5, 1.45, 1.0, "pareto")
    _, plain = quadratic_runs("no_log", 1.5, 1.45, 1.0, "pareto", method="sgd")
    assert q(plain.f_last, 0.99) / q(clipped.f_last, 0.99) >= 10


def test_inequality_reach_and_event_hold_in_every_run():
    s, t = quadratic_runs("log1", 2.001, 2.0, 0.1, "pareto_one_sided")
    # float32 accumulates 2000 terms: 1e-4 of Phi_0; the float64 test below is sharp.
    assert t.slack.min() > -1e-4
    assert t.reach_left.min() >= -1e-3
    assert t.within[:, -1].mean() >= 1 - s.delta
    assert H.potential_gap(t, s, np.full(60, RADIUS**2)).max() < 1
    assert t.skipped.sum() == 0


def test_inequality_is_sharp_in_float64_on_random_quadratics():
    with jax.enable_x64():
        keys = jax.random.split(jax.random.key(3), 24)

        def one(key):
            k1, k2, k3, k4 = jax.random.split(key, 4)
            spectrum = jnp.concatenate([jnp.ones(1), jax.random.uniform(k1, (4,))])
            target = jax.random.normal(k2, (5,))
            base = O.quadratic(5, Noise("pareto", 1.5, 0.3))
            noise = base.sample_gradient
            problem = O.Problem(
                value=lambda x: jnp.sum(spectrum * (x - target) ** 2) / 2,
                gradient=lambda x: spectrum * (x - target),
                sample_gradient=lambda k, x: spectrum * (x - target) + noise(k, x) - x,
                minimum=0.0,
                minimiser=target,
                smoothness=1.0,
            )
            s = S.preset("practical", alpha=1.4, smoothness=1.0, radius=3.0, sigma=1.0)
            t = H.run(k3, target + jax.random.normal(k4, (5,)), problem, s, record_at=tuple(range(1, 40)))
            return t.slack, t.reach_left

        slack, reach = jax.jit(jax.vmap(one))(keys)
        assert slack.dtype == jnp.float64
        assert float(slack.min()) > -1e-8
        assert float(reach.min()) > -1e-12


def test_without_noise_it_is_monotone_and_never_clips_after_the_start():
    with jax.enable_x64():
        s = S.preset("practical", alpha=2.0, smoothness=1.0, radius=2.0, sigma=0.0)
        problem = O.quadratic(6, Noise("none"))
        t = H.run(jax.random.key(0), jnp.full((6,), 0.3), problem, s, record_at=tuple(range(1, 60)))
        assert np.all(np.diff(t.f_last) < 0)
        late = H.run(jax.random.key(0), jnp.full((6,), 0.3), problem, s, record_at=(20,))
        assert int(t.clipped) == int(late.clipped)


def test_horizon_free():
    s = S.preset("log1", alpha=1.8, smoothness=1.0, radius=1.0, sigma=1.0)
    problem = O.quadratic(4, Noise("pareto", 1.9, 0.1))
    run = jax.jit(lambda marks: H.run(jax.random.key(1), jnp.ones(4), problem, s, record_at=marks), static_argnums=0)
    np.testing.assert_array_equal(run((50, 500)).f_last, run((50, 500, 5000)).f_last[:2])


def test_dropping_the_damping_hurts_on_one_sided_noise():
    _, damped = quadratic_runs("no_log", 2.001, 2.0, 1.0, "pareto_one_sided")
    _, free = quadratic_runs("no_log", 2.001, 2.0, 1.0, "pareto_one_sided", damped=False)
    assert q(free.f_last, 0.99) > q(damped.f_last, 0.99)


@pytest.mark.parametrize("method", H.METHODS)
def test_every_method_moves_by_its_length(method):
    eager = H.direction(method, jnp.array([3.0, 4.0]), jnp.asarray(1.0), 0.5)
    expected = {"clipped": 1.0, "sgd": 5.0, "constant": 0.5, "normalised": 1.0, "sign": 1.0}[method]
    assert float(jnp.linalg.norm(eager)) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("method", ["clipped", "sign"])
def test_learner_equals_run(method):
    s = S.preset("practical", alpha=1.8, smoothness=1.0, radius=2.0, sigma=0.5)
    config = H.Config(O.Spec(dim=4, noise=Noise("student_t", 2.001, 0.1)), s, method=method, constant=0.5, chunk=20)
    key, x0 = jax.random.key(2), jnp.ones(4)
    state = H.init(key, config, x0)
    step = jax.jit(H.update, static_argnums=2)
    for _ in range(2):
        state, metrics = step(state, None, config)
    whole = H.run(key, x0, O.build(config.objective), s, record_at=(20, 40), method=method, constant=0.5)
    assert float(metrics["f_last"]) == pytest.approx(float(whole.f_last[-1]), rel=1e-5)
    assert float(metrics["f_average"]) == pytest.approx(float(whole.f_average[-1]), rel=1e-5)
    assert int(metrics["k"]) == 40 and float(metrics["f_last"]) < 2.0


def test_ridge_logistic_optimum_and_gradient():
    with jax.enable_x64():
        problem = O.ridge_logistic(jnp.asarray([0.6, 0.8]), 0.1, Noise("none"))
        assert float(jnp.abs(problem.gradient(problem.minimiser)).max()) < 1e-14
        check_grads(problem.value, (jnp.array([0.3, -1.0]),), order=1, modes=["rev"])
        x = jnp.array([0.3, -1.0])
        np.testing.assert_allclose(problem.gradient(x), jax.grad(problem.value)(x), atol=1e-14)
        top = jnp.linalg.eigvalsh(jax.hessian(problem.value)(jnp.zeros(2)))[-1]
        assert float(top) == pytest.approx(float(problem.smoothness), abs=1e-14)


def test_statistical_problem_is_unbiased_and_its_minimum_is_one():
    x = jnp.array([0.5, -0.5, 0.2])

    @jax.jit
    def facts(key, keys):
        data = O.statistical_data(key, 3, 6.0, 20_000)
        problem = O.build(O.Spec("statistical", dim=3, tail=6.0), data)
        draws = jax.vmap(lambda k: problem.sample_gradient(k, x))(keys)
        return (
            problem.gradient(problem.minimiser),
            problem.minimiser - data["planted"],
            draws.mean(0) - problem.gradient(x),
        )

    gradient, error, bias = facts(jax.random.key(0), jax.random.split(jax.random.key(1), 20_000))
    assert float(jnp.abs(gradient).max()) < 1e-4
    assert float(jnp.abs(error).max()) < 0.1 and float(jnp.abs(bias).max()) < 0.04


def test_table_and_network_problems():
    rng = np.random.default_rng(0)
    features, labels = jnp.asarray(rng.normal(size=(40, 3)), jnp.float32), jnp.asarray(rng.integers(0, 2, 40))
    spec = O.Spec("table", dim=6, classes=2, ridge=0.05, noise=Noise("none"))
    network = O.Spec("network", classes=2, hidden=4, batch=8, noise=Noise("none"))
    x = 0.1 * jnp.arange(O.network_size(network, 3), dtype=jnp.float32)

    @jax.jit
    def facts(keys):
        data = O.table_data(features, labels, 2, 0.05, steps=8)
        problem, net = O.build(spec, data), O.build(network, data)
        hessian = jax.hessian(problem.value)(problem.minimiser)
        draws = jax.vmap(lambda k: problem.sample_gradient(k, jnp.ones(6)))(keys)
        bias = draws.mean(0) - problem.gradient(jnp.ones(6))
        net_draws = jax.vmap(lambda k: net.sample_gradient(k, x))(keys)
        net_bias = net_draws.mean(0) - net.gradient(x)
        return problem.gradient(problem.minimiser), hessian, data["smoothness"], bias, net_bias

    gradient, hessian, smoothness, bias, net_bias = facts(jax.random.split(jax.random.key(1), 4000))
    assert float(jnp.abs(gradient).max()) < 1e-4
    assert np.linalg.eigvalsh(hessian)[-1] <= float(smoothness)
    # 4000 draws of entries of order 1: four standard errors.
    assert float(jnp.abs(bias).max()) < 0.06 and float(jnp.abs(net_bias).max()) < 0.06


def test_quantiles_and_rate_fit_have_known_answers():
    runs = jnp.arange(101.0)[:, None] * jnp.ones((1, 2))
    values, bands = H.quantiles(runs, (0.5, 0.95), jax.random.key(0), resamples=50)
    np.testing.assert_allclose(values[:, 0], [50, 95], atol=1e-4)
    assert np.all(bands[0] <= values) and np.all(values <= bands[1]) and bands.shape == (2, 2, 2)
    k = jnp.array([10.0, 100.0, 1000.0])
    assert float(H.fit_rate(k, 5 * k**-0.4)) == pytest.approx(-0.4, abs=1e-5)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: H.direction("adam", jnp.ones(2), jnp.ones(()), 1.0), "method must be one of"),
        (lambda: O.build(O.Spec("table")), "needs data"),
        (lambda: O.ridge_logistic(jnp.ones(2), 0.0, Noise()), "ridge must be positive"),
        (lambda: O.table_data(jnp.ones((4, 2)), jnp.ones(3, jnp.int32), 2, 0.1), "features must be"),
        (
            lambda: H.run(
                jax.random.key(0),
                jnp.ones(2),
                O.quadratic(2, Noise()),
                S.preset("log1", alpha=2.0, smoothness=1.0, radius=1.0, sigma=1.0),
                record_at=(5, 3),
            ),
            "rising step counts",
        ),
    ],
)
def test_bad_input_is_refused(call, words):
    with pytest.raises(ValueError, match=words):
        call()
