import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from papyrax.jaxlib_ext.hl_gauss import hl_gauss_cross_entropy
from papyrax.jaxlib_ext.hl_gauss.reference import hl_gauss_decode, hl_gauss_encode
from papyrax.methods.control.reppo import losses, networks
from papyrax.methods.control.reppo.config import ReppoConfig
from papyrax.methods.control.reppo.losses import ActorNoise, Rows

pytestmark = pytest.mark.proof("reppo", "proof")

CFG = ReppoConfig(
    num_envs=4, steps=4, minibatches=2, hidden_actor=8, hidden_critic=8, bins=21, vmin=-5.0, vmax=5.0, kl_samples=4
)
LOG = {"log_alpha": jnp.log(0.2), "log_beta": jnp.log(0.5)}
LOGP, Q, KL = jnp.asarray([1.0, -1.0]), jnp.asarray([2.0, 3.0]), jnp.asarray([0.05, 0.3])


def policy(kl=KL, logp=LOGP, q=Q, config=CFG, log=LOG):
    goal = losses.target_entropy(config, 2, discrete=False)
    return losses.policy_loss(0.2 * logp - q, -logp, kl, log["log_alpha"], log["log_beta"], config, goal)


def test_hl_gauss_known_values():
    x = jnp.asarray([0.0, 0.4, 1.0, 74.2, 150.0])
    p = hl_gauss_encode(x, 151, 0.0, 150.0)
    np.testing.assert_allclose(p.sum(-1), 1, atol=1e-6)
    np.testing.assert_allclose(hl_gauss_decode(p, 0.0, 150.0), [0.369, 0.588, 1.047, 74.2, 149.631], atol=1e-3)


def test_cross_entropy_has_no_gradient_at_the_target():
    value = jnp.asarray([-4.9, 0.3, 2.0])
    logits = jnp.log(hl_gauss_encode(value, 21, -5.0, 5.0) + 1e-30)
    grad = jax.grad(lambda x: hl_gauss_cross_entropy(x, value, -5.0, 5.0).sum())(logits)
    np.testing.assert_allclose(grad, 0, atol=1e-6)


def test_actor_step_arithmetic():
    total, metrics = policy()
    np.testing.assert_allclose(total, -0.6625, atol=1e-6)
    np.testing.assert_allclose(metrics["policy_loss"], (-1.8 + 0.15) / 2, atol=1e-6)
    np.testing.assert_allclose([metrics["kl_over"], metrics["entropy"], metrics["kl"]], [0.5, 0.0, 0.175], atol=1e-6)


def test_modes():
    want = {"clipped": [-1.8, 0.15], "full": [-1.8 + 0.025, -3.2 + 0.15], "value": [-1.8, -3.2]}
    for mode, values in want.items():
        got = losses.switched(0.2 * LOGP - Q, KL, jnp.asarray(0.5), 0.1, mode)
        np.testing.assert_allclose(got, values, atol=1e-6)


def test_switch_lies_exactly_at_the_bound():
    kl = jnp.asarray([np.nextafter(np.float32(0.1), np.float32(0)), np.float32(0.1)])
    got = losses.switched(jnp.full(2, 7.0), kl, jnp.asarray(1.0), 0.1, "clipped")
    assert got[0] == 7.0 and got[1] == np.float32(0.1)


def test_gradient_of_the_objective_vanishes_above_the_bound():
    grad = jax.grad(lambda q: policy(q=q)[0])(Q)
    np.testing.assert_allclose(grad, [-0.5, 0.0], atol=1e-6)
    grad = jax.grad(lambda kl: policy(kl=kl)[0])(KL)
    np.testing.assert_allclose(grad, [0.0, 0.5 * 0.5], atol=1e-6)


@pytest.mark.parametrize("kl, sign", [(0.3, 1), (0.01, -1)])
def test_kl_weight_rises_when_kl_is_above_its_bound(kl, sign):
    grad = jax.grad(lambda log: policy(kl=jnp.full(2, kl), log=log)[0])(LOG)
    np.testing.assert_allclose(grad["log_beta"], 0.5 * (0.1 - kl), rtol=1e-5)
    assert np.sign(-grad["log_beta"]) == sign


