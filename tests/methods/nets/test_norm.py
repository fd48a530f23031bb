import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from papyrax.methods.nets.norm import group_norm, layer_norm, rms_norm

RNG = np.random.default_rng(1)
X = jnp.asarray(3 + 2 * RNG.normal(size=(4, 5, 12)), jnp.float32)
SCALE = jnp.asarray(RNG.normal(size=12), jnp.float32)
BIAS = jnp.asarray(RNG.normal(size=12), jnp.float32)


@pytest.mark.parametrize("eps", [1e-6, 1e-2])
def test_layer_norm_equals_flax(eps):
    want = nn.LayerNorm(epsilon=eps).apply({"params": {"scale": SCALE, "bias": BIAS}}, X)
    np.testing.assert_allclose(layer_norm(X, SCALE, BIAS, eps), want, rtol=1e-4, atol=1e-5)


def test_rms_norm_equals_flax():
    want = nn.RMSNorm(epsilon=1e-6).apply({"params": {"scale": SCALE}}, X)
    np.testing.assert_allclose(rms_norm(X, SCALE, 1e-6), want, rtol=1e-5, atol=1e-6)


def test_group_norm_equals_flax():
    want = nn.GroupNorm(num_groups=3, epsilon=1e-5).apply({"params": {"scale": SCALE, "bias": BIAS}}, X)
    np.testing.assert_allclose(group_norm(X, 3, 1e-5, SCALE, BIAS), want, rtol=1e-4, atol=1e-5)


def test_layer_norm_survives_a_large_offset():
    # The one-pass variance E[x²] - E[x]² loses every digit here.
    shifted = layer_norm(X + 1e3, SCALE, BIAS, 1e-6)
    np.testing.assert_allclose(shifted, layer_norm(X, SCALE, BIAS, 1e-6), atol=2e-3)


def test_bfloat16_statistics_are_taken_in_float32():
    y = layer_norm(X.astype(jnp.bfloat16), SCALE, BIAS, 1e-6)
    assert y.dtype == jnp.bfloat16
    np.testing.assert_allclose(y.astype(jnp.float32), layer_norm(X, SCALE, BIAS, 1e-6), atol=0.05)


def test_gradient_at_a_constant_row_is_finite():
    grad = jax.grad(lambda x: jnp.sum(layer_norm(x, SCALE, BIAS, 1e-6) ** 2))(jnp.zeros((2, 12)))
    assert np.isfinite(grad).all()


def test_group_norm_refuses_groups_that_do_not_divide():
    with pytest.raises(ValueError, match=r"groups = 5.*12 channels"):
        group_norm(X, 5, 1e-5)
