"""The diffusion head and the image branch: scalings, chunks, conditions, the U-Net's shapes, training, acting."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from papyrax.methods.control.darp import diffusion, learner, retrieval, unet, visual
from papyrax.methods.control.darp.config import Config
from papyrax.methods.control.darp.demos import make_demos
from tests.support.params import drawn

pytestmark = pytest.mark.proof("darp", "core")
SEARCH = Config(width=8, depth=1, k=4, lookback=2, ratio=0.5)
CFG = diffusion.DiffusionConfig(
    search=SEARCH, horizon=4, levels=20, steps=5, down=(8, 16), kernel=3, groups=4, time_dim=8, learning_rate=3e-3,
    warmup=5, total_steps=400,
)  # fmt: skip
N = 24
FORK_STEPS = 400


@pytest.fixture(scope="module")
def demos():
    rng = np.random.default_rng(0)
    obs = np.cumsum(rng.normal(size=(N, 3)), 0).astype(np.float32)
    return make_demos(obs, np.tanh(obs[:, :2]).astype(np.float32), np.array([0, 10]))


@pytest.fixture(scope="module")
def memory(demos):
    return diffusion.prepare(demos, CFG)


def test_scaling_chunks_and_conditions(memory, demos):
    ranges = memory.ranges
    for values in (ranges.obs(demos.obs), ranges.act(demos.act)):
        np.testing.assert_allclose([values.min(), values.max()], [-1, 1], atol=1e-5)
    np.testing.assert_allclose(ranges.raw_act(ranges.act(demos.act)), demos.act, atol=1e-5)
    chunk = diffusion.target_actions(memory, jnp.array([0, 8, 23]), CFG)
    rows = np.array([[0, 1, 2, 3], [8, 9, 9, 9], [23, 23, 23, 23]])
    np.testing.assert_allclose(chunk, ranges.act(demos.act)[rows], atol=1e-6)
    idx, recent = jnp.array([[10, 5]]), demos.obs[None, 2:4]
    cond = diffusion.conditions(memory, idx, recent, CFG)
    assert cond.shape == (1, 2, diffusion.condition_size(3, 2, CFG))
    spread = np.asarray(demos.obs.max(0) - demos.obs.min(0))
    # row 10 begins a trajectory, so its past is itself
    np.testing.assert_allclose(cond[0, 0, :6], np.tile(ranges.obs(demos.obs[10]), 2), atol=1e-5)
    want = (np.asarray(demos.obs[4:6]) - np.asarray(recent[0])) / spread
    np.testing.assert_allclose(cond[0, 1, 6:12], want.reshape(-1), atol=1e-5)
    np.testing.assert_allclose(cond[0, 1, 12:], ranges.act(demos.act)[5], atol=1e-6)
    assert float(jnp.abs(ranges.difference(demos.obs[:, None] - demos.obs[None])).max()) <= 1 + 1e-6
    hist = jnp.arange(2.0 * 3 * 1).reshape(2, 3, 1)
    got = diffusion.recent_states(hist, jnp.array([1, 3]), CFG)
    np.testing.assert_array_equal(got[..., 0], [[2, 2], [4, 5]])


def test_unet_shapes_and_condition():
    params = drawn(lambda: unet.init(jax.random.key(0), 2, 3, down=(8, 16, 16), kernel=3, time_dim=8))
    x = jnp.asarray(np.random.default_rng(1).normal(size=(2, 8, 2)), jnp.float32)
    apply = jax.jit(unet.apply, static_argnames="groups")
    out = apply(params, x, jnp.array([3, 3]), jnp.array([[0.0, 0, 0], [1, 1, 1]]), groups=4)
    same = apply(params, jnp.stack([x[1], x[1]]), jnp.array([3, 9]), jnp.zeros((2, 3)), groups=4)
    assert out.shape == x.shape and bool(jnp.isfinite(out).all())
    assert float(jnp.abs(same[0] - same[1]).max()) > 1e-4  # the noise level matters
    assert float(jnp.abs(out[1] - same[0]).max()) > 1e-4  # and so does the condition
    with pytest.raises(ValueError, match="multiple of 4, got 6"):
        unet.apply(params, x[:, :6], jnp.zeros(2, int), jnp.zeros((2, 3)), groups=4)


def test_training_acting_and_the_average(memory, demos):
    params = drawn(lambda: diffusion.init(jax.random.key(0), demos, CFG).params)
    state = diffusion.fresh(jax.random.key(0), params, CFG)
    rows = jnp.asarray(np.stack([learner.batch_rows(0, i, N, 12) for i in range(200)]))
    fit = jax.jit(lambda s, r: jax.lax.scan(lambda s, b: diffusion.update(s, b, CFG, frozen=memory), s, r))
    trained, metrics = fit(state, rows)
    assert float(metrics["loss"][-40:].mean()) < 0.7 * float(metrics["loss"][:10].mean())
    np.testing.assert_allclose(diffusion.ema_decay(jnp.arange(3), 0.75), [0, 1 - 2**-0.75, 1 - 3**-0.75], rtol=1e-5)
    assert float(diffusion.ema_decay(jnp.asarray(10**9), 0.75)) == pytest.approx(0.9999)
    first, _ = fit(state, rows[:1])
    for a, b in zip(jax.tree.leaves(first.params), jax.tree.leaves(first.average)):
        np.testing.assert_array_equal(a, b)  # the first average is the first weights, whose rate is still 0
    hist = demos.obs[jnp.array([[2, 3], [14, 15]])].at[0, 0].set(jnp.nan)
    act = jax.jit(diffusion.act, static_argnums=5)
    got = act(trained.average, memory, hist, jnp.array([1, 2]), jax.random.key(0), CFG)
    assert got.shape == (2, 4, 2) and bool(jnp.isfinite(got).all())
    low, high = demos.act.min(0), demos.act.max(0)
    assert bool(((got >= low - 1e-4) & (got <= high + 1e-4)).all())


def test_a_denoised_fork_stays_a_fork():
    """Expert episodes go left or right at the same states. The mean of two neighbours' sequences lies on one side, where the mean of the expert's
    actions, which a point learns, lies between; other noise, other side."""
    rng = np.random.default_rng(0)
    episodes, length = 40, 4
    obs = rng.normal(size=(episodes * length, 2)).astype(np.float32)
    side = np.repeat(np.where(np.arange(episodes) % 2 == 0, 1.0, -1.0), length)
    act = (side + 0.05 * rng.normal(size=len(side))).astype(np.float32)[:, None]
    demos = make_demos(obs, act, np.arange(episodes) * length)
    cfg = dataclasses.replace(CFG, learning_rate=1e-2, total_steps=FORK_STEPS)
    memory = diffusion.prepare(demos, cfg)
    assert memory.cache.shape == (len(obs), 2)
    params = drawn(lambda: diffusion.init(jax.random.key(0), demos, cfg).params)
    rows = jnp.asarray(np.stack([learner.batch_rows(0, i, len(obs), 40) for i in range(FORK_STEPS)]))
    fit = jax.jit(lambda s, r, m: jax.lax.scan(lambda s, b: diffusion.update(s, b, cfg, frozen=m), s, r))
    state, _ = fit(diffusion.fresh(jax.random.key(0), params, cfg), rows, memory)
    got = jax.jit(diffusion.act, static_argnums=5)(
        state.average, memory, demos.obs[:, None] + 0.01, jnp.ones(len(obs), int), jax.random.key(1), cfg
    )[:, 0, 0]
    between = float(jnp.mean(jnp.abs(jnp.abs(got) - 1) > 0.5))
    assert between < 0.2 and 0.2 < float(jnp.mean(got > 0)) < 0.8, (between, got)


def test_image_branch_on_precomputed_features():
    """Two cameras of 6 features each from a stand-in extractor; projected differences enter through their own weights."""
    rng = np.random.default_rng(0)
    images = jnp.asarray(rng.normal(size=(N, 2, 4, 4, 3)).astype(np.float32))
    feats = visual.camera_features(lambda x: x.reshape(x.shape[0], -1)[:, :6], images)
    assert feats.shape == (N, 12)
    np.testing.assert_array_equal(feats[3, 6:], images[3, 1].reshape(-1)[:6])
    demos = make_demos(feats, rng.normal(size=(N, 2)).astype(np.float32), np.array([0]))
    cfg = visual.VisualConfig(policy=dataclasses.replace(SEARCH, learning_rate=1e-2), project=5, fusion=(16, 8))
    memory = learner.prepare(demos, cfg.policy)
    params = drawn(lambda: visual.init_state(jax.random.key(0), demos, cfg).params)
    state = learner.fresh(jax.random.key(0), params, cfg.policy)
    assert state.params["policy"]["f"][0]["w"].shape == (8, 8) and state.params["fuse"][0]["w"].shape == (12, 16)
    rows = jnp.asarray(np.stack([learner.batch_rows(0, i, N, 12) for i in range(60)]))
    fit = jax.jit(lambda s, r: jax.lax.scan(lambda s, b: visual.update(s, b, cfg, frozen=memory), s, r))
    state, metrics = fit(state, rows)
    assert float(metrics["loss"][-6:].mean()) < 0.7 * float(metrics["loss"][:4].mean())

    @jax.jit
    def act(params, hist):
        idx = retrieval.retrieve(
            demos, memory.scalers, hist, jnp.full(3, 2), metric="cosine", **retrieval.search_of(cfg.policy)
        )
        apart = visual.apply(params, demos, memory.scalers, idx, hist[:, -1], cfg)
        return visual.act(params, demos, memory.scalers, idx, hist[:, -1], None, cfg), memory.scalers.raw_act(apart)

    got, want = act(state.params, jnp.stack([feats[i : i + 2] + 0.01 for i in (1, 5, 9)]))
    assert got.shape == (3, 2)
    np.testing.assert_allclose(got, want, atol=1e-6)
    with pytest.raises(ValueError, match="for state policies alone"):
        visual.VisualConfig(policy=dataclasses.replace(SEARCH, difference="norm"))