@pytest.mark.parametrize("entropy, sign", [(-1.5, 1), (-0.5, -1)])
def test_temperature_rises_when_entropy_is_below_its_target(entropy, sign):
    grad = jax.grad(lambda log: policy(logp=jnp.full(2, -entropy), log=log)[0])(LOG)
    np.testing.assert_allclose(grad["log_alpha"], 0.2 * (entropy + 1.0), rtol=1e-5)
    assert np.sign(-grad["log_alpha"]) == sign


def test_entropy_targets():
    assert losses.target_entropy(CFG, 4, discrete=False) == -2.0
    np.testing.assert_allclose(losses.target_entropy(CFG, 4, discrete=True), 0.5 * np.log(4), rtol=1e-6)


def test_leave_one_out_subtracts_the_mean_of_the_others():
    q = jnp.asarray(np.random.default_rng(0).normal(size=(4, 5)), jnp.float32)
    want = [q[i] - np.delete(q, i, 0).mean(0) for i in range(4)]
    np.testing.assert_allclose(losses.leave_one_out(q), want, rtol=1e-5, atol=1e-6)


def test_score_objective_has_the_gradient_of_the_expected_value():
    """On Q = -a² the leave-one-out score gradient averages to the pathwise one, 2 for the loss at mean 1."""
    noise = jax.random.normal(jax.random.key(0), (4, 100_000))

    def loss(mean):
        a = jax.lax.stop_gradient(mean + 0.5 * noise)
        logp = -0.5 * jnp.square((a - mean) / 0.5)
        return losses.score_objective(logp, -jnp.square(a), jnp.asarray(0.0)).mean()

    np.testing.assert_allclose(jax.grad(loss)(1.0), 2.0, atol=0.05)


def rows(config, discrete=False, n=8):
    rng = np.random.default_rng(1)

    def draw(*shape):
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    action = jax.nn.one_hot(jnp.arange(n) % 3, 3) if discrete else jnp.tanh(draw(n, 2))
    old = jax.nn.log_softmax(draw(n, 3)) if discrete else (draw(n, 2), jnp.exp(draw(n, 2)))
    flags = jnp.asarray(rng.random(n) < 0.4, jnp.float32)
    return Rows(
        obs=draw(n, 5),
        action=action,
        target=draw(n),
        old=old,
        next_embed=draw(n, config.hidden_critic),
        reward=draw(n),
        done=flags,
        trunc=flags * jnp.asarray(rng.random(n) < 0.5, jnp.float32),
        adv=draw(n),
        logp_old=draw(n),
    )


@pytest.mark.parametrize("kind", ["continuous", "discrete", "mse"])
def test_critic_loss_equals_its_formula(kind):
    discrete = kind == "discrete"
    config = dataclasses.replace(CFG, critic="mse" if kind == "mse" else "hl_gauss", aux_weight=0.7)
    batch = rows(config, discrete)
    params = networks.critic_init(jax.random.key(0), config, 5, batch.action.shape[-1], discrete=discrete)
    got, _ = losses.critic_loss(params, batch, config, discrete=discrete)
    jitted, _ = jax.jit(lambda p, r: losses.critic_loss(p, r, config, discrete=discrete))(params, batch)
    np.testing.assert_allclose(jitted, got, rtol=1e-5)
    out = networks.critic_apply(params, batch.obs, batch.action, config, discrete=discrete)
    value, logits, total = np.asarray(out.value), np.asarray(out.logits, np.float64), []
    for i in range(8):
        if batch.trunc[i]:
            total.append(0.0)
            continue
        index = (i, int(batch.action[i].argmax())) if discrete else (i,)
        if kind == "mse":
            regression = (value[index] - float(batch.target[i])) ** 2
        else:
            p = np.asarray(hl_gauss_encode(batch.target[i], 21, -5.0, 5.0))
            row = logits[index]
            regression = -(p * (row - np.log(np.exp(row - row.max()).sum()) - row.max())).sum()
        pred = np.append(out.pred[i], out.pred_r[i]) - np.append(batch.next_embed[i], batch.reward[i])
        total.append(regression + 0.7 * (1 - float(batch.done[i])) * np.mean(pred**2))
    np.testing.assert_allclose(got, np.mean(total), rtol=1e-4)


