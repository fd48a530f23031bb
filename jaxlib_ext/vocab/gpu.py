"""Vocabulary statistics on the GPU (Pallas, Triton): a program holds a tile of rows and walks over the words (over the rows for dw).

The width of h is walked in pieces, so no tile has to hold a whole row of the table. Formulas: `tpu`.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from papyrax.jaxlib_ext import dispatch

ROWS, WORDS, PIECE = 32, 64, 64
LOW = -1e30


def _dot(a, b):
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    return jnp.dot(a, b, precision=precision, preferred_element_type=jnp.float32)


def _tile(h, w, at_rows, at_words, pieces, first, words, temperature, softcap):
    """Logits of a tile, their columns, which of them exist, and the derivative of the logits by the raw product."""

    def piece(i, raw):
        at = pl.ds(i * PIECE, PIECE)
        return raw + _dot(h[at_rows, at], w[at_words, at].T)

    raw = jax.lax.fori_loop(0, pieces, piece, jnp.zeros((ROWS, WORDS), jnp.float32))
    column = first + jnp.arange(WORDS, dtype=jnp.int32)[None, :]
    slope = jnp.full_like(raw, 1.0 / temperature)
    if softcap is not None:
        e = jnp.exp(-2.0 * jnp.abs(raw) / softcap)
        bent = jnp.sign(raw) * (1.0 - e) / (1.0 + e)
        raw, slope = softcap * bent, (1.0 - bent * bent) / temperature
    return raw / temperature, column, jnp.broadcast_to(column < words, raw.shape), slope


def _forward_kernel(h, w, top_o, arg_o, lse_o, ent_o, *, words, tiles, pieces, temperature, softcap):
    def step(j, carry):
        top, arg, mass, dot = carry
        first = j * WORDS
        z, column, inside, _ = _tile(h, w, slice(None), pl.ds(first, WORDS), pieces, first, words, temperature, softcap)
        z = jnp.where(inside, z, LOW)
        here = jnp.max(z, axis=1)
        index = jnp.min(jnp.where(z == here[:, None], column, words), axis=1)
        new = jnp.maximum(top, here)
        keep = jnp.exp(top - new)
        p = jnp.where(inside, jnp.exp(z - new[:, None]), 0.0)
        return (
            new,
            jnp.where(here > top, index, arg),
            keep * mass + jnp.sum(p, axis=1),
            keep * dot + jnp.sum(p * z, axis=1),
        )

    zero = jnp.zeros((ROWS,), jnp.float32)
    start = (jnp.full((ROWS,), LOW, jnp.float32), jnp.zeros((ROWS,), jnp.int32), zero, zero)
    top, arg, mass, dot = jax.lax.fori_loop(0, tiles, step, start)
    lse = top + jnp.log(mass)
    top_o[...], arg_o[...], lse_o[...], ent_o[...] = top, arg, lse, lse - dot / mass


def _d_logits(z, inside, slope, lse, ent, d_lse, d_ent):
    p = jnp.where(inside, jnp.exp(jnp.where(inside, z, LOW) - lse[:, None]), 0.0)
    return p * (d_lse[:, None] - d_ent[:, None] * (z - lse[:, None] + ent[:, None])) * slope


def _dh_kernel(h, w, lse, ent, d_lse, d_ent, w_piece, dh, *, words, tiles, pieces, temperature, softcap):
    rows = [x[...] for x in (lse, ent, d_lse, d_ent)]

    def step(j, acc):
        at, first = pl.ds(j * WORDS, WORDS), j * WORDS
        z, _, inside, slope = _tile(h, w, slice(None), at, pieces, first, words, temperature, softcap)
        return acc + _dot(_d_logits(z, inside, slope, *rows).astype(w.dtype), w_piece[at, :])

    dh[...] = jax.lax.fori_loop(0, tiles, step, jnp.zeros((ROWS, PIECE), jnp.float32)).astype(dh.dtype)


def _dw_kernel(h, w, lse, ent, d_lse, d_ent, h_piece, dw, *, words, tiles, pieces, temperature, softcap):
    first = pl.program_id(0) * WORDS

    def step(i, acc):
        at = pl.ds(i * ROWS, ROWS)
        z, _, inside, slope = _tile(h, w, at, slice(None), pieces, first, words, temperature, softcap)
        dz = _d_logits(z, inside, slope, *(x[at] for x in (lse, ent, d_lse, d_ent)))
        return acc + _dot(dz.astype(h.dtype).T, h_piece[at, :])

    dw[...] = jax.lax.fori_loop(0, tiles, step, jnp.zeros((WORDS, PIECE), jnp.float32)).astype(dw.dtype)


def _pad(x, rows, columns=None):
    widths = [(0, -x.shape[0] % rows)] + ([(0, -x.shape[1] % columns)] if columns else [])
    return jnp.pad(x, widths) if any(b for _, b in widths) else x


def _call(kernel, grid, in_specs, out_specs, out_shape, interpret):
    return pl.pallas_call(
        kernel,
        grid=grid,
        in_specs=in_specs,
        out_specs=out_specs,
        out_shape=out_shape,
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=2),
    )


def forward(h, w, temperature, softcap, *, interpret):
    """(max, argmax, lse, entropy) of every row."""
    n, v = h.shape[0], w.shape[0]
    h, w = _pad(h, ROWS, PIECE), _pad(w, WORDS, PIECE)
    e = h.shape[1]
    options = {
        "words": v,
        "tiles": w.shape[0] // WORDS,
        "pieces": e // PIECE,
        "temperature": temperature,
        "softcap": softcap,
    }
    out = _call(
        functools.partial(_forward_kernel, **options),
        (h.shape[0] // ROWS,),
        [pl.BlockSpec((ROWS, e), lambda i: (i, 0)), pl.BlockSpec(w.shape, lambda i: (0, 0))],
        [pl.BlockSpec((ROWS,), lambda i: (i,))] * 4,
        [dispatch.output(h.shape[:1], dtype, h) for dtype in (jnp.float32, jnp.int32, jnp.float32, jnp.float32)],
        interpret,
    )(h, w)
    return tuple(x[:n] for x in out)


def backward(h, w, lse, entropy, d_lse, d_entropy, temperature, softcap, *, interpret):
    """Cotangents of h and w from those of lse and entropy; rows of padding have zero cotangents and add nothing."""
    (n, width), v = h.shape, w.shape[0]
    h, w = _pad(h, ROWS, PIECE), _pad(w, WORDS, PIECE)
    rows = tuple(_pad(x, ROWS) for x in (lse, entropy, d_lse, d_entropy))
    (n_all, e), v_all = h.shape, w.shape[0]
    options = {"words": v, "pieces": e // PIECE, "temperature": temperature, "softcap": softcap}
    row, all_rows = pl.BlockSpec((ROWS,), lambda i, p: (i,)), pl.BlockSpec((n_all,), lambda j, p: (0,))
    dh = _call(
        functools.partial(_dh_kernel, tiles=v_all // WORDS, **options),
        (n_all // ROWS, e // PIECE),
        [pl.BlockSpec((ROWS, e), lambda i, p: (i, 0)), pl.BlockSpec((v_all, e), lambda i, p: (0, 0))]
        + [row] * 4
        + [pl.BlockSpec((v_all, PIECE), lambda i, p: (0, p))],
        pl.BlockSpec((ROWS, PIECE), lambda i, p: (i, p)),
        dispatch.output(h.shape, h.dtype, h),
        interpret,
    )(h, w, *rows, w)
    dw = _call(
        functools.partial(_dw_kernel, tiles=n_all // ROWS, **options),
        (v_all // WORDS, e // PIECE),
        [pl.BlockSpec((n_all, e), lambda j, p: (0, 0)), pl.BlockSpec((WORDS, e), lambda j, p: (j, 0))]
        + [all_rows] * 4
        + [pl.BlockSpec((n_all, PIECE), lambda j, p: (0, p))],
        pl.BlockSpec((WORDS, PIECE), lambda j, p: (j, p)),
        dispatch.output(w.shape, w.dtype, h),
        interpret,
    )(h, w, *rows, h)
    return dh[:n, :width], dw[:v, :width]
