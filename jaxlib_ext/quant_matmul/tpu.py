"""Products with packed weights on the TPU (Pallas, Mosaic): a tile of codes is widened in VMEM and multiplied at once.

One scale serves 32 lanes; scales are spread over lanes by a product with a 0/1 matrix, which the matrix unit does exactly. The two nibbles of
a byte belong to inputs 16 apart, so x is cut into the inputs of low and of high nibbles beforehand and no byte is ever interleaved.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from papyrax.jaxlib_ext import dispatch
from papyrax.jaxlib_ext.quant_matmul.reference import BLOCK, Packed, join_parts, split_parts

OUT = 128


def _input_tile(width: int, parts: int) -> int:
    """Inputs a tile: the largest divisor up to 1,024 whose codes fill whole lanes, or all of them."""
    fits = [n for n in range(128 * parts, 1025, 128 * parts) if width % n == 0]
    return max(fits) if fits else width


def _rows_tile(n: int) -> int:
    return min(256, -(-n // 16) * 16)


def _dot(a, b, contract):
    return jax.lax.dot_general(
        a,
        b,
        ((contract[:1], contract[1:]), ((), ())),
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )


def _weights(codes, scale, shift, parts):
    """The tile of each part, ``[bo, bi / parts]`` in float32."""
    unit = BLOCK // parts
    width = codes.shape[1]
    group = jax.lax.broadcasted_iota(jnp.int32, (scale.shape[1], width), 0)
    lane = jax.lax.broadcasted_iota(jnp.int32, (scale.shape[1], width), 1)
    spread = jnp.where(jax.lax.div(lane, jnp.int32(unit)) == group, 1.0, 0.0)
    scales = _dot(scale[...], spread, (1, 0))
    whole = codes[...].astype(jnp.int32)
    if parts == 1:
        return [whole.astype(jnp.float32) * scales]
    shifts = _dot(shift[...], spread, (1, 0))
    nibbles = [whole & 15, (whole >> 4) & 15]
    return [q.astype(jnp.float32) * scales + shifts for q in nibbles]


def _matmul_kernel(*refs, parts):
    x, (codes, scale, *shift), (out, acc) = refs[:parts], refs[parts:-2], refs[-2:]
    step = pl.program_id(2)

    @pl.when(step == 0)
    def _():
        acc[...] = jnp.zeros_like(acc)

    for part, w in zip(x, _weights(codes, scale, shift[0] if shift else None, parts)):
        acc[...] += _dot(part[...].astype(jnp.float32), w, (1, 1))

    @pl.when(step == pl.num_programs(2) - 1)
    def _():
        out[...] = acc[...].astype(out.dtype)


def _transposed_kernel(*refs, parts, outputs):
    dy, codes, scale, *rest = refs
    shift, out, acc = rest[: parts - 1], rest[parts - 1 : 2 * parts - 1], rest[2 * parts - 1 :]
    step = pl.program_id(2)

    @pl.when(step == 0)
    def _():
        for a in acc:
            a[...] = jnp.zeros_like(a)

    rows, columns = dy.shape
    inside = lambda shape, axis: step * columns + jax.lax.broadcasted_iota(jnp.int32, shape, axis) < outputs  # noqa: E731
    d = jnp.where(inside((rows, columns), 1), dy[...].astype(jnp.float32), 0.0)
    for a, w in zip(acc, _weights(codes, scale, shift[0] if shift else None, parts)):
        a[...] += _dot(d, jnp.where(inside(w.shape, 0), w, 0.0), (1, 0))

    @pl.when(step == pl.num_programs(2) - 1)
    def _():
        for o, a in zip(out, acc):
            o[...] = a[...].astype(o.dtype)


def _arrays(w: Packed, bi: int):
    """Codes as int8 and scales as ``[tiles, o, groups a tile]`` in float32, so that every block is whole in its last axis."""
    o = w.scale.shape[0]
    tiled = lambda s: jnp.swapaxes(s.astype(jnp.float32).reshape(o, -1, bi // BLOCK), 0, 1)  # noqa: E731
    codes = w.codes if w.codes.dtype == jnp.int8 else jax.lax.bitcast_convert_type(w.codes, jnp.int8)
    return [codes, tiled(w.scale)] + ([] if w.shift is None else [tiled(w.shift)])


def _layout(x_rows, w: Packed):
    parts = 1 if w.kind == "q8_0" else 2
    width, outputs = w.shape
    bi, bn = _input_tile(width, parts), _rows_tile(x_rows)
    bo = OUT if outputs > OUT else outputs
    return parts, width, outputs, bi, bn, bo


def matmul(x, w: Packed, *, interpret):
    """As `reference.matmul`."""
    parts, width, outputs, bi, bn, bo = _layout(x.shape[0], w)
    arrays = _arrays(w, bi)
    small = pl.BlockSpec((None, bo, bi // BLOCK), lambda n, o, i: (i, o, 0))
    return pl.pallas_call(
        functools.partial(_matmul_kernel, parts=parts),
        grid=(pl.cdiv(x.shape[0], bn), pl.cdiv(outputs, bo), width // bi),
        in_specs=[pl.BlockSpec((bn, bi // parts), lambda n, o, i: (n, i))] * parts
        + [pl.BlockSpec((bo, bi // parts), lambda n, o, i: (o, i))]
        + [small] * (len(arrays) - 1),
        out_specs=pl.BlockSpec((bn, bo), lambda n, o, i: (n, o)),
        out_shape=dispatch.output((x.shape[0], outputs), x.dtype, x),
        scratch_shapes=[pltpu.VMEM((bn, bo), jnp.float32)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        interpret=interpret,
    )(*split_parts(x, parts), *arrays)


def matmul_transposed(dy, w: Packed, *, interpret):
    """As `reference.matmul_transposed`."""
    parts, width, outputs, bi, bn, bo = _layout(dy.shape[0], w)
    arrays = _arrays(w, bi)
    small = pl.BlockSpec((None, bo, bi // BLOCK), lambda n, i, o: (i, o, 0))
    out = pl.pallas_call(
        functools.partial(_transposed_kernel, parts=parts, outputs=outputs),
        grid=(pl.cdiv(dy.shape[0], bn), width // bi, pl.cdiv(outputs, bo)),
        in_specs=[
            pl.BlockSpec((bn, bo), lambda n, i, o: (n, o)),
            pl.BlockSpec((bo, bi // parts), lambda n, i, o: (o, i)),
        ]
        + [small] * (len(arrays) - 1),
        out_specs=[pl.BlockSpec((bn, bi // parts), lambda n, i, o: (n, i))] * parts,
        out_shape=[dispatch.output((dy.shape[0], width // parts), dy.dtype, dy)] * parts,
        scratch_shapes=[pltpu.VMEM((bn, bi // parts), jnp.float32)] * parts,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        interpret=interpret,
    )(dy, *arrays)
    return join_parts(out)
