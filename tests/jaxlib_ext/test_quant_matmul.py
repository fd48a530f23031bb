"""Packed weights: known bytes, rounding error, and kernels against the reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from papyrax.jaxlib_ext.quant_matmul import Packed, dequant_matmul, pack, unpack, unpack_rows
from tests.support.kernels import Case, check_cuda_lowering, check_op, check_tpu_compile, normal


def test_known_blocks():
    codes = np.zeros((1, 16), np.uint8)
    codes[0, 3] = 0xA5  # element 3 has code 5, element 19 has code 10
    w = Packed(jnp.asarray(codes), jnp.full((1, 1), 0.5, jnp.float16), jnp.full((1, 1), -1.0, jnp.float16), "q4_1")
    want = np.full(32, -1.0)
    want[3], want[19] = 1.5, 4.0
    np.testing.assert_array_equal(unpack(w)[0], want)
    codes = np.arange(-16, 16, dtype=np.int8)[None]
    w = Packed(jnp.asarray(codes), jnp.full((1, 1), 0.25, jnp.float16), None, "q8_0")
    np.testing.assert_array_equal(unpack(w), 0.25 * codes)
    assert w.shape == (32, 1) and w.dense().shape == (32, 1)


@pytest.mark.parametrize("kind, steps", [("q8_0", 254), ("q4_1", 15)])
def test_packing_errs_by_half_a_step(kind, steps):
    w = np.asarray(normal(0, (64, 5)))
    packed = pack(w, kind)
    blocks = w.T.reshape(5, 2, 32)
    span = 2 * np.abs(blocks).max(-1) if kind == "q8_0" else blocks.max(-1) - blocks.min(-1)
    error = np.abs(np.asarray(unpack(packed)).reshape(5, 2, 32) - blocks)
    assert np.all(error <= 0.501 * span[..., None] / steps)
    np.testing.assert_allclose(unpack_rows(packed, jnp.asarray([3, 1])), unpack(packed)[jnp.asarray([3, 1])])
    np.testing.assert_allclose(packed.dense(), unpack(packed).T)


@pytest.mark.parametrize("kind", ["q8_0", "q4_1"])
def test_kernels_equal_the_reference(kind):
    def op(x, codes, scale, shift, **options):
        return dequant_matmul(x, Packed(codes, scale, shift, kind), **options)

    def case(n, i, o, dtype=jnp.float32):
        w = pack(np.asarray(normal(1, (i, o))), kind)
        return Case((normal(2, (n, i), dtype), w.codes, w.scale, w.shift))

    check_op(op, [case(3, 96, 130), case(1, 512, 40, jnp.bfloat16)], grads=(0,))


def test_packed_weights_are_constants():
    w = pack(np.asarray(normal(1, (32, 4))), "q4_1")
    gradient = jax.grad(lambda w: jnp.sum(dequant_matmul(normal(0, (2, 32)), w)), allow_int=True)(w)
    assert float(jnp.max(jnp.abs(gradient.scale))) == 0.0
    with pytest.raises(ValueError, match=r"wants x \(n, i\)"):
        dequant_matmul(normal(0, (2, 64)), w)


@pytest.mark.parametrize("kind", ["q8_0", "q4_1"])
def test_compiles_for_tpu_and_lowers_for_cuda(kind):
    w = pack(np.asarray(normal(1, (1024, 576))), kind, np.float16)
    arrays = (normal(0, (8, 1024), jnp.bfloat16), *(a for a in (w.codes, w.scale, w.shift) if a is not None))

    def op(x, codes, scale, shift=None, **options):
        return dequant_matmul(x, Packed(codes, scale, shift, kind), **options)

    check_tpu_compile(op, *arrays, grads=(0,))
    check_cuda_lowering(op, *arrays, grads=(0,))
