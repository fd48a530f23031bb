"""Products with packed weights on the GPU (Pallas, Triton): codes are widened in registers, a few groups of 32 inputs at a time."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from papyrax.jaxlib_ext import dispatch
from papyrax.jaxlib_ext.quant_matmul.reference import BLOCK, Packed, join_parts, split_parts

OUT, ROWS = 64, 16


def _dot(a, b):
    return jnp.dot(a, b, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


def _groups_tile(groups: int) -> int:
    """Groups a step: the largest power of two up to 4 that divides."""
    return next(n for n in (4, 2, 1) if groups % n == 0)


def _weights(codes, scale, shift, rows, at_groups, at_codes, ok, parts):
    """The tile of each part, ``[bo, groups * unit]`` in float32; rows that are not ``ok`` are zero."""
    unit = BLOCK // parts

    def load(ref):
        return ref[...] if ok is None else plgpu.load(ref, mask=ok, other=0)

    def spread(ref):
        s = load(ref.at[rows, at_groups]).astype(jnp.float32)
        return jnp.broadcast_to(s[:, :, None], (*s.shape, unit)).reshape(s.shape[0], s.shape[1] * unit)

    whole = load(codes.at[rows, at_codes])
    scales = spread(scale)
    if parts == 1:
        return [whole.astype(jnp.float32) * scales]
    whole, shifts = whole.astype(jnp.int32), spread(shift)
    return [q.astype(jnp.float32) * scales + shifts for q in (whole & 15, (whole >> 4) & 15)]


def _matmul_kernel(*refs, parts, steps, step_groups, rows, outputs):
    x, (codes, scale, *shift), out = refs[:parts], refs[parts:-1], refs[-1]
    unit = BLOCK // parts
    row_ok = (pl.program_id(0) * ROWS + jnp.arange(ROWS, dtype=jnp.int32) < rows)[:, None]
    out_ok = (pl.program_id(1) * OUT + jnp.arange(OUT, dtype=jnp.int32) < outputs)[:, None]

    def step(i, acc):
        at_groups, at_codes = pl.ds(i * step_groups, step_groups), pl.ds(i * step_groups * unit, step_groups * unit)
        tiles = _weights(codes, scale, shift[0] if shift else None, slice(None), at_groups, at_codes, out_ok, parts)
        for part, w in zip(x, tiles):
            acc += _dot(plgpu.load(part.at[:, at_codes], mask=row_ok, other=0.0).astype(jnp.float32), w.T)
        return acc

    acc = jax.lax.fori_loop(0, steps, step, jnp.zeros((ROWS, OUT), jnp.float32))
    plgpu.store(out, acc.astype(out.dtype), mask=row_ok & out_ok.T)


def _transposed_kernel(*refs, parts, steps, step_groups, rows, tile):
    dy, codes, scale, *rest = refs
    shift, out = rest[: parts - 1], rest[parts - 1 :]
    unit = BLOCK // parts
    width = step_groups * unit
    row_ok = (pl.program_id(0) * ROWS + jnp.arange(ROWS, dtype=jnp.int32) < rows)[:, None]

    def step(i, acc):
        at = pl.ds(i * tile, tile)
        every = slice(None)
        tiles = _weights(codes, scale, shift[0] if shift else None, at, every, every, None, parts)
        d = plgpu.load(dy.at[:, at], mask=row_ok, other=0.0).astype(jnp.float32)
        return tuple(a + _dot(d, w) for a, w in zip(acc, tiles))

    acc = jax.lax.fori_loop(0, steps, step, tuple(jnp.zeros((ROWS, width), jnp.float32) for _ in range(parts)))
    for o, a in zip(out, acc):
        plgpu.store(o, a.astype(o.dtype), mask=row_ok)


def _arrays(w: Packed):
    return [w.codes, w.scale] + ([] if w.shift is None else [w.shift])


def matmul(x, w: Packed, *, interpret):
    """As `reference.matmul`."""
    parts = 1 if w.kind == "q8_0" else 2
    n, (width, outputs) = x.shape[0], w.shape
    groups = width // BLOCK
    step = _groups_tile(groups)
    arrays = _arrays(w)
    return pl.pallas_call(
        functools.partial(_matmul_kernel, parts=parts, steps=groups // step, step_groups=step, rows=n, outputs=outputs),
        grid=(pl.cdiv(n, ROWS), pl.cdiv(outputs, OUT)),
        in_specs=[pl.BlockSpec((ROWS, width // parts), lambda n, o: (n, 0))] * parts
        + [pl.BlockSpec((OUT, a.shape[1]), lambda n, o: (o, 0)) for a in arrays],
        out_specs=pl.BlockSpec((ROWS, OUT), lambda n, o: (n, o)),
        out_shape=dispatch.output((n, outputs), x.dtype, x),
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=2),
    )(*split_parts(x, parts), *arrays)


def matmul_transposed(dy, w: Packed, *, interpret):
    """As `reference.matmul_transposed`."""
    parts = 1 if w.kind == "q8_0" else 2
    n, (width, outputs) = dy.shape[0], w.shape
    groups = width // BLOCK
    step = _groups_tile(groups)
    arrays = _arrays(w)
    # The loop runs over outputs, so they come in whole tiles: by the size of the tile where one divides, else by zeros.
    tile = next((size for size in (OUT, OUT // 2, OUT // 4) if outputs % size == 0), OUT)
    pad = -outputs % tile
    if pad:
        dy, arrays = jnp.pad(dy, ((0, 0), (0, pad))), [jnp.pad(a, ((0, pad), (0, 0))) for a in arrays]
    total = outputs + pad
    cut = lambda a: pl.BlockSpec((total, a.shape[1] // (groups // step)), lambda n, i: (0, i))  # noqa: E731
    out_spec = pl.BlockSpec((ROWS, step * BLOCK // parts), lambda n, i: (n, i))
    out = pl.pallas_call(
        functools.partial(_transposed_kernel, parts=parts, steps=total // tile, step_groups=step, rows=n, tile=tile),
        grid=(pl.cdiv(n, ROWS), groups // step),
        in_specs=[pl.BlockSpec((ROWS, total), lambda n, i: (n, 0))] + [cut(a) for a in arrays],
        out_specs=[out_spec] * parts,
        out_shape=[dispatch.output((n, width // parts), dy.dtype, dy)] * parts,
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=2),
    )(dy, *arrays)
    return join_parts(out)
