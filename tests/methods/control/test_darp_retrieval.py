"""Neighbours: known cases, brute force in numpy on the real rows, every edge of the history re-ranking."""

import dataclasses
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from papyrax.methods.control.darp import retrieval
from papyrax.methods.control.darp.config import TASKS, Config, kept
from papyrax.methods.control.darp.demos import Demos, Scalers, fit_scalers, make_demos, positions
from papyrax.methods.control.darp.retrieval import build_cache

pytestmark = pytest.mark.proof("darp", "proof")
HOPPER = Path(os.environ.get("PAPYRAX_DATA", "")) / "darp" / "hopper-expert-v2_1.pkl"
# one compilation a case instead of one an operation
retrieve = jax.jit(
    retrieval.retrieve,
    static_argnames=(
        "k",
        "lookback",
        "decay",
        "ratio",
        "metric",
        "normalise",
        "weights",
        "rotation",
        "keep_equal",
        "axis_name",
    ),
)
needs_hopper = pytest.mark.skipif(not HOPPER.is_file(), reason="the folder darp is not in PAPYRAX_DATA")


@pytest.fixture(scope="module")
def hopper():
    from papyrax.train.data.demonstrations import load

    return make_demos(*load(HOPPER))


@pytest.fixture(scope="module")
def small():
    """Three trajectories of random walks, 40 rows of 4 numbers."""
    rng = np.random.default_rng(0)
    start = np.array([0, 15, 22])
    obs = np.concatenate([np.cumsum(rng.normal(size=(n, 4)), 0) for n in (15, 7, 18)]).astype(np.float32)
    return make_demos(obs, rng.normal(size=(40, 2)).astype(np.float32), start)


def unscaled(o, a=1):
    return Scalers(jnp.zeros(o), jnp.ones(o), jnp.zeros(a), jnp.ones(a))


def brute(demos, scalers, hist, valid, *, k, lookback, decay, ratio, normalise=False, own=None):
    """The definition, one query at a time, in float64."""
    z = (np.asarray(demos.obs, np.float64) - np.asarray(scalers.obs_mean)) / np.asarray(scalers.obs_std)
    h = (np.asarray(hist, np.float64) - np.asarray(scalers.obs_mean)) / np.asarray(scalers.obs_std)
    place = np.asarray(positions(demos.start, len(z)))
    found = []
    for q in range(len(h)):
        d = np.linalg.norm(z - h[q, -1], axis=1)
        d[(np.asarray(demos.obs) == np.asarray(hist)[q, -1]).all(1)] = np.inf
        near = np.argsort(d, kind="stable")[: min(k, len(z) - 1)]
        score = []
        for j in near:
            terms = min(lookback, place[j] + 1, valid[q])
            total = sum((i + 1.0) ** decay * np.linalg.norm(h[q, -1 - i] - z[j - i]) for i in range(terms))
            score.append(total / terms if normalise else total)
        found.append(set(near[np.argsort(score, kind="stable")[: kept(len(near), ratio)]]))
    return found


@needs_hopper
def test_plain_neighbours_of_every_hopper_row(hopper):
    scalers = fit_scalers(hopper)
    n = hopper.obs.shape[0]
    got = retrieve(hopper, scalers, hopper.obs[:, None], jnp.ones(n, int), k=20, lookback=1, decay=0.0, ratio=1.0)
    want = brute(hopper, scalers, hopper.obs[:, None], np.ones(n, int), k=20, lookback=1, decay=0.0, ratio=1.0)
    assert [set(map(int, row)) for row in got] == want


@needs_hopper
def test_the_papers_cache_on_hopper(hopper):
    """The Hopper row of the paper, with its history re-ranking, for every 50th expert row; no row holds itself."""
    cfg, scalers = TASKS["hopper"], fit_scalers(hopper)
    cache = np.asarray(build_cache(hopper, scalers, cfg))
    assert cache.shape == (1000, 145)
    assert not (cache == np.arange(1000)[:, None]).any()
    rows = np.arange(0, 1000, 50)
    hist = np.asarray(hopper.obs)[np.maximum(rows[:, None] - np.arange(13)[::-1], 0)]
    want = brute(
        hopper, scalers, hist, np.minimum(rows + 1, 13), k=cfg.k, lookback=13, decay=cfg.decay, ratio=cfg.ratio
    )
    for row, ids in zip(rows, want):
        # float32 may swap rows whose scores agree to six digits at the border of the kept set
        assert len(set(cache[row].tolist()) ^ ids) <= 2


