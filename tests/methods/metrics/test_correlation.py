"""Correlations against scipy, with and without ties, masked and mapped."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from papyrax.methods.metrics.correlation import kendall, midranks, pearson, spearman


@pytest.fixture(scope="module")
def data():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(4, 200)).astype(np.float32)
    y = (0.5 * x + rng.normal(size=x.shape)).astype(np.float32)
    x[2:], y[2:] = np.round(x[2:]), np.round(y[2:])
    valid = rng.random(x.shape) < 0.7
    return x, y, valid


def test_against_scipy(data):
    x, y, valid = data
    got = jax.jit(lambda *a: (pearson(*a), spearman(*a), kendall(*a)))(x, y, valid)
    for name, ours, theirs in zip(
        ("pearson", "spearman", "kendall"), got, (scipy.stats.pearsonr, scipy.stats.spearmanr, scipy.stats.kendalltau)
    ):
        want = [theirs(a[m], b[m]).statistic for a, b, m in zip(x, y, valid)]
        np.testing.assert_allclose(ours, want, atol=2e-6, err_msg=name)


def test_midranks_share_ties(data):
    x = data[0][2]
    np.testing.assert_allclose(midranks(jnp.asarray(x)), scipy.stats.rankdata(x))
    np.testing.assert_allclose(midranks(jnp.array([jnp.inf, 1.0, 2.0]), jnp.array([True, True, False])), [2, 1, 0])


def test_constant_is_nan_and_scale_does_not_matter():
    x = jnp.array([1.0, 2.0, 4.0])
    for fn in (pearson, spearman, kendall):
        assert np.isnan(fn(x, jnp.ones(3)))
        np.testing.assert_allclose(fn(x * 1e25, -x * 1e-25), -1, atol=0.05)
    with pytest.raises(ValueError, match="at least two entries"):
        pearson(x[:1], x[:1])
