import jax.numpy as jnp
import numpy as np
import pytest

from papyrax.methods.nets.embed import fourier_embed, time_embed


def test_time_embed_is_sines_and_cosines_of_a_geometric_ladder():
    t = np.array([0.0, 1.0, 37.0])
    angles = t[:, None] * 10000.0 ** (-np.arange(4) / 4)
    want = np.concatenate([np.sin(angles), np.cos(angles)], -1)
    np.testing.assert_allclose(time_embed(jnp.asarray(t), 8, order="sin_cos", max_period=10000), want, atol=2e-5)
    swapped = time_embed(jnp.asarray(t), 8, order="cos_sin", max_period=10000)
    np.testing.assert_allclose(swapped, np.roll(want, 4, axis=-1), atol=2e-5)


def test_time_embed_takes_integer_steps():
    assert time_embed(jnp.arange(3), 4, order="sin_cos", max_period=100).shape == (3, 4)


def test_time_embed_refuses_odd_widths_and_unknown_orders():
    with pytest.raises(ValueError, match="dim must be even"):
        time_embed(jnp.zeros(2), 5, order="sin_cos", max_period=100)
    with pytest.raises(ValueError, match="order must be"):
        time_embed(jnp.zeros(2), 4, order="mixed", max_period=100)


def test_fourier_embed_has_period_one_at_integer_frequencies():
    x = jnp.asarray([[0.25, 0.5], [1.25, -0.5]])
    y = fourier_embed(x, jnp.asarray([[1.0, 0.0], [0.0, 2.0]]))
    np.testing.assert_allclose(y[0], [0, 1, 1, 0], atol=1e-5)
    np.testing.assert_allclose(y[0], y[1], atol=1e-5)
    with pytest.raises(ValueError, match="frequencies must have 2 rows"):
        fourier_embed(x, jnp.ones((3, 4)))
