"""What the vocabulary ops mean: statistics of softmax(h W^T / temperature) over rows, from logits taken a block of rows at a time.

With logits z (after the cap ``c tanh(z / c)``, then divided by the temperature) and p = softmax(z):

    lse = log sum exp z,     entropy = lse - sum p z,     cross entropy = lse - z[target]
    kl(a, b) = sum p_a (log p_a - log p_b),     jsd = (kl(a, m) + kl(b, m)) / 2 with m = (p_a + p_b) / 2,     tv = sum |p_a - p_b| / 2

"jsd_swapped" has the arguments of both terms the other way round, (kl(m, a) + kl(m, b)) / 2, as released code of several papers has.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

__all__ = ["KINDS", "Stats", "backward", "block_rows", "divergence_rows", "forward", "logits", "stats_rows"]

KINDS = ("jsd", "jsd_swapped", "kl", "tv")


class Stats(NamedTuple):
    """Per row: largest logit and its lowest index, log-sum-exp, entropy in nats, and the logits at the picked columns."""

    max: jax.Array
    argmax: jax.Array
    lse: jax.Array
    entropy: jax.Array
    picked: jax.Array


def logits(h, w, temperature=1.0, softcap=None):
    """Float32 (or wider) logits of rows ``h [n, e]`` under a table ``w [v, e]``; ``w`` None: h are logits already."""
    wide = jnp.promote_types(h.dtype, jnp.float32)
    z = (
        h.astype(wide)
        if w is None
        else jax.lax.dot_general(h, w, (((1,), (1,)), ((), ())), preferred_element_type=wide)
    )
    if softcap is not None:
        z = softcap * jnp.tanh(z / softcap)
    return z / temperature


def stats_rows(z, pick) -> Stats:
    """Statistics of whole rows of logits."""
    top = jnp.max(z, axis=-1)
    shifted = jnp.exp(z - jax.lax.stop_gradient(top)[:, None])
    mass = jnp.sum(shifted, axis=-1)
    lse = jax.lax.stop_gradient(top) + jnp.log(mass)
    mean = jnp.sum(shifted * z, axis=-1) / mass
    return Stats(top, jnp.argmax(z, axis=-1).astype(jnp.int32), lse, lse - mean, jnp.take_along_axis(z, pick, axis=1))


def forward(h, w, temperature, softcap, *, block):
    """(max, argmax, lse, entropy): what the kernels compute, a block of rows at a time."""

    def rows(h):
        return stats_rows(logits(h, w, temperature, softcap), jnp.zeros((h.shape[0], 0), jnp.int32))[:4]

    return block_rows(rows, (h,), block)


def backward(h, w, lse, entropy, d_lse, d_entropy, temperature, softcap, *, block):
    """Cotangents of h and w: dz = p (d_lse - d_entropy (z - lse + entropy)), through temperature and cap, recomputed by blocks of rows."""
    pad = -h.shape[0] % block if h.shape[0] > block else 0
    size = min(block, h.shape[0])
    arrays = [jnp.pad(a, [(0, pad)] + [(0, 0)] * (a.ndim - 1)) for a in (h, lse, entropy, d_lse, d_entropy)]
    arrays = [a.reshape(-1, size, *a.shape[1:]) for a in arrays]

    def rows(dw, x):
        h, lse, entropy, d_lse, d_entropy = x
        z, pull = jax.vjp(lambda h, w: logits(h, w, temperature, softcap), h, w)
        p = jnp.exp(z - lse[:, None])
        dh, more = pull(p * (d_lse[:, None] - d_entropy[:, None] * (z - lse[:, None] + entropy[:, None])))
        return dw + more.astype(dw.dtype), dh

    # Rows of padding have zero cotangents, so they add nothing (their lse is 0 and their logits, too).
    dw, dh = jax.lax.scan(rows, jnp.zeros(w.shape, jnp.promote_types(w.dtype, jnp.float32)), tuple(arrays))
    return dh.reshape(-1, h.shape[1])[: h.shape[0]], dw.astype(w.dtype)


def divergence_rows(za, zb, kind):
    """Divergence in nats of softmax(za) and softmax(zb), row by row."""
    la, lb = jax.nn.log_softmax(za), jax.nn.log_softmax(zb)
    pa, pb = jnp.exp(la), jnp.exp(lb)
    if kind == "tv":
        return 0.5 * jnp.sum(jnp.abs(pa - pb), axis=-1)
    if kind == "kl":
        return jnp.sum(pa * (la - lb), axis=-1)
    lm = jnp.logaddexp(la, lb) - jnp.log(2.0).astype(la.dtype)
    if kind == "jsd":
        return 0.5 * jnp.sum(pa * (la - lm) + pb * (lb - lm), axis=-1)
    return 0.5 * jnp.sum(jnp.exp(lm) * (2 * lm - la - lb), axis=-1)


def block_rows(function, arrays, block):
    """``function`` over blocks of rows of ``arrays`` (None stays None), results joined; recomputed in the backward pass."""
    n = next(a for a in arrays if a is not None).shape[0]
    if n <= block:
        return function(*arrays)
    pad = -n % block
    split = [None if a is None else jnp.pad(a, [(0, pad)] + [(0, 0)] * (a.ndim - 1)) for a in arrays]
    split = [None if a is None else a.reshape(-1, block, *a.shape[1:]) for a in split]
    out = jax.lax.map(jax.checkpoint(lambda xs: function(*xs)), tuple(split))
    return jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:])[:n], out)
