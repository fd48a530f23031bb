import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from papyrax.envs.rollout import Batch
from papyrax.methods.control.reppo import distributions as dist
from papyrax.methods.control.reppo import learn, networks
from papyrax.methods.control.reppo.config import ReppoConfig
from papyrax.methods.objectives.returns import lambda_returns

pytestmark = pytest.mark.proof("reppo", "core")

CFG = ReppoConfig(
    num_envs=2,
    steps=5,
    minibatches=2,
    epochs=2,
    hidden_actor=8,
    hidden_critic=8,
    actor_layers=1,
    trunk_layers=1,
    bins=21,
    vmin=-5.0,
    vmax=5.0,
    value_samples=3,
    kl_samples=4,
    alpha0=0.3,
    gamma=0.9,
)
T, N, O, D = 5, 2, 3, 2
# Environment 0 is truncated at step 1 and terminates at step 3; environment 1 runs on.
DONE = np.zeros((T, N), bool)
DONE[1, 0] = DONE[3, 0] = True
TRUNC = np.zeros((T, N), bool)
TRUNC[1, 0] = True


@pytest.fixture(scope="module")
def params():
    def make(key):
        a, c, z = jax.random.split(key, 3)
        critic = networks.critic_init(c, CFG, O, D, discrete=False)
        critic["z0"] = 0.01 * jax.random.normal(z, critic["z0"].shape)
        return {"actor": networks.actor_init(a, CFG, O, D, discrete=False), "critic": critic}

    return jax.jit(make)(jax.random.key(0))


@pytest.fixture(scope="module")
def data(params):
    rng = np.random.default_rng(0)
    obs, reset = rng.normal(size=(T + 1, N, O)), rng.normal(size=(T, N, O))
    # obs[t + 1] is the next observation inside an episode, a fresh start after its end.
    next_obs = np.where(DONE[..., None], rng.normal(size=(T, N, O)), obs[1:])
    obs[1:] = np.where(DONE[..., None], reset, obs[1:])
    obs = jnp.asarray(obs[:-1], jnp.float32)
    return Batch(
        obs=obs,
        action=dist.clip_action(jnp.tanh(jnp.asarray(rng.normal(size=(T, N, D)), jnp.float32))),
        extras=jax.jit(functools.partial(networks.actor_apply, config=CFG, discrete=False))(params["actor"], obs),
        reward=jnp.asarray(rng.normal(size=(T, N)), jnp.float32),
        cost=None,
        done=jnp.asarray(DONE),
        trunc=jnp.asarray(TRUNC),
        next_obs=jnp.asarray(next_obs, jnp.float32),
        privileged=None,
        next_privileged=None,
        fault=jnp.zeros((T, N), bool),
    )


@functools.partial(jax.jit, static_argnames="config")
def make(params, data, config=CFG):
    key = jax.random.key(1)
    rows, metrics = learn.make_rows(
        key, params["actor"], params["critic"], data, data.reward, data.obs, data.next_obs, None, config, discrete=False
    )
    return rows, metrics


def targets(params, data, config=CFG):
    return make(params, data, config)[0].target.reshape(T, N)


