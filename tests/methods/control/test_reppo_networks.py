import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from papyrax.methods.control.reppo import networks
from papyrax.methods.control.reppo.config import ReppoConfig

pytestmark = pytest.mark.proof("reppo", "proof")

CFG = ReppoConfig(num_envs=4, steps=4, minibatches=2, hidden_actor=16, hidden_critic=12, bins=31, vmin=0.0, vmax=30.0)
OBS = jnp.asarray(np.random.default_rng(0).normal(size=(9, 5)), jnp.float32)
ACT = jnp.tanh(jnp.asarray(np.random.default_rng(1).normal(size=(9, 2)), jnp.float32))


class Block(nn.Module):
    width: int
    norm: str
    relu: bool = False

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(self.width, name="linear")(x)
        if self.norm == "layer":
            x = nn.LayerNorm(name="norm")(x)
        elif self.norm == "rms":
            x = nn.RMSNorm(name="norm")(x)
        return nn.relu(x) if self.relu else nn.swish(x)


class Actor(nn.Module):
    width: int
    outputs: int
    norm: str

    @nn.compact
    def __call__(self, x):
        for i in range(3):
            x = Block(self.width, self.norm, name=f"hidden{i}")(x)
        mean, log_std = jnp.split(nn.Dense(2 * self.outputs, name="last")(x), 2, axis=-1)
        return mean, jnp.exp(log_std) + 1e-6


class Critic(nn.Module):
    width: int
    bins: int
    vmax: float
    norm: str

    @nn.compact
    def __call__(self, obs, act):
        x = jnp.concatenate([obs, act], -1)
        for i in range(3):
            x = Block(self.width, self.norm, name=f"trunk{i}")(x)
        logits = nn.Dense(self.bins, name="q_last")(Block(self.width, self.norm, name="q")(x))
        logits = logits + 40 * self.param("z0", nn.initializers.zeros, (self.bins,))
        pred = nn.Dense(self.width + 1, name="pred_last")(Block(self.width, self.norm, name="pred")(x))
        value = nn.softmax(logits) @ jnp.linspace(0, self.vmax, self.bins)
        return value, logits, x, pred


def linen(layer):
    tree = {"linear": {"kernel": layer["w"], "bias": layer["b"]}}
    norm = {k: layer[k] for k in ("scale", "bias") if k in layer}
    return tree | ({"norm": norm} if norm else {})


def shaken(params, key):
    """Parameters off their special initial values, so that every one of them matters."""
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(key, len(leaves))
    return jax.tree.unflatten(tree, [x + 0.1 * jax.random.normal(k, x.shape) for x, k in zip(leaves, keys)])


