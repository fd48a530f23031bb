"""The optax transformations: clip laws, parity with a NumPy loop and with inject_hyperparams, inf and NaN, chains."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.test_util import check_grads

from papyrax.methods.optimization.clipped_sgd import schedule as S
from papyrax.methods.optimization.clipped_sgd import transform as T

pytestmark = pytest.mark.proof("clipped_sgd", "core")

SCHEDULE = S.preset("practical", alpha=1.6, smoothness=2.0, radius=3.0, sigma=1.5, delta=0.1)


def gradients(steps=60):
    rng = np.random.default_rng(0)
    return rng.standard_t(1.7, (steps, 5))


def numpy_loop(x0, noise, s):
    """The loop of the paper, written out independently: f(x) = |x|^2."""
    x, mean, d, levels = x0.copy(), x0.copy(), 0.0, []
    beta, p = S.optimal_beta(s.alpha), S.noise_ratio(s.alpha, s.smoothness, s.radius, s.sigma)
    for k, e in enumerate(noise):
        l = math.log(6 * (k + 1) ** 2 / s.delta)
        gamma = min(1 / (s.smoothness * l**s.log_power), 1 / (p * (k + 1) ** beta * l**s.log_power))
        lam = s.radius / (s.clip_constant * gamma * math.sqrt(l)) * min(1 / math.sqrt(d) if d > 0 else math.inf, 1)
        g = 2 * x + e
        x = x - gamma * g * min(1, lam / np.linalg.norm(g))
        mean += (x - mean) / (k + 2)
        d += 2 * s.smoothness * gamma
        levels.append((gamma, lam))
    return x, mean, np.array(levels)


@pytest.fixture(scope="module")
def trajectory():
    with jax.enable_x64():
        tx = T.clipped_sgd_theory(SCHEDULE)
        x0 = {"a": jnp.ones(3, jnp.float64), "b": jnp.full(2, -2.0, jnp.float64)}

        def one(carry, e):
            x, state = carry
            g = {"a": 2 * x["a"] + e[:3], "b": 2 * x["b"] + e[3:]}
            updates, state = tx.update(g, state, x)
            x = optax.apply_updates(x, updates)
            return (x, state), jnp.concatenate([x["a"], x["b"]])

        scan = jax.jit(lambda x, e: jax.lax.scan(one, (x, tx.init(x)), e))
        (_, state), path = scan(x0, jnp.asarray(gradients()))
        return np.asarray(path), np.concatenate(jax.tree.leaves(T.average_of(state))), state


@pytest.mark.proof("clipped_sgd", "proof")
def test_chain_is_the_papers_loop(trajectory):
    path, mean, state = trajectory
    x, expected_mean, _ = numpy_loop(np.array([1.0, 1, 1, -2, -2]), gradients(), SCHEDULE)
    np.testing.assert_allclose(path[-1], x, atol=1e-10)
    np.testing.assert_allclose(mean, expected_mean, atol=1e-12)
    stored = np.vstack([[1.0, 1, 1, -2, -2], path]).mean(0)
    np.testing.assert_allclose(mean, stored, atol=1e-12)
    assert int(T.skipped_of(state)) == 0


@pytest.mark.proof("clipped_sgd", "proof")
def test_inject_hyperparams_with_the_same_numbers_gives_the_same_path(trajectory):
    *_, levels = numpy_loop(np.array([1.0, 1, 1, -2, -2]), gradients(), SCHEDULE)
    with jax.enable_x64():

        def peer(level, rate):
            return optax.chain(optax.clip_by_global_norm(level), optax.sgd(rate))

        tx = optax.inject_hyperparams(peer)(level=1.0, rate=1.0)
        x = jnp.asarray([1.0, 1, 1, -2, -2])
        state = tx.init(x)

        @jax.jit
        def one(x, state, e, gamma, lam):
            state.hyperparams["level"], state.hyperparams["rate"] = lam, gamma
            updates, state = tx.update(2 * x + e, state, x)
            return optax.apply_updates(x, updates), state

        for e, (gamma, lam) in zip(gradients(), levels, strict=True):
            x, state = one(x, state, e, gamma, lam)
        np.testing.assert_allclose(x, trajectory[0][-1], atol=1e-10)


def test_clip_laws():
    g = {"a": jnp.array([3.0, 0.0]), "b": jnp.array([[4.0]])}
    clipped = T.clip_tree(g, 1.0)
    assert float(T.tree_norm(clipped)) == pytest.approx(1.0, abs=1e-6)
    np.testing.assert_allclose(clipped["a"], [0.6, 0.0], atol=1e-7)
    again = T.clip_tree(clipped, 1.0)
    np.testing.assert_allclose(again["b"], clipped["b"], rtol=2e-7)
    same = T.clip_tree(g, 7.0)
    np.testing.assert_array_equal(same["a"], g["a"])
    zero = jnp.zeros(4)
    np.testing.assert_array_equal(T.clip_tree(zero, 1.0), zero)
    jacobian = jax.jacobian(lambda v: T.clip_tree(v, 1.0))(zero)
    np.testing.assert_allclose(jacobian, jnp.eye(4))
    # Squares of 1e30 overflow float32; the norm does not.
    assert float(T.tree_norm(jnp.full(4, 1e30))) == pytest.approx(2e30, rel=1e-6)
    np.testing.assert_allclose(T.clip_tree(jnp.full(4, 1e30), 2.0), np.ones(4), rtol=1e-6)


def test_clip_gradient_matches_finite_differences():
    with jax.enable_x64():
        v = jnp.array([0.3, -2.0, 0.7])
        check_grads(lambda g: T.clip_tree(g, 1.0), (v,), order=1, modes=["rev"])


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_a_gradient_that_is_not_finite_is_a_counted_zero_step(bad):
    tx = T.clipped_sgd_theory(SCHEDULE)
    x = jnp.ones(3)
    state = tx.init(x)
    updates, state = tx.update(jnp.array([1.0, bad, 0.0]), state, x)
    np.testing.assert_array_equal(updates, np.zeros(3))
    assert int(T.skipped_of(state)) == 1
    # The schedule moved on, so a later step uses its own gamma.
    gamma_1 = S.step(SCHEDULE, S.step(SCHEDULE, S.init())[2])[0]
    updates, state = tx.update(jnp.array([1e-3, 0.0, 0.0]), state, x)
    assert float(updates[0]) == pytest.approx(-1e-3 * float(gamma_1), rel=1e-6)
    assert int(T.skipped_of(state)) == 1


def test_it_chains_and_the_order_of_decay_and_clip_is_the_callers():
    x, g = jnp.array([10.0, 0.0]), jnp.array([0.0, 5.0])
    gamma, level, _ = S.step(SCHEDULE, S.init())
    inside = optax.chain(
        optax.add_decayed_weights(0.1), T.clip_by_theory_level(SCHEDULE), T.scale_by_theory_step(SCHEDULE)
    )
    outside = optax.chain(
        T.clip_by_theory_level(SCHEDULE), optax.add_decayed_weights(0.1), T.scale_by_theory_step(SCHEDULE)
    )
    u_in, _ = inside.update(g, inside.init(x), x)
    u_out, _ = outside.update(g, outside.init(x), x)
    assert float(jnp.linalg.norm(u_in)) == pytest.approx(float(gamma * min(level, 26**0.5)), rel=1e-6)
    np.testing.assert_allclose(u_out, -gamma * (np.array([1.0, 0.0]) + np.array([0.0, min(5.0, level)])), rtol=1e-6)


def test_state_without_average_and_missing_params_are_refused():
    tx = T.clipped_sgd_theory(SCHEDULE, average=False)
    state = tx.init(jnp.ones(2))
    tx.update(jnp.ones(2), state)
    with pytest.raises(ValueError, match="holds no average"):
        T.average_of(state)
    full = T.clipped_sgd_theory(SCHEDULE)
    with pytest.raises(ValueError, match="needs params"):
        full.update(jnp.ones(2), full.init(jnp.ones(2)))
