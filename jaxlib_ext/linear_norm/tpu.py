"""Linear, norm and swish on the TPU (Pallas, Mosaic): a block of whole rows stays in VMEM from the product to the
output.

The grid walks row blocks and, inside, blocks of input features that are added into a float32 scratch [rows, o]. The
last of them normalises, activates and writes. The backward kernel computes the row block again and leaves dh and one
line of parameter sums a row block; the two products with dh are ordinary XLA products.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from papyrax.jaxlib_ext import dispatch
from papyrax.jaxlib_ext.linear_norm import reference

VMEM_BUDGET = 8 * 2**20
MAX_FEATURES = 8192


def _blocks(n: int, i: int, o: int, itemsize: int) -> tuple[int, int]:
    """(rows, input features) of a block: about half of VMEM, twice buffered, with four float32 rows of work."""
    inputs = i if i <= 512 else 512
    while inputs > 128 and 2 * inputs * o * itemsize > VMEM_BUDGET // 2:
        inputs //= 2
    rows = 256
    while rows > 16 and rows * (4 * o * 4 + 2 * inputs * itemsize) > VMEM_BUDGET:
        rows //= 2
    return min(rows, -(-n // 16) * 16), inputs


def _accumulate(x_ref, w_ref, b_ref, h_ref, i: int) -> None:
    """Adds the product of this block of input features into the scratch, which starts at b."""
    step, inputs = pl.program_id(1), x_ref.shape[1]

    @pl.when(step == 0)
    def _():
        h_ref[...] = jnp.broadcast_to(b_ref[...].astype(jnp.float32), h_ref.shape)

    x, w = x_ref[...], w_ref[...]
    if i % inputs:
        # the last block reaches past the array, where memory may hold anything
        left = i - step * inputs
        x = jnp.where(jax.lax.broadcasted_iota(jnp.int32, x.shape, 1) < left, x, jnp.zeros_like(x))
        w = jnp.where(jax.lax.broadcasted_iota(jnp.int32, w.shape, 0) < left, w, jnp.zeros_like(w))
    h_ref[...] += jnp.dot(x, w, preferred_element_type=jnp.float32)


def _forward_kernel(x_ref, w_ref, b_ref, scale_ref, bias_ref, y_ref, h_ref, *, i, norm, eps):
    _accumulate(x_ref, w_ref, b_ref, h_ref, i)

    @pl.when(pl.program_id(1) == pl.num_programs(1) - 1)
    def _():
        n, _ = reference.normalised(h_ref[...], norm, eps)
        z = n * scale_ref[...].astype(jnp.float32) + bias_ref[...].astype(jnp.float32)
        y_ref[...] = (z / (1.0 + jnp.exp(-z))).astype(y_ref.dtype)


def _backward_kernel(dy_ref, x_ref, w_ref, b_ref, scale_ref, bias_ref, dh_ref, sums_ref, h_ref, *, n, i, norm, eps):
    _accumulate(x_ref, w_ref, b_ref, h_ref, i)
    rows = h_ref.shape[0]
    first = pl.program_id(0) * rows

    @pl.when(pl.program_id(1) == pl.num_programs(1) - 1)
    def _():
        scale, bias = scale_ref[...].astype(jnp.float32), bias_ref[...].astype(jnp.float32)
        # rows past the end must not reach the sums
        row = first + jax.lax.broadcasted_iota(jnp.int32, h_ref.shape, 0)
        dy = jnp.where(row < n, dy_ref[...].astype(jnp.float32), 0.0)
        h = jnp.where(row < n, h_ref[...], 0.0)
        dh, dz, normal = reference.backward_rows(h, dy, scale, bias, norm, eps)
        dh_ref[...] = dh.astype(dh_ref.dtype)
        sums_ref[0, 0:1] = jnp.sum(dh, axis=0, keepdims=True)
        sums_ref[0, 1:2] = jnp.sum(dz * normal, axis=0, keepdims=True)
        sums_ref[0, 2:3] = jnp.sum(dz, axis=0, keepdims=True)


def _plan(x, w):
    n, i = x.shape
    o = w.shape[1]
    rows, inputs = _blocks(n, i, o, x.dtype.itemsize)
    whole = pl.BlockSpec((rows, o), lambda r, k: (r, 0))
    line = pl.BlockSpec((1, o), lambda r, k: (0, 0))
    operands = [pl.BlockSpec((rows, inputs), lambda r, k: (r, k)), pl.BlockSpec((inputs, o), lambda r, k: (k, 0))]
    options = {
        "grid": (pl.cdiv(n, rows), pl.cdiv(i, inputs)),
        "scratch_shapes": [pltpu.VMEM((rows, o), jnp.float32)],
        "compiler_params": pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
    }
    return whole, [*operands, line, line, line], options


@functools.partial(jax.jit, static_argnames=("norm", "eps", "interpret"))
def forward(x, w, b, scale, bias, norm, eps, interpret=False):
    """y [n, o]; see `reference.linear_norm_swish`, with no parameter left out."""
    whole, inputs, options = _plan(x, w)
    return pl.pallas_call(
        functools.partial(_forward_kernel, i=x.shape[1], norm=norm, eps=eps),
        out_shape=dispatch.output((x.shape[0], w.shape[1]), x.dtype, x),
        in_specs=inputs,
        out_specs=whole,
        interpret=interpret,
        name="linear_norm_swish",
        **options,
    )(x, w, b[None], scale[None], bias[None])


@functools.partial(jax.jit, static_argnames=("norm", "eps", "interpret"))
def gradient_before_norm(dy, x, w, b, scale, bias, norm, eps, interpret=False):
    """(dh [n, o], sums [3, o]): gradients of x w + b, and of b, scale and bias; see `reference.backward_rows`."""
    n, o = dy.shape
    whole, inputs, options = _plan(x, w)
    blocks = options["grid"][0]
    dh, sums = pl.pallas_call(
        functools.partial(_backward_kernel, n=n, i=x.shape[1], norm=norm, eps=eps),
        out_shape=(dispatch.output((n, o), x.dtype, x), dispatch.output((blocks, 3, o), jnp.float32, x)),
        in_specs=[whole, *inputs],
        out_specs=(whole, pl.BlockSpec((1, 3, o), lambda r, k: (r, 0, 0))),
        interpret=interpret,
        name="linear_norm_swish_backward",
        **options,
    )(dy, x, w, b[None], scale[None], bias[None])
    return dh, jnp.sum(sums, axis=0)
