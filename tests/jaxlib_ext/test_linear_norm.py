"""Linear + norm + swish: against flax, gradients against JAX's own, kernels against the reference."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from papyrax.jaxlib_ext.linear_norm import linear_norm_swish
from tests.support.kernels import Case, check_cuda_lowering, check_op, check_tpu_compile, normal

pytestmark = pytest.mark.proof("reppo", "kernel")


def arrays(n, i, o, dtype=jnp.float32, affine=True):
    x, w = normal(0, (n, i), dtype), normal(1, (i, o), dtype, scale=i**-0.5)
    lines = [normal(k, (o,)) for k in (2, 3, 4)] if affine else [None] * 3
    return (x, w, *lines)


@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_equals_flax(norm):
    x, w, b, scale, bias = arrays(6, 10, 33)
    layers = {"layer": nn.LayerNorm(epsilon=1e-6), "rms": nn.RMSNorm(epsilon=1e-6)}
    params = {"scale": scale, "bias": bias} if norm == "layer" else {"scale": scale}
    wanted = nn.swish(layers[norm].apply({"params": params}, x @ w + b))
    ours = linear_norm_swish(x, w, b, scale, bias if norm == "layer" else None, norm=norm)
    np.testing.assert_allclose(ours, wanted, atol=3e-6)


def test_rows_do_not_see_each_other_and_scale_does_not_matter():
    x, w, _, scale, bias = arrays(5, 8, 16)
    whole = linear_norm_swish(x, w, None, scale, bias)
    np.testing.assert_allclose(linear_norm_swish(x[2:3], w, None, scale, bias), whole[2:3], atol=1e-6)
    np.testing.assert_allclose(linear_norm_swish(x * 50.0, w, None, scale, bias), whole, atol=2e-5)


def test_kernels_equal_the_reference():
    cases = [
        Case(arrays(300, 37, 51), {"norm": "layer"}),
        Case(arrays(1, 513, 17, jnp.bfloat16), {"norm": "rms"}),
        Case(arrays(9, 5, 128, affine=False), {"norm": "none"}),
    ]
    check_op(linear_norm_swish, cases, grads=(0, 1, 2, 3, 4))


def test_reference_gradient_is_that_of_float64():
    args = arrays(11, 13, 19)
    gradient = jax.jit(jax.grad(lambda *a: jnp.sum(jnp.sin(linear_norm_swish(*a))), argnums=(0, 1, 2, 3, 4)))(*args)
    with jax.enable_x64():
        wide = [jnp.asarray(np.asarray(a, np.float64)) for a in args]
        x, step = wide[1], np.zeros(args[1].shape)
        step[3, 4] = 1e-6
        f = jax.jit(lambda w: jnp.sum(jnp.sin(linear_norm_swish(wide[0], w, *wide[2:]))))
        slope = float(f(x + step) - f(x - step)) / 2e-6
    assert float(gradient[1][3, 4]) == pytest.approx(slope, rel=1e-4, abs=1e-5)


def test_empty_rows_and_wide_layers():
    assert linear_norm_swish(*arrays(0, 3, 4)).shape == (0, 4)
    assert linear_norm_swish(*arrays(2, 3, 3000)).shape == (2, 3000)


def test_shapes_that_no_kernel_takes_are_the_reference_off_the_cpu():
    for args in (arrays(4, 3, 3000), (arrays(4, 3, 8)[0], arrays(4, 3, 8, jnp.bfloat16)[1])):
        text = {
            kind: jax.jit(lambda *a, kind=kind: linear_norm_swish(*a, implementation=kind))
            .trace(*args)
            .lower(lowering_platforms=("tpu",))
            .as_text()
            for kind in ("auto", "reference")
        }
        counts = {kind: [t.count(f"stablehlo.{op}") for op in ("dot_general", "reduce(")] for kind, t in text.items()}
        assert counts["auto"] == counts["reference"] and "custom_call" not in text["auto"]


def test_forward_mode_wants_the_reference():
    x, w, *_ = arrays(2, 3, 4)
    with pytest.raises(TypeError, match="custom_vjp"):
        jax.jvp(lambda w: linear_norm_swish(x, w), (w,), (w,))
    assert jax.jvp(lambda w: linear_norm_swish(x, w, implementation="reference"), (w,), (w,))[1].shape == (2, 4)


def test_compiles_for_tpu():
    check_tpu_compile(linear_norm_swish, *arrays(300, 512, 512), grads=(0, 1, 2, 3, 4))
    check_tpu_compile(linear_norm_swish, *arrays(40, 700, 150, jnp.bfloat16), grads=(0, 1), norm="rms")


def test_lowers_for_cuda():
    check_cuda_lowering(linear_norm_swish, *arrays(300, 37, 512), grads=(0, 1, 2, 3, 4))
    check_cuda_lowering(linear_norm_swish, *arrays(300, 64, 51, jnp.bfloat16), grads=(0, 1))


def test_bad_input_is_told():
    x, w, b, scale, _ = arrays(2, 3, 4)
    with pytest.raises(ValueError, match=r"shapes \[n, i\] and \[i, o\], got \(2, 3\) and \(4, 3\)"):
        linear_norm_swish(x, w.T)
    with pytest.raises(ValueError, match=r"scale must have shape \(4,\) like the columns of w, got \(3,\)"):
        linear_norm_swish(x, w, b, scale[:3])
    with pytest.raises(ValueError, match="norm must be layer, rms or none, got 'batch'"):
        linear_norm_swish(x, w, norm="batch")
    with pytest.raises(ValueError, match="eps must not be negative"):
        linear_norm_swish(x, w, eps=-1.0)
    with pytest.raises(ValueError, match="gpu kernel takes at most 2048 output features, got 3000"):
        linear_norm_swish(*arrays(2, 3, 3000), implementation="gpu")
