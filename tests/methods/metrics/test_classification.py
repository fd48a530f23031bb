"""Detection metrics against scikit-learn, with ties, padding and leading axes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sklearn.metrics as sk

from papyrax.methods.metrics import classification as c

ROWS, N = 6, 40


@pytest.fixture(scope="module")
def data():
    """Rows of scores rounded to tenths (many ties), labels of either kind in each row, and a mask."""
    rng = np.random.default_rng(0)
    scores = np.round(rng.normal(size=(ROWS, N)), 1).astype(np.float32)
    scores[1] = 0.5
    y = rng.random((ROWS, N)) < 0.4
    valid = rng.random((ROWS, N)) < 0.8
    y[:, 0], y[:, 1], valid[:, :2] = True, False, True
    return scores, y, valid


def rowwise(fn, scores, y, valid):
    return np.array([fn(yy[m], ss[m]) for ss, yy, m in zip(scores, y, valid)])


def test_areas(data):
    scores, y, valid = data
    area = jax.jit(lambda s, y, v: (c.auroc(s, y, v), c.auprc(s, y, v)))
    for mask in (valid, np.ones_like(valid)):
        roc, prc = area(scores, y, mask)
        np.testing.assert_allclose(roc, rowwise(sk.roc_auc_score, scores, y, mask), atol=1e-6)
        np.testing.assert_allclose(prc, rowwise(sk.average_precision_score, scores, y, mask), atol=1e-6)


@pytest.mark.parametrize("fpr", [0.0, 0.1, 0.5])
def test_tpr_at_fpr(data, fpr):
    scores, y, valid = data

    def reference(y, s):
        low, high, _ = sk.roc_curve(y, s, drop_intermediate=False)
        return high[low <= fpr].max()

    np.testing.assert_allclose(
        c.tpr_at_fpr(*map(jnp.asarray, (scores, y)), fpr, jnp.asarray(valid)),
        rowwise(reference, scores, y, valid),
        atol=1e-6,
    )


def test_best_f1_is_reached_at_its_threshold(data):
    scores, y, valid = map(jnp.asarray, data)
    f1, threshold = c.best_f1(scores, y, valid)
    _, _, at = c.prf(scores >= threshold[:, None], y, valid)
    np.testing.assert_allclose(f1, at, atol=1e-6)

    def reference(y, s):
        return max(sk.f1_score(y, s >= t) for t in np.unique(s))

    np.testing.assert_allclose(f1, rowwise(reference, *data), atol=1e-6)


def test_counts(data):
    scores, y, valid = data
    pred = scores > 0.2
    precision, recall, f1 = c.prf(*map(jnp.asarray, (pred, y, valid)))
    want = np.array(
        [
            sk.precision_recall_fscore_support(yy[m], p[m], average="binary", zero_division=0)[:3]
            for p, yy, m in zip(pred, y, valid)
        ]
    )
    np.testing.assert_allclose(np.stack([precision, recall, f1], 1), want, atol=1e-6)
    np.testing.assert_allclose(
        c.balanced_accuracy(*map(jnp.asarray, (pred, y, valid))),
        [sk.balanced_accuracy_score(yy[m], p[m]) for p, yy, m in zip(pred, y, valid)],
        atol=1e-6,
    )


def test_undefined_is_nan_and_bad_input_is_told():
    s, none = jnp.array([0.1, 0.2]), jnp.zeros(2, bool)
    for got in (c.auroc(s, none), c.auprc(s, none), c.tpr_at_fpr(s, none, 0.1), c.tpr_at_fpr(s, ~none, 0.1)):
        assert np.isnan(got)
    assert np.isnan(c.best_f1(s, none)[0]) and np.isnan(c.balanced_accuracy(none, none))
    assert [float(v) for v in c.prf(none, none)] == [0, 0, 0]
    with pytest.raises(ValueError, match="labels must be boolean"):
        c.auroc(s, jnp.array([0, 1]))
    with pytest.raises(ValueError, match="share one shape"):
        c.auprc(s, jnp.zeros(3, bool))
    with pytest.raises(ValueError, match=r"fpr must lie in \[0, 1\]"):
        c.tpr_at_fpr(s, none, 1.5)
