"""Ranking metrics against definitions written with sets, and against scikit-learn's nDCG and average precision."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sklearn.metrics as sk

from papyrax.methods.metrics import ranking as r

Q, N, G, ITEMS = 8, 12, 5, 20


@pytest.fixture(scope="module")
def data():
    rng = np.random.default_rng(0)
    ids = np.stack([rng.permutation(ITEMS)[:N] for _ in range(Q)]).astype(np.int32)
    gold = np.stack([rng.permutation(ITEMS)[:G] for _ in range(Q)]).astype(np.int32)
    valid = rng.random((Q, G)) < 0.7
    valid[:, 0] = True
    ids[2, 4:] = -1
    return jnp.asarray(ids), jnp.asarray(gold), jnp.asarray(valid)


def each(data, fn):
    return np.array([fn(list(map(int, i)), {int(x) for x, v in zip(g, m) if v}) for i, g, m in zip(*data)])


@pytest.mark.parametrize("k", [1, 5, 30])
def test_counts_at_k(data, k):
    @functools.partial(jax.jit, static_argnums=3)
    def all_of(ids, gold, valid, k):
        return tuple(f(ids, gold, k, valid) for f in (r.hit_at_k, r.recall_at_k, r.precision_at_k, r.mrr_at_k))

    hit, recall, precision, mrr = all_of(*data, k)
    np.testing.assert_allclose(hit, each(data, lambda i, g: float(bool(set(i[:k]) & g))))
    np.testing.assert_allclose(recall, each(data, lambda i, g: len(set(i[:k]) & g) / len(g)), rtol=1e-6)
    np.testing.assert_allclose(precision, each(data, lambda i, g: len(set(i[:k]) & g) / k), rtol=1e-6)
    np.testing.assert_allclose(
        mrr, each(data, lambda i, g: next((1 / (p + 1) for p, x in enumerate(i[:k]) if x in g), 0)), rtol=1e-6
    )


def test_recall_at_percent_rounds_up(data):
    ids, gold, valid = data
    np.testing.assert_array_equal(r.recall_at_percent(ids, gold, 12, ITEMS, valid), r.recall_at_k(ids, gold, 3, valid))


def test_ndcg_is_scikit_learns_when_cut(data):
    ids, gold, valid = data
    gain = jnp.asarray(np.random.default_rng(1).integers(1, 4, (Q, G)).astype(np.float32))
    got = r.ndcg_at_k(ids, gold, 4, valid, ideal="cut", gain=gain)
    for q in range(Q):
        relevance, score = np.zeros(ITEMS), np.zeros(ITEMS)
        relevance[np.asarray(gold[q])[np.asarray(valid[q])]] = np.asarray(gain[q])[np.asarray(valid[q])]
        ranked = np.asarray(ids[q])
        ranked = ranked[ranked >= 0]
        score[ranked] = np.arange(len(ranked), 0, -1)
        assert float(got[q]) == pytest.approx(sk.ndcg_score(relevance[None], score[None], k=4), abs=1e-6)


def test_ndcg_over_all_gold_is_below_one_when_gold_exceeds_k():
    ids, gold = jnp.array([[3, 1, 2]]), jnp.array([[1, 2, 3]])
    cut = r.ndcg_at_k(ids, gold, 2, ideal="cut")
    whole = r.ndcg_at_k(ids, gold, 2, ideal="all")
    assert float(cut[0]) == pytest.approx(1.0)
    assert float(whole[0]) == pytest.approx((1 + 1 / np.log2(3)) / (1 + 1 / np.log2(3) + 0.5), rel=1e-6)


def test_average_precision(data):
    ids, gold, valid = data
    got = r.average_precision(ids, gold, valid)

    def by_hand(i, g):
        found, total = 0, 0.0
        for place, x in enumerate(i, 1):
            if x in g:
                found += 1
                total += found / place
        return total / len(g)

    np.testing.assert_allclose(got, each(data, by_hand), rtol=1e-5)
    full = np.random.default_rng(5).permutation(ITEMS).astype(np.int32)
    y = np.isin(full, np.asarray(gold[0]))
    np.testing.assert_allclose(
        r.average_precision(jnp.asarray(full)[None], gold[:1])[0],
        sk.average_precision_score(y, np.arange(ITEMS, 0, -1)),
        rtol=1e-5,
    )


def test_repeats_count_once_and_no_gold_is_nan():
    ids, gold = jnp.array([[7, 7, 7, 1]]), jnp.array([[7, 1]])
    assert float(r.recall_at_k(ids, gold, 3)[0]) == 0.5
    assert float(r.precision_at_k(ids, gold, 3)[0]) == pytest.approx(1 / 3)
    assert np.isnan(r.hit_at_k(ids, gold, 3, jnp.zeros((1, 2), bool))[0])
    padded = jnp.array([[7, -1]])
    assert float(r.recall_at_k(jnp.array([[-1, 5]]), padded, 2)[0]) == 0


def test_bad_input_is_told():
    ids, gold = jnp.zeros((2, 3), int), jnp.zeros((2, 1), int)
    with pytest.raises(ValueError, match="k must be at least 1"):
        r.hit_at_k(ids, gold, 0)
    with pytest.raises(ValueError, match='"cut" or "all"'):
        r.ndcg_at_k(ids, gold, 2, ideal="best")
    with pytest.raises(ValueError, match="one row a query"):
        r.mrr_at_k(ids, gold[:1], 2)
    with pytest.raises(ValueError, match="percent must lie"):
        r.recall_at_percent(ids, gold, 0, 10)
