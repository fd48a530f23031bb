"""Attention on the GPU (Pallas, Triton): a program holds one tile of queries (of keys for dK and dV) and walks over the other side.

Widths are padded to powers of two; tiles that nobody sees cost one comparison of positions. Formulas: `reference`.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from papyrax.jaxlib_ext import dispatch
from papyrax.jaxlib_ext.attention.reference import EMPTY

TILE = 64


def _pow2(n: int) -> int:
    return max(16, pl.next_power_of_2(n))


def _padded(x, axis, size, value=0):
    if x.shape[axis] == size:
        return x
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, size - x.shape[axis])
    return jnp.pad(x, widths, constant_values=value)


def _up(n: int, tile: int) -> int:
    return -(-n // tile) * tile


def _see(q_pos, k_pos, q_seg, k_seg, causal, window):
    q_pos, q_seg, k_pos, k_seg = q_pos[:, None], q_seg[:, None], k_pos[None, :], k_seg[None, :]
    see = (q_seg == k_seg) & (q_seg >= 0)
    if causal:
        see &= k_pos <= q_pos
    if window is not None:
        see &= jnp.abs(q_pos - k_pos) < window
    return see


def _any(see):
    return jnp.max(jnp.max(see.astype(jnp.int32), axis=1), axis=0) > 0


def _dot(a, b):
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    return jnp.dot(a, b, precision=precision, preferred_element_type=jnp.float32)


def _scores(q, k, scale, softcap):
    s = _dot(q, k.T) * scale
    if softcap is None:
        return s
    e = jnp.exp(-2.0 * jnp.abs(s) / softcap)  # tanh from one exponential that can't overflow
    return softcap * jnp.sign(s) * (1.0 - e) / (1.0 + e)


def _forward_kernel(qp, kp, qs, ks, q, k, v, out, lse, *, causal, window, softcap, scale, bs, ns):
    q_pos, q_seg, query = qp[...], qs[...], q[...]
    bt, c = query.shape[0], v.shape[-1]

    def tile(j, carry):
        at = pl.ds(j * bs, bs)
        see = _see(q_pos, kp[at], q_seg, ks[at], causal, window)

        def seen(acc, top, mass):
            s = jnp.where(see, _scores(query, k[at, :], scale, softcap), EMPTY)
            new = jnp.maximum(top, jnp.max(s, axis=1))
            keep = jnp.exp(top - new)
            p = jnp.where(see, jnp.exp(s - new[:, None]), 0.0)
            acc = keep[:, None] * acc + _dot(p.astype(v.dtype), v[at, :])
            return acc, new, keep * mass + jnp.sum(p, axis=1)

        return jax.lax.cond(_any(see), seen, lambda *same: same, *carry)

    start = (jnp.zeros((bt, c), jnp.float32), jnp.full((bt,), EMPTY, jnp.float32), jnp.zeros((bt,), jnp.float32))
    acc, top, mass = jax.lax.fori_loop(0, ns, tile, start)
    safe = jnp.where(mass > 0.0, mass, 1.0)
    out[...] = (acc / safe[:, None]).astype(out.dtype)
    lse[...] = jnp.where(mass > 0.0, top + jnp.log(safe), EMPTY)


def _probabilities(see, q, k, lse, do, v, delta, scale, softcap):
    """P and dS of a tile."""
    s = _scores(q, k, scale, softcap)
    p = jnp.where(see, jnp.exp(s - lse[:, None]), 0.0)
    ds = p * (_dot(do, v.T) - delta[:, None])
    if softcap is not None:
        ds = ds * (1.0 - jnp.square(jnp.where(see, s, 0.0) / softcap))
    return p, ds * scale


def _dq_kernel(qp, kp, qs, ks, q, k, v, do, lse, delta, dq, *, causal, window, softcap, scale, bs, ns):
    q_pos, q_seg, query, d_out, row_lse, row_delta = qp[...], qs[...], q[...], do[...], lse[...], delta[...]

    def tile(j, acc):
        at = pl.ds(j * bs, bs)
        see = _see(q_pos, kp[at], q_seg, ks[at], causal, window)

        def seen(acc):
            _, ds = _probabilities(see, query, k[at, :], row_lse, d_out, v[at, :], row_delta, scale, softcap)
            return acc + _dot(ds.astype(k.dtype), k[at, :])

        return jax.lax.cond(_any(see), seen, lambda same: same, acc)

    dq[...] = jax.lax.fori_loop(0, ns, tile, jnp.zeros(query.shape, jnp.float32)).astype(dq.dtype)


def _dkv_kernel(qp, kp, qs, ks, q, k, v, do, lse, delta, dk, dv, *, causal, window, softcap, scale, bt, nt, groups):
    k_pos, k_seg, key, value = kp[...], ks[...], k[...], v[...]

    def tile(n, carry):
        g, i = jax.lax.div(n, jnp.int32(nt)), jax.lax.rem(n, jnp.int32(nt))
        at = pl.ds(i * bt, bt)
        see = _see(qp[at], k_pos, qs[at], k_seg, causal, window)

        def seen(dk, dv):
            query, d_out = q[g, at, :], do[g, at, :]
            p, ds = _probabilities(see, query, key, lse[g, at], d_out, value, delta[g, at], scale, softcap)
            return dk + _dot(ds.astype(query.dtype).T, query), dv + _dot(p.astype(d_out.dtype).T, d_out)

        return jax.lax.cond(_any(see), seen, lambda *same: same, *carry)

    start = (jnp.zeros(key.shape, jnp.float32), jnp.zeros(value.shape, jnp.float32))
    dk_sum, dv_sum = jax.lax.fori_loop(0, groups * nt, tile, start)
    dk[...] = dk_sum.astype(dk.dtype)
    dv[...] = dv_sum.astype(dv.dtype)


def _prepare(q, k, v, q_pos, k_pos, q_seg, k_seg):
    t, s, d, c = _up(q.shape[2], TILE), _up(k.shape[2], TILE), _pow2(q.shape[3]), _pow2(v.shape[3])
    masks = (_padded(q_pos, 1, t), _padded(k_pos, 1, s), _padded(q_seg, 1, t, -1), _padded(k_seg, 1, s, -1))
    return masks, *(_padded(_padded(x, 2, n), 3, w) for x, n, w in ((q, t, d), (k, s, d), (v, s, c)))


def _call(kernel, grid, in_specs, out_specs, out_shape, interpret, warps):
    return pl.pallas_call(
        kernel,
        grid=grid,
        in_specs=in_specs,
        out_specs=out_specs,
        out_shape=out_shape,
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=2),
    )


def attention_forward(q, k, v, q_pos, k_pos, q_seg, k_seg, *, causal, window, softcap, scale, interpret):
    """As `reference.attention_forward`."""
    b, hq, t, _ = q.shape
    groups, width = hq // k.shape[1], v.shape[3]
    masks, q, k, v = _prepare(q, k, v, q_pos, k_pos, q_seg, k_seg)
    d, c, tp, sp = q.shape[3], v.shape[3], q.shape[2], k.shape[2]
    on_t, on_s = pl.BlockSpec((None, TILE), lambda b, h, i: (b, i)), pl.BlockSpec((None, sp), lambda b, h, i: (b, 0))
    head = lambda w: pl.BlockSpec((None, None, TILE, w), lambda b, h, i: (b, h, i, 0))  # noqa: E731
    keys = lambda w: pl.BlockSpec((None, None, sp, w), lambda b, h, i: (b, jax.lax.div(h, jnp.int32(groups)), 0, 0))  # noqa: E731
    options = {"causal": causal, "window": window, "softcap": softcap, "scale": scale, "bs": TILE, "ns": sp // TILE}
    out, lse = _call(
        functools.partial(_forward_kernel, **options),
        (b, hq, tp // TILE),
        [on_t, on_s, on_t, on_s, head(d), keys(d), keys(c)],
        [head(c), pl.BlockSpec((None, None, TILE), lambda b, h, i: (b, h, i))],
        [dispatch.output((b, hq, tp, c), q.dtype, q), dispatch.output((b, hq, tp), jnp.float32, q)],
        interpret,
        4,
    )(*masks, q, k, v)
    return out[:, :, :t, :width], lse[:, :, :t]


def attention_backward(
    q, k, v, q_pos, k_pos, q_seg, k_seg, out, lse, d_out, d_lse, *, causal, window, softcap, scale, interpret
):
    """As `reference.attention_backward`."""
    b, hq, t, width = q.shape
    hkv, s, c_width = k.shape[1], k.shape[2], v.shape[3]
    groups = hq // hkv
    delta = jnp.sum(d_out.astype(jnp.float32) * out.astype(jnp.float32), axis=-1) - d_lse
    masks, q, k, v = _prepare(q, k, v, q_pos, k_pos, q_seg, k_seg)
    d, c, tp, sp = q.shape[3], v.shape[3], q.shape[2], k.shape[2]
    d_out = _padded(_padded(d_out, 2, tp), 3, c)
    lse, delta = _padded(lse, 2, tp), _padded(delta, 2, tp)
    rule = {"causal": causal, "window": window, "softcap": softcap, "scale": scale}
    arrays = (*masks, q, k, v, d_out, lse, delta)

    on_t, on_s = pl.BlockSpec((None, TILE), lambda b, h, i: (b, i)), pl.BlockSpec((None, sp), lambda b, h, i: (b, 0))
    head = lambda w: pl.BlockSpec((None, None, TILE, w), lambda b, h, i: (b, h, i, 0))  # noqa: E731
    keys = lambda w: pl.BlockSpec((None, None, sp, w), lambda b, h, i: (b, jax.lax.div(h, jnp.int32(groups)), 0, 0))  # noqa: E731
    row = pl.BlockSpec((None, None, TILE), lambda b, h, i: (b, h, i))
    dq = _call(
        functools.partial(_dq_kernel, bs=TILE, ns=sp // TILE, **rule),
        (b, hq, tp // TILE),
        [on_t, on_s, on_t, on_s, head(d), keys(d), keys(c), head(c), row, row],
        head(d),
        dispatch.output(q.shape, q.dtype, q),
        interpret,
        4,
    )(*arrays)

    all_t, on_s = pl.BlockSpec((None, tp), lambda b, h, j: (b, 0)), pl.BlockSpec((None, TILE), lambda b, h, j: (b, j))
    group = lambda w: pl.BlockSpec((None, groups, tp, w), lambda b, h, j: (b, h, 0, 0))  # noqa: E731
    key = lambda w: pl.BlockSpec((None, None, TILE, w), lambda b, h, j: (b, h, j, 0))  # noqa: E731
    rows = pl.BlockSpec((None, groups, tp), lambda b, h, j: (b, h, 0))
    dk, dv = _call(
        functools.partial(_dkv_kernel, bt=TILE, nt=tp // TILE, groups=groups, **rule),
        (b, hkv, sp // TILE),
        [all_t, on_s, all_t, on_s, group(d), key(d), key(c), group(c), rows, rows],
        [key(d), key(c)],
        [dispatch.output(k.shape, k.dtype, q), dispatch.output(v.shape, v.dtype, q)],
        interpret,
        4,
    )(*arrays)
    return dq[:, :, :t, :width], dk[:, :, :s, :width], dv[:, :, :s, :c_width]
