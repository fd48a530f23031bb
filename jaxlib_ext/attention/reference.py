"""What `attention` means, in plain jnp: softmax attention over explicit positions and segments, and its hand-written backward.

Rows of queries are taken in blocks, so at most ``block_t x s`` scores a head live at once, forward and backward. With
``S = cap(scale * q k^T)``, ``P = exp(S - lse)`` and cotangents ``dO`` of the output and ``dL`` of the log-sum-exp (Dao et al. 2022 have
the first two terms of the bracket; the last is what makes merged parts differentiable):

    dV = P^T dO,   dS = P * (dO V^T - rowsum(dO * O) + dL),   dQ = scale * dS K,   dK = scale * dS^T Q.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

__all__ = ["EMPTY", "Mask", "attention_backward", "attention_forward", "visible", "weights"]

EMPTY = -1e30  # log-sum-exp of a query that sees no key: finite, so that no NaN can come of it


class Mask(NamedTuple):
    """Who sees whom: arrays ``[b, t]`` for queries and ``[b, s]`` for keys; a segment of -1 is padding."""

    q_pos: jax.Array
    k_pos: jax.Array
    q_seg: jax.Array
    k_seg: jax.Array


def visible(mask: Mask, causal: bool, window: int | None) -> jax.Array:
    """Boolean ``[b, t, s]``: same segment, not padding, not later (causal), nearer than ``window`` positions."""
    q_pos, k_pos = mask.q_pos[:, :, None], mask.k_pos[:, None, :]
    q_seg, k_seg = mask.q_seg[:, :, None], mask.k_seg[:, None, :]
    see = (q_seg == k_seg) & (q_seg >= 0)
    if causal:
        see &= k_pos <= q_pos
    if window is not None:
        see &= jnp.abs(q_pos - k_pos) < window
    return see


def _scores(q, k, scale, softcap):
    s = jnp.einsum("bhgtd,bhsd->bhgts", q, k, preferred_element_type=jnp.promote_types(q.dtype, jnp.float32)) * scale
    return s if softcap is None else softcap * jnp.tanh(s / softcap)


def _fold(x, groups):
    b, h, t = x.shape[:3]
    return x.reshape(b, h // groups, groups, t, *x.shape[3:])


def _rows(q, k, v, mask, causal, window, softcap, scale):
    """One block of query rows against all keys: q ``[b, hkv, g, t, d]``."""
    s = _scores(q, k, scale, softcap)
    see = visible(mask, causal, window)[:, None, None]
    s = jnp.where(see, s, EMPTY)
    top = jnp.max(s, axis=-1, keepdims=True, initial=EMPTY)
    p = jnp.where(see, jnp.exp(s - top), 0.0)
    mass = jnp.sum(p, axis=-1, keepdims=True)
    seen = mass > 0
    out = jnp.einsum("bhgts,bhsc->bhgtc", p.astype(v.dtype), v, preferred_element_type=p.dtype)
    out = jnp.where(seen, out / jnp.where(seen, mass, 1.0), 0.0)
    lse = jnp.where(seen, top + jnp.log(jnp.where(seen, mass, 1.0)), EMPTY)[..., 0]
    return out.astype(q.dtype), lse


def _blocks(x, axis, block):
    """Splits ``axis`` into leading blocks of ``block`` rows (its size must divide)."""
    x = jnp.moveaxis(x, axis, 0)
    return jnp.moveaxis(x.reshape(x.shape[0] // block, block, *x.shape[1:]), 1, axis + 1)


def _join(x, axis):
    x = jnp.moveaxis(x, axis + 1, 1)
    return jnp.moveaxis(x.reshape(-1, *x.shape[2:]), 0, axis)


def _pad_rows(t, block):
    return -t % block if t > block else 0


def _pad(x, axis, amount, value=0):
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, amount)
    return jnp.pad(x, widths, constant_values=value) if amount else x


def attention_forward(q, k, v, q_pos, k_pos, q_seg, k_seg, *, causal, window, softcap, scale, block_t=512):
    """Output ``[b, hq, t, c]`` and log-sum-exp ``[b, hq, t]``; arguments as in `papyrax.jaxlib_ext.attention.attention`."""
    b, hq, t, _ = q.shape
    mask = Mask(q_pos, k_pos, q_seg, k_seg)
    groups = hq // k.shape[1]
    rows = functools.partial(_rows, causal=causal, window=window, softcap=softcap, scale=scale)
    if t <= block_t:
        out, lse = rows(_fold(q, groups), k, v, mask)
    else:
        pad = _pad_rows(t, block_t)
        blocks = (
            _blocks(_pad(_fold(q, groups), 3, pad), 3, block_t),
            _blocks(_pad(mask.q_pos, 1, pad), 1, block_t),
            _blocks(_pad(mask.q_seg, 1, pad, -1), 1, block_t),
        )
        block = jax.checkpoint(lambda x: rows(x[0], k, v, Mask(x[1], mask.k_pos, x[2], mask.k_seg)))
        out, lse = jax.lax.map(block, blocks)
        out, lse = _join(out, 3)[:, :, :, :t], _join(lse, 3)[:, :, :, :t]
    return out.reshape(b, hq, t, v.shape[-1]), lse.reshape(b, hq, t)


def attention_backward(
    q, k, v, q_pos, k_pos, q_seg, k_seg, out, lse, d_out, d_lse, *, causal, window, softcap, scale, block_t=512
):
    """Cotangents of q, k and v by recomputing each block's probabilities from the saved log-sum-exp."""
    _, hq, t, _ = q.shape
    groups = hq // k.shape[1]
    mask = Mask(q_pos, k_pos, q_seg, k_seg)
    block_t = min(block_t, t)
    pad = _pad_rows(t, block_t)
    wide = jnp.promote_types(q.dtype, jnp.float32)
    delta = jnp.sum(d_out.astype(wide) * out.astype(wide), axis=-1) - d_lse.astype(wide)

    def rows(carry, x):
        dk, dv = carry
        q_b, do_b, lse_b, delta_b, pos_b, seg_b = x
        s = _scores(q_b, k, scale, softcap)
        see = visible(Mask(pos_b, mask.k_pos, seg_b, mask.k_seg), causal, window)[:, None, None]
        p = jnp.where(see, jnp.exp(s - lse_b[..., None]), 0.0)
        dp = jnp.einsum("bhgtc,bhsc->bhgts", do_b, v, preferred_element_type=wide)
        ds = p * (dp - delta_b[..., None])
        if softcap is not None:
            ds = ds * (1.0 - jnp.square(jnp.where(see, s, 0.0) / softcap))
        ds = (ds * scale).astype(q.dtype)
        dq = jnp.einsum("bhgts,bhsd->bhgtd", ds, k, preferred_element_type=wide)
        dk = dk + jnp.einsum("bhgts,bhgtd->bhsd", ds, q_b, preferred_element_type=wide)
        dv = dv + jnp.einsum("bhgts,bhgtc->bhsc", p.astype(q.dtype), do_b, preferred_element_type=wide)
        return (dk, dv), dq

    folded = [_pad(_fold(x, groups), 3, pad) for x in (q, d_out, lse, delta)]
    blocks = [_blocks(x, 3, block_t) for x in folded]
    blocks += [_blocks(_pad(mask.q_pos, 1, pad), 1, block_t), _blocks(_pad(mask.q_seg, 1, pad, -1), 1, block_t)]
    zero = (jnp.zeros(k.shape, wide), jnp.zeros(v.shape, wide))
    (dk, dv), dq = jax.lax.scan(rows, zero, tuple(blocks))
    dq = _join(dq, 3)[:, :, :, :t].reshape(q.shape)
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype)


def weights(q, k, mask: Mask, *, causal, window, softcap, scale):
    """The probabilities themselves, ``[b, hq, t, s]``; rows that see no key are zero. For taps; costs the full matrix."""
    b, hq, t, _ = q.shape
    s = _scores(_fold(q, hq // k.shape[1]), k, scale, softcap)
    see = visible(mask, causal, window)[:, None, None]
    s = jnp.where(see, s, EMPTY)
    p = jnp.where(see, jnp.exp(s - jnp.max(s, axis=-1, keepdims=True)), 0.0)
    mass = jnp.sum(p, axis=-1, keepdims=True)
    return (p / jnp.where(mass > 0, mass, 1.0)).reshape(b, hq, t, k.shape[2])
