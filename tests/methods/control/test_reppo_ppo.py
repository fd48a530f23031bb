import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from papyrax.envs.pendulums import pendulums
from papyrax.methods.control.reppo import ppo
from tests.support.worlds import corridor

pytestmark = pytest.mark.proof("reppo", "core")

CFG = ppo.PpoConfig(num_envs=16, steps=8, epochs=2, minibatches=2, hidden=16, layers=1, lr=3e-3, entropy=1e-3)


# These programs run for milliseconds and would compile for seconds.
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def start(config, world, seed=0):
    return jax.jit(lambda key: ppo.init(key, config, world), compiler_options=QUICK)(jax.random.key(seed))


@functools.partial(jax.jit, static_argnames=("config", "n"), compiler_options=QUICK)
def train(state, config, n):
    return jax.lax.scan(lambda s, _: ppo.update(s, None, config), state, None, n)


def test_the_stored_sample_is_scored_before_it_is_clipped():
    """Beyond the clip the stored sample still ties the mean to itself; an action clipped to 0.999 would let it run away."""
    config = dataclasses.replace(CFG, min_std=1e-6)
    mean, std = jnp.asarray([[5.0]]), jnp.asarray([[0.5]])
    u = jnp.asarray([[5.2]])
    slope = jax.grad(lambda m: ppo._logp(u, m, std, config).sum())(mean)
    np.testing.assert_allclose(slope, (5.2 - 5.0) / 0.25, rtol=1e-4)
    trap = jax.grad(lambda m: ppo.dist.tanh_logp(m, std, ppo._squash(u, config)).sum())(mean)
    assert trap < 0 < slope
    assert ppo._squash(u, config) == np.float32(0.999)


def test_a_rollout_under_the_same_policy_has_ratio_one():
    """Before the first step of an update the surrogate's ratio is 1, so KL and the clipped share are 0."""
    config = dataclasses.replace(CFG, epochs=1, minibatches=1)
    for world in (pendulums(1), corridor()):
        _, metrics = train(start(config, world), config, 1)
        np.testing.assert_allclose([metrics["kl"][0], metrics["clipped"][0]], 0, atol=1e-5)


def test_loss_equals_its_formula():
    config = dataclasses.replace(CFG, entropy=0.1, value=0.7)
    state = start(config, pendulums(1))
    rng = np.random.default_rng(0)
    draw = [jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((6, 3), (6, 1), (6,), (6,), (6,), (6, 1))]
    rows = ppo.PpoRows(*draw)
    loss, metrics = jax.jit(lambda p: ppo.ppo_loss(p, rows, config, discrete=False))(state.params)
    mean, std = ppo._gaussian(ppo._net(state.params["actor"], rows.obs, config), config)
    logp = np.asarray(ppo._logp(rows.taken, mean, std, config))
    ratio, adv = np.exp(logp - np.asarray(rows.logp)), np.asarray(rows.adv)
    surrogate = -np.minimum(ratio * adv, np.clip(ratio, 0.8, 1.2) * adv).mean()
    value = np.asarray(ppo._net(state.params["value"], rows.obs, config))[:, 0]
    entropy = -np.mean(ppo._logp(mean + std * rows.noise, mean, std, config))
    want = surrogate + 0.35 * np.mean((value - np.asarray(rows.returns)) ** 2) - 0.1 * entropy
    np.testing.assert_allclose(loss, want, rtol=1e-4)
    np.testing.assert_allclose(metrics["entropy"], entropy, rtol=1e-4)


def test_discrete_actions_learn_to_reach_the_goal():
    config = dataclasses.replace(CFG, num_envs=32, minibatches=4, epochs=4, lr=1e-2)
    after, metrics = train(start(config, corridor()), config, 20)
    assert metrics["reward"][-1] > 1.5 * metrics["reward"][0]
    returns = jax.jit(lambda k, s: ppo.evaluate(k, s, config, 16))(jax.random.key(1), after)
    np.testing.assert_array_equal(returns, np.ones(16))


def test_continuous_options_run_and_vmap():
    config = dataclasses.replace(CFG, squash="clip", norm="rms", scale_returns=True, reward_scale=0.3)
    keys = jax.random.split(jax.random.key(0), 2)
    states = jax.jit(jax.vmap(lambda key: ppo.init(key, config, pendulums(2))), compiler_options=QUICK)(keys)
    states, metrics = jax.jit(jax.vmap(lambda s: ppo.update(s, None, config)), compiler_options=QUICK)(states)
    for name, values in metrics.items():
        assert values.shape == (2,) and np.isfinite(values).all(), name


def test_bad_settings_are_told():
    with pytest.raises(ValueError, match="squash must be"):
        dataclasses.replace(CFG, squash="none")
    with pytest.raises(ValueError, match="minibatches must divide the 128 samples"):
        dataclasses.replace(CFG, minibatches=3)
    for name, value in (("lr", 0.0), ("max_grad_norm", -1.0), ("reward_scale", 0.0), ("min_std", -1.0), ("gamma", 1.1)):
        with pytest.raises(ValueError, match=f"{name} must"):
            dataclasses.replace(CFG, **{name: value})
    with pytest.raises(ValueError, match="lam must lie in"):
        dataclasses.replace(CFG, lam=float("nan"))
