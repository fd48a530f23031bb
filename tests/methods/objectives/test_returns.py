import jax
import jax.numpy as jnp
import numpy as np
import pytest

from papyrax.methods.objectives.returns import gae, lambda_returns

Y, V, NO = jnp.ones(3), jnp.full(3, 4.0), jnp.zeros(3)
AT_1 = jnp.asarray([0.0, 1.0, 0.0])


@pytest.mark.proof("reppo", "proof")
@pytest.mark.parametrize(
    "done, trunc, want",
    [(NO, NO, [2.6875, 2.75, 3.0]), (AT_1, NO, [2.25, 1.0, 3.0]), (AT_1, AT_1, [2.75, 3.0, 3.0])],
    ids=["running", "terminated", "truncated"],
)
def test_known_values(done, trunc, want):
    np.testing.assert_allclose(lambda_returns(Y, V, done, trunc, 0.5, 0.5), want, rtol=1e-6)


@pytest.mark.proof("reppo", "proof")
def test_lambda_one_is_the_discounted_sum_plus_bootstrap():
    rng = np.random.default_rng(0)
    r, v = rng.normal(size=6), rng.normal(size=6)
    got = lambda_returns(jnp.asarray(r), jnp.asarray(v), jnp.zeros(6), jnp.zeros(6), 0.9, 1.0)
    np.testing.assert_allclose(got[0], sum(0.9**i * r[i] for i in range(6)) + 0.9**6 * v[-1], rtol=1e-5)


def test_lambda_zero_is_one_step_and_gae_is_the_sum_of_td_errors():
    rng = np.random.default_rng(1)
    r, v, v_next = (jnp.asarray(rng.normal(size=(5, 3)), jnp.float32) for _ in range(3))
    done = jnp.asarray(rng.random((5, 3)) < 0.3)
    trunc = done & jnp.asarray(rng.random((5, 3)) < 0.5)
    # A terminated step bootstraps nothing, a truncated one its true next state.
    bootstrap = jnp.where(done & ~trunc, 0.0, v_next)
    np.testing.assert_allclose(lambda_returns(r, v_next, done, trunc, 0.9, 0.0), r + 0.9 * bootstrap, rtol=1e-5)
    # With v_next[t] = v[t+1] inside episodes, GAE is the discounted sum of TD errors.
    v_next = jnp.concatenate([v[1:], v_next[-1:]])
    bootstrap = jnp.where(done & ~trunc, 0.0, v_next)
    delta, want, acc = r + 0.9 * bootstrap - v, np.zeros((5, 3)), np.zeros(3)
    for t in reversed(range(5)):
        acc = delta[t] + 0.9 * 0.8 * (1 - done[t]) * acc
        want[t] = acc
    np.testing.assert_allclose(gae(r, v, v_next, done, trunc, 0.9, 0.8), want, rtol=1e-4, atol=1e-5)


def test_nothing_passes_over_the_end_of_an_episode():
    grad = jax.grad(lambda r: lambda_returns(r, V, AT_1, NO, 0.5, 0.5)[0])(Y)
    np.testing.assert_allclose(grad, [1.0, 0.25, 0.0])


def test_shapes_are_told():
    with pytest.raises(ValueError, match=r"one shape.*'v_next': \(2,\)"):
        lambda_returns(Y, V[:2], NO, NO, 0.5, 0.5)
    with pytest.raises(ValueError, match="v must have the shape"):
        gae(Y, V[:2], V, NO, NO, 0.5, 0.5)
