"""Actor and critic of REPPO as pure functions of parameter dictionaries.

Actor: hidden layers (Linear, norm, swish), then a Linear to mean and log standard deviation. Its parameters also hold
the logarithms of the two multipliers, which its optimiser trains.

Critic, of (s, a): trunk of hidden layers -> embedding e; Q head (hidden layer, Linear) -> logits over bins; prediction
head (hidden layer, Linear) -> the next embedding and the reward. To the logits 40 z0 is added, z0 a trained vector that
starts as the HL-Gauss histogram of 0: every value is close to 0 at first.

With discrete actions the actor gives logits, activations are relu, and the critic reads s alone and gives the logits of
every action; only the prediction head sees which action was taken.
"""

import math

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from papyrax.jaxlib_ext.hl_gauss.reference import hl_gauss_decode, hl_gauss_encode
from papyrax.jaxlib_ext.linear_norm import linear_norm_swish
from papyrax.methods.control.reppo.config import ReppoConfig
from papyrax.methods.nets.init import lecun_normal
from papyrax.methods.nets.linear import dense
from papyrax.methods.nets.mlp import Layer, hidden_layers, layer_init, layer_normed, layers_init

__all__ = [
    "CriticOut",
    "actor_apply",
    "actor_init",
    "critic_apply",
    "critic_init",
    "embed_apply",
    "encoder_apply",
    "encoder_init",
    "predict_apply",
    "q_apply",
    "q_samples",
]

Params = dict
_ZERO_GAIN = 40.0
_CHANNELS = 16
_PICTURE_WIDTH = 512


@flax.struct.dataclass
class CriticOut:
    """What the critic says of states and actions; with discrete actions value and logits have an axis for them.

    Attributes:
        value: expected soft return, without the entropy of the action itself.
        logits: over the bins (one number with the "mse" critic).
        embed: the trunk's output e.
        pred: predicted next embedding.
        pred_r: predicted reward.
    """

    value: Float[Array, "*n"]
    logits: Float[Array, "*n b"]
    embed: Float[Array, "*n h"]
    pred: Float[Array, "*n h"]
    pred_r: Float[Array, "*n"]


def encoder_init(key: Key[Array, ""], image: tuple[int, int, int], norm: str) -> Params:
    """MinAtar encoder: 3x3 convolution to 16 channels without padding, norm, relu, flatten, Linear to 512, norm, relu."""
    height, width, channels = image
    if height < 3 or width < 3:
        raise ValueError(f"image must be at least 3 x 3 for the encoder's kernel, but is {height} x {width}.")
    key_conv, key_dense = jax.random.split(key)
    conv = {"w": lecun_normal(key_conv, (3, 3, channels, _CHANNELS)), "b": jnp.zeros(_CHANNELS)}
    if norm != "none":
        conv["scale"] = jnp.ones(_CHANNELS)
    if norm == "layer":
        conv["bias"] = jnp.zeros(_CHANNELS)
    flat = (height - 2) * (width - 2) * _CHANNELS
    return {"conv": conv, "dense": layer_init(key_dense, flat, _PICTURE_WIDTH, norm=norm, init="lecun_normal")}


