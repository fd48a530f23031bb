import dataclasses
import functools

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from papyrax.envs import rollout
from papyrax.envs.protocol import Step, World

pytestmark = pytest.mark.proof("reppo", "core")


@flax.struct.dataclass
class Count:
    """A number that each step raises by the action; starts anywhere in [0, 100)."""

    value: jax.Array


def observe(state):
    return state.value[None]


def step(state, action):
    """Ends above 1000; the number 500 breaks the simulation."""
    value = state.value + action[0]
    value = jnp.where(value == 500, jnp.nan, value)
    after = Count(value)
    done = value > 1000
    obs = observe(after)
    secret = jnp.concatenate([obs, -obs])
    return after, Step(obs, value, value[None], done, jnp.zeros_like(done), obs, secret, secret)


COUNTER = World(
    name="counter",
    reset=lambda key: Count(jnp.floor(jax.random.uniform(key, (), maxval=100.0))),
    observe=observe,
    step=step,
    obs_dim=1,
    act_dim=1,
    episode_length=4,
    privileged=lambda state: jnp.stack([state.value, -state.value]),
    privileged_dim=2,
    cost_dim=1,
)


@functools.partial(jax.jit, static_argnames="t")
def run(key, envs, amount, t=6):
    """Steps of the counter that add `amount`."""
    return rollout.rollout(key, lambda key, obs: (jnp.full((obs.shape[0], 1), amount), obs[:, 0]), envs, t)


begin = jax.jit(functools.partial(rollout.start, world=COUNTER, n=5, stagger=False))


def test_time_limit_keeps_the_observation_before_the_reset():
    envs = begin(jax.random.key(0))
    first = np.asarray(envs.obs[:, 0])
    after, batch = run(jax.random.key(1), envs, 1.0)
    np.testing.assert_array_equal(batch.done, np.arange(6)[:, None].repeat(5, 1) == 3)
    np.testing.assert_array_equal(batch.trunc, batch.done)
    np.testing.assert_array_equal(batch.next_obs[3, :, 0], first + 4)
    np.testing.assert_array_equal(batch.next_obs[:3], batch.obs[1:4])
    fresh = np.asarray(batch.obs[4, :, 0])
    assert (fresh < 100).all() and (fresh != first + 4).any() and (fresh != first).any()
    np.testing.assert_array_equal(batch.next_obs[4, :, 0], fresh + 1)
    np.testing.assert_array_equal(batch.privileged, np.concatenate([batch.obs, -np.asarray(batch.obs)], -1))
    np.testing.assert_array_equal(batch.next_privileged[3, :, 1], -(first + 4))
    np.testing.assert_array_equal(batch.extras, batch.obs[..., 0])
    np.testing.assert_array_equal(after.last_return, 4 * first + 10)
    np.testing.assert_array_equal(after.episode_return, 2 * fresh + 3)
    np.testing.assert_array_equal(after.time, 2)


def test_termination_at_the_time_limit_is_no_truncation():
    _, batch = run(jax.random.key(1), begin(jax.random.key(0)), 300.0)
    assert bool(batch.done[3].all()) and not bool(batch.trunc[:4].any()) and not bool(batch.fault.any())


def test_nan_ends_the_episode_without_reward():
    envs = begin(jax.random.key(0))
    value = envs.state.value.at[0].set(499.0)
    envs = envs.replace(state=Count(value), obs=value[:, None])
    _, batch = run(jax.random.key(1), envs, 1.0)
    np.testing.assert_array_equal(batch.fault[0], [True, False, False, False, False])
    np.testing.assert_array_equal(batch.done[0], batch.fault[0])
    assert not bool(batch.trunc[0].any())
    assert float(batch.reward[0, 0]) == 0 and float(batch.cost[0, 0, 0]) == 0
    assert float(batch.next_obs[0, 0, 0]) == 499 and float(batch.obs[1, 0, 0]) < 100
    # The fresh episode of that row runs its four steps.
    np.testing.assert_array_equal(batch.trunc[:, 0], [False, False, False, False, True, False])
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(batch))


