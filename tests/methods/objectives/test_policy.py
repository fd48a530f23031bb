import jax
import jax.numpy as jnp
import numpy as np
import pytest

from papyrax.methods.objectives.policy import clip_loss, normalize_adv


def test_clip_loss_known_values():
    ratio = jnp.asarray([0.5, 1.0, 1.5, 0.5, 1.5])
    adv = jnp.asarray([1.0, 1.0, 1.0, -1.0, -1.0])
    got = clip_loss(jnp.log(ratio), jnp.zeros(5), adv, low=0.2, high=0.3)
    np.testing.assert_allclose(got, [-0.5, -1.0, -1.3, 0.8, 1.5], rtol=1e-6)


def test_the_gradient_vanishes_only_where_moving_on_would_gain():
    logp = jnp.log(jnp.asarray([0.5, 1.5, 0.5, 1.5]))
    adv = jnp.asarray([1.0, 1.0, -1.0, -1.0])
    grad = jax.grad(lambda p: clip_loss(p, jnp.zeros(4), adv, low=0.2, high=0.2).sum())(logp)
    np.testing.assert_allclose(grad, [-0.5, 0.0, 0.0, 1.5], rtol=1e-6)


def test_a_huge_ratio_can_be_cut():
    logp, adv = jnp.asarray([100.0, 1.0]), jnp.asarray([-1.0, -1.0])
    loss = lambda p: clip_loss(p, jnp.zeros(2), adv, low=0.2, high=0.2, log_ratio_max=2.0)  # noqa: E731
    np.testing.assert_allclose(loss(logp), jnp.exp(jnp.asarray([2.0, 1.0])), rtol=1e-6)
    np.testing.assert_allclose(jax.grad(lambda p: loss(p).sum())(logp), [0.0, jnp.e], rtol=1e-6)


def test_normalised_advantages_have_mean_zero_and_deviation_one_over_all_devices():
    adv = jnp.asarray(np.random.default_rng(0).normal(3, 7, size=(4, 50)), jnp.float32)
    whole = normalize_adv(adv)
    np.testing.assert_allclose([whole.mean(), whole.std()], [0, 1], atol=1e-5)
    parts = jax.vmap(lambda a: normalize_adv(a, axis_name="d"), axis_name="d")(adv)
    np.testing.assert_allclose(parts, whole, atol=1e-5)


def test_equal_advantages_give_zero_not_nan():
    np.testing.assert_array_equal(normalize_adv(jnp.full(4, 2.0)), np.zeros(4))


def test_bad_input_is_told():
    with pytest.raises(ValueError, match="one shape"):
        clip_loss(jnp.zeros(2), jnp.zeros(3), jnp.zeros(2), low=0.2, high=0.2)
    with pytest.raises(ValueError, match=r"low must lie in \(0, 1\]"):
        clip_loss(jnp.zeros(2), jnp.zeros(2), jnp.zeros(2), low=0.0, high=0.2)