def test_known_case():
    demos = make_demos(jnp.arange(4.0)[:, None], jnp.zeros((4, 1)), jnp.array([0]))
    hist, valid = jnp.array([[[1.1], [2.1]]]), jnp.array([2])
    space = retrieval.Metric()
    expert, past = retrieval.embed(unscaled(1), demos.obs, space), retrieval.embed(unscaled(1), hist, space)
    d, rows = retrieval.candidates(retrieval.Space(past.flat[:, -1], past.turn[:, -1]), expert, 2, space)
    np.testing.assert_array_equal(rows, [[2, 3]])
    np.testing.assert_allclose(d, [[0.1, 0.9]], rtol=1e-5)
    score = retrieval.history_scores(
        expert, positions(demos.start, 4), rows, past, valid, space, lookback=2, decay=-1.0
    )
    np.testing.assert_allclose(score, [[0.15, 1.35]], rtol=1e-5)
    got = retrieve(demos, unscaled(1), hist, valid, k=2, lookback=2, decay=-1.0, ratio=0.5)
    np.testing.assert_array_equal(got, [[2]])


def test_constant_history_without_decay_is_the_distance_times_l():
    demos = make_demos(jnp.ones((9, 2)) * 3.0, jnp.zeros((9, 1)), jnp.array([0]))
    space = retrieval.Metric()
    expert, past = (retrieval.embed(unscaled(2), x, space) for x in (demos.obs, jnp.zeros((1, 5, 2))))
    rows = jnp.array([[8, 1]])
    score = retrieval.history_scores(
        expert, positions(demos.start, 9), rows, past, jnp.array([5]), space, lookback=5, decay=0.0
    )
    # row 1 has only two steps behind it, so its sum has two terms: favoured, as published
    np.testing.assert_allclose(score, np.sqrt(18) * np.array([[5, 2]]), rtol=1e-6)
    score = retrieval.history_scores(
        expert, positions(demos.start, 9), rows, past, jnp.array([5]), space, lookback=5, decay=0.0, normalise=True
    )
    np.testing.assert_allclose(score, np.sqrt(18) * np.ones((1, 2)), rtol=1e-6)


def test_histories_across_trajectories(small):
    scalers = fit_scalers(small)
    rng = np.random.default_rng(1)
    hist = jnp.asarray(rng.normal(size=(6, 5, 4)).astype(np.float32)) * 2
    valid = np.array([1, 2, 3, 4, 5, 5])
    how = dict(k=12, lookback=4, decay=-0.7, ratio=0.5, normalise=True)
    want = brute(small, scalers, hist, valid, **how)
    padded = jnp.where(jnp.arange(5)[None, :, None] < 5 - valid[:, None, None], jnp.nan, hist)
    for history in (padded, hist):
        assert [set(map(int, row)) for row in retrieve(small, scalers, history, jnp.asarray(valid), **how)] == want


def test_lookback_one_is_plain_and_cosine_matches_numpy(small):
    scalers = fit_scalers(small)
    hist = jnp.asarray(np.random.default_rng(2).normal(size=(5, 3, 4)).astype(np.float32))
    valid = jnp.full(5, 3)
    plain = dict(k=8, decay=-1.0, ratio=0.5)
    a = retrieve(small, scalers, hist, valid, lookback=1, **plain)
    b = retrieve(small, scalers, hist[:, -1:], jnp.ones(5, int), lookback=6, **plain)
    np.testing.assert_array_equal(a, b)
    z, q = np.asarray(scalers.obs(small.obs)), np.asarray(scalers.obs(hist[:, -1]))
    cosine = 1 - (q @ z.T) / np.linalg.norm(q, axis=1)[:, None] / np.linalg.norm(z, axis=1)
    got = retrieve(small, scalers, hist, valid, lookback=1, metric="cosine", **plain)
    assert [set(map(int, r)) for r in got] == [set(np.argsort(c)[:4]) for c in cosine]


