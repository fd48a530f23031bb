import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from papyrax.methods.control.reppo.noise import normals, threefry

pytestmark = pytest.mark.proof("reppo", "core")


@pytest.mark.parametrize("seed", [0, 0xDEADBEEF])
def test_bits_are_those_of_jax(seed):
    from jax.extend.random import threefry_2x32

    rng = np.random.default_rng(seed)
    key = jnp.asarray(rng.integers(0, 2**32, 2, dtype=np.uint32))
    count = jnp.asarray(rng.integers(0, 2**32, 64, dtype=np.uint32))
    ours = jnp.concatenate(threefry((key[0], key[1]), count[:32], count[32:]))
    np.testing.assert_array_equal(ours, threefry_2x32(key, count))


def test_law_is_the_standard_normal_and_numbers_do_not_hang_together():
    n = 200_000
    x = np.asarray(jax.jit(lambda key: normals(key, (n,)))(jax.random.key(3)))
    assert x.dtype == np.float32 and np.isfinite(x).all() and np.abs(x).max() < 5.5
    # Five standard errors of mean, variance, skewness and kurtosis.
    for moment, want, spread in ((x, 0, 1), (x**2, 1, 2), (x**3, 0, 15), (x**4, 3, 96)):
        assert abs(moment.mean(dtype=np.float64) - want) < 5 * (spread / n) ** 0.5
    assert stats.kstest(x[: n // 4], "norm").pvalue > 1e-3
    # Both words of a block, and neighbours, are independent.
    assert abs(np.mean(x[: n // 2] * x[n // 2 :])) < 5 * (2 / n) ** 0.5
    assert abs(np.mean(x[:-1] * x[1:])) < 5 * n**-0.5


@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 5), (2, 3, 4), (0,)])
def test_any_count_is_filled_with_numbers_of_its_own(shape):
    x = np.asarray(normals(jax.random.key(0), shape))
    assert x.shape == shape and len(set(x.ravel().tolist())) == x.size
    other = np.asarray(normals(jax.random.key(1), shape))
    assert x.size == 0 or not np.intersect1d(x, other).size


def test_keys_of_another_kind_go_to_jax():
    key = jax.random.key(0, impl="rbg")
    np.testing.assert_array_equal(normals(key, (2, 3)), jax.random.normal(key, (2, 3)))
