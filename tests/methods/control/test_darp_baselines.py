"""Baselines: replay, local regression, cloning with and without smoothing, the ensemble; divergence and theory."""

import dataclasses
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
import sklearn.linear_model
import sklearn.neighbors

from papyrax.methods.control.darp import bc, divergence, learner, network, replay, retrieval, theory
from papyrax.methods.control.darp.config import BCConfig, Config
from papyrax.methods.control.darp.demos import fit_scalers, make_demos
from papyrax.methods.control.darp.features import features
from tests.support.params import drawn

pytestmark = pytest.mark.proof("darp", "core")
HOPPER = Path(os.environ.get("PAPYRAX_DATA", "")) / "darp" / "hopper-expert-v2_1.pkl"
CFG = Config(width=8, k=10, lookback=3, decay=-0.5, ratio=0.8)
BC = BCConfig(width=16, depth=2, learning_rate=1e-2)
N = 40


@pytest.fixture(scope="module")
def demos():
    rng = np.random.default_rng(0)
    obs = np.cumsum(rng.normal(size=(N, 3)), 0).astype(np.float32)
    return make_demos(obs, (obs[:, :2] * 0.3 + 0.1).astype(np.float32), np.array([0, 15]))


def test_replay_keeps_rows_at_distance_zero(demos):
    scalers = fit_scalers(demos)
    rows = np.array([2, 9, 30])
    hist = jnp.asarray(np.asarray(demos.obs)[rows[:, None] - np.arange(2)[::-1]])
    valid = jnp.full(3, 2)
    for fn in (replay.retrieve_and_play, replay.nearest_sequence):
        np.testing.assert_array_equal(jax.jit(fn, static_argnums=4)(demos, scalers, hist, valid, CFG), demos.act[rows])
    query = jnp.asarray(np.random.default_rng(1).normal(size=(20, 3)).astype(np.float32)) * 3
    knn = sklearn.neighbors.KNeighborsRegressor(1).fit(scalers.obs(demos.obs), demos.act)
    got = jax.jit(replay.retrieve_and_play, static_argnums=4)(demos, scalers, query[:, None], jnp.ones(20, int), CFG)
    np.testing.assert_allclose(got, knn.predict(scalers.obs(query)), atol=1e-6)


def test_lwr_is_weighted_ridge(demos):
    rng = np.random.default_rng(2)
    delta, u = rng.normal(size=(3, 12, 4)).astype(np.float32), rng.normal(size=(3, 12, 2)).astype(np.float32)
    got = jax.jit(replay.lwr_fit)(delta, u)
    for d, t, ours in zip(delta, u, got):
        square = (d**2).sum(1)
        ridge = sklearn.linear_model.Ridge(1e-3).fit(d, t, np.exp(-0.5 * square / square.max()))
        np.testing.assert_allclose(ours, ridge.intercept_, atol=1e-4)
    # actions that are linear in the state are found exactly, up to the small ridge
    scalers, hist = fit_scalers(demos), demos.obs[5:8, None] + 0.05
    got = jax.jit(replay.lwr, static_argnums=4)(demos, scalers, hist, jnp.ones(3, int), CFG)
    np.testing.assert_allclose(got, hist[:, 0, :2] * 0.3 + 0.1, atol=0.02)


def start(seed, demos, cfg):
    params = drawn(lambda: bc.init(jax.random.key(0), demos, cfg).params, seed)
    return learner.fresh(jax.random.key(seed), params, cfg)


def train(demos, cfg, seed, steps=150):
    memory = bc.prepare(demos, cfg)
    rows = jnp.asarray(np.stack([learner.batch_rows(seed, i, N, 20) for i in range(steps)]))
    fit = jax.jit(lambda s, r: jax.lax.scan(lambda s, b: bc.update(s, b, cfg, frozen=memory), s, r))
    return memory, *fit(start(seed, demos, cfg), rows)


def test_cloning_fits_and_smoothing_smooths(demos):
    memory, plain, metrics = train(demos, BC, 0)
    assert float(metrics["loss"][-1]) < 0.05 < float(metrics["loss"][0])
    np.testing.assert_allclose(memory.scalers.obs_std, np.asarray(demos.obs).std(0), rtol=1e-5)
    near = bc.prepare(demos, dataclasses.replace(BC, smoothing=10.0, neighbours=5))
    assert near.near.shape == (N, 5) and not (np.asarray(near.near) == np.arange(N)[:, None]).any()
    np.testing.assert_allclose(near.weight.sum(1), 1, rtol=1e-5)
    _, smooth, _ = train(demos, dataclasses.replace(BC, smoothing=10.0, neighbours=5), 0)
    z = memory.scalers.obs(demos.obs)
    energy = [
        float(jnp.mean(bc.smoothness(bc.apply(s.params, z), bc.apply(s.params, z[near.near]), near.weight)))
        for s in (plain, smooth)
    ]
    assert energy[1] < 0.3 * energy[0]


def test_ensemble_is_the_mean_of_its_members(demos):
    scalers = fit_scalers(demos, 0, 0)
    members = [start(i, demos, BC).params for i in range(10)]
    got = jax.jit(bc.act_ensemble)(jax.tree.map(lambda *x: jnp.stack(x), *members), scalers, demos.obs[:4])
    one = jax.jit(bc.act)
    each = [one(params, scalers, demos.obs[:4]) for params in members]
    np.testing.assert_allclose(got, np.mean(each, 0), atol=1e-5)
    assert np.std(each, 0).min() > 0