def test_targets_follow_the_equations(params, data):
    """Recomputed step by step, with the same fresh samples (the noise that the function draws from its key)."""
    rows, _ = make(params, data)
    key = jax.random.split(jax.random.key(1))[0]
    noise = jax.random.normal(key, (CFG.value_samples, T, N, D))
    following = np.zeros((T, N, D), np.float32)
    following[:-1] = data.action[1:]
    anew = DONE | (np.arange(T) == T - 1)[:, None]

    @jax.jit
    def expected(params, data, noise):
        mean, std = networks.actor_apply(params["actor"], data.next_obs, CFG, discrete=False)
        fresh = dist.clip_action(jnp.tanh(mean + std * noise))
        out = [networks.critic_apply(params["critic"], data.next_obs, a, CFG, discrete=False) for a in fresh]
        b = jnp.where(anew[..., None], fresh[0], following)
        y = data.reward - 0.9 * 0.3 * dist.tanh_logp(mean, std, b)
        v = sum(o.value for o in out) / 3
        return lambda_returns(y, v, data.done, data.trunc, 0.9, 0.95), out[0].embed

    target, embed = expected(params, data, noise)
    np.testing.assert_allclose(rows.target.reshape(T, N), target, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(rows.next_embed.reshape(T, N, -1), embed, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(rows.done.reshape(T, N), DONE)
    np.testing.assert_array_equal(rows.action.reshape(T, N, D), data.action)


def test_a_time_limit_bootstraps_from_the_true_next_observation_never_from_the_fresh_start(params, data):
    before = targets(params, data)
    changed_start = data.replace(obs=data.obs.at[2, 0].add(1.0), action=data.action.at[2, 0].set(0.5))
    np.testing.assert_array_equal(before, targets(params, changed_start))
    changed_end = targets(params, data.replace(next_obs=data.next_obs.at[1, 0].add(1.0)))
    moved = np.abs(changed_end - before) > 1e-6
    np.testing.assert_array_equal(moved[:, 0], [True, True, False, False, False])
    assert not moved[:, 1].any()


def test_a_termination_bootstraps_nothing_and_its_entropy_bonus_is_a_choice(params, data):
    changed = data.replace(next_obs=data.next_obs.at[3, 0].add(1.0))
    without = dataclasses.replace(CFG, keep_terminal_entropy=False)
    np.testing.assert_array_equal(targets(params, data, without), targets(params, changed, without))
    assert targets(params, data)[3, 0] != targets(params, changed)[3, 0]
    np.testing.assert_allclose(targets(params, data, without)[3, 0], data.reward[3, 0], rtol=1e-6)


def test_next_action_of_the_code_scores_the_fresh_starts_action_after_a_termination(params, data):
    code = dataclasses.replace(CFG, next_action="code")
    changed = data.replace(action=data.action.at[4, 0].set(0.9))
    fresh_moved = targets(params, data) != targets(params, changed)
    code_moved = targets(params, data, code) != targets(params, changed, code)
    assert not fresh_moved.any() and code_moved[3, 0]


def test_targets_carry_no_gradient(params, data):
    grads = jax.grad(lambda p: targets(p, data).sum())(params)
    assert not any(np.asarray(g).any() for g in jax.tree.leaves(grads))


def test_the_auxiliary_loss_predicts_rewards_without_the_running_scale(params, data):
    config = dataclasses.replace(CFG, reward_scale=0.1, scale_returns=True)
    rows, _ = jax.jit(
        lambda reward: learn.make_rows(
            jax.random.key(1),
            params["actor"],
            params["critic"],
            data,
            reward,
            data.obs,
            data.next_obs,
            None,
            config,
            discrete=False,
        )
    )(0.1 * data.reward / 7)
    np.testing.assert_allclose(rows.reward.reshape(T, N), 0.1 * data.reward, rtol=1e-6)


def test_pack_returns_every_field(params, data):
    rows, _ = make(params, data, dataclasses.replace(CFG, policy="score_gae"))
    flat, unpack = learn.pack(rows)
    assert flat.shape[0] == T * N
    for a, b in zip(jax.tree.leaves(unpack(flat)), jax.tree.leaves(rows)):
        np.testing.assert_array_equal(a, b)


def test_minibatches_hold_every_sample_once_an_epoch_and_keys_never_repeat():
    rows = {"id": jnp.arange(12), "x": jnp.zeros((12, 2))}
    config = dataclasses.replace(CFG, num_envs=4, steps=3, minibatches=3, epochs=4)

    def step(carry, key, some):
        seen, keys, i = carry
        return (seen.at[i].set(some["id"]), keys.at[i].set(jax.random.key_data(key)), i + 1), {"i": i.astype(float)}

    start = (jnp.zeros((12, 4), jnp.int32), jnp.zeros((12, 2), jnp.uint32), 0)
    (seen, keys, _), metrics = jax.jit(lambda k: learn.minibatch_scan(k, step, start, rows, config))(jax.random.key(0))
    orders = np.asarray(seen).reshape(4, 12)
    np.testing.assert_array_equal(np.sort(orders, axis=1), np.tile(np.arange(12), (4, 1)))
    assert len({tuple(o) for o in orders}) == 4 and len({tuple(k) for k in np.asarray(keys)}) == 12
    np.testing.assert_allclose(metrics["i"], 5.5)


def test_optimiser_tames_broken_gradients_clips_and_gives_multipliers_their_rate():
    config = dataclasses.replace(CFG, lr=1e-3, multiplier_lr=1e-2)
    params = {"w": jnp.zeros(3), "log_alpha": jnp.zeros(()), "log_beta": jnp.zeros(())}
    optimizer = learn.optimizer(config, multipliers=True)
    grads = {"w": jnp.asarray([jnp.nan, jnp.inf, -jnp.inf]), "log_alpha": jnp.ones(()), "log_beta": jnp.ones(())}
    updates, state = optimizer.update(grads, optimizer.init(params))
    # Adam's first step has the size of the rate whatever the gradient.
    np.testing.assert_allclose(updates["w"], [0, -1e-3, 1e-3], rtol=1e-3)
    np.testing.assert_allclose([updates["log_alpha"], updates["log_beta"]], [-1e-2, -1e-2], rtol=1e-3)
    # The gradient (1, 1, 0, 1, -1) of all five has norm 2 and is cut to 0.5 before the moments see it.
    first_moment = next(x for x in jax.tree.leaves(state) if jnp.shape(x) == (5,))
    np.testing.assert_allclose(first_moment, [0.025, 0.025, 0, 0.025, -0.025], rtol=1e-5)


def test_a_gradient_step_is_the_critic_first_then_the_actor_against_the_new_critic(params, data):
    rows, _ = make(params, data)
    noise = learn.draw_noise(jax.random.key(2), T * N, D, CFG)
    opt = {name: learn.optimizer(CFG, name == "actor").init(params[name]) for name in params}
    after, _, metrics = jax.jit(lambda p, o: learn.gradient_step(p, o, rows, noise, CFG, discrete=False))(params, opt)

    def first_moment(critic):
        grads = jax.grad(lambda a: learn.actor_loss(a, critic, rows, noise, CFG, discrete=False)[0])(params["actor"])
        updates, _ = learn.optimizer(CFG, True).update(grads, opt["actor"])
        return jnp.concatenate([x.ravel() for x in jax.tree.leaves(updates)])

    got = jnp.concatenate([(a - b).ravel() for a, b in zip(*map(jax.tree.leaves, (after["actor"], params["actor"])))])
    np.testing.assert_allclose(got, jax.jit(first_moment)(after["critic"]), atol=2e-6)
    assert np.isfinite([float(x) for x in metrics.values()]).all()


def test_rows_that_do_not_cut_evenly_are_told(params, data):
    rows, _ = make(params, data)
    with pytest.raises(ValueError, match="minibatches must divide the 10 samples of a device, but is 4"):
        config = dataclasses.replace(CFG, num_envs=4, minibatches=4)
        learn.run_epochs(jax.random.key(0), params, {}, rows, config, discrete=False)
