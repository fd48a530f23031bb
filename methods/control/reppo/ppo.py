"""PPO with clipping (Schulman et al. 2017, arXiv 1707.06347), the baseline of REPPO on the same worlds and rollouts.

Continuous actions are a Gaussian squashed by tanh, or a Gaussian that the world clips. The *unsquashed* sample is
stored and scored. Recomputing it from an action that was clipped to ±0.999 leaves the mean free to run away beyond the
clip, where the stored action's score still rises: entropy collapses and the baseline looks worse than it is.
"""

import dataclasses
from typing import Literal

import flax.struct
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int, Key

from papyrax.envs import rollout as worlds
from papyrax.envs.protocol import World
from papyrax.envs.rollout import Envs
from papyrax.methods.control.reppo import distributions as dist
from papyrax.methods.control.reppo.collect import (
    ReturnScaler,
    device_key,
    episode_metrics,
    merge_moments,
    scale_rewards,
    scaler_init,
)
from papyrax.methods.control.reppo.learn import minibatch_scan, optimizer
from papyrax.methods.nets.mlp import Layer, mlp, mlp_init
from papyrax.methods.nets.normalizers import Moments, moments_init, standardize
from papyrax.methods.objectives.policy import clip_loss, normalize_adv
from papyrax.methods.objectives.returns import gae

__all__ = ["PpoConfig", "PpoState", "evaluate", "init", "ppo_loss", "update"]

_OBS_EPS = 1e-8


