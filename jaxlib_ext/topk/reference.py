"""Exact nearest rows, block by block, in plain jnp: the definition of `topk` and what runs on the CPU.

Scores (larger is better): ip = q.x; cosine = q.x / (|q| |x|), 0 when either is a zero row; l2 = -sum (q - x)^2.
"""

import math

import jax
import jax.numpy as jnp

NEG = -jnp.inf


def scores_of(q: jax.Array, x: jax.Array, metric: str) -> jax.Array:
    """Scores [m, n] of all pairs; l2 by differences, so that equal rows score exactly 0."""
    if metric == "l2":
        total = jnp.zeros((q.shape[0], x.shape[0]), q.dtype)
        if q.shape[1] <= 64:
            for j in range(q.shape[1]):
                total = total - jnp.square(q[:, j, None] - x[None, :, j])
            return total
        return jax.lax.fori_loop(0, q.shape[1], lambda j, t: t - jnp.square(q[:, j][:, None] - x[:, j][None, :]), total)
    if metric == "cosine":
        q, x = unit(q), unit(x)
    return jnp.matmul(q, x.T, precision=jax.lax.Precision.HIGHEST)


def unit(rows: jax.Array) -> jax.Array:
    """Rows divided by their length; zero rows stay zero."""
    length = jnp.sqrt(jnp.sum(rows * rows, axis=-1, keepdims=True))
    return rows / jnp.where(length > 0, length, 1.0)


def equal_rows(q: jax.Array, x: jax.Array) -> jax.Array:
    """True where two rows agree in every entry [m, n]."""
    same = jnp.ones((q.shape[0], x.shape[0]), bool)
    if q.shape[1] <= 64:
        for j in range(q.shape[1]):
            same &= q[:, j, None] == x[None, :, j]
        return same
    return jax.lax.fori_loop(0, q.shape[1], lambda j, s: s & (q[:, j][:, None] == x[:, j][None, :]), same)


def topk(q, x, k, metric, valid, exclude, drop_equal, block, offset=0):
    """Top k of every query over the rows of x (ids start at `offset`); see the package's docstring."""
    m, n = q.shape[0], x.shape[0]
    wide = jnp.promote_types(jnp.promote_types(q.dtype, x.dtype), jnp.float32)
    q, x = q.astype(wide), x.astype(wide)
    block = min(block or 4096, max(n, 1))
    blocks = max(1, math.ceil(n / block))
    pad = blocks * block - n
    valid = jnp.ones(n, bool) if valid is None else valid
    x = jnp.pad(x, ((0, pad), (0, 0))).reshape(blocks, block, -1)
    valid = jnp.pad(valid, (0, pad)).reshape(blocks, block)
    rows = jnp.arange(m)[:, None]

    def step(carry, part):
        best, ids = carry
        xb, vb, start = part
        s = jnp.where(vb[None, :], scores_of(q, xb, metric), NEG)
        if exclude is not None:
            local = exclude - offset - start
            local = jnp.where((local >= 0) & (local < block), local, block)
            s = s.at[rows, local].set(NEG, mode="drop")
        if drop_equal:
            s = jnp.where(equal_rows(q, xb), NEG, s)
        all_scores = jnp.concatenate([best, s], axis=1)
        here = jnp.broadcast_to(start + offset + jnp.arange(block, dtype=jnp.int32), s.shape)
        all_ids = jnp.concatenate([ids, here], axis=1)
        best, where = jax.lax.top_k(all_scores, k)
        return (best, jnp.take_along_axis(all_ids, where, axis=1)), None

    start = (jnp.full((m, k), NEG, wide), jnp.full((m, k), -1, jnp.int32))
    starts = jnp.arange(blocks, dtype=jnp.int32) * block
    (best, ids), _ = jax.lax.scan(step, start, (x, valid, starts))
    return best, jnp.where(best == NEG, -1, ids)