def encoder_apply(params: Params, obs: Float[Array, "*n o"], config: ReppoConfig) -> Float[Array, "*n 512"]:
    """Flat pictures to features; see `encoder_init`."""
    conv = params["conv"]
    if config.image is None:
        raise ValueError("image is None, but the encoder needs the height, width and channels of its pictures.")
    pictures = obs.reshape(-1, *config.image)
    x = jax.lax.conv_general_dilated(pictures, conv["w"], (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    x = jax.nn.relu(layer_normed(conv, x + conv["b"], eps=config.norm_eps))
    x = x.reshape(*obs.shape[:-1], -1)
    return hidden_layers((params["dense"],), x, eps=config.norm_eps, act=jax.nn.relu)


def actor_init(key: Key[Array, ""], config: ReppoConfig, obs_dim: int, outputs: int, *, discrete: bool) -> Params:
    """Actor for ``outputs`` action axes, or as many discrete actions (whose last layer starts a hundredth as large)."""
    key_encoder, key_layers, key_last = jax.random.split(key, 3)
    params, width = {}, obs_dim
    if config.image is not None:
        params["encoder"], width = encoder_init(key_encoder, config.image, config.norm), _PICTURE_WIDTH
    sizes = (width, *[config.hidden_actor] * config.actor_layers)
    last = layer_init(key_last, sizes[-1], outputs if discrete else 2 * outputs, norm="none", init="lecun_normal")
    if discrete:
        last["w"] = 0.01 * last["w"]
    return params | {
        "hidden": layers_init(key_layers, sizes, norm=config.norm, init="lecun_normal"),
        "last": last,
        "log_alpha": jnp.log(jnp.asarray(config.alpha0, jnp.float32)),
        "log_beta": jnp.log(jnp.asarray(config.beta0, jnp.float32)),
    }


def actor_apply(
    params: Params, obs: Float[Array, "*n o"], config: ReppoConfig, *, discrete: bool
) -> tuple[Float[Array, "*n d"], Float[Array, "*n d"]] | Float[Array, "*n a"]:
    """Mean and standard deviation before tanh, or the log probabilities of the discrete actions."""
    x = encoder_apply(params["encoder"], obs, config) if config.image is not None else obs
    x = _hidden(params["hidden"], x, config, discrete)
    x = dense(x, params["last"]["w"], params["last"]["b"])
    if discrete:
        return jax.nn.log_softmax(x)
    mean, log_std = jnp.split(x, 2, axis=-1)
    return mean, jnp.exp(log_std) + config.min_std


def critic_init(key: Key[Array, ""], config: ReppoConfig, obs_dim: int, actions: int, *, discrete: bool) -> Params:
    """Critic for states of ``obs_dim`` (privileged ones, where a task has them) and ``actions`` axes or choices."""
    keys = jax.random.split(key, 6)
    params, width, hidden = {}, obs_dim, config.hidden_critic
    if config.image is not None:
        params["encoder"], width = encoder_init(keys[0], config.image, config.norm), _PICTURE_WIDTH
    sizes = (width + (0 if discrete else actions), *[hidden] * config.trunk_layers)
    bins = config.bins if config.critic == "hl_gauss" else 1

    def layer(key, n_in, n_out, norm=config.norm):
        return layer_init(key, n_in, n_out, norm=norm, init="lecun_normal")

    params |= {
        "trunk": layers_init(keys[1], sizes, norm=config.norm, init="lecun_normal"),
        "q": layer(keys[2], hidden, hidden),
        "q_last": layer(keys[3], hidden, bins * (actions if discrete else 1), "none"),
        "pred": layer(keys[4], hidden + (actions if discrete else 0), hidden),
        "pred_last": layer(keys[5], hidden, hidden + 1, "none"),
    }
    if config.critic == "hl_gauss":
        params["z0"] = hl_gauss_encode(jnp.zeros(()), config.bins, config.vmin, config.vmax)
    return params


def embed_apply(
    params: Params, obs: Float[Array, "*n o"], action: Float[Array, "*n d"] | None, config: ReppoConfig
) -> Float[Array, "*n h"]:
    """The trunk: embedding of (s, a), or of s alone when ``action`` is None (discrete actions)."""
    x = encoder_apply(params["encoder"], obs, config) if config.image is not None else obs
    if action is not None:
        x = jnp.concatenate((x, action), axis=-1)
    return _hidden(params["trunk"], x, config, action is None)


def q_apply(
    params: Params, embed: Float[Array, "*n h"], config: ReppoConfig, *, actions: int | None = None
) -> tuple[Float[Array, "*n"], Float[Array, "*n b"]]:
    """Q head: values and logits; with ``actions`` discrete choices both gain that axis."""
    x = _hidden((params["q"],), embed, config, actions is not None)
    logits = dense(x, params["q_last"]["w"], params["q_last"]["b"])
    if actions is not None:
        logits = logits.reshape(*logits.shape[:-1], actions, -1)
    if config.critic == "mse":
        return logits[..., 0], logits
    logits = logits + _ZERO_GAIN * params["z0"]
    return hl_gauss_decode(jax.nn.softmax(logits), config.vmin, config.vmax), logits


def predict_apply(
    params: Params, embed: Float[Array, "*n h"], config: ReppoConfig, *, one_hot: Float[Array, "*n a"] | None = None
) -> tuple[Float[Array, "*n h"], Float[Array, "*n"]]:
    """Prediction head: next embedding and reward."""
    x = embed if one_hot is None else jnp.concatenate((embed, one_hot), axis=-1)
    x = _hidden((params["pred"],), x, config, one_hot is not None)
    x = dense(x, params["pred_last"]["w"], params["pred_last"]["b"])
    return x[..., :-1], x[..., -1]


def critic_apply(
    params: Params, obs: Float[Array, "*n o"], action: Float[Array, "*n d"], config: ReppoConfig, *, discrete: bool
) -> CriticOut:
    """The whole critic; discrete actions come one-hot."""
    embed = embed_apply(params, obs, None if discrete else action, config)
    value, logits = q_apply(params, embed, config, actions=action.shape[-1] if discrete else None)
    pred, pred_r = predict_apply(params, embed, config, one_hot=action if discrete else None)
    return CriticOut(value, logits, embed, pred, pred_r)


def q_samples(
    params: Params, obs: Float[Array, "n o"], actions: Float[Array, "m n d"], config: ReppoConfig
) -> tuple[Float[Array, "m n"], Float[Array, "n h"]]:
    """Values of m actions a state, and the embedding of the first.

    The first layer is linear in (s, a), so its state part is computed once for all m.
    """
    x = encoder_apply(params["encoder"], obs, config) if config.image is not None else obs
    first, width = params["trunk"][0], x.shape[-1]
    state = dense(x, first["w"][:width], first["b"])
    hidden = jax.nn.swish(layer_normed(first, state + jnp.matmul(actions, first["w"][width:]), eps=config.norm_eps))
    embed = _hidden(params["trunk"][1:], hidden, config, False)
    return q_apply(params, embed, config)[0], embed[0]


def _hidden(layers: tuple[Layer, ...], x: Array, config: ReppoConfig, relu: bool) -> Array:
    if relu:
        return hidden_layers(layers, x, eps=config.norm_eps, act=jax.nn.relu)
    lead = x.shape[:-1]
    x = x.reshape(math.prod(lead), x.shape[-1])
    for layer in layers:
        x = linear_norm_swish(
            x,
            layer["w"],
            layer["b"],
            layer.get("scale"),
            layer.get("bias"),
            norm=config.norm,
            eps=config.norm_eps,
            implementation=config.implementation,
        )
    return x.reshape(*lead, x.shape[-1])