@dataclasses.dataclass(frozen=True)
class PpoConfig:
    """Static settings, hashable. ``squash`` "tanh" or "clip" is the kind of Gaussian; the other names are the usual ones."""

    num_envs: int = 1024
    steps: int = 32
    epochs: int = 4
    minibatches: int = 16
    gamma: float = 0.99
    lam: float = 0.95
    reward_scale: float = 1.0
    scale_returns: bool = False

    hidden: int = 512
    layers: int = 3
    norm: Literal["layer", "rms", "none"] = "layer"
    norm_eps: float = 1e-6
    min_std: float = 1e-6
    squash: Literal["tanh", "clip"] = "tanh"

    clip: float = 0.2
    entropy: float = 0.0
    value: float = 0.5
    lr: float = 3e-4
    max_grad_norm: float = 0.5

    def __post_init__(self):
        if self.squash not in ("tanh", "clip"):
            raise ValueError(f'squash must be "tanh" or "clip", but is {self.squash!r}.')
        for name in ("num_envs", "steps", "epochs", "minibatches", "hidden", "layers"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, but is {getattr(self, name)}.")
        for name in ("lr", "max_grad_norm", "reward_scale"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0, but is {getattr(self, name)}.")
        for name in ("norm_eps", "min_std", "entropy", "value"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must not be negative, but is {getattr(self, name)}.")
        for name in ("gamma", "lam"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must lie in [0, 1], but is {getattr(self, name)}.")
        if self.norm not in ("layer", "rms", "none"):
            raise ValueError(f"norm must be layer, rms or none, but is {self.norm!r}.")
        if not 0 < self.clip < 1:
            raise ValueError(f"clip must lie in (0, 1), but is {self.clip}.")
        if (self.num_envs * self.steps) % self.minibatches:
            raise ValueError(
                f"minibatches must divide the {self.num_envs * self.steps} samples of an iteration, "
                f"but is {self.minibatches}."
            )


@flax.struct.dataclass
class PpoState:
    """As `papyrax.methods.control.reppo.agent.State`; params are "actor" and "value"."""

    params: dict[str, tuple[Layer, ...]]
    opt: optax.OptState
    obs: Moments
    scaler: ReturnScaler | None
    envs: Envs
    key: Key[Array, ""]
    step: Int[Array, ""]


@flax.struct.dataclass
class PpoRows:
    """Samples: ``taken`` is the unsquashed sample, or the action's index."""

    obs: Float[Array, "n o"]
    taken: Float[Array, "n d"] | Int[Array, " n"]
    logp: Float[Array, " n"]
    adv: Float[Array, " n"]
    returns: Float[Array, " n"]
    noise: Float[Array, "n d"] | None


def init(key: Key[Array, ""], config: PpoConfig, world: World) -> PpoState:
    """Fresh networks (policy and value apart), optimiser, statistics and environments with staggered time limits."""
    key_actor, key_value, key_envs, key = jax.random.split(key, 4)
    hidden = [config.hidden] * config.layers
    outputs = world.n_actions if world.discrete else 2 * world.act_dim
    actor = mlp_init(key_actor, (world.obs_dim, *hidden, outputs), norm=config.norm, init="lecun_normal")
    # A policy that starts near its centre, as usual for PPO.
    actor = (*actor[:-1], {**actor[-1], "w": 0.01 * actor[-1]["w"]})
    value = mlp_init(key_value, (world.obs_dim, *hidden, 1), norm=config.norm, init="lecun_normal")
    params = {"actor": actor, "value": value}
    return PpoState(
        params=params,
        opt=optimizer(config, multipliers=False).init(params),
        obs=moments_init(world.obs_dim),
        scaler=scaler_init(config.num_envs) if config.scale_returns else None,
        envs=worlds.start(key_envs, world, config.num_envs),
        key=key,
        step=jnp.zeros((), jnp.int32),
    )


def ppo_loss(
    params: dict[str, tuple[Layer, ...]], rows: PpoRows, config: PpoConfig, *, discrete: bool
) -> tuple[Float[Array, ""], dict[str, Array]]:
    """Clipped surrogate + ``value`` * half squared error - ``entropy`` * entropy (exact, or of one fresh sample)."""
    out = _net(params["actor"], rows.obs, config)
    if discrete:
        log_probs = jax.nn.log_softmax(out)
        logp = jnp.take_along_axis(log_probs, rows.taken[:, None], axis=1)[:, 0]
        entropy = dist.categorical_entropy(log_probs)
    else:
        if rows.noise is None:
            raise ValueError("rows.noise is None, but the entropy of continuous actions is estimated from it.")
        mean, std = _gaussian(out, config)
        logp = _logp(rows.taken, mean, std, config)
        entropy = -_logp(mean + std * rows.noise, mean, std, config)
    policy = jnp.mean(clip_loss(logp, rows.logp, rows.adv, low=config.clip, high=config.clip))
    error = jnp.mean(jnp.square(_net(params["value"], rows.obs, config)[:, 0] - rows.returns))
    entropy = jnp.mean(entropy)
    loss = policy + 0.5 * config.value * error - config.entropy * entropy
    ratio = jnp.exp(logp - rows.logp)
    metrics = {
        "policy_loss": policy,
        "value_loss": error,
        "entropy": entropy,
        "kl": jnp.mean(ratio - 1 - (logp - rows.logp)),
        "clipped": jnp.mean(jnp.abs(ratio - 1) > config.clip),
    }
    return loss, metrics


def update(
    state: PpoState, batch: None, config: PpoConfig, *, frozen: None = None, axis_name: str | None = None
) -> tuple[PpoState, dict[str, Array]]:
    """One iteration of rollout, advantages and epochs; arguments as in `papyrax.methods.control.reppo.agent.update`."""
    discrete = state.envs.world.discrete
    key, key_rollout, key_epochs = jax.random.split(state.key, 3)

    def policy(key, obs):
        out = _net(state.params["actor"], _normal(state.obs, obs), config)
        if discrete:
            log_probs = jax.nn.log_softmax(out)
            index = jax.random.categorical(key, log_probs)
            return index, (index, jnp.take_along_axis(log_probs, index[:, None], axis=1)[:, 0])
        mean, std = _gaussian(out, config)
        u = mean + std * jax.random.normal(key, mean.shape)
        return _squash(u, config), (u, _logp(u, mean, std, config))

    envs, data = worlds.rollout(device_key(key_rollout, axis_name), policy, state.envs, config.steps)
    reward, scaler = config.reward_scale * data.reward, state.scaler
    if config.scale_returns:
        scaler, reward = scale_rewards(scaler, reward, data.done, config.gamma, axis_name)
    taken, logp = data.extras
    obs, next_obs = _normal(state.obs, data.obs), _normal(state.obs, data.next_obs)
    value = _net(state.params["value"], obs, config)[..., 0]
    value_next = _net(state.params["value"], next_obs, config)[..., 0]
    adv = gae(reward, value, value_next, data.done, data.trunc, config.gamma, config.lam)
    rows = PpoRows(obs, taken, logp, normalize_adv(adv, axis_name=axis_name), adv + value, None)
    rows = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), rows)

    def step(carry, key, some):
        params, opt = carry
        if not discrete:
            some = some.replace(noise=jax.random.normal(key, some.taken.shape))
        grads, metrics = jax.grad(ppo_loss, has_aux=True)(params, some, config, discrete=discrete)
        if axis_name is not None:
            grads, metrics = jax.lax.pmean((grads, metrics), axis_name)
        updates, opt = optimizer(config, multipliers=False).update(grads, opt)
        return (optax.apply_updates(params, updates), opt), metrics

    key_epochs = device_key(key_epochs, axis_name)
    (params, opt), metrics = minibatch_scan(key_epochs, step, (state.params, state.opt), rows, config)
    after = PpoState(
        params=params,
        opt=opt,
        obs=merge_moments(state.obs, data.obs, axis_name, data.fault),
        scaler=scaler,
        envs=envs,
        key=key,
        step=state.step + 1,
    )
    return after, metrics | episode_metrics(envs, data, axis_name)


def evaluate(
    key: Key[Array, ""], state: PpoState, config: PpoConfig, n: int, steps: int | None = None
) -> Float[Array, " n"]:
    """Undiscounted returns of the deterministic policy over n fresh episodes of at most ``steps`` steps."""
    world = state.envs.world

    def policy(obs):
        out = _net(state.params["actor"], _normal(state.obs, obs), config)
        return jnp.argmax(out, axis=-1) if world.discrete else _squash(_gaussian(out, config)[0], config)

    return worlds.evaluate(key, world, policy, n, steps)


def _net(layers, x, config):
    return mlp(layers, x, eps=config.norm_eps, act=jax.nn.swish)


def _gaussian(out, config):
    mean, log_std = jnp.split(out, 2, axis=-1)
    return mean, jnp.exp(log_std) + config.min_std


def _squash(u, config):
    return dist.clip_action(jnp.tanh(u)) if config.squash == "tanh" else jnp.clip(u, -1.0, 1.0)


def _logp(u, mean, std, config):
    """Of the action: squashed samples lose the volume that tanh takes."""
    logp = dist.gaussian_logp(u, mean, std)
    return logp - dist.squash_correction(u) if config.squash == "tanh" else logp


def _normal(moments, x):
    return standardize(moments, x, ddof=0, eps=_OBS_EPS)
