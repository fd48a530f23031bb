"""Detection metrics over scores and binary labels, traced, ties honoured, padding masked.

Each function works on the last axis and maps over all axes before it. `valid` marks the entries that count. Equal
scores are never split: thresholds lie only between different scores, as in scikit-learn. Counts are exact up to 2^24
entries in float32. Where a metric does not exist (no positives, no negatives) it is NaN, never a guess.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


def auroc(
    scores: Float[Array, "*b n"], y: Bool[Array, "*b n"], valid: Bool[Array, "*b n"] | None = None
) -> Float[Array, "*b"]:
    """Area under the receiver operating curve: the chance that a positive outscores a negative, ties counted half."""

    def area(scores, y, valid):
        _, tp, fp = _counts(scores, y, valid)
        wide = jnp.diff(fp, prepend=0)
        high = tp + jnp.concatenate([jnp.zeros(1, tp.dtype), tp[:-1]])
        return jnp.sum(wide * high) / (2 * tp[-1] * fp[-1])

    return _over_rows("auroc", area, scores, y, valid)


def auprc(
    scores: Float[Array, "*b n"], y: Bool[Array, "*b n"], valid: Bool[Array, "*b n"] | None = None
) -> Float[Array, "*b"]:
    """Area under the precision-recall curve as average precision: recall steps times precision, no interpolation."""

    def area(scores, y, valid):
        _, tp, fp = _counts(scores, y, valid)
        precision = tp / jnp.maximum(tp + fp, 1)
        return jnp.sum(jnp.diff(tp, prepend=0) * precision) / tp[-1]

    return _over_rows("auprc", area, scores, y, valid)


def tpr_at_fpr(
    scores: Float[Array, "*b n"], y: Bool[Array, "*b n"], fpr: float, valid: Bool[Array, "*b n"] | None = None
) -> Float[Array, "*b"]:
    """Largest true positive rate among the thresholds whose false positive rate is at most `fpr`."""
    if not 0 <= fpr <= 1:
        raise ValueError(f"tpr_at_fpr: fpr must lie in [0, 1], got {fpr}.")

    def rate(scores, y, valid):
        _, tp, fp = _counts(scores, y, valid)
        best = jnp.max(jnp.where(fp / fp[-1] <= fpr, tp, 0)) / tp[-1]
        return jnp.where(fp[-1] > 0, best, jnp.nan)

    return _over_rows("tpr_at_fpr", rate, scores, y, valid)


def best_f1(
    scores: Float[Array, "*b n"], y: Bool[Array, "*b n"], valid: Bool[Array, "*b n"] | None = None
) -> tuple[Float[Array, "*b"], Float[Array, "*b"]]:
    """(highest F1 over all thresholds, that threshold); scores at or above the threshold are predicted positive."""

    def best(scores, y, valid):
        threshold, tp, fp = _counts(scores, y, valid)
        f1 = 2 * tp / (tp + fp + tp[-1])
        f1 = jnp.where(tp + fp > 0, f1, 0)
        at = jnp.argmax(f1)
        return jnp.where(tp[-1] > 0, f1[at], jnp.nan), threshold[at]

    return _over_rows("best_f1", best, scores, y, valid)


def prf(
    pred: Bool[Array, "*b n"], y: Bool[Array, "*b n"], valid: Bool[Array, "*b n"] | None = None
) -> tuple[Float[Array, "*b"], Float[Array, "*b"], Float[Array, "*b"]]:
    """(precision, recall, F1) of binary predictions; 0 where a denominator is empty, as scikit-learn counts it."""
    tp, fp, fn, _ = _confusion("prf", pred, y, valid)

    def ratio(a, b):
        return jnp.where(b > 0, a / jnp.maximum(b, 1), 0.0)

    return ratio(tp, tp + fp), ratio(tp, tp + fn), ratio(2 * tp, 2 * tp + fp + fn)


def balanced_accuracy(
    pred: Bool[Array, "*b n"], y: Bool[Array, "*b n"], valid: Bool[Array, "*b n"] | None = None
) -> Float[Array, "*b"]:
    """Mean of the recalls of positives and of negatives; NaN when one of them is absent."""
    tp, fp, fn, tn = _confusion("balanced_accuracy", pred, y, valid)
    return (tp / (tp + fn) + tn / (tn + fp)) / 2


def _counts(scores, y, valid):
    """Thresholds in falling order with true and false positives at or above each, masked entries last.

    Inside a run of equal scores every entry carries the counts of the run's end, so that no threshold splits a tie and
    areas get nothing from repeated points.
    """
    n = scores.shape[0]
    order = jnp.lexsort((-scores, ~valid))
    scores, y, valid = scores[order], y[order], valid[order]
    tp = jnp.cumsum(y & valid).astype(scores.dtype)
    fp = jnp.cumsum(~y & valid).astype(scores.dtype)
    last = jnp.append((scores[1:] != scores[:-1]) | ~valid[1:], True)
    end = jax.lax.cummin(jnp.where(last, jnp.arange(n), n - 1), reverse=True)
    return scores, tp[end], fp[end]


def _confusion(name, pred, y, valid):
    valid = jnp.ones(y.shape, bool) if valid is None else valid
    _same_shape(name, pred, y, valid)

    def count(mask):
        return jnp.sum(mask & valid, axis=-1).astype(jnp.float32)

    return count(pred & y), count(pred & ~y), count(~pred & y), count(~pred & ~y)


def _same_shape(name: str, scores: Array, y: Array, valid: Array) -> None:
    if not scores.shape == y.shape == valid.shape or scores.ndim == 0 or scores.shape[-1] == 0:
        raise ValueError(
            f"{name}: scores, labels and valid must share one shape with at least one entry on the last axis, "
            f"got {scores.shape}, {y.shape} and {valid.shape}."
        )
    if y.dtype != bool:
        raise ValueError(f"{name}: labels must be boolean, got dtype {y.dtype}.")


def _over_rows(name: str, row: Callable, scores: Array, y: Array, valid: Array | None):
    valid = jnp.ones(y.shape, bool) if valid is None else valid
    _same_shape(name, scores, y, valid)
    for _ in range(scores.ndim - 1):
        row = jax.vmap(row)
    return row(scores, y, valid)