def test_a_broken_reset_shows_zeros_and_ends_at_the_next_step():
    """Episodes begin at NaN with probability one half; every one of those breaks at once and is drawn anew."""

    def reset(key):
        draw, coin = jax.random.split(key)
        return Count(jnp.where(jax.random.bernoulli(coin), jnp.nan, COUNTER.reset(draw).value))

    world = dataclasses.replace(COUNTER, reset=reset)
    envs = jax.jit(lambda key: rollout.start(key, world, 16, stagger=False))(jax.random.key(0))
    broken = np.isnan(envs.state.value)
    assert 0 < broken.sum() < 16 and not np.asarray(envs.obs)[broken].any()
    _, batch = run(jax.random.key(1), envs, 1.0)
    np.testing.assert_array_equal(batch.fault[0], broken)
    assert batch.fault[1:].any() and not np.asarray(batch.next_obs)[np.asarray(batch.fault)].any()
    assert not np.asarray(batch.privileged)[np.asarray(batch.fault)].any()
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(batch))


def test_neither_chunks_nor_seeds_nor_jit_change_numbers():
    start = jax.jit(functools.partial(rollout.start, world=COUNTER, n=5, chunk=1))
    keys = jax.random.split(jax.random.key(0), 2)
    single = run(keys[1], start(keys[1]), 2.0)[1]
    assert single.done.sum() >= 5  # staggered limits: each environment ends at least once in 6 steps of at most 4
    whole = run(keys[1], start(keys[1]).replace(chunk=5), 2.0)[1]
    jax.tree.map(np.testing.assert_array_equal, single, whole)
    pair = jax.tree.map(lambda *x: jnp.stack(x), start(keys[0]), start(keys[1]))
    seeds = jax.jit(jax.vmap(lambda key, envs: run(key, envs, 2.0)[1]))(keys, pair)
    jax.tree.map(lambda many, one: np.testing.assert_array_equal(many[1], one), seeds, single)
    with jax.disable_jit():
        plain = run(keys[1], start(keys[1]), 2.0, t=2)[1]
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b[:2]), plain, single)


def test_start_counters_are_uniform():
    world = dataclasses.replace(COUNTER, episode_length=10)
    time = np.asarray(jax.jit(lambda key: rollout.start(key, world, 20_000).time)(jax.random.key(0)))
    counts = np.bincount(time, minlength=10)
    assert len(counts) == 10
    # 20,000 draws, 2,000 expected in a bin, standard deviation 42: five of them.
    assert np.abs(counts - 2000).max() < 212
    assert not bool(rollout.start(jax.random.key(0), world, 3, stagger=False).time.any())


def test_evaluate_counts_the_first_episode_only():
    starts = jax.vmap(lambda key: COUNTER.reset(key).value)(jax.random.split(jax.random.key(0), 4))
    policy = lambda obs: jnp.full((obs.shape[0], 1), 1.0)  # noqa: E731
    np.testing.assert_array_equal(rollout.evaluate(jax.random.key(0), COUNTER, policy, 4), 4 * starts + 10)
    fast = lambda obs: jnp.full((obs.shape[0], 1), 600.0)  # noqa: E731
    # Ends by termination at the second step.
    np.testing.assert_array_equal(rollout.evaluate(jax.random.key(0), COUNTER, fast, 4, 9), 2 * starts + 1800)


def test_record_repeats_the_last_state():
    states = rollout.record(jax.random.key(0), COUNTER, lambda obs: jnp.full((1, 1), 600.0), 4)
    start = float(COUNTER.reset(jax.random.key(0)).value)
    np.testing.assert_array_equal(states.value, [start, start + 600, start + 1200, start + 1200, start + 1200])


def test_bad_input_is_told():
    with pytest.raises(ValueError, match="n is 0"):
        rollout.start(jax.random.key(0), COUNTER, 0)
    with pytest.raises(ValueError, match="chunk is 0"):
        rollout.start(jax.random.key(0), COUNTER, 2, chunk=0)
