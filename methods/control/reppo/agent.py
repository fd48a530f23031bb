"""REPPO as a learner: a rollout, targets, epochs of minibatches and the merge of statistics are one pure `update`.

The world and its states lie inside the State (`papyrax.envs.rollout.Envs`), so an update needs no batch, vmaps over
seeds, and shards over devices: environments and what belongs to them along a mesh axis, everything else replicated.
"""

import flax.struct
import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int, Key, PyTree

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
from papyrax.methods.control.reppo.config import ReppoConfig
from papyrax.methods.control.reppo.learn import make_rows, optimizer, run_epochs
from papyrax.methods.control.reppo.networks import Params, actor_apply, actor_init, critic_init
from papyrax.methods.nets.normalizers import Moments, moments_init, standardize

__all__ = ["OBS_EPS", "State", "act", "behaviour", "evaluate", "init", "state_specs", "update"]

OBS_EPS = 1e-8


@flax.struct.dataclass
class State:
    """Everything that learning changes.

    Attributes:
        params: "actor" (with both multipliers) and "critic".
        opt: optimiser states under the same names.
        obs: statistics of observations, privileged those of the critic's (None where it has none of its own).
        scaler: return statistics, None unless ``scale_returns``.
        envs: the environments in the middle of their episodes.
        key: typed key.
        step: iterations done.
    """

    params: dict[str, Params]
    opt: dict[str, optax.OptState]
    obs: Moments
    privileged: Moments | None
    scaler: ReturnScaler | None
    envs: Envs
    key: Key[Array, ""]
    step: Int[Array, ""]


def init(key: Key[Array, ""], config: ReppoConfig, world: World) -> State:
    """Fresh networks, optimisers, statistics and ``config.num_envs`` environments with staggered time limits."""
    if config.image is not None and _size(config.image) != world.obs_dim:
        raise ValueError(f"image {config.image} does not hold the {world.obs_dim} numbers that {world.name} shows.")
    if world.discrete and config.policy != "pathwise":
        raise ValueError(f"policy {config.policy!r} needs continuous actions, but {world.name} has discrete ones.")
    key_actor, key_critic, key_envs, key = jax.random.split(key, 4)
    actions = world.n_actions if world.discrete else world.act_dim
    params = {
        "actor": actor_init(key_actor, config, world.obs_dim, actions, discrete=world.discrete),
        "critic": critic_init(
            key_critic, config, world.privileged_dim or world.obs_dim, actions, discrete=world.discrete
        ),
    }
    return State(
        params=params,
        opt={name: optimizer(config, name == "actor").init(params[name]) for name in params},
        obs=moments_init(world.obs_dim),
        privileged=moments_init(world.privileged_dim) if world.privileged_dim else None,
        scaler=scaler_init(config.num_envs) if config.scale_returns else None,
        envs=worlds.start(key_envs, world, config.num_envs),
        key=key,
        step=jnp.zeros((), jnp.int32),
    )


def act(
    actor: Params, moments: Moments, obs: Float[Array, "n o"], config: ReppoConfig, *, discrete: bool
) -> Float[Array, "n d"] | Int[Array, " n"]:
    """The deterministic action: tanh(mean), or the likeliest choice."""
    out = actor_apply(actor, _normal(moments, obs, config), config, discrete=discrete)
    return jnp.argmax(out, axis=-1) if discrete else dist.clip_action(jnp.tanh(out[0]))


def behaviour(state: State, config: ReppoConfig) -> worlds.Policy:
    """The policy that gathers data: a sample for each observation, and the policy's output there (see `actor_apply`)."""
    discrete = state.envs.world.discrete

    def policy(key, obs):
        out = actor_apply(state.params["actor"], _normal(state.obs, obs, config), config, discrete=discrete)
        if discrete:
            return jax.random.categorical(key, out), out
        mean, std = out
        return dist.clip_action(jnp.tanh(mean + std * jax.random.normal(key, mean.shape))), out

    return policy


def update(
    state: State, batch: None, config: ReppoConfig, *, frozen: None = None, axis_name: str | None = None
) -> tuple[State, dict[str, Array]]:
    """One iteration: ``config.steps`` steps of every environment, then ``epochs * minibatches`` gradient steps.

    ``batch`` and ``frozen`` are None: data comes from the environments in the state, and nothing is frozen. Under
    `shard_map` or `vmap` with ``axis_name`` each device steps its own environments and cuts its own samples into
    ``minibatches``; gradients, statistics and metrics are merged.
    """
    world, discrete = state.envs.world, state.envs.world.discrete
    key, key_rollout, key_rows, key_epochs = jax.random.split(state.key, 4)
    envs, data = worlds.rollout(device_key(key_rollout, axis_name), behaviour(state, config), state.envs, config.steps)
    reward, scaler = config.reward_scale * data.reward, state.scaler
    if config.scale_returns:
        scaler, reward = scale_rewards(scaler, reward, data.done, config.gamma, axis_name)
    privileged = None
    if world.privileged_dim:
        privileged = tuple(_normal(state.privileged, x, config) for x in (data.privileged, data.next_privileged))

    rows, target_metrics = make_rows(
        device_key(key_rows, axis_name),
        state.params["actor"],
        state.params["critic"],
        data,
        reward,
        _normal(state.obs, data.obs, config),
        _normal(state.obs, data.next_obs, config),
        privileged,
        config,
        discrete=discrete,
        axis_name=axis_name,
    )
    if axis_name is not None:
        target_metrics = jax.lax.pmean(target_metrics, axis_name)
    params, opt, metrics = run_epochs(
        device_key(key_epochs, axis_name),
        state.params,
        state.opt,
        rows,
        config,
        discrete=discrete,
        axis_name=axis_name,
    )
    after = State(
        params=params,
        opt=opt,
        obs=merge_moments(state.obs, data.obs, axis_name, data.fault),
        privileged=(
            merge_moments(state.privileged, data.privileged, axis_name, data.fault) if world.privileged_dim else None
        ),
        scaler=scaler,
        envs=envs,
        key=key,
        step=state.step + 1,
    )
    return after, metrics | target_metrics | episode_metrics(envs, data, axis_name)


def evaluate(
    key: Key[Array, ""], state: State, config: ReppoConfig, n: int, steps: int | None = None
) -> Float[Array, " n"]:
    """Undiscounted returns of the deterministic policy over n fresh episodes of at most ``steps`` steps."""
    world = state.envs.world

    def policy(obs):
        return act(state.params["actor"], state.obs, obs, config, discrete=world.discrete)

    return worlds.evaluate(key, world, policy, n, steps)


def state_specs(state: PyTree, axis_name: str) -> PyTree:
    """Partition specs of a State (of REPPO or of PPO): environments along ``axis_name``, the rest replicated."""
    spread, whole = PartitionSpec(axis_name), PartitionSpec()
    specs = jax.tree.map(lambda _: whole, state)
    scaler = None if state.scaler is None else specs.scaler.replace(running=spread)
    return specs.replace(envs=jax.tree.map(lambda _: spread, state.envs), scaler=scaler)


def _normal(moments: Moments, x: Float[Array, "*n d"], config: ReppoConfig) -> Float[Array, "*n d"]:
    return standardize(moments, x, ddof=0, eps=OBS_EPS) if config.normalize_obs else x


def _size(shape: tuple[int, ...]) -> int:
    height, width, channels = shape
    return height * width * channels