@pytest.mark.parametrize("norm", ["layer", "rms", "none"])
def test_networks_equal_an_independent_forward_with_the_same_weights(norm):
    config = dataclasses.replace(CFG, norm=norm)
    actor = shaken(networks.actor_init(jax.random.key(0), config, 5, 2, discrete=False), jax.random.key(1))
    tree = {f"hidden{i}": linen(layer) for i, layer in enumerate(actor["hidden"])}
    tree["last"] = {"kernel": actor["last"]["w"], "bias": actor["last"]["b"]}
    want = jax.jit(Actor(16, 2, norm).apply)({"params": tree}, OBS)
    for a, b in zip(networks.actor_apply(actor, OBS, config, discrete=False), want):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)

    critic = shaken(networks.critic_init(jax.random.key(2), config, 5, 2, discrete=False), jax.random.key(3))
    tree = {f"trunk{i}": linen(layer) for i, layer in enumerate(critic["trunk"])} | {"z0": critic["z0"]}
    for head in ("q", "pred"):
        tree[head] = linen(critic[head])
        tree[f"{head}_last"] = {"kernel": critic[f"{head}_last"]["w"], "bias": critic[f"{head}_last"]["b"]}
    value, logits, embed, pred = jax.jit(Critic(12, 31, 30.0, norm).apply)({"params": tree}, OBS, ACT)
    out = networks.critic_apply(critic, OBS, ACT, config, discrete=False)
    np.testing.assert_allclose(out.value, value, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(out.logits, logits, rtol=1e-4, atol=1e-3)
    np.testing.assert_allclose(out.embed, embed, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(jnp.append(out.pred, out.pred_r[:, None], 1), pred, rtol=1e-4, atol=1e-4)

    actions = jnp.stack([ACT, -ACT, 0.5 * ACT])
    values, first = networks.q_samples(critic, OBS, actions, config)
    for i in range(3):
        np.testing.assert_allclose(
            values[i],
            networks.critic_apply(critic, OBS, actions[i], config, discrete=False).value,
            rtol=1e-4,
            atol=1e-4,
        )
    np.testing.assert_allclose(first, embed, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("vmin, vmax, bins", [(0, 150, 151), (-10, 10, 151), (0, 40, 101)])
@pytest.mark.parametrize("discrete", [False, True])
def test_every_initial_value_is_about_zero(vmin, vmax, bins, discrete):
    config = dataclasses.replace(CFG, vmin=float(vmin), vmax=float(vmax), bins=bins, hidden_critic=64)
    critic = networks.critic_init(jax.random.key(0), config, 5, 2, discrete=discrete)
    obs = 10 * jax.random.normal(jax.random.key(1), (50, 5))
    act = jax.nn.one_hot(jnp.arange(50) % 2, 2) if discrete else jax.random.uniform(jax.random.key(2), (50, 2))
    value = networks.critic_apply(critic, obs, act, config, discrete=discrete).value
    assert jnp.abs(value).max() < 1e-3


def test_mse_critic_gives_its_one_output():
    config = dataclasses.replace(CFG, critic="mse")
    critic = networks.critic_init(jax.random.key(0), config, 5, 2, discrete=False)
    out = networks.critic_apply(critic, OBS, ACT, config, discrete=False)
    assert "z0" not in critic and out.logits.shape == (9, 1)
    np.testing.assert_array_equal(out.value, out.logits[:, 0])


def test_discrete_networks_read_pictures_and_start_almost_uniform():
    config = dataclasses.replace(CFG, image=(6, 5, 2), actor_layers=1, trunk_layers=1)
    obs = jax.random.normal(jax.random.key(0), (3, 60))
    actor = networks.actor_init(jax.random.key(1), config, 60, 4, discrete=True)
    log_probs = networks.actor_apply(actor, obs, config, discrete=True)
    np.testing.assert_allclose(jnp.exp(log_probs).sum(-1), 1, rtol=1e-5)
    np.testing.assert_allclose(log_probs, -np.log(4), atol=0.1)
    critic = networks.critic_init(jax.random.key(2), config, 60, 4, discrete=True)
    out = networks.critic_apply(critic, obs, jax.nn.one_hot(jnp.arange(3), 4), config, discrete=True)
    assert out.value.shape == (3, 4) and out.logits.shape == (3, 4, 31) and out.embed.shape == (3, 12)
    # Features of the encoder against Flax's convolution.
    encoder = shaken(actor["encoder"], jax.random.key(3))
    x = obs.reshape(3, 6, 5, 2)
    conv = encoder["conv"]
    x = nn.Conv(16, (3, 3), padding="VALID").apply({"params": {"kernel": conv["w"], "bias": conv["b"]}}, x)
    x = nn.relu(nn.LayerNorm().apply({"params": {"scale": conv["scale"], "bias": conv["bias"]}}, x)).reshape(3, -1)
    want = Block(512, "layer", relu=True).apply({"params": linen(encoder["dense"])}, x)
    np.testing.assert_allclose(networks.encoder_apply(encoder, obs, config), want, rtol=1e-4, atol=1e-4)


def test_a_picture_too_small_for_the_kernel_is_refused():
    with pytest.raises(ValueError, match="image must be at least 3 x 3"):
        networks.encoder_init(jax.random.key(0), (2, 5, 1), "layer")
