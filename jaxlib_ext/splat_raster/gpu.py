"""Pallas Triton kernels of the compositor: one program a tile, its pixels the program's threads.

The program walks the tile's list entry by entry; an entry's numbers are scalars that all threads read. Opacity,
transmittance and sums live in registers. Whether any pixel still lets light through is asked once in BATCH entries.
The backward program walks back from the last contributing entry and writes each entry's sums over pixels to a row of
its own: no atomics, the same result every time.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from papyrax.jaxlib_ext.splat_raster import weights as W

BATCH = 16


def _pair(entries, t, k, pixel, nf, weight, low, high, near):
    f = [entries[t, k, i] for i in range(nf - 1)]
    raw, saved = W.opacity(weight, f, pixel, near)
    alpha = jnp.minimum(raw, high)
    return jnp.where(alpha >= low, alpha, 0.0), raw, saved, f


def _forward_kernel(entries, counts, pixels, out, *, nf, nc, static):
    weight, low, high, stop, near = static
    t = pl.program_id(0)
    pixel = [pixels[t, i, :] for i in range(W.PIXEL[weight])]
    count = counts[t]
    zero = jnp.zeros(pixel[0].shape, jnp.float32)

    def step(k, state):
        light, final, passed, sums = state
        alpha, *_ = _pair(entries, t, k, pixel, nf, weight, low, high, near)
        after = light * (1.0 - alpha)
        lets = after > stop
        w = jnp.where(lets, light - after, 0.0)
        sums = tuple(s + w * entries[t, k, nf - 1 + j] for j, s in enumerate(sums))
        return jnp.where(lets, after, 0.0), jnp.where(lets, after, final), passed + jnp.where(lets, 1.0, 0.0), sums

    def batch(state):
        start, *rest = state
        rest = lax.fori_loop(start, jnp.minimum(start + BATCH, count), step, tuple(rest))
        return start + BATCH, *rest

    def more(state):
        return (state[0] < count) & (jnp.max(state[1]) > 0.0)

    state = (jnp.int32(0), zero + 1.0, zero + 1.0, zero, (zero,) * (nc + 1))
    _, _, final, passed, sums = lax.while_loop(more, batch, state)
    for j, row in enumerate((*sums, final, passed)):
        out[t, j, :] = row


def _backward_kernel(entries, last, pixels, by_value, state, out, *, nf, nc, static, absolute):
    weight, low, high, _, near = static
    t = pl.program_id(0)
    pixel = [pixels[t, i, :] for i in range(W.PIXEL[weight])]
    by = [by_value[t, j, :] for j in range(nc + 1)]
    final, passed, by_light = (state[t, j, :] for j in range(3))
    count = last[t]

    def step(i, carry):
        light, behind = carry
        k = count - 1 - i
        alpha, raw, saved, f = _pair(entries, t, k, pixel, nf, weight, low, high, near)
        alpha = jnp.where(k.astype(jnp.float32) < passed, alpha, 0.0)
        before = light / (1.0 - alpha)
        w = alpha * before
        value = sum(entries[t, k, nf - 1 + j] * b for j, b in enumerate(by))
        g = jnp.where((alpha > 0.0) & (raw <= high), before * value - behind / (1.0 - alpha), 0.0)
        grads = W.pullback(weight, f, pixel, saved, g, absolute)
        for j, grad in enumerate(grads[: nf - 1] + [w * b for b in by] + grads[nf - 1 :]):
            out[t, k, j] = jnp.sum(grad)
        return before, behind + w * value

    lax.fori_loop(0, count, step, (final, final * by_light))


def _entries(prims, colours, lists):
    return jnp.concatenate([prims, colours], 1).astype(jnp.float32)[lists]


def _check(px):
    if px & (px - 1):
        raise ValueError(f"tiles have {px} pixels, the Triton kernel wants a power of two.")


def forward(prims, colours, lists, counts, pixels, weight, low, high, stop, near, *, interpret):
    """As `reference.forward`."""
    tiles, px, _ = pixels.shape
    _check(px)
    nf, nc = prims.shape[1], colours.shape[1]
    out = pl.pallas_call(
        functools.partial(_forward_kernel, nf=nf, nc=nc, static=(weight, low, high, stop, near)),
        grid=(tiles,),
        out_shape=jax.ShapeDtypeStruct((tiles, nc + 3, px), jnp.float32),
        compiler_params=plgpu.CompilerParams(num_warps=max(1, min(8, px // 32)), num_stages=2),
        interpret=interpret,
    )(
        _entries(prims, colours, lists),
        jnp.minimum(counts, lists.shape[1]).astype(jnp.int32),
        pixels.astype(jnp.float32).swapaxes(1, 2),
    )
    dtype = prims.dtype
    colour = out[:, 1 : 1 + nc].swapaxes(1, 2).astype(dtype)
    return colour, out[:, nc + 1].astype(dtype), out[:, 0].astype(dtype), out[:, nc + 2].astype(jnp.int32)


def backward(
    prims, colours, lists, counts, pixels, final, passed, grads, weight, low, high, stop, near, absolute, *, interpret
):
    """As `reference.backward`."""
    by_colour, by_light, by_depth = grads
    tiles, px, _ = pixels.shape
    _check(px)
    nf, nc = prims.shape[1], colours.shape[1]
    width = nf + nc + (W.probes(weight) if absolute else 0)
    last = jnp.minimum(jnp.minimum(counts, lists.shape[1]), passed.max(1)).astype(jnp.int32)
    value = jnp.concatenate([by_depth[..., None], by_colour], -1).astype(jnp.float32).swapaxes(1, 2)
    state = jnp.stack([final.astype(jnp.float32), passed.astype(jnp.float32), by_light.astype(jnp.float32)], 1)
    out = pl.pallas_call(
        functools.partial(
            _backward_kernel, nf=nf, nc=nc, static=(weight, low, high, stop, near), absolute=absolute
        ),
        grid=(tiles,),
        out_shape=jax.ShapeDtypeStruct((tiles, lists.shape[1], width), jnp.float32),
        compiler_params=plgpu.CompilerParams(num_warps=max(1, min(8, px // 32)), num_stages=2),
        interpret=interpret,
    )(
        _entries(prims, colours, lists),
        last,
        pixels.astype(jnp.float32).swapaxes(1, 2),
        value,
        state,
    )  # fmt: skip
    # Entries behind the last contributing one are never written.
    written = jnp.arange(lists.shape[1])[None] < last[:, None]
    return jnp.where(written[..., None], out, 0).astype(prims.dtype)
