import jax
import numpy as np
import pytest

from papyrax.methods.nets.init import fan_in_uniform, lecun_normal


def test_fan_in_uniform_fills_its_interval():
    w = np.asarray(fan_in_uniform(jax.random.key(0), (16, 4000)))
    assert 0.249 < w.max() <= 0.25 and -0.25 <= w.min() < -0.249
    np.testing.assert_allclose(w.std(), 0.25 / np.sqrt(3), rtol=0.01)


def test_a_bias_takes_the_fan_in_of_its_layer():
    assert np.abs(fan_in_uniform(jax.random.key(0), (1000,), 100)).max() <= 0.1


def test_lecun_normal_has_variance_one_over_fan_in_also_for_convolutions():
    ours = np.asarray(lecun_normal(jax.random.key(1), (3, 3, 8, 2000)))
    flax = np.asarray(jax.nn.initializers.lecun_normal()(jax.random.key(2), (3, 3, 8, 2000)))
    np.testing.assert_allclose(ours.std(), 1 / np.sqrt(72), rtol=0.01)
    np.testing.assert_allclose(np.abs(ours).max(), np.abs(flax).max(), rtol=0.01)


def test_empty_fan_in_is_refused():
    with pytest.raises(ValueError, match="fan_in must be at least 1"):
        lecun_normal(jax.random.key(0), (0, 3))
