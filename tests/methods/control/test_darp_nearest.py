"""The set of the nearest rows: equal to a stable sort in NumPy, with ties, exclusions and too few rows."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from papyrax.methods.control.darp import retrieval
from papyrax.methods.control.darp.nearest import largest_set, nearest_set

pytestmark = pytest.mark.proof("darp", "proof")


def by_sorting(score, k):
    return np.sort(np.argsort(-np.asarray(score), axis=1, kind="stable")[:, :k], axis=1)


@pytest.mark.parametrize(("n", "k"), [(1, 1), (31, 31), (65, 7), (500, 3), (2003, 40)])
def test_largest_set_is_that_of_a_stable_sort(n, k):
    rng = np.random.default_rng(n)
    score = rng.standard_normal((5, n)).astype(np.float32)
    score[1] = np.round(score[1])  # many equal entries
    score[2] = 1.0
    score[3, k // 2 :] = -np.inf  # too few finite ones
    score[4] *= 1e-30
    np.testing.assert_array_equal(jax.jit(largest_set, static_argnums=1)(score, k), by_sorting(score, k))


@pytest.mark.parametrize("n", [60, 3000])
def test_nearest_set_leaves_out_equal_and_excluded_rows(n):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((n, 3)).astype(np.float32)
    x[7], x[9] = x[5], x[5]
    q = np.concatenate([x[5:6], rng.standard_normal((2, 3)).astype(np.float32)])
    exclude = np.array([[2], [-1], [11]], np.int32)
    far = np.sum(np.square(q[:, None] - x[None]), axis=-1)
    far[0, 2] = far[2, 11] = np.inf
    find = jax.jit(nearest_set, static_argnames=("k", "drop_equal"))
    np.testing.assert_array_equal(find(q, x, k=13, exclude=exclude, drop_equal=False), by_sorting(-far, 13))
    far[0, [5, 7, 9]] = np.inf
    np.testing.assert_array_equal(find(q, x, k=13, exclude=exclude), by_sorting(-far, 13))


def test_missing_rows_are_minus_one():
    x = jnp.zeros((4, 2)).at[3].set(1.0)
    found = np.asarray(jax.jit(functools.partial(nearest_set, k=3))(jnp.zeros((1, 2)), x))
    assert sorted(found[0]) == [-1, -1, 3]


def test_queries_are_searched_in_tiles(monkeypatch):
    rng = np.random.default_rng(1)
    q, x = rng.standard_normal((21, 4)).astype(np.float32), rng.standard_normal((50, 4)).astype(np.float32)
    whole = np.asarray(jax.jit(functools.partial(nearest_set, k=6))(q, x))
    monkeypatch.setattr("papyrax.methods.control.darp.nearest._TILE", 50)
    np.testing.assert_array_equal(jax.jit(functools.partial(nearest_set, k=6))(q, x), whole)


def test_candidate_set_is_the_set_of_candidates():
    rng = np.random.default_rng(2)
    q, x = (jnp.asarray(rng.standard_normal((m, 4)), jnp.float32) for m in (6, 90))
    spaces = retrieval.Space(q, q[:, :0]), retrieval.Space(x, x[:, :0])
    for kind in ("euclidean", "cosine"):
        metric = retrieval.Metric(kind)
        ordered, found = jax.jit(
            lambda a, b, m=metric: (retrieval.candidates(a, b, 10, m)[1], retrieval.candidate_set(a, b, 10, m))
        )(*spaces)
        np.testing.assert_array_equal(np.sort(found, axis=1), np.sort(ordered, axis=1))


@pytest.mark.parametrize("k", [0, 5])
def test_a_number_of_rows_that_there_are_not_is_refused(k):
    with pytest.raises(ValueError, match="nearest_set"):
        nearest_set(jnp.zeros((1, 2)), jnp.zeros((4, 2)), k)
