"""Training and acting: the loss, AdamW, padding, seeds, plateau, the history buffer, devices."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from papyrax.methods.control.darp import heads, learner, network, policy, retrieval
from papyrax.methods.control.darp.config import Config
from papyrax.methods.control.darp.demos import make_demos
from papyrax.methods.control.darp.features import features
from tests.support.params import drawn

pytestmark = pytest.mark.proof("darp", "core")
CFG = Config(width=8, depth=2, k=6, lookback=3, decay=-0.5, ratio=0.7, learning_rate=1e-2, batch=8)
N = 26


@pytest.fixture(scope="module")
def demos():
    rng = np.random.default_rng(0)
    obs = np.cumsum(rng.normal(size=(N, 3)), 0).astype(np.float32)
    return make_demos(obs, np.tanh(obs[:, :2] - obs[:, 1:]), np.array([0, 10]))


@pytest.fixture(scope="module")
def memory(demos):
    return learner.prepare(demos, CFG)


@pytest.fixture(scope="module")
def state(demos):
    return start(0, demos, CFG)


step = jax.jit(learner.update, static_argnums=2)


def start(seed, demos, cfg):
    """A fresh State on parameters drawn by numpy."""
    params = drawn(lambda: learner.init(jax.random.key(0), demos, cfg).params, seed)
    return learner.fresh(jax.random.key(seed), params, cfg)


def update(state, rows, memory, cfg=CFG):
    """One step on up to 16 rows, one compilation for all of them."""
    rows = jnp.pad(rows, (0, 16 - rows.shape[0]), constant_values=-1)
    return step(state, rows, cfg, frozen=memory)


def test_the_average_lies_inside_the_square(state, memory):
    rows = jnp.array([3, 11, 20])
    demos, scalers = memory.demos, memory.scalers
    feats = features(demos, scalers, memory.cache[rows], demos.obs[rows], CFG)
    u = scalers.act(demos.act[rows])
    one = jax.jit(network.apply, static_argnums=2)
    each = jnp.stack([one(state.params, feats[:, i : i + 1], CFG) for i in range(feats.shape[1])], 1)
    got = jax.jit(learner.loss, static_argnums=3)(state.params, memory, rows, CFG)
    np.testing.assert_allclose(got, jnp.mean((each.mean(1) - u) ** 2), atol=1e-6)
    assert float(got) < float(jnp.mean((each - u[:, None]) ** 2))


def test_one_step_is_clipped_adamw(state, memory):
    rows = jnp.array([3, 11, 20])
    new, metrics = update(state, rows, memory)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2, weight_decay=1e-5))

    @jax.jit
    def by_hand(params):
        grads = jax.grad(learner.loss)(params, memory, rows, CFG)
        return grads, optax.apply_updates(params, tx.update(grads, tx.init(params), params)[0])

    grads, want = by_hand(state.params)
    for a, b in zip(jax.tree.leaves(new.params), jax.tree.leaves(want)):
        np.testing.assert_allclose(a, b, atol=1e-6)
    assert float(metrics["grad_norm"]) == pytest.approx(float(optax.global_norm(grads)), rel=1e-4)
    assert int(new.step) == 1 and all(v.shape == () for v in metrics.values())


def test_padding_has_no_weight(state, memory):
    full, _ = step(state, jnp.array([3, 11, 20]), CFG, frozen=memory)
    padded, _ = update(state, jnp.array([3, -1, 11, 20, -1]), memory)
    for a, b in zip(jax.tree.leaves(full.params), jax.tree.leaves(padded.params)):
        np.testing.assert_allclose(a, b, atol=1e-6)


def test_training_lowers_the_loss_and_seeds_train_together(demos, memory):
    """Two seeds in one call equal each alone; every seed has its own shuffle."""
    states = jax.jit(jax.vmap(lambda k: learner.init(k, demos, CFG)))(jax.random.split(jax.random.key(1), 2))
    rows = np.stack([[learner.batch_rows(s, i, N, 8) for s in (0, 1)] for i in range(40)])
    assert not np.array_equal(rows[0, 0], rows[0, 1])

    def run(step):
        return jax.jit(lambda s, r: jax.lax.scan(step, s, r))

    together, metrics = run(jax.vmap(lambda s, b: learner.update(s, b, CFG, frozen=memory)))(states, rows)
    assert metrics["loss"].shape == (40, 2)
    assert float(metrics["loss"][-4:].mean()) < 0.5 * float(metrics["loss"][:4].mean())
    alone, _ = run(lambda s, b: learner.update(s, b, CFG, frozen=memory))(
        jax.tree.map(lambda x: x[1], states), rows[:, 1]
    )
    for a, b in zip(*(jax.tree.leaves(s.params) for s in (together, alone))):
        np.testing.assert_allclose(a[1], b, atol=1e-3)


def test_a_training_step_searches_nothing(state, memory):
    """The neighbours are in the cache: no sort and no top-k in the whole program of a step; retrieval has one."""
    rows = jnp.arange(8)
    names = r"\b(sort|top_k|approx_top_k)\["
    program = jax.make_jaxpr(lambda s, r, m: learner.update(s, r, CFG, frozen=m))(state, rows, memory)
    assert not re.search(names, str(program))
    search = jax.make_jaxpr(
        lambda m: retrieval.retrieve(
            m.demos, m.scalers, m.demos.obs[None, :3], jnp.array([3]), **retrieval.search_of(CFG)
        )
    )
    assert re.search(names, str(search(memory)))


def test_compiled_equals_plain(state, memory, demos):
    """A step and an action, compiled and operation by operation."""
    rows = jnp.array([3, 11, 20, -1])
    hist, valid = demos.obs[None, 4:7] + 0.1, jnp.array([3])

    def both(state, memory):
        new, metrics = learner.update(state, rows, CFG, frozen=memory)
        return new.params, metrics, policy.act(state.params, memory.demos, memory.scalers, hist, valid, None, CFG)

    with jax.disable_jit():
        plain = both(state, memory)
    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(jax.jit(both)(state, memory))):
        np.testing.assert_allclose(a, b, atol=1e-5, rtol=1e-5)


def test_every_epoch_visits_every_row_once():
    steps = learner.epoch_steps(N, 8)
    assert steps == 4
    first = [learner.batch_rows(0, i, N, 8) for i in range(steps)]
    assert sorted(np.concatenate(first)[: -(steps * 8 - N)]) == list(range(N)) and (first[-1] == -1).sum() == 6
    second = np.concatenate([learner.batch_rows(0, i, N, 8) for i in range(steps, 2 * steps)])
    assert not np.array_equal(second, np.concatenate(first))
    assert [learner.epoch_steps(1000, 32) * 237] == [7584]


def test_plateau_halves_then_stops(state, memory):
    end_epoch = jax.jit(learner.end_epoch)
    state = end_epoch(state, jnp.asarray(1.0))
    factors = []
    for _ in range(13):
        state = end_epoch(state, jnp.asarray(1.5))
        factors.append(float(state.plateau.factor))
    assert factors == [1.0] * 4 + [0.5] * 5 + [0.25] * 4 and bool(state.plateau.stopped)
    still, _ = update(state, jnp.array([1, 2]), memory)
    for a, b in zip(jax.tree.leaves(still.params), jax.tree.leaves(state.params)):
        np.testing.assert_array_equal(a, b)
    better = end_epoch(end_epoch(state, jnp.asarray(2.0)), jnp.asarray(0.5))
    assert int(better.plateau.bad) == 0 and float(better.plateau.best) == 0.5


def test_acting_along_an_episode(state, memory, demos):
    """The buffer, the prepared form and the plain form give the same actions; a new episode forgets the old one."""
    ready = policy.prepare(state.params, demos, memory.scalers, CFG)
    act = jax.jit(policy.act_ready, static_argnames="cfg")
    history = policy.history_init(2, 3, CFG.lookback)
    walk = np.cumsum(np.random.default_rng(3).normal(size=(5, 2, 3)), 0).astype(np.float32)
    for t in range(5):
        history = policy.history_push(history, jnp.asarray(walk[t]), jnp.array([t == 3, False]))
    np.testing.assert_array_equal(history.valid, [2, 3])
    np.testing.assert_array_equal(history.states[1], walk[2:, 1])
    got = act(ready, history.states, history.valid, None, cfg=CFG)

    @jax.jit
    def by_parts(hist, valid):
        idx = retrieval.retrieve(demos, memory.scalers, hist, valid, k=6, lookback=3, decay=-0.5, ratio=0.7)
        feats = features(demos, memory.scalers, idx, hist[:, -1], CFG)
        return memory.scalers.raw_act(network.apply(state.params, feats, CFG))

    want = by_parts(history.states, history.valid)
    np.testing.assert_allclose(got, want, atol=1e-5)
    lost = history.states.at[0, 0].set(jnp.nan)  # padding of the first episode
    np.testing.assert_allclose(act(ready, lost, history.valid, None, cfg=CFG), want, atol=1e-5)
    whole = jax.jit(policy.act, static_argnums=6)(state.params, demos, memory.scalers, lost, history.valid, None, CFG)
    np.testing.assert_allclose(whole, want, atol=1e-5)


def test_ablations_train_and_act(demos):
    """One switch each; random neighbours differ from call to call with the key."""
    hist, valid = demos.obs[None, 4:7], jnp.array([3])
    for change in (
        {"neighbour_action": False},
        {"difference": "query"},
        {"difference": "norm"},
        {"neighbours": "random"},
        {"aggregator": "ordered"},
    ):
        cfg = dataclasses.replace(CFG, depth=1, lookback=1, **change)
        memory = learner.prepare(demos, cfg, jax.random.key(5))
        state, metrics = update(start(0, demos, cfg), jnp.arange(8), memory, cfg)
        assert np.isfinite(float(metrics["loss"]))
        act = jax.jit(policy.act, static_argnums=6)
        a, b = (act(state.params, demos, memory.scalers, hist, valid, jax.random.key(k), cfg) for k in (0, 1))
        assert a.shape == (1, 2) and bool(jnp.isfinite(a).all())
        assert bool((a != b).any()) == (cfg.neighbours == "random")


def test_mixture_policy_draws(demos):
    cfg = dataclasses.replace(CFG, head="gmm", modes=2, depth=1, lookback=1)
    memory = learner.prepare(demos, cfg)
    state = start(0, demos, cfg)
    assert heads.head_size(2, cfg) == state.params["f"][-1]["b"].shape[0] == 10
    args = (state.params, demos, memory.scalers, demos.obs[None, 4:7], jnp.array([3]))
    act = jax.jit(policy.act, static_argnums=6)
    a, b = (act(*args, jax.random.key(k), cfg) for k in (0, 1))
    assert bool((a != b).any())
