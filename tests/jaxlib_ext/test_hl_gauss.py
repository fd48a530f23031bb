"""HL-Gauss: known values, gradients against JAX's own and differences, kernels against the reference."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from papyrax.jaxlib_ext.hl_gauss import hl_gauss_cross_entropy
from papyrax.jaxlib_ext.hl_gauss.gpu import rational_erf
from papyrax.jaxlib_ext.hl_gauss.reference import hl_gauss_decode, hl_gauss_encode
from tests.support.kernels import Case, check_cuda_lowering, check_op, check_tpu_compile, normal

pytestmark = pytest.mark.proof("reppo", "kernel")
RANGE = (0.0, 150.0)


def op(logits, value, *, vmin=-3.0, vmax=5.0, **options):
    return hl_gauss_cross_entropy(logits, value, vmin, vmax, **options)


def test_encoding_is_a_distribution():
    p = hl_gauss_encode(jnp.linspace(-20.0, 170.0, 77), 151, *RANGE)
    assert float(p.min()) >= -1e-7  # erf rises to one rounding only
    np.testing.assert_allclose(p.sum(-1), 1.0, atol=1e-6)


def test_encoding_is_the_gaussian_mass_of_each_bin():
    value, bins, vmin, vmax = 0.83, 9, -2.0, 2.0
    width = (vmax - vmin) / (bins - 1)
    edges = [vmin - width / 2 + j * width for j in range(bins + 1)]
    cdf = [0.5 * (1 + math.erf((g - value) / (math.sqrt(2) * 0.5 * width))) for g in edges]
    wanted = [(b - a) / (cdf[-1] - cdf[0]) for a, b in itertools.pairwise(cdf)]
    ours = hl_gauss_encode(jnp.float32(value), bins, vmin, vmax, sigma_ratio=0.5)
    np.testing.assert_allclose(ours, wanted, atol=2e-7)


@pytest.mark.parametrize(
    ("value", "decoded"), [(0.0, 0.369), (0.4, 0.588), (1.0, 1.047), (74.2, 74.2), (150.0, 149.631)]
)
def test_decoding(value, decoded):
    ours = hl_gauss_decode(hl_gauss_encode(jnp.float32(value), 151, *RANGE), *RANGE)
    assert float(ours) == pytest.approx(decoded, abs=1e-3)


def test_decoding_inverts_inside_to_a_thousandth_of_a_bin():
    x = jnp.linspace(3.0, 147.0, 1000)
    np.testing.assert_allclose(hl_gauss_decode(hl_gauss_encode(x, 151, *RANGE), *RANGE), x, atol=1e-3)


def test_logits_of_the_target_have_no_gradient():
    value = jnp.array([0.0, 0.4, 74.2, 200.0])
    logits = jnp.log(hl_gauss_encode(value, 151, *RANGE) + 1e-30)
    gradient = jax.jit(jax.grad(lambda l: hl_gauss_cross_entropy(l, value, *RANGE).sum()))(logits)
    np.testing.assert_allclose(gradient, 0.0, atol=1e-6)


@pytest.mark.parametrize("implementation", ["auto", "tpu", "gpu"])
def test_gradient_of_the_value_is_the_slope(implementation):
    logits, value = normal(0, (7, 11)), jnp.array([-9.0, -3.0, -2.9, 0.1, 1.7, 4.9, 6.0])
    interpret = implementation != "auto"
    f = functools.partial(op, implementation=implementation, interpret=interpret)
    ours = jax.jit(jax.grad(lambda v: f(logits, v).sum()))(value)
    with jax.enable_x64():
        wide, v = np.asarray(logits, np.float64), np.asarray(value, np.float64)
        f = functools.partial(op, jnp.asarray(wide), implementation="reference")
        slope = (np.asarray(f(jnp.asarray(v + 1e-6))) - np.asarray(f(jnp.asarray(v - 1e-6)))) / 2e-6
    slope[:2] = slope[-1] = 0.0  # clipped; the slope at vmin itself is taken from outside
    np.testing.assert_allclose(ours, slope, atol=1e-5)


def test_rational_erf_is_within_its_bound():
    x = np.concatenate([np.linspace(-6, 6, 20001), [-np.inf, np.inf]]).astype(np.float32)
    wanted = np.array([math.erf(v) for v in x.astype(np.float64)])
    assert np.abs(np.asarray(rational_erf(jnp.asarray(x)), np.float64) - wanted).max() < 5e-7


def test_kernels_equal_the_reference():
    shapes = [(1, 2), (300, 151)]
    cases = [Case((normal(1, s, scale=3.0), normal(2, s[:1], scale=4.0))) for s in shapes]
    cases.append(Case((normal(3, (9, 101), jnp.bfloat16), normal(4, (9,))), {"sigma_ratio": 0.5, "vmin": 0.0}))
    check_op(op, cases, grads=(0, 1))


def test_float64_and_empty_rows():
    assert op(jnp.zeros((0, 5)), jnp.zeros(0)).shape == (0,)
    with jax.enable_x64():
        loss = op(jnp.zeros((2, 5), jnp.float64), jnp.zeros(2, jnp.float64))
        assert loss.dtype == jnp.float64
        np.testing.assert_allclose(loss, math.log(5), rtol=1e-14)


def test_large_logits_stay_finite():
    logits = jnp.array([[1e4, -1e4, 0.0], [-1e30, -1e30, 0.0]])
    loss, gradient = jax.jit(jax.value_and_grad(lambda l: op(l, jnp.array([5.0, 5.0])).sum()))(logits)
    assert np.isfinite(loss) and np.isfinite(gradient).all()


def test_compiles_for_tpu():
    check_tpu_compile(op, normal(0, (300, 151)), normal(1, (300,)), grads=(0, 1))
    check_tpu_compile(op, normal(0, (64, 127), jnp.bfloat16), normal(1, (64,)), grads=(0, 1))


def test_lowers_for_cuda():
    check_cuda_lowering(op, normal(0, (300, 151)), normal(1, (300,)), grads=(0, 1))


def test_bad_input_is_told():
    with pytest.raises(ValueError, match=r"shapes \[n, b\] and \[n\], got \(2, 5\) and \(3,\)"):
        op(jnp.zeros((2, 5)), jnp.zeros(3))
    with pytest.raises(ValueError, match=r"vmin < vmax, got 1\.0 and 1\.0"):
        op(jnp.zeros((2, 5)), jnp.zeros(2), vmin=1, vmax=1)
    with pytest.raises(ValueError, match="bins must be at least 2, got 1"):
        op(jnp.zeros((2, 1)), jnp.zeros(2))
    with pytest.raises(ValueError, match="sigma_ratio must be positive"):
        op(jnp.zeros((2, 5)), jnp.zeros(2), sigma_ratio=0)
    with pytest.raises(ValueError, match="implementation must be"):
        op(jnp.zeros((2, 5)), jnp.zeros(2), implementation="cuda")
