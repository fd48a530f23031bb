"""Vocabulary statistics on the TPU (Pallas, Mosaic): logits exist as one tile in VMEM, forward and backward.

With cotangents dL of the log-sum-exp and dH of the entropy: dz = p (dL - dH (z - lse + H)), then dh = dz w and dw = dz^T h, each by its own walk
over tiles (words innermost for dh, rows innermost for dw).
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from papyrax.jaxlib_ext import dispatch

ROWS, WORDS, LANES = 128, 512, 128
LOW = -1e30


def _dot(a, b, contract):
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    return jax.lax.dot_general(
        a, b, ((contract[:1], contract[1:]), ((), ())), precision=precision, preferred_element_type=jnp.float32
    )


def _tile(h, w, first, words, temperature, softcap):
    """Logits of a tile, which columns exist, and the derivative of the logits by the raw product."""
    raw = _dot(h, w, (1, 1))
    column = first + jax.lax.broadcasted_iota(jnp.int32, raw.shape, 1)
    slope = 1.0 / temperature
    if softcap is not None:
        bent = jnp.tanh(raw / softcap)
        raw, slope = softcap * bent, (1.0 - bent * bent) / temperature
    return raw / temperature, column, column < words, slope


def _clean(w, first, words):
    """Rows beyond the last word are zero instead of whatever lies in memory there."""
    row = first + jax.lax.broadcasted_iota(jnp.int32, w.shape, 0)
    return jnp.where(row < words, w, jnp.zeros_like(w))


def _forward_kernel(h, w, top_o, arg_o, lse_o, ent_o, top, arg, mass, dot, *, words, temperature, softcap):
    j = pl.program_id(1)
    first = j * w.shape[0]

    @pl.when(j == 0)
    def _():
        top[...] = jnp.full_like(top, LOW)
        arg[...] = jnp.zeros_like(arg)
        mass[...] = jnp.zeros_like(mass)
        dot[...] = jnp.zeros_like(dot)

    z, column, inside, _ = _tile(h[...], _clean(w[...], first, words), first, words, temperature, softcap)
    z = jnp.where(inside, z, LOW)
    here = jnp.max(z, axis=1, keepdims=True)
    index = jnp.min(jnp.where(z == here, column, words).astype(jnp.float32), axis=1, keepdims=True)
    old = top[:, :1]
    new = jnp.maximum(old, here)
    keep = jnp.exp(old - new)
    p = jnp.where(inside, jnp.exp(z - new), 0.0)
    spread = lambda x, like: jnp.broadcast_to(x, like.shape)  # noqa: E731
    arg[...] = jnp.where(spread(here > old, arg), spread(index, arg), arg[...])
    mass[...] = spread(keep * mass[:, :1] + jnp.sum(p, axis=1, keepdims=True), mass)
    dot[...] = spread(keep * dot[:, :1] + jnp.sum(p * z, axis=1, keepdims=True), dot)
    top[...] = spread(new, top)

    @pl.when(j == pl.num_programs(1) - 1)
    def _():
        lse = top[:, :1] + jnp.log(mass[:, :1])
        top_o[...] = top[:, :1]
        arg_o[...] = arg[:, :1].astype(jnp.int32)
        lse_o[...] = lse
        ent_o[...] = lse - dot[:, :1] / mass[:, :1]


def _d_logits(h, w, lse, entropy, d_lse, d_ent, first, words, temperature, softcap):
    z, _, inside, slope = _tile(h, w, first, words, temperature, softcap)
    p = jnp.where(inside, jnp.exp(jnp.where(inside, z, LOW) - lse), 0.0)
    return p * (d_lse - d_ent * (z - lse + entropy)) * slope


def _dh_kernel(h, w, lse, ent, d_lse, d_ent, dh, acc, *, words, temperature, softcap):
    j = pl.program_id(1)
    first = j * w.shape[0]

    @pl.when(j == 0)
    def _():
        acc[...] = jnp.zeros_like(acc)

    table = _clean(w[...], first, words)
    dz = _d_logits(h[...], table, lse[...], ent[...], d_lse[...], d_ent[...], first, words, temperature, softcap)
    acc[...] += _dot(dz.astype(table.dtype), table, (1, 0))

    @pl.when(j == pl.num_programs(1) - 1)
    def _():
        dh[...] = acc[...].astype(dh.dtype)


def _dw_kernel(h, w, lse, ent, d_lse, d_ent, dw, acc, *, words, temperature, softcap):
    i, first = pl.program_id(1), pl.program_id(0) * w.shape[0]

    @pl.when(i == 0)
    def _():
        acc[...] = jnp.zeros_like(acc)

    table = _clean(w[...], first, words)
    dz = _d_logits(h[...], table, lse[...], ent[...], d_lse[...], d_ent[...], first, words, temperature, softcap)
    acc[...] += _dot(dz.astype(h.dtype), h[...], (0, 0))

    @pl.when(i == pl.num_programs(1) - 1)
    def _():
        dw[...] = acc[...].astype(dw.dtype)


def _pad_rows(x, multiple):
    return jnp.pad(x, [(0, -x.shape[0] % multiple)] + [(0, 0)] * (x.ndim - 1))


def _sizes(n, v):
    return min(ROWS, -(-n // 16) * 16), min(WORDS, -(-v // 16) * 16)


def forward(h, w, temperature, softcap, *, interpret):
    """(max, argmax, lse, entropy) of every row."""
    n, v, e = h.shape[0], w.shape[0], h.shape[1]
    bn, bv = _sizes(n, v)
    h = _pad_rows(h, bn)
    column = pl.BlockSpec((bn, 1), lambda i, j: (i, 0))
    shape = (h.shape[0], 1)
    out = pl.pallas_call(
        functools.partial(_forward_kernel, words=v, temperature=temperature, softcap=softcap),
        grid=(h.shape[0] // bn, pl.cdiv(v, bv)),
        in_specs=[pl.BlockSpec((bn, e), lambda i, j: (i, 0)), pl.BlockSpec((bv, e), lambda i, j: (j, 0))],
        out_specs=[column] * 4,
        out_shape=[dispatch.output(shape, dtype, h) for dtype in (jnp.float32, jnp.int32, jnp.float32, jnp.float32)],
        scratch_shapes=[pltpu.VMEM((bn, LANES), jnp.float32)] * 4,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        interpret=interpret,
    )(h, w)
    return tuple(x[:n, 0] for x in out)


def backward(h, w, lse, entropy, d_lse, d_entropy, temperature, softcap, *, interpret):
    """Cotangents of h and w from those of lse and entropy."""
    n, v, e = h.shape[0], w.shape[0], h.shape[1]
    bn, bv = _sizes(n, v)
    # Rows of padding have zero cotangents, so they add nothing.
    arrays = (_pad_rows(h, bn), w, *(_pad_rows(x[:, None], bn) for x in (lse, entropy, d_lse, d_entropy)))
    rows, words = arrays[0].shape[0] // bn, pl.cdiv(v, bv)
    options = {"words": v, "temperature": temperature, "softcap": softcap}
    params = pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary"))

    def specs(row, word):
        column = pl.BlockSpec((bn, 1), lambda *g: (row(*g), 0))
        return [pl.BlockSpec((bn, e), lambda *g: (row(*g), 0)), pl.BlockSpec((bv, e), lambda *g: (word(*g), 0))] + [
            column
        ] * 4

    dh = pl.pallas_call(
        functools.partial(_dh_kernel, **options),
        grid=(rows, words),
        in_specs=specs(lambda i, j: i, lambda i, j: j),
        out_specs=pl.BlockSpec((bn, e), lambda i, j: (i, 0)),
        out_shape=dispatch.output(arrays[0].shape, h.dtype, h),
        scratch_shapes=[pltpu.VMEM((bn, e), jnp.float32)],
        compiler_params=params,
        interpret=interpret,
    )(*arrays)
    dw = pl.pallas_call(
        functools.partial(_dw_kernel, **options),
        grid=(words, rows),
        in_specs=specs(lambda j, i: i, lambda j, i: j),
        out_specs=pl.BlockSpec((bv, e), lambda j, i: (j, 0)),
        out_shape=dispatch.output(w.shape, w.dtype, h),
        scratch_shapes=[pltpu.VMEM((bv, e), jnp.float32)],
        compiler_params=params,
        interpret=interpret,
    )(*arrays)
    return dh[:n], dw