def test_weights_and_angles(small):
    """A weight of zero removes a dimension; angles are compared round the circle, as a second norm."""
    scalers = fit_scalers(small)
    hist, valid = small.obs[None, 3:4] + 0.1, jnp.ones(1, int)
    how = dict(k=6, lookback=1, decay=0.0, ratio=1.0)
    noisy = Demos(small.obs.at[:, 2].multiply(-3.0), small.act, small.start)
    weighted = [retrieve(d, scalers, hist, valid, weights=(1.0, 2.0, 0.0, 1.0), **how) for d in (small, noisy)]
    np.testing.assert_array_equal(*weighted)
    angle = np.array([[0.0, 0.1], [0.0, 6.2], [0.0, 3.0], [0.02, 1.0]], np.float32)
    demos = make_demos(angle, np.zeros((4, 1), np.float32), np.array([0]))
    query = jnp.array([[[0.0, 0.0]]])
    got = retrieve(demos, unscaled(2), query, valid, rotation=(1,), weights=(1.0, 2.0), **{**how, "k": 3})
    d = [2 * 0.1, 2 * (2 * np.pi - 6.2), 2 * 3.0, 0.02 * 2 * np.pi + 2 * 1.0]  # times 2 pi
    np.testing.assert_array_equal(got[0], np.argsort(d)[:3])


def test_duplicates_and_small_sets():
    """Exact copies of the query never come back unless asked for, k is clamped, K is at least 1."""
    obs = jnp.array([[0.0], [1.0], [0.0], [2.0]])
    demos = make_demos(obs, jnp.zeros((4, 1)), jnp.array([0, 2]))
    one = jnp.ones(1, int)
    got = retrieve(demos, unscaled(1), jnp.array([[[0.0]]]), one, k=99, lookback=1, decay=0.0, ratio=1.0)
    assert got.shape == (1, 3) and set(np.asarray(got[0]).tolist()) == {1, 3}
    assert int(got[0, 2]) == 1  # the nearest stands in for what is missing
    got = retrieve(
        demos, unscaled(1), jnp.array([[[0.0]]]), one, k=4, lookback=1, decay=0.0, ratio=0.5, keep_equal=True
    )
    np.testing.assert_array_equal(got, [[0, 2]])
    assert retrieve(demos, unscaled(1), jnp.array([[[0.5]]]), one, k=1, lookback=3, decay=0.0, ratio=0.01).shape == (
        1,
        1,
    )
    cache = build_cache(demos, unscaled(1), Config(k=3, lookback=2, ratio=1.0))
    assert not (np.asarray(cache) == np.arange(4)[:, None]).any() and not (np.asarray(cache)[0] == 2).any()


def test_random_neighbours_are_others_and_different():
    demos = make_demos(jnp.arange(30.0)[:, None], jnp.zeros((30, 1)), jnp.array([0]))
    cfg = Config(k=20, ratio=0.5, neighbours="random")
    cache = np.asarray(build_cache(demos, unscaled(1), cfg, jax.random.key(0)))
    assert cache.shape == (30, 10) and not (cache == np.arange(30)[:, None]).any()
    assert all(len(set(row)) == 10 for row in cache.tolist())
    with pytest.raises(ValueError, match="key is needed"):
        build_cache(demos, unscaled(1), cfg)


def test_kept_neighbours_of_the_papers_rows():
    sizes = {"hopper": 145, "walker": 55, "halfcheetah": 239, "ant": 14, "maze2d": 7, "stack": 159, "push_t": 1725}
    for task, size in sizes.items():
        assert TASKS[task].kept(10**6) == size
    assert TASKS["halfcheetah"].kept(11) == 6


def test_bad_input_is_told(small):
    scalers, hist = fit_scalers(small), jnp.zeros((2, 3, 4))
    how = dict(k=2, lookback=1, decay=0.0, ratio=1.0)
    one = jnp.ones(2, int)
    for match, args, change in (
        (r"hist must have shape \(b, h, 4\)", (hist[..., :3], one), {}),
        ("ratio in \\(0, 1\\]", (hist, one), {"ratio": 0.0}),
        ('"euclidean" or "cosine"', (hist, one), {"metric": "manhattan"}),
        ("one number for each of 4", (hist, one), {"weights": (1.0,)}),
        ("dimensions below 4", (hist, one), {"rotation": (4,)}),
        ("needs the euclidean metric", (hist, one), {"rotation": (0,), "metric": "cosine"}),
    ):
        with pytest.raises(ValueError, match=match):
            retrieve(small, scalers, *args, **{**how, **change})
    with pytest.raises(ValueError, match="decay must not be positive"):
        Config(decay=0.5)
    with pytest.raises(ValueError, match="multiple of set_heads"):
        dataclasses.replace(Config(), aggregator="set", set_dim=10, set_heads=3)
    with pytest.raises(ValueError, match="same two or more rows"):
        make_demos(jnp.zeros((3, 2)), jnp.zeros((2, 1)), jnp.zeros(1))
