"""Attention on the TPU (Pallas, Mosaic): scores live in VMEM only, forward and backward; key tiles that nobody sees are skipped.

Grids run over (batch, head, query tile, key tile), key tiles innermost with running maximum, mass and accumulator in scratch; for dK and dV
over (batch, key head, key tile, head of the group, query tile). Queries' positions come as columns, keys' as rows, so that a tile of the
mask is one comparison of broadcasts. Formulas: `reference`.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from papyrax.jaxlib_ext import dispatch
from papyrax.jaxlib_ext.attention.reference import EMPTY

LANES = 128


def _tiles(t: int, s: int) -> tuple[int, int]:
    return min(128, -(-t // 16) * 16), 256 if s > 128 else 128


def _padded(x, axis, multiple, value=0):
    amount = -x.shape[axis] % multiple
    if not amount:
        return x
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, amount)
    return jnp.pad(x, widths, constant_values=value)


def _see(q_pos, k_pos, q_seg, k_seg, causal, window):
    """Columns of queries against rows of keys."""
    see = (q_seg == k_seg) & (q_seg >= 0)
    if causal:
        see &= k_pos <= q_pos
    if window is not None:
        see &= jnp.abs(q_pos - k_pos) < window
    return see


def _dot(a, b, contract):
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    return jax.lax.dot_general(
        a, b, ((contract[:1], contract[1:]), ((), ())), precision=precision, preferred_element_type=jnp.float32
    )


def _scores(q, k, scale, softcap):
    s = _dot(q, k, (1, 1)) * scale
    return s if softcap is None else softcap * jnp.tanh(s / softcap)


def _any(see):
    return jnp.max(jnp.where(see, 1.0, 0.0)) > 0.0


def _forward_kernel(qp, kp, qs, ks, q, k, v, out, lse, acc, top, mass, *, causal, window, softcap, scale):
    j = pl.program_id(3)

    @pl.when(j == 0)
    def _():
        acc[...] = jnp.zeros_like(acc)
        top[...] = jnp.full_like(top, EMPTY)
        mass[...] = jnp.zeros_like(mass)

    see = _see(qp[...], kp[...], qs[...], ks[...], causal, window)

    @pl.when(_any(see))
    def _():
        s = jnp.where(see, _scores(q[...], k[...], scale, softcap), EMPTY)
        old = top[:, :1]
        new = jnp.maximum(old, jnp.max(s, axis=1, keepdims=True))
        keep = jnp.exp(old - new)
        p = jnp.where(see, jnp.exp(s - new), 0.0)
        mass[...] = jnp.broadcast_to(keep * mass[:, :1] + jnp.sum(p, axis=1, keepdims=True), mass.shape)
        acc[...] = keep * acc[...] + _dot(p.astype(v.dtype), v[...], (1, 0))
        top[...] = jnp.broadcast_to(new, top.shape)

    @pl.when(j == pl.num_programs(3) - 1)
    def _():
        total = mass[:, :1]
        seen = total > 0.0
        safe = jnp.where(seen, total, 1.0)
        out[...] = (acc[...] / safe).astype(out.dtype)
        lse[...] = jnp.where(seen, top[:, :1] + jnp.log(safe), EMPTY)


def _probabilities(see, q, k, lse, scale, softcap):
    s = _scores(q, k, scale, softcap)
    return jnp.where(see, jnp.exp(s - lse), 0.0), s


def _d_scores(p, s, see, do, v, delta, scale, softcap):
    ds = p * (_dot(do, v, (1, 1)) - delta)
    if softcap is not None:
        ds = ds * (1.0 - jnp.square(jnp.where(see, s, 0.0) / softcap))
    return ds * scale


def _dq_kernel(qp, kp, qs, ks, q, k, v, do, lse, delta, dq, acc, *, causal, window, softcap, scale):
    j = pl.program_id(3)

    @pl.when(j == 0)
    def _():
        acc[...] = jnp.zeros_like(acc)

    see = _see(qp[...], kp[...], qs[...], ks[...], causal, window)

    @pl.when(_any(see))
    def _():
        p, s = _probabilities(see, q[...], k[...], lse[...], scale, softcap)
        ds = _d_scores(p, s, see, do[...], v[...], delta[...], scale, softcap)
        acc[...] += _dot(ds.astype(k.dtype), k[...], (1, 0))

    @pl.when(j == pl.num_programs(3) - 1)
    def _():
        dq[...] = acc[...].astype(dq.dtype)


def _dkv_kernel(qp, kp, qs, ks, q, k, v, do, lse, delta, dk, dv, dk_acc, dv_acc, *, causal, window, softcap, scale):
    first = (pl.program_id(3) == 0) & (pl.program_id(4) == 0)
    last = (pl.program_id(3) == pl.num_programs(3) - 1) & (pl.program_id(4) == pl.num_programs(4) - 1)

    @pl.when(first)
    def _():
        dk_acc[...] = jnp.zeros_like(dk_acc)
        dv_acc[...] = jnp.zeros_like(dv_acc)

    see = _see(qp[...], kp[...], qs[...], ks[...], causal, window)

    @pl.when(_any(see))
    def _():
        p, s = _probabilities(see, q[...], k[...], lse[...], scale, softcap)
        dv_acc[...] += _dot(p.astype(do.dtype), do[...], (0, 0))
        ds = _d_scores(p, s, see, do[...], v[...], delta[...], scale, softcap)
        dk_acc[...] += _dot(ds.astype(q.dtype), q[...], (0, 0))

    @pl.when(last)
    def _():
        dk[...] = dk_acc[...].astype(dk.dtype)
        dv[...] = dv_acc[...].astype(dv.dtype)


def _prepare(q, k, v, q_pos, k_pos, q_seg, k_seg):
    t, s = q.shape[2], k.shape[2]
    bt, bs = _tiles(t, s)
    columns = [_padded(q_pos, 1, bt)[:, :, None], _padded(q_seg, 1, bt, -1)[:, :, None]]
    rows = [_padded(k_pos, 1, bs)[:, None, :], _padded(k_seg, 1, bs, -1)[:, None, :]]
    masks = (columns[0], rows[0], columns[1], rows[1])
    return bt, bs, masks, _padded(q, 2, bt), _padded(k, 2, bs), _padded(v, 2, bs)


def _specs(bt, bs, d, c, query, key, head, key_head):
    """Blocks of the four mask arrays, q, k and v, from functions of the grid position."""
    column = pl.BlockSpec((None, bt, 1), lambda b, *g: (b, query(*g), 0))
    row = pl.BlockSpec((None, 1, bs), lambda b, *g: (b, 0, key(*g)))
    q = lambda width: pl.BlockSpec((None, None, bt, width), lambda b, *g: (b, head(*g), query(*g), 0))  # noqa: E731
    kv = lambda width: pl.BlockSpec((None, None, bs, width), lambda b, *g: (b, key_head(*g), key(*g), 0))  # noqa: E731
    return [column, row, column, row, q(d), kv(d), kv(c)], q, kv


def attention_forward(q, k, v, q_pos, k_pos, q_seg, k_seg, *, causal, window, softcap, scale, interpret):
    """As `reference.attention_forward`."""
    b, hq, t, d = q.shape
    hkv, c = k.shape[1], v.shape[-1]
    bt, bs, masks, q, k, v = _prepare(q, k, v, q_pos, k_pos, q_seg, k_seg)
    nt, ns = q.shape[2] // bt, k.shape[2] // bs
    inputs, on_q, _ = _specs(
        bt,
        bs,
        d,
        c,
        lambda h, i, j: i,
        lambda h, i, j: j,
        lambda h, i, j: h,
        lambda h, i, j: jax.lax.div(h, jnp.int32(hq // hkv)),
    )
    out, lse = pl.pallas_call(
        functools.partial(_forward_kernel, causal=causal, window=window, softcap=softcap, scale=scale),
        grid=(b, hq, nt, ns),
        in_specs=inputs,
        out_specs=[on_q(c), on_q(1)],
        out_shape=[
            dispatch.output((b, hq, nt * bt, c), q.dtype, q),
            dispatch.output((b, hq, nt * bt, 1), jnp.float32, q),
        ],
        scratch_shapes=[pltpu.VMEM((bt, c), jnp.float32)] + [pltpu.VMEM((bt, LANES), jnp.float32)] * 2,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",) * 3 + ("arbitrary",)),
        interpret=interpret,
    )(*masks, q, k, v)
    return out[:, :, :t], lse[:, :, :t, 0]


def attention_backward(
    q, k, v, q_pos, k_pos, q_seg, k_seg, out, lse, d_out, d_lse, *, causal, window, softcap, scale, interpret
):
    """As `reference.attention_backward`."""
    b, hq, t, d = q.shape
    hkv, s, c = k.shape[1], k.shape[2], v.shape[-1]
    groups = hq // hkv
    delta = jnp.sum(d_out.astype(jnp.float32) * out.astype(jnp.float32), axis=-1) - d_lse
    bt, bs, masks, q, k, v = _prepare(q, k, v, q_pos, k_pos, q_seg, k_seg)
    d_out, lse, delta = _padded(d_out, 2, bt), _padded(lse, 2, bt)[..., None], _padded(delta, 2, bt)[..., None]
    nt, ns = q.shape[2] // bt, k.shape[2] // bs
    options = {"causal": causal, "window": window, "softcap": softcap, "scale": scale}
    arrays = (*masks, q, k, v, d_out, lse, delta)

    inputs, on_q, _ = _specs(
        bt,
        bs,
        d,
        c,
        lambda h, i, j: i,
        lambda h, i, j: j,
        lambda h, i, j: h,
        lambda h, i, j: jax.lax.div(h, jnp.int32(groups)),
    )
    dq = pl.pallas_call(
        functools.partial(_dq_kernel, **options),
        grid=(b, hq, nt, ns),
        in_specs=[*inputs, on_q(c), on_q(1), on_q(1)],
        out_specs=on_q(d),
        out_shape=dispatch.output(q.shape, q.dtype, q),
        scratch_shapes=[pltpu.VMEM((bt, d), jnp.float32)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",) * 3 + ("arbitrary",)),
        interpret=interpret,
    )(*arrays)

    inputs, on_q, on_kv = _specs(
        bt,
        bs,
        d,
        c,
        lambda h, j, g, i: i,
        lambda h, j, g, i: j,
        lambda h, j, g, i: h * groups + g,
        lambda h, j, g, i: h,
    )
    dk, dv = pl.pallas_call(
        functools.partial(_dkv_kernel, **options),
        grid=(b, hkv, ns, groups, nt),
        in_specs=[*inputs, on_q(c), on_q(1), on_q(1)],
        out_specs=[on_kv(d), on_kv(c)],
        out_shape=[dispatch.output(k.shape, k.dtype, q), dispatch.output(v.shape, v.dtype, q)],
        scratch_shapes=[pltpu.VMEM((bs, d), jnp.float32), pltpu.VMEM((bs, c), jnp.float32)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",) * 3 + ("arbitrary",) * 2),
        interpret=interpret,
    )(*arrays)
    return dq[:, :, :t], dk[:, :, :s], dv[:, :, :s]