def test_masks_may_be_left_out_and_aux_switched_off():
    config = dataclasses.replace(CFG, aux_weight=0.0, mask_truncated=False)
    batch = rows(config).replace(next_embed=None, reward=None, done=None, trunc=None)
    params = networks.critic_init(jax.random.key(0), config, 5, 2, discrete=False)
    loss, metrics = losses.critic_loss(params, batch, config, discrete=False)
    np.testing.assert_allclose(loss, metrics["critic_loss"], rtol=1e-6)
    assert "aux_loss" not in metrics
    grads = jax.grad(lambda p: losses.critic_loss(p, batch, config, discrete=False)[0])(params)
    assert not grads["pred_last"]["w"].any() and grads["z0"].any()


@pytest.mark.parametrize("kind", ["pathwise", "score_q", "score_gae", "discrete"])
def test_actor_loss_trains_the_actor_and_never_the_critic(kind):
    discrete = kind == "discrete"
    config = dataclasses.replace(CFG, policy="pathwise" if discrete else kind, mode="full")
    batch = rows(config, discrete)
    actions = batch.action.shape[-1]
    critic = networks.critic_init(jax.random.key(0), config, 5, actions, discrete=discrete)
    actor = networks.actor_init(jax.random.key(1), config, 5, actions, discrete=discrete)
    k = 4 if kind == "score_q" else 1
    noise = ActorNoise(*(jax.random.normal(jax.random.key(i), (s, 8, 2)) for i, s in ((2, k), (3, 4))))

    def loss(actor, critic):
        return losses.actor_loss(actor, critic, batch, noise, config, discrete=discrete)[0]

    grad_actor, grad_critic = jax.jit(jax.grad(loss, argnums=(0, 1)))(actor, critic)
    assert not any(np.asarray(g).any() for g in jax.tree.leaves(grad_critic))
    for name, leaf in jax.tree_util.tree_leaves_with_path(grad_actor):
        assert np.isfinite(leaf).all() and np.asarray(leaf).any(), name


def test_pathwise_objective_is_alpha_logp_minus_q_of_the_same_action():
    config = dataclasses.replace(CFG, mode="value")
    batch = rows(config)
    critic = networks.critic_init(jax.random.key(0), config, 5, 2, discrete=False)
    actor = networks.actor_init(jax.random.key(1), config, 5, 2, discrete=False)
    noise = ActorNoise(jax.random.normal(jax.random.key(2), (1, 8, 2)), jnp.zeros((1, 8, 2)))
    total, metrics = losses.actor_loss(actor, critic, batch, noise, config, discrete=False)
    jitted, _ = jax.jit(lambda a, c: losses.actor_loss(a, c, batch, noise, config, discrete=False))(actor, critic)
    np.testing.assert_allclose(jitted, total, rtol=1e-5)
    mean, std = networks.actor_apply(actor, batch.obs, config, discrete=False)
    action, logp = losses.dist.tanh_sample(noise.action[0], mean, std)
    value = networks.critic_apply(critic, batch.obs, action, config, discrete=False).value
    np.testing.assert_allclose(metrics["policy_loss"], jnp.mean(0.01 * logp - value), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(metrics["entropy"], -logp.mean(), rtol=1e-5)


def test_bad_settings_are_told_in_one_sentence():
    cases = {
        "mode": ("penalty", "mode must be one of clipped, full, value, but is 'penalty'"),
        "kl_samples": (0, "kl_samples must be at least 1, but is 0"),
        "beta0": (0.0, "beta0 must be above 0"),
        "gamma": (1.5, r"gamma must lie in \[0, 1\], but is 1.5"),
        "vmin": (200.0, "vmin must be below vmax"),
        "minibatches": (3, "minibatches must divide the 16 samples"),
        "score_samples": (1, "score_samples must be at least 2"),
    }
    for name, (value, message) in cases.items():
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(CFG, **{name: value})
