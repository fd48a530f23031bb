import jax
import jax.numpy as jnp
import numpy as np
import pytest

from papyrax.methods.control.reppo.collect import scale_rewards, scaler_init

pytestmark = pytest.mark.proof("reppo", "core")


def test_rewards_are_divided_by_the_spread_of_running_returns_or_a_tenth_of_the_largest():
    rng = np.random.default_rng(0)
    reward, done = rng.normal(1, 2, (6, 3)).astype(np.float32), rng.random((6, 3)) < 0.3
    scaler, totals = scaler_init(3), []
    for part in (slice(0, 4), slice(4, 6)):
        scaler, got = scale_rewards(scaler, jnp.asarray(reward[part]), jnp.asarray(done[part]), 0.9)
    running = np.zeros(3)
    for t in range(6):
        running = reward[t] + 0.9 * running
        totals.append(running.copy())
        running = running * ~done[t]
    totals = np.asarray(totals)
    np.testing.assert_allclose(got, reward[4:] / max(totals.std(), np.abs(totals).max() / 10), rtol=1e-4)
    np.testing.assert_allclose(scaler.running, running, rtol=1e-4, atol=1e-5)


def test_a_tenth_of_the_largest_return_holds_the_scale_of_steady_rewards():
    _, got = scale_rewards(scaler_init(2), jnp.ones((3, 2)), jnp.ones((3, 2), bool), 0.9)
    np.testing.assert_allclose(got, 10.0, rtol=1e-5)


def test_every_device_gets_the_scale_of_all():
    reward = jnp.asarray(np.random.default_rng(1).normal(size=(5, 4)), jnp.float32)
    done = jnp.zeros((5, 4), bool)
    _, whole = scale_rewards(scaler_init(4), reward, done, 0.9)
    split = jax.vmap(
        lambda r, d: scale_rewards(scaler_init(2), r, d, 0.9, "d")[1], in_axes=1, out_axes=1, axis_name="d"
    )(reward.reshape(5, 2, 2), done.reshape(5, 2, 2))
    np.testing.assert_allclose(split.reshape(5, 4), whole, rtol=1e-4)
