import jax
import jax.numpy as jnp
import numpy as np
import pytest

from papyrax.methods.nets.normalizers import (
    moments_add,
    moments_init,
    moments_merge,
    moments_psum,
    moments_std,
    standardize,
)

X = np.random.default_rng(0).normal(loc=[5, -100, 0.1], scale=[1, 3, 0.01], size=(600, 3)).astype(np.float32)


@pytest.mark.proof("reppo", "core")
def test_merging_batches_equals_numpy_on_the_concatenated_rows():
    m = moments_init(3)
    for part in np.split(X, [10, 11, 300]):
        m = moments_add(m, jnp.asarray(part))
    np.testing.assert_allclose(m.mean, X.mean(0), rtol=1e-4)
    np.testing.assert_allclose(moments_std(m, ddof=0, eps=0.0), X.std(0), rtol=1e-4)
    np.testing.assert_allclose(moments_std(m, ddof=1, eps=0.0), X.std(0, ddof=1), rtol=1e-4)
    want = (X - X.mean(0)) / np.sqrt(X.var(0) + 1e-8)
    np.testing.assert_allclose(standardize(m, jnp.asarray(X), ddof=0, eps=1e-8), want, atol=2e-3)


def test_merge_is_symmetric_and_an_empty_side_changes_nothing():
    a = moments_add(moments_init(3), jnp.asarray(X[:100]))
    b = moments_add(moments_init(3), jnp.asarray(X[100:]))
    for u, v in zip(jax.tree.leaves(moments_merge(a, b)), jax.tree.leaves(moments_merge(b, a))):
        np.testing.assert_allclose(u, v, rtol=1e-4)
    for u, v in zip(jax.tree.leaves(moments_merge(a, moments_init(3))), jax.tree.leaves(a)):
        np.testing.assert_array_equal(u, v)


def test_invalid_rows_do_not_count_even_when_they_are_nan():
    valid = np.arange(600) % 3 != 0
    rows = np.where(valid[:, None], X, np.nan)
    m = moments_add(moments_init(3), jnp.asarray(rows).reshape(20, 30, 3), jnp.asarray(valid).reshape(20, 30))
    np.testing.assert_allclose(m.mean, X[valid].mean(0), rtol=1e-4)
    np.testing.assert_allclose(moments_std(m, ddof=0, eps=0.0), X[valid].std(0), rtol=1e-4)


def test_before_any_row_the_input_passes_through():
    np.testing.assert_allclose(standardize(moments_init(3), jnp.asarray(X[:5]), ddof=1, eps=0.0), X[:5])


def test_zero_spread_divides_by_one():
    m = moments_add(moments_init(2), jnp.asarray([[1.0, 2.0], [1.0, 4.0]]))
    np.testing.assert_allclose(moments_std(m, ddof=0, eps=0.0), [1.0, 1.0])
    np.testing.assert_allclose(standardize(m, jnp.asarray([[3.0, 3.0]]), ddof=0, eps=0.0), [[2.0, 0.0]])


def test_psum_merges_unequal_devices():
    valid = jnp.asarray(np.arange(600) < 450).reshape(4, 150)

    def device(rows, flags):
        return moments_psum(moments_add(moments_init(3), rows, flags), "d")

    m = jax.vmap(device, axis_name="d")(jnp.asarray(X).reshape(4, 150, 3), valid)
    np.testing.assert_allclose(m.count, [450] * 4)
    np.testing.assert_allclose(m.mean[2], X[:450].mean(0), rtol=1e-4)
    np.testing.assert_allclose(jnp.sqrt(m.m2[0] / 450), X[:450].std(0), rtol=1e-4)


def test_wrong_shapes_are_told():
    with pytest.raises(ValueError, match="rows of 3 numbers"):
        moments_add(moments_init(3), jnp.ones((4, 2)))
    with pytest.raises(ValueError, match="valid must have shape"):
        moments_add(moments_init(3), jnp.ones((4, 3)), jnp.ones(3, bool))
