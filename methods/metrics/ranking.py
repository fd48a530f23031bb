"""Ranking metrics on retrieved ids and gold ids, one number a query, traced.

`ids` holds the ranking of each query, best first; `gold` the ids to be found, padded where queries have different
numbers of them; `valid` marks the true entries of `gold` (None: all). Negative ids are empty places of a ranking. An id
that a ranking repeats counts once, at its first place. A query without gold has no score: NaN (average with `nanmean`).

"Recall" has several meanings in the literature, so each has its own name: `hit_at_k` (any gold found), `recall_at_k`
(share of the gold found), `recall_at_percent` (share found in the top p percent of the collection).
"""

import math
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def hit_at_k(
    ids: Int[Array, "q n"], gold: Int[Array, "q g"], k: int, valid: Bool[Array, "q g"] | None = None
) -> Float[Array, " q"]:
    """1 when any gold id stands among the first k, else 0."""
    hits, total = _hits("hit_at_k", ids, gold, k, valid)
    return _defined(jnp.any(hits, axis=1).astype(jnp.float32), total)


def recall_at_k(
    ids: Int[Array, "q n"], gold: Int[Array, "q g"], k: int, valid: Bool[Array, "q g"] | None = None
) -> Float[Array, " q"]:
    """Share of the gold ids that stand among the first k."""
    hits, total = _hits("recall_at_k", ids, gold, k, valid)
    return _defined(jnp.sum(hits, axis=1) / jnp.maximum(total, 1), total)


def recall_at_percent(
    ids: Int[Array, "q n"], gold: Int[Array, "q g"], percent: float, size: int, valid: Bool[Array, "q g"] | None = None
) -> Float[Array, " q"]:
    """Share of the gold ids in the top `percent` % of a collection of `size` (k rounded up)."""
    if not 0 < percent <= 100:
        raise ValueError(f"recall_at_percent: percent must lie in (0, 100], got {percent}.")
    return recall_at_k(ids, gold, math.ceil(size * percent / 100), valid)


def precision_at_k(
    ids: Int[Array, "q n"], gold: Int[Array, "q g"], k: int, valid: Bool[Array, "q g"] | None = None
) -> Float[Array, " q"]:
    """Share of the first k places that hold a gold id; empty places count as wrong."""
    hits, total = _hits("precision_at_k", ids, gold, k, valid)
    return _defined(jnp.sum(hits, axis=1) / k, total)


def mrr_at_k(
    ids: Int[Array, "q n"], gold: Int[Array, "q g"], k: int, valid: Bool[Array, "q g"] | None = None
) -> Float[Array, " q"]:
    """1 / (place of the first gold id) when it stands among the first k, else 0."""
    hits, total = _hits("mrr_at_k", ids, gold, k, valid)
    first = jnp.argmax(hits, axis=1)
    return _defined(jnp.where(jnp.any(hits, axis=1), 1.0 / (first + 1.0), 0.0), total)


def ndcg_at_k(
    ids: Int[Array, "q n"],
    gold: Int[Array, "q g"],
    k: int,
    valid: Bool[Array, "q g"] | None = None,
    *,
    ideal: Literal["cut", "all"],
    gain: Float[Array, "q g"] | None = None,
) -> Float[Array, " q"]:
    """Discounted cumulative gain of the first k, discount 1/log2(place + 1), over that of an ideal ranking.

    Args:
      ids, gold, k, valid: see the module.
      ideal: "cut" ranks the best k gold ids (Järvelin and Kekäläinen 2002; scikit-learn), "all" ranks every gold id, so
        that a query with more gold than k cannot reach 1.
      gain: gain of each gold id, at least 0 (None: 1 each).

    Raises:
      ValueError: an unknown `ideal`, or a k below 1.
    """
    if ideal not in ("cut", "all"):
        raise ValueError(f'ndcg_at_k: ideal must be "cut" or "all", got {ideal!r}.')
    _check("ndcg_at_k", ids, gold, k, valid)
    gain = jnp.ones(gold.shape, jnp.float32) if gain is None else gain
    match, total = _matches(ids[:, :k], gold, valid)
    gain = gain if valid is None else jnp.where(valid, gain, 0)
    dcg = jnp.einsum("qkg,qg,k->q", match.astype(gain.dtype), gain, _discount(match.shape[1], gain.dtype))
    best = -jnp.sort(-gain, axis=1)
    best = best[:, :k] if ideal == "cut" else best
    ideal_dcg = best @ _discount(best.shape[1], gain.dtype)
    return _defined(dcg / jnp.where(ideal_dcg > 0, ideal_dcg, 1), total)


def average_precision(
    ids: Int[Array, "q n"], gold: Int[Array, "q g"], valid: Bool[Array, "q g"] | None = None
) -> Float[Array, " q"]:
    """Mean, over all gold ids, of the precision at the place of each; a gold id that is not ranked adds 0.

    Its mean over queries is mAP; cut `ids` for mAP@k over all gold.
    """
    hits, total = _hits("average_precision", ids, gold, ids.shape[-1], valid)
    precision = jnp.cumsum(hits, axis=1) / jnp.arange(1, hits.shape[1] + 1)
    return _defined(jnp.sum(jnp.where(hits, precision, 0), axis=1) / jnp.maximum(total, 1), total)


def _discount(n: int, dtype) -> Float[Array, " n"]:
    return 1 / jnp.log2(jnp.arange(2, n + 2, dtype=dtype))


def _defined(value: Array, total: Array) -> Array:
    return jnp.where(total > 0, value, jnp.nan)


def _matches(ids, gold, valid):
    """match[q, place, g]: this place holds gold g and no earlier place did; and the number of gold ids."""
    valid = jnp.ones(gold.shape, bool) if valid is None else valid
    match = (ids[:, :, None] == gold[:, None, :]) & valid[:, None, :] & (ids >= 0)[:, :, None]
    first = jax.lax.cumsum(match.astype(jnp.int32), axis=1) == 1
    return match & first, jnp.sum(valid, axis=1)


def _hits(name, ids, gold, k, valid):
    _check(name, ids, gold, k, valid)
    match, total = _matches(ids[:, :k], gold, valid)
    return jnp.any(match, axis=2), total


def _check(name, ids, gold, k, valid):
    if ids.ndim != 2 or gold.ndim != 2 or ids.shape[0] != gold.shape[0]:
        raise ValueError(
            f"{name}: ids and gold must be two-dimensional with one row a query, got shapes {ids.shape} and "
            f"{gold.shape}."
        )
    if valid is not None and valid.shape != gold.shape:
        raise ValueError(f"{name}: valid must have the shape {gold.shape} of gold, got {valid.shape}.")
    if k < 1:
        raise ValueError(f"{name}: k must be at least 1, got {k}.")
