"""From a rollout to new parameters: soft TD(lambda) targets once, then epochs of minibatches.

With theta_old fixed, for step t that led to the true next state s'_t:

    b_t = a_{t+1} inside an episode, else a fresh sample of pi_old(s'_t)
    y_t = r_t - gamma alpha log pi_old(b_t | s'_t)        the *next* action's entropy, so Q leaves out its own
    V_t = mean of Q(s'_t, a') over M samples a' of pi_old
    G_t = y_t + gamma [V_t if truncated, else (1 - done_t)(lambda G_{t+1} + (1 - lambda) V_t)]

Targets, next embeddings and the old policy's parameters at every state are stored once an iteration, and all that the
losses read lies in one matrix, so that a minibatch is one slice of one gather.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Key, PyTree

from papyrax.envs.rollout import Batch
from papyrax.methods.control.reppo import distributions as dist
from papyrax.methods.control.reppo.config import ReppoConfig
from papyrax.methods.control.reppo.losses import ActorNoise, Rows, actor_loss, critic_loss
from papyrax.methods.control.reppo.networks import Params, actor_apply, embed_apply, q_apply, q_samples
from papyrax.methods.control.reppo.noise import normals
from papyrax.methods.objectives.policy import normalize_adv
from papyrax.methods.objectives.returns import lambda_returns

__all__ = [
    "draw_noise",
    "gradient_step",
    "make_rows",
    "minibatch_scan",
    "optimizer",
    "pack",
    "run_epochs",
    "soft_rewards",
]


def optimizer(config, multipliers: bool) -> optax.GradientTransformation:
    """NaN gradients to 0 and infinite ones to ±1, global norm clip, Adam; multipliers at their own rate.

    It works on one flat vector, because leaf by leaf it would be many small programs, each with a cost of its own. The
    learning rate is part of the optimiser's state, so that runs which differ in it alone share one compiled program.
    """
    flat = optax.flatten(
        optax.chain(
            optax.stateless(
                lambda g, _: jax.tree.map(lambda x: jnp.nan_to_num(x, nan=0.0, posinf=1.0, neginf=-1.0), g)
            ),
            optax.clip_by_global_norm(config.max_grad_norm),
            optax.scale_by_adam(),
            optax.inject_hyperparams(optax.scale_by_learning_rate)(learning_rate=config.lr),
        )
    )
    if not multipliers or config.multiplier_lr is None:
        return flat
    ratio = config.multiplier_lr / config.lr

    def rescale(updates: Any, _):
        return updates | {k: ratio * updates[k] for k in ("log_alpha", "log_beta")}

    return optax.chain(flat, optax.stateless(rescale))


def soft_rewards(
    reward: Float[Array, "t n"],
    entropy: Float[Array, "t n"],
    terminated: Float[Array, "t n"],
    alpha: Float[Array, ""],
    config: ReppoConfig,
) -> Float[Array, "t n"]:
    """``r + gamma alpha H(next action)``; H is an estimate -log pi(b | s') or exact. At a termination the bonus stays
    or goes by ``keep_terminal_entropy``.
    """
    bonus = config.gamma * alpha * entropy
    return reward + (bonus if config.keep_terminal_entropy else (1 - terminated) * bonus)


def make_rows(
    key: Key[Array, ""],
    actor: Params,
    critic: Params,
    data: Batch,
    reward: Float[Array, "t n"],
    obs: Float[Array, "t n o"],
    next_obs: Float[Array, "t n o"],
    privileged: tuple[Float[Array, "t n p"], Float[Array, "t n p"]] | None,
    config: ReppoConfig,
    *,
    discrete: bool,
    axis_name: str | None = None,
) -> tuple[Rows, dict[str, Array]]:
    """What the losses need of every step, as t * n rows, and metrics of the targets.

    ``obs``, ``next_obs`` and ``privileged`` (now and next) are normalised; ``data.extras`` holds the old policy's
    output at ``obs``; ``reward`` is scaled, by the spread of returns too if ``scale_returns``, while the auxiliary loss
    predicts ``reward_scale`` times that of ``data``. ``actor`` and ``critic`` are those of the rollout.
    """
    alpha = jnp.exp(actor["log_alpha"])
    done, trunc = data.done.astype(reward.dtype), data.trunc.astype(reward.dtype)
    state, next_state = (obs, next_obs) if privileged is None else privileged
    key_next, key_now = jax.random.split(key)
    new = actor_apply(actor, next_obs, config, discrete=discrete)

    if discrete:
        action = jax.nn.one_hot(data.action, new.shape[-1])
        embed = embed_apply(critic, next_state, None, config)
        values = q_apply(critic, embed, config, actions=new.shape[-1])[0]
        value, entropy = jnp.sum(jnp.exp(new) * values, axis=-1), dist.categorical_entropy(new)
    else:
        action, (mean, std) = data.action, new
        samples = _samples(key_next, mean, std, config.value_samples)
        anew = done if config.next_action == "fresh" else trunc
        anew = anew.at[-1].set(1.0)[..., None]
        following = jnp.concatenate((action[1:], samples[0, -1:]))
        entropy = -dist.tanh_logp(mean, std, jnp.where(anew > 0, samples[0], following))
        value, embed = _values(critic, next_state, samples, config)

    y = soft_rewards(reward, entropy, done * (1 - trunc), alpha, config)
    target = lambda_returns(y, value, done, trunc, config.gamma, config.lam)
    optional = {}
    if privileged is not None:
        optional["critic_obs"] = state
    if config.aux_weight:
        # a fixed unit, never the running spread of returns: that target would drift with the policy
        optional |= {"next_embed": embed, "reward": config.reward_scale * data.reward, "done": done}
    if config.mask_truncated:
        optional["trunc"] = trunc
    if config.policy == "score_gae":
        value_now, _ = _values(critic, state, _samples(key_now, *data.extras, config.value_samples), config)
        optional["adv"] = normalize_adv(target - value_now, axis_name=axis_name)
        optional["logp_old"] = dist.tanh_logp(*data.extras, action)
    rows = Rows(obs=obs, action=action, target=target, old=data.extras, **optional)
    rows = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), jax.lax.stop_gradient(rows))
    outside = (target < config.vmin) | (target > config.vmax)
    return rows, {"target": jnp.mean(target), "target_outside": jnp.mean(outside), "value_next": jnp.mean(value)}


def pack(rows: PyTree) -> tuple[Float[Array, "n w"], Callable[[Float[Array, "b w"]], PyTree]]:
    """All fields (vectors or matrices of n rows) side by side in one matrix, and the function that reads rows of it back.

    Integers return as integers; they must be small enough for float32 to hold (below 2^24).
    """
    leaves, tree = jax.tree.flatten(rows)
    flat = jnp.concatenate([x.reshape(x.shape[0], -1).astype(jnp.float32) for x in leaves], axis=1)

    def unpack(some):
        out, start = [], 0
        for leaf in leaves:
            width = 1 if leaf.ndim == 1 else leaf.shape[1]
            piece = some[:, start : start + width].astype(leaf.dtype)
            out.append(piece[:, 0] if leaf.ndim == 1 else piece)
            start += width
        return jax.tree.unflatten(tree, out)

    return flat, unpack


def draw_noise(key: Key[Array, ""], n: int, actions: int, config: ReppoConfig) -> ActorNoise:
    """The normals of one minibatch of n samples."""
    k = config.score_samples if config.policy == "score_q" else 1
    # Kept in memory: fused into each of its readers, the noise would be drawn once for each of them.
    noise = jax.lax.optimization_barrier(normals(key, (k + config.kl_samples, n, actions)))
    return ActorNoise(noise[:k], noise[k:])


def gradient_step(
    params: dict[str, Params],
    opt: dict[str, optax.OptState],
    rows: Rows,
    noise: ActorNoise | None,
    config: ReppoConfig,
    *,
    discrete: bool,
    axis_name: str | None = None,
) -> tuple[dict[str, Params], dict[str, optax.OptState], dict[str, Array]]:
    """A critic step, then an actor step against the new critic; gradients are means over ``axis_name``."""

    def step(name, loss, *args) -> tuple[Any, Any, dict[str, Array]]:
        grads, metrics = jax.grad(loss, has_aux=True)(params[name], *args, config, discrete=discrete)
        if axis_name is not None:
            grads, metrics = jax.lax.pmean((grads, metrics), axis_name)
        updates, state = optimizer(config, name == "actor").update(grads, opt[name])
        return optax.apply_updates(params[name], updates), state, metrics

    critic, opt_critic, critic_metrics = step("critic", critic_loss, rows)
    actor, opt_actor, actor_metrics = step("actor", actor_loss, critic, rows, noise)
    return (
        {"actor": actor, "critic": critic},
        {"actor": opt_actor, "critic": opt_critic},
        critic_metrics | actor_metrics,
    )


def minibatch_scan(
    key: Key[Array, ""],
    step: Callable[[PyTree, Key[Array, ""], PyTree], tuple[PyTree, dict[str, Array]]],
    carry: PyTree,
    rows: PyTree,
    config,
) -> tuple[PyTree, dict[str, Array]]:
    """``epochs`` passes, each a fresh permutation of the rows cut into ``minibatches``, each with a key of its own.

    ``step(carry, key, rows) -> (carry, metrics)``; the metrics returned are means over all steps. ``config`` is that of
    REPPO or of PPO.

    Raises:
      ValueError: the rows of this device do not cut into equal minibatches.
    """
    flat, unpack = pack(rows)
    n = flat.shape[0]
    if n % config.minibatches:
        raise ValueError(f"minibatches must divide the {n} samples of a device, but is {config.minibatches}.")

    def minibatch(carry, item):
        key, some = item
        return step(carry, key, unpack(some))

    def epoch(carry, key):
        key_order, key_steps = jax.random.split(key)
        shuffled = flat[jax.random.permutation(key_order, n)].reshape(config.minibatches, n // config.minibatches, -1)
        return jax.lax.scan(minibatch, carry, (jax.random.split(key_steps, config.minibatches), shuffled))

    carry, metrics = jax.lax.scan(epoch, carry, jax.random.split(key, config.epochs))
    return carry, jax.tree.map(jnp.mean, metrics)


def run_epochs(
    key: Key[Array, ""],
    params: dict[str, Params],
    opt: dict[str, optax.OptState],
    rows: Rows,
    config: ReppoConfig,
    *,
    discrete: bool,
    axis_name: str | None = None,
) -> tuple[dict[str, Params], dict[str, optax.OptState], dict[str, Array]]:
    """`gradient_step` over `minibatch_scan`, with fresh noise in every minibatch."""

    def step(carry, key, some):
        noise = None if discrete else draw_noise(key, *some.action.shape, config)
        *carry, metrics = gradient_step(*carry, some, noise, config, discrete=discrete, axis_name=axis_name)
        return tuple(carry), metrics

    (params, opt), metrics = minibatch_scan(key, step, (params, opt), rows, config)
    return params, opt, metrics


def _samples(key, mean, std, count):
    noise = jax.random.normal(key, (count, *mean.shape))
    return dist.clip_action(jnp.tanh(mean + std * noise))


def _values(critic, state, samples, config):
    """Mean value over the samples of each state, and the embedding with the first."""
    lead = state.shape[:-1]
    flat = samples.reshape(samples.shape[0], -1, samples.shape[-1])
    values, embed = q_samples(critic, state.reshape(-1, state.shape[-1]), flat, config)
    return jnp.mean(values, axis=0).reshape(lead), embed.reshape(*lead, -1)
