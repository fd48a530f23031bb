"""Pallas TPU kernels of the compositor: one grid row a tile, chunks of 128 list entries on lanes, pixels on sublanes.

A chunk's features arrive as one (rows, 128) block, double-buffered by the pipeline; chunks behind the end of a list
repeat the last block, which is not fetched again, and are skipped, as are all chunks once the tile is opaque. The
running product of (1 - alpha) is a seven-step scan over lanes. Sums over primitives and over pixels against colours
and cotangents are matrix products; the other gradients are sums over sublanes. Rows of a block: depth and colours,
padded to 8, then the features, padded to 8. Per-pixel vectors enter and leave as lanes and are turned by a masked sum.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from papyrax.jaxlib_ext.splat_raster import weights as W

LANES = 128


def _eight(n):
    return -(-n // 8) * 8


def _column(row):
    """(1, px) to (px, 1)."""
    px = row.shape[1]
    eye = lax.broadcasted_iota(jnp.int32, (px, px), 0) == lax.broadcasted_iota(jnp.int32, (px, px), 1)
    return jnp.sum(jnp.where(eye, row, 0.0), axis=1, keepdims=True)


def _row(column):
    """(px, 1) to (1, px)."""
    px = column.shape[0]
    eye = lax.broadcasted_iota(jnp.int32, (px, px), 0) == lax.broadcasted_iota(jnp.int32, (px, px), 1)
    return jnp.sum(jnp.where(eye, column, 0.0), axis=0, keepdims=True)


def _scan(x, combine, neutral, reverse):
    """Inclusive scan over lanes by doubling."""
    lane = lax.broadcasted_iota(jnp.int32, x.shape, 1)
    shift = 1
    while shift < LANES:
        if reverse:
            other = jnp.where(lane < LANES - shift, pltpu.roll(x, LANES - shift, 1), neutral)
        else:
            other = jnp.where(lane >= shift, pltpu.roll(x, shift, 1), neutral)
        x = combine(x, other)
        shift *= 2
    return x


def _dot(a, b, dims):
    return lax.dot_general(a, b, (dims, ((), ())), precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


def _alphas(block, v8, columns, count, start, weight, low, high, near):
    f = [block[v8 + i : v8 + i + 1] for i in range(W.FEATURES[weight] - 1)]
    lane = lax.broadcasted_iota(jnp.int32, (1, LANES), 1) + start
    place = W.OPACITY[weight]
    f[place] = jnp.where(lane < count, f[place], 0.0)
    pixel = [columns[:, i : i + 1] for i in range(W.PIXEL[weight])]
    raw, saved = W.opacity(weight, f, pixel, near)
    alpha = jnp.minimum(raw, high)
    return jnp.where(alpha >= low, alpha, 0.0), raw, saved, f, pixel, lane


def _forward_kernel(counts, feats, pixels, out, columns, light, final, passed, total, *, v8, static):
    weight, low, high, stop, near = static
    t, c = pl.program_id(0), pl.program_id(1)

    @pl.when(c == 0)
    def _():
        for i in range(W.PIXEL[weight]):
            columns[:, i : i + 1] = _column(pixels[0, i : i + 1, :])
        light[...] = jnp.ones_like(light)
        final[...] = jnp.ones_like(final)
        passed[...] = jnp.zeros_like(passed)
        total[...] = jnp.zeros_like(total)

    @pl.when((c * LANES < counts[t]) & (jnp.max(light[...]) > 0.0))
    def _():
        block = feats[0]
        alpha, *_ = _alphas(block, v8, columns, counts[t], c * LANES, weight, low, high, near)
        after = light[...] * _scan(1.0 - alpha, jnp.multiply, 1.0, False)
        lets = after > stop
        w = jnp.where(lets, alpha * after / (1.0 - alpha), 0.0)
        total[...] += _dot(block[:v8], w, ((1,), (1,)))
        final[...] = jnp.minimum(final[...], jnp.min(jnp.where(lets, after, 1.0), axis=1, keepdims=True))
        passed[...] += jnp.sum(jnp.where(lets, 1.0, 0.0), axis=1, keepdims=True)
        light[...] = jnp.where(after[:, LANES - 1 :] > stop, after[:, LANES - 1 :], 0.0)

    @pl.when(c == pl.num_programs(1) - 1)
    def _():
        out[0, :v8, :] = total[...]
        out[0, v8 : v8 + 1, :] = _row(final[...])
        out[0, v8 + 1 : v8 + 2, :] = _row(passed[...])


def _backward_kernel(
    last, feats, pixels, by_value, state, out, columns, light, behind, passed, *, v8, static, absolute
):
    weight, low, high, _, near = static
    t = pl.program_id(0)
    c = pl.num_programs(1) - 1 - pl.program_id(1)

    @pl.when(pl.program_id(1) == 0)
    def _():
        for i in range(W.PIXEL[weight]):
            columns[:, i : i + 1] = _column(pixels[0, i : i + 1, :])
        light[...] = _column(state[0, 0:1, :])
        passed[...] = _column(state[0, 1:2, :])
        behind[...] = light[...] * _column(state[0, 2:3, :])

    @pl.when(c * LANES >= last[t])
    def _():
        out[...] = jnp.zeros_like(out)

    @pl.when(c * LANES < last[t])
    def _():
        block = feats[0]
        # Entries past a list's end were passed with opacity 0, so cutting at `last` changes nothing.
        alpha, raw, saved, f, pixel, lane = _alphas(block, v8, columns, last[t], c * LANES, weight, low, high, near)
        alpha = jnp.where(lane.astype(jnp.float32) < passed[...], alpha, 0.0)
        before = light[...] / _scan(1.0 - alpha, jnp.multiply, 1.0, True)
        w = alpha * before
        value = _dot(by_value[0], block[:v8], ((0,), (0,)))
        wv = w * value
        rear = behind[...] + _scan(wv, jnp.add, 0.0, True) - wv
        g = jnp.where((alpha > 0.0) & (raw <= high), before * value - rear / (1.0 - alpha), 0.0)
        out[0, :v8, :] = _dot(by_value[0], w, ((1,), (0,)))
        grads = W.pullback(weight, f, pixel, saved, g, absolute)
        for i, grad in enumerate(grads):
            out[0, v8 + i : v8 + i + 1, :] = jnp.sum(grad, axis=0, keepdims=True)
        for i in range(v8 + len(grads), out.shape[1]):
            out[0, i : i + 1, :] = jnp.zeros((1, LANES), jnp.float32)
        light[...] = before[:, :1]
        behind[...] += jnp.sum(wv, axis=1, keepdims=True)


def _blocks(prims, colours, lists):
    """List entries as (tiles, rows, entries): depth and colours, then features; entries a multiple of 128."""
    v8, f8 = _eight(1 + colours.shape[1]), _eight(prims.shape[1] - 1)
    values = jnp.concatenate([prims[:, -1:], colours], 1)
    table = jnp.concatenate([_wide(values, v8), _wide(prims[:, :-1], f8)], 1).astype(jnp.float32)
    padded = jnp.pad(lists, ((0, 0), (0, -lists.shape[1] % LANES)))
    return table.T[:, padded].swapaxes(0, 1), v8


def _wide(a, n):
    return jnp.pad(a, ((0, 0), (0, n - a.shape[1])))


def _by_chunk(rows, reverse):
    """Blocks of `rows` rows that walk the list; past its end the index stays, so nothing is fetched."""

    def index(t, c, counts):
        chunk = pl.num_programs(1) - 1 - c if reverse else c
        return t, 0, jnp.minimum(chunk, jnp.maximum(lax.div(counts[t] - 1, jnp.int32(LANES)), 0))

    return pl.BlockSpec((1, rows, LANES), index)


def _by_tile(rows, px):
    return pl.BlockSpec((1, rows, px), lambda t, c, counts: (t, 0, 0))


def forward(prims, colours, lists, counts, pixels, weight, low, high, stop, near, *, interpret):
    """As `reference.forward`."""
    feats, v8 = _blocks(prims, colours, lists)
    tiles, px, g = pixels.shape
    chunks = feats.shape[2] // LANES
    column = pltpu.VMEM((px, 1), jnp.float32)
    out = pl.pallas_call(
        functools.partial(_forward_kernel, v8=v8, static=(weight, low, high, stop, near)),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(tiles, chunks),
            in_specs=[_by_chunk(feats.shape[1], False), _by_tile(g, px)],
            out_specs=_by_tile(v8 + 8, px),
            scratch_shapes=[
                pltpu.VMEM((px, LANES), jnp.float32), column, column, column, pltpu.VMEM((v8, px), jnp.float32)
            ],
        ),
        out_shape=jax.ShapeDtypeStruct((tiles, v8 + 8, px), jnp.float32),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        interpret=interpret,
    )(counts.astype(jnp.int32), feats, pixels.astype(jnp.float32).swapaxes(1, 2))  # fmt: skip
    dtype = prims.dtype
    colour = out[:, 1 : 1 + colours.shape[1]].swapaxes(1, 2).astype(dtype)
    passed = out[:, v8 + 1].astype(jnp.int32)
    return colour, out[:, v8].astype(dtype), out[:, 0].astype(dtype), passed


def backward(
    prims, colours, lists, counts, pixels, final, passed, grads, weight, low, high, stop, near, absolute, *, interpret
):
    """As `reference.backward`."""
    by_colour, by_light, by_depth = grads
    feats, v8 = _blocks(prims, colours, lists)
    tiles, px, g = pixels.shape
    nf, nc, extra = prims.shape[1], colours.shape[1], W.probes(weight) if absolute else 0
    rows = v8 + _eight(nf - 1 + extra)
    last = jnp.minimum(counts, passed.max(1)).astype(jnp.int32)
    value = jnp.concatenate([by_depth[..., None], by_colour], -1).astype(jnp.float32)
    value = jnp.pad(value, ((0, 0), (0, 0), (0, v8 - 1 - nc))).swapaxes(1, 2)
    state = jnp.stack([final.astype(jnp.float32), passed.astype(jnp.float32), by_light.astype(jnp.float32)], 1)
    state = jnp.pad(state, ((0, 0), (0, 5), (0, 0)))
    chunks = feats.shape[2] // LANES
    column = pltpu.VMEM((px, 1), jnp.float32)
    out = pl.pallas_call(
        functools.partial(
            _backward_kernel, v8=v8, static=(weight, low, high, stop, near), absolute=absolute
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(tiles, chunks),
            in_specs=[_by_chunk(feats.shape[1], True), _by_tile(g, px), _by_tile(v8, px), _by_tile(8, px)],
            out_specs=pl.BlockSpec((1, rows, LANES), lambda t, c, last: (t, 0, pl.num_programs(1) - 1 - c)),
            scratch_shapes=[pltpu.VMEM((px, LANES), jnp.float32), column, column, column],
        ),
        out_shape=jax.ShapeDtypeStruct((tiles, rows, feats.shape[2]), jnp.float32),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        interpret=interpret,
    )(last, feats, pixels.astype(jnp.float32).swapaxes(1, 2), value, state)  # fmt: skip
    out = out.swapaxes(1, 2)[:, : lists.shape[1]].astype(prims.dtype)
    parts = [out[..., v8 : v8 + nf - 1], out[..., : 1 + nc], out[..., v8 + nf - 1 : v8 + nf - 1 + extra]]
    return jnp.concatenate(parts, -1)
