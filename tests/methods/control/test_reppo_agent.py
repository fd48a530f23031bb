import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from papyrax.envs.pendulums import pendulums
from papyrax.methods.control.reppo import agent
from papyrax.methods.control.reppo.config import ReppoConfig
from tests.support.worlds import corridor, hidden_goal

pytestmark = pytest.mark.proof("reppo", "core")

CFG = ReppoConfig(
    num_envs=8,
    steps=4,
    minibatches=2,
    epochs=2,
    hidden_actor=8,
    hidden_critic=8,
    actor_layers=1,
    trunk_layers=1,
    bins=21,
    vmin=-5.0,
    vmax=5.0,
    kl_samples=4,
    lr=3e-3,
)


# These programs run for milliseconds and would compile for seconds.
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def start(config, world, seed=0):
    return jax.jit(lambda key: agent.init(key, config, world), compiler_options=QUICK)(jax.random.key(seed))


@functools.partial(jax.jit, static_argnames=("config", "n"), compiler_options=QUICK)
def train(state, config, n):
    return jax.lax.scan(lambda s, _: agent.update(s, None, config), state, None, n)


def test_statistics_are_those_of_all_observations_seen_and_the_batch_uses_the_old_ones():
    world = pendulums(1)

    @jax.jit
    def replay(state):
        """The rollout that an update makes, from the same keys."""

        def policy(key, obs):
            seen = agent._normal(state.obs, obs, CFG)
            mean, std = agent.actor_apply(state.params["actor"], seen, CFG, discrete=False)
            return agent.dist.clip_action(jnp.tanh(mean + std * jax.random.normal(key, mean.shape))), None

        return agent.worlds.rollout(jax.random.split(state.key, 4)[1], policy, state.envs, CFG.steps)[1].obs

    state, seen = start(CFG, world), []
    assert state.obs.count == 0
    for _ in range(2):
        seen.append(np.asarray(replay(state)).reshape(-1, 3))
        state, _ = train(state, CFG, 1)
    seen = np.concatenate(seen)
    assert state.obs.count == len(seen) == 64
    np.testing.assert_allclose(state.obs.mean, seen.mean(0), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(state.obs.m2 / 64, seen.var(0), rtol=1e-4, atol=1e-4)


def test_seeds_vmap_over_the_whole_update():
    world = pendulums(1)
    states = jax.jit(jax.vmap(lambda key: agent.init(key, CFG, world)), compiler_options=QUICK)(
        jax.random.split(jax.random.key(0), 2)
    )
    together, metrics = jax.jit(jax.vmap(lambda s: agent.update(s, None, CFG)), compiler_options=QUICK)(states)
    assert metrics["kl"].shape == (2,)
    for i in range(2):
        alone, _ = train(jax.tree.map(lambda x, i=i: x[i], states), CFG, 1)
        for a, b in zip(jax.tree.leaves(together.params), jax.tree.leaves(alone.params)):
            np.testing.assert_allclose(a[i], b, atol=1e-4)


@pytest.mark.parametrize(
    "change",
    [
        {"policy": "score_q", "mode": "full", "norm": "rms", "scale_returns": True},
        {
            "policy": "score_gae",
            "mode": "value",
            "norm": "none",
            "critic": "mse",
            "aux_weight": 0.0,
            "mask_truncated": False,
            "next_action": "code",
            "normalize_obs": False,
        },
    ],
    ids=["score_q", "score_gae"],
)
def test_ablations_run_and_change_the_parameters(change):
    config = dataclasses.replace(CFG, **change)
    state = start(config, pendulums(1))
    after, metrics = train(state, config, 2)
    for name, values in metrics.items():
        assert values.shape == (2,) and np.isfinite(values).all(), name
    assert after.step == 2 and any(
        np.abs(a - b).max() > 1e-4 for a, b in zip(*(jax.tree.leaves(s.params) for s in (state, after)))
    )


def test_the_critic_sees_what_the_actor_does_not():
    world = hidden_goal()
    config = dataclasses.replace(CFG, num_envs=32, minibatches=4, epochs=4, aux_weight=0.0, hidden_critic=16)
    state = start(config, world)
    assert state.params["critic"]["trunk"][0]["w"].shape[0] == 1 + 1
    assert state.params["actor"]["hidden"][0]["w"].shape[0] == 2
    after, metrics = train(state, config, 30)
    np.testing.assert_allclose(after.privileged.count, 30 * 32 * 4)
    # The best blind action is ±0.25 by the goal's sign: mean squared error 1/48.
    assert metrics["reward"][-1] > -0.1 > metrics["reward"][0]


def test_discrete_actions_learn_to_reach_the_goal():
    world = corridor()
    config = dataclasses.replace(
        CFG, num_envs=32, steps=8, minibatches=4, epochs=4, aux_weight=0.0, vmin=-1.0, vmax=2.0, kl_bound=0.1, beta0=0.3
    )
    state = start(config, world)
    after, metrics = train(state, config, 25)
    assert after.step == 25 and metrics["reward"][-1] > 1.5 * metrics["reward"][0]
    returns = jax.jit(lambda k, s: agent.evaluate(k, s, config, 16))(jax.random.key(1), after)
    np.testing.assert_array_equal(returns, np.ones(16))


def test_evaluation_is_deterministic_and_counts_the_steps_it_is_given():
    world = pendulums(1)
    state = start(CFG, world)
    run = jax.jit(lambda key, s: agent.evaluate(key, s, CFG, 3, steps=7))
    first = run(jax.random.key(0), state)
    np.testing.assert_array_equal(first, run(jax.random.key(0), state))
    assert first.shape == (3,) and (first <= 7).all() and (first >= 0).all()


def test_a_broken_reset_neither_reaches_the_networks_nor_the_statistics():
    """Every second episode of this pendulum starts at a number that is not one."""
    whole = pendulums(1)

    def reset(key):
        state = whole.reset(key)
        return state.replace(speed=jnp.where(jax.random.bernoulli(key), jnp.nan, state.speed))

    world = dataclasses.replace(whole, reset=reset, episode_length=2)
    state, metrics = train(start(CFG, world), CFG, 3)
    for name, values in metrics.items():
        assert np.isfinite(values).all(), name
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(state.params))
    faults = metrics["fault"].sum() * 32
    assert 5 < faults < 60 and state.obs.count == 96 - faults
    # A pendulum's cosine and sine: without the zeros of broken starts their squares sum to 1.
    squares = state.obs.m2[:2] / state.obs.count + state.obs.mean[:2] ** 2
    np.testing.assert_allclose(squares.sum(), 1, rtol=1e-4)


def test_bad_input_is_told_in_one_sentence():
    with pytest.raises(ValueError, match=r"image \(3, 3, 1\) does not hold the 3 numbers"):
        agent.init(jax.random.key(0), dataclasses.replace(CFG, image=(3, 3, 1)), pendulums(1))
    with pytest.raises(ValueError, match="policy 'score_q' needs continuous actions"):
        agent.init(jax.random.key(0), dataclasses.replace(CFG, policy="score_q"), corridor())
    for name, value in (("min_std", -1.0), ("multiplier_lr", 0.0), ("score_clip", 1.0), ("vmax", float("inf"))):
        with pytest.raises(ValueError, match=name if name != "vmax" else "vmin must be below vmax"):
            dataclasses.replace(CFG, **{name: value})
    with pytest.raises(ValueError, match="image must be at least 3 x 3"):
        dataclasses.replace(CFG, image=(2, 5, 1))
