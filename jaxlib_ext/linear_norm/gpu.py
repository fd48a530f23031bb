"""Linear, norm and swish on the GPU (Pallas, Triton): a program owns whole rows, from the product to the output.

Widths are padded to powers of two inside the program and masked. The backward kernel computes the rows again and
leaves dh and one line of parameter sums a program; the two products with dh are ordinary XLA products.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from papyrax.jaxlib_ext import dispatch
from papyrax.jaxlib_ext.linear_norm import reference

ROWS, INPUTS = 16, 32
MAX_FEATURES = 2048
"""A row block of 16 x 2048 float32 is what the registers of a program of eight warps hold."""


def _product(x_ref, w_ref, b_ref, n: int, i: int, o: int, width: int) -> jax.Array:
    """h [ROWS, width] in float32, zero past the last feature."""
    rows = pl.program_id(0) * ROWS + jnp.arange(ROWS)
    columns = jnp.arange(width)

    def step(k, h):
        inside = k * INPUTS + jnp.arange(INPUTS) < i
        x = plgpu.load(x_ref.at[:, pl.ds(k * INPUTS, INPUTS)], mask=(rows < n)[:, None] & inside[None, :], other=0.0)
        w = plgpu.load(w_ref.at[pl.ds(k * INPUTS, INPUTS), :], mask=inside[:, None] & (columns < o)[None, :], other=0.0)
        return h + pl.dot(x, w)

    h = jax.lax.fori_loop(0, pl.cdiv(i, INPUTS), step, jnp.zeros((ROWS, width), jnp.float32))
    return h + _line(b_ref, o, width)


def _line(ref, o: int, width: int) -> jax.Array:
    return plgpu.load(ref, mask=jnp.arange(width) < o, other=0.0).astype(jnp.float32)[None, :]


def _mask(n: int, o: int, width: int) -> jax.Array:
    rows = pl.program_id(0) * ROWS + jnp.arange(ROWS)
    return (rows < n)[:, None] & (jnp.arange(width) < o)[None, :]


def _forward_kernel(x_ref, w_ref, b_ref, scale_ref, bias_ref, y_ref, *, n, i, o, width, norm, eps):
    h = _product(x_ref, w_ref, b_ref, n, i, o, width)
    normal, _ = reference.normalised(h, norm, eps, o)
    z = normal * _line(scale_ref, o, width) + _line(bias_ref, o, width)
    y = z / (1.0 + jnp.exp(-z))
    plgpu.store(y_ref, y.astype(y_ref.dtype), mask=_mask(n, o, width))


def _backward_kernel(dy_ref, x_ref, w_ref, b_ref, scale_ref, bias_ref, dh_ref, sums_ref, *, n, i, o, width, norm, eps):
    mask = _mask(n, o, width)
    h = _product(x_ref, w_ref, b_ref, n, i, o, width)
    dy = plgpu.load(dy_ref, mask=mask, other=0.0).astype(jnp.float32)
    scale, bias = _line(scale_ref, o, width), _line(bias_ref, o, width)
    dh, dz, normal = reference.backward_rows(h, dy, scale, bias, norm, eps, o)
    plgpu.store(dh_ref, dh.astype(dh_ref.dtype), mask=mask)
    inside = (jnp.arange(width) < o)[None, :]
    # rows past the end hold dy = 0 and so add nothing
    for place, part in enumerate((dh, dz * normal, dz)):
        plgpu.store(sums_ref.at[pl.ds(place, 1), :], jnp.sum(part, axis=0)[None, :], mask=inside)


def _plan(x, w):
    n, i = x.shape
    o = w.shape[1]
    width = max(16, pl.next_power_of_2(o))
    depth = -(-i // INPUTS) * INPUTS
    whole = pl.BlockSpec((ROWS, width), lambda r: (r, 0))
    line = pl.BlockSpec((width,), lambda r: (0,))
    operands = [pl.BlockSpec((ROWS, depth), lambda r: (r, 0)), pl.BlockSpec((depth, width), lambda r: (0, 0))]
    options = {
        "grid": (pl.cdiv(n, ROWS),),
        "compiler_params": plgpu.CompilerParams(num_warps=4 if width <= 512 else 8, num_stages=2),
    }
    return {"n": n, "i": i, "o": o, "width": width}, whole, [*operands, line, line, line], options


@functools.partial(jax.jit, static_argnames=("norm", "eps", "interpret"))
def forward(x, w, b, scale, bias, norm, eps, interpret=False):
    """y [n, o]; see `reference.linear_norm_swish`, with no parameter left out."""
    sizes, whole, inputs, options = _plan(x, w)
    return pl.pallas_call(
        functools.partial(_forward_kernel, **sizes, norm=norm, eps=eps),
        out_shape=dispatch.output((x.shape[0], w.shape[1]), x.dtype, x),
        in_specs=inputs,
        out_specs=whole,
        interpret=interpret,
        name="linear_norm_swish",
        **options,
    )(x, w, b, scale, bias)


@functools.partial(jax.jit, static_argnames=("norm", "eps", "interpret"))
def gradient_before_norm(dy, x, w, b, scale, bias, norm, eps, interpret=False):
    """(dh [n, o], sums [3, o]): gradients of x w + b, and of b, scale and bias; see `reference.backward_rows`."""
    n, o = dy.shape
    sizes, whole, inputs, options = _plan(x, w)
    blocks = options["grid"][0]
    dh, sums = pl.pallas_call(
        functools.partial(_backward_kernel, **sizes, norm=norm, eps=eps),
        out_shape=(dispatch.output((n, o), x.dtype, x), dispatch.output((blocks, 3, o), jnp.float32, x)),
        in_specs=[whole, *inputs],
        out_specs=(whole, pl.BlockSpec((None, 4, sizes["width"]), lambda r: (r, 0, 0))),
        interpret=interpret,
        name="linear_norm_swish_backward",
        **options,
    )(dy, x, w, b, scale, bias)
    return dh, jnp.sum(sums, axis=0)
