"""Robust means against scipy, bootstrap intervals against their known coverage and limits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from papyrax.methods.metrics.intervals import bootstrap, iqm, paired_bootstrap, quantile_band


@pytest.mark.parametrize("n", [1, 7, 8])
def test_iqm_is_scipys_trimmed_mean(n):
    x = np.random.default_rng(n).normal(size=(3, n)).astype(np.float32)
    np.testing.assert_allclose(iqm(jnp.asarray(x), axis=1), scipy.stats.trim_mean(x, 0.25, axis=1), rtol=2e-5)
    np.testing.assert_allclose(iqm(jnp.asarray(x)), scipy.stats.trim_mean(x.ravel(), 0.25), rtol=2e-5)


def test_iqm_ignores_outliers_and_refuses_nothing():
    assert float(iqm(jnp.array([1.0, 1.0, 1.0, 1e9]))) == 1.0
    with pytest.raises(ValueError, match="at least one value"):
        iqm(jnp.zeros((2, 0)), axis=1)


def test_quantile_band_matches_numpy():
    x = np.random.default_rng(0).normal(size=(9, 5)).astype(np.float32)
    low, mid, high = quantile_band(jnp.asarray(x), 0.1, 0.8)
    np.testing.assert_allclose(low, np.quantile(x, 0.1, axis=0), atol=1e-6)
    np.testing.assert_allclose(mid, np.median(x, axis=0), atol=1e-6)
    np.testing.assert_allclose(high, np.quantile(x, 0.8, axis=0), atol=1e-6)
    with pytest.raises(ValueError, match="0 <= low <= high <= 1"):
        quantile_band(jnp.asarray(x), 0.9, 0.1)


def test_bootstrap_of_a_mean_is_the_normal_interval():
    """For 400 rows the percentile interval of a mean is mean +- 1.96 s/sqrt(n) up to resampling noise."""
    x = jnp.asarray(np.random.default_rng(1).normal(2.0, 3.0, 400).astype(np.float32))
    got = jax.jit(lambda k: bootstrap(k, jnp.mean, x, resamples=4000))(jax.random.key(0))
    half = 1.96 * float(jnp.std(x)) / 20
    assert float(got.estimate) == pytest.approx(float(jnp.mean(x)), abs=1e-6)
    assert float(got.low) == pytest.approx(float(jnp.mean(x)) - half, abs=0.08 * half)
    assert float(got.high) == pytest.approx(float(jnp.mean(x)) + half, abs=0.08 * half)


def test_groups_widen_the_interval_and_padding_never_counts():
    """Ten groups of equal rows carry the information of ten rows: sqrt(20) wider than the rowwise interval."""
    rng = np.random.default_rng(2)
    sizes = np.array([20] * 9 + [3])
    groups = np.repeat(np.arange(10), sizes)
    centre = rng.normal(size=10).astype(np.float32)
    x = jnp.asarray(centre[groups])

    def mean(v, valid):
        return jnp.sum(jnp.where(valid, v, 0)) / jnp.sum(valid)

    wide = bootstrap(jax.random.key(1), mean, x, groups)
    narrow = bootstrap(jax.random.key(1), jnp.mean, x)
    assert float(wide.high - wide.low) > 3 * float(narrow.high - narrow.low)
    assert centre.min() <= float(wide.low) <= float(wide.estimate) <= float(wide.high) <= centre.max()
    constant = bootstrap(jax.random.key(1), mean, jnp.ones_like(x), groups)
    np.testing.assert_allclose([constant.low, constant.high], 1.0, rtol=1e-6)


def test_paired_bootstrap_sees_a_small_steady_difference():
    rng = np.random.default_rng(3)
    hard = rng.normal(0, 10, 200)
    a = jnp.asarray((hard + 0.5 + rng.normal(0, 0.1, 200)).astype(np.float32))
    b = jnp.asarray(hard.astype(np.float32))
    got = paired_bootstrap(jax.random.key(0), jnp.mean, a, b)
    assert 0.4 < float(got.low) < float(got.estimate) < float(got.high) < 0.6
    assert float(got.p) == 0.0
    same = paired_bootstrap(jax.random.key(0), jnp.mean, b, b)
    assert float(same.p) == 1.0 and float(same.estimate) == 0.0


def test_bad_input_is_told():
    x = jnp.ones(4)
    with pytest.raises(ValueError, match="share one leading axis"):
        bootstrap(jax.random.key(0), jnp.mean, (x, jnp.ones(3)))
    with pytest.raises(ValueError, match="level must lie"):
        bootstrap(jax.random.key(0), jnp.mean, x, level=1.0)
    with pytest.raises(ValueError, match="one entry for each of the 4 rows"):
        bootstrap(jax.random.key(0), jnp.mean, x, np.zeros(3, int))