@pytest.mark.proof("darp", "proof")
def test_averaging_is_the_low_pass_filter():
    """On a ring with two neighbours a side, the eigenvector of frequency m has mu = 1 - mean cos; it shrinks by 1 - mu."""
    n, frequency = 24, 3
    idx = jnp.asarray((np.arange(n)[:, None] + np.array([-2, -1, 1, 2])) % n)
    f = jnp.asarray(np.cos(2 * np.pi * frequency * np.arange(n) / n)[:, None].astype(np.float32))
    mu = 1 - np.mean(np.cos(2 * np.pi * frequency * np.array([1, 2]) / n))
    lap = theory.laplacian(idx)
    np.testing.assert_allclose(lap @ f, mu * f, atol=1e-5)
    np.testing.assert_allclose(theory.average(idx, f), theory.attenuation(mu) * f, atol=1e-5)
    # any function linear in features: the averaged map is (I - L) f
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(n, 5)), jnp.float32)
    linear = x @ jnp.asarray(rng.normal(size=(5, 2)), jnp.float32)
    np.testing.assert_allclose(theory.average(idx, linear), (jnp.eye(n) - lap) @ linear, atol=1e-5)
    np.testing.assert_allclose(theory.dirichlet_energy(idx, linear), jnp.trace(linear.T @ lap @ linear) / n, rtol=1e-4)
    slope = theory.local_lipschitz(idx, x, 3 * x)
    np.testing.assert_allclose(slope, 3, rtol=1e-5)


@pytest.mark.proof("darp", "proof")
def test_the_policy_filters_its_own_network():
    """DARP's network without its difference weights: K outputs averaged are (I - L) times the outputs at K = 1, and the wave of frequency m
    in them shrinks by 1 - mu."""
    n, frequency = 24, 3
    angle = 2 * np.pi * np.arange(n) / n
    obs = np.stack([np.cos(angle), np.sin(angle), np.cos(frequency * angle)], 1).astype(np.float32)
    demos = make_demos(obs, np.sin(2 * angle)[:, None].astype(np.float32), [0])
    scalers = fit_scalers(demos)
    idx = jnp.asarray((np.arange(n)[:, None] + np.array([-2, -1, 1, 2])) % n)
    params = drawn(lambda: network.init(jax.random.key(0), 3, 1, CFG))
    first, *rest = params["f"]
    params = {"f": [{**first, "w": first["w"].at[4:].set(0)}, *rest]}  # without the rows of the difference
    apply = jax.jit(lambda rows: network.apply(params, features(demos, scalers, rows, demos.obs, CFG), CFG))
    alone, averaged = apply(jnp.arange(n)[:, None]), apply(idx)
    np.testing.assert_allclose(averaged, (jnp.eye(n) - theory.laplacian(idx)) @ alone, atol=1e-5)
    wave = np.cos(frequency * angle)
    mu = 1 - np.mean(np.cos(2 * np.pi * frequency * np.array([1, 2]) / n))
    assert abs(wave @ alone[:, 0]) > 0.1
    np.testing.assert_allclose(wave @ averaged[:, 0], theory.attenuation(mu) * (wave @ alone[:, 0]), atol=1e-4)


@pytest.mark.proof("darp", "proof")
def test_drift_recursion():
    np.testing.assert_allclose(
        theory.drift_bound(jnp.asarray(1.0), 0.5, 2.0, jnp.array([0.0, 1.0, 0.0])), [0.5, 2.25, 1.125]
    )


def test_log_density_against_scipy():
    x = np.random.default_rng(0).normal(size=(200, 3)) @ np.array([[1, 0.5, 0], [0, 1, 0.2], [0, 0, 2]])
    g = divergence.fit_gaussian(jnp.asarray(x, jnp.float32), ridge=0.0)
    want = scipy.stats.multivariate_normal(x.mean(0), np.cov(x.T, bias=True)).logpdf(x)
    np.testing.assert_allclose(jax.jit(divergence.log_density)(g, x.astype(np.float32)), want, atol=1e-4)


@pytest.mark.skipif(not HOPPER.is_file(), reason="the folder darp is not in PAPYRAX_DATA")
@pytest.mark.proof("darp", "proof")
def test_a_state_can_leave_the_data_while_its_differences_stay_in():
    """Real hopper rows moved together along the direction in which they vary least, by a step that neighbours span."""
    from papyrax.train.data.demonstrations import load

    obs, act, start = load(HOPPER)
    demos = make_demos(obs[:250], act[:250], start)
    cfg = Config(k=60, lookback=1, ratio=1.0)
    scalers = fit_scalers(demos)
    cache = retrieval.build_cache(demos, scalers, cfg)
    z = np.asarray(scalers.obs(demos.obs))
    _, vectors = np.linalg.eigh(np.cov(z.T))
    states = demos.obs[100:110] + 0.9 * vectors[:, 0] * scalers.obs_std
    states = jnp.concatenate([states, demos.obs[100:110]])

    @jax.jit
    def analyse(states):
        idx = retrieval.retrieve(
            demos, scalers, states[:, None], jnp.ones(20, int), k=60, lookback=1, decay=0.0, ratio=1.0
        )
        return divergence.divergence(demos, scalers, cache, states, idx)

    got = analyse(states)
    assert not bool(got.state_out[10:].any()) and bool(got.difference_in.all())
    assert float(got.state[:10].mean()) < float(got.state_threshold)
    assert float(got.difference[:10].mean()) > float(got.difference_threshold)
    drop_state = float(got.state[10:].mean() - got.state[:10].mean())
    drop_difference = float(got.difference[10:].mean() - got.difference[:10].mean())
    assert drop_state > drop_difference
