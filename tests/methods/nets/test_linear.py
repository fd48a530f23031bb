import jax.numpy as jnp
import numpy as np
import pytest

from papyrax.methods.nets.linear import dense


def test_dense_is_the_affine_map():
    rng = np.random.default_rng(0)
    x, w, b = rng.normal(size=(2, 3, 5)), rng.normal(size=(5, 4)), rng.normal(size=4)
    np.testing.assert_allclose(dense(jnp.float32(x), jnp.float32(w), jnp.float32(b)), x @ w + b, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(dense(jnp.float32(x), jnp.float32(w)), x @ w, rtol=1e-5, atol=1e-5)


def test_dense_follows_the_dtype_of_its_input():
    assert dense(jnp.ones((2, 3), jnp.bfloat16), jnp.ones((3, 4), jnp.bfloat16)).dtype == jnp.bfloat16


def test_dense_tells_which_width_does_not_fit():
    with pytest.raises(ValueError, match=r"in = 3.*\(4, 2\)"):
        dense(jnp.ones((1, 3)), jnp.ones((4, 2)))
