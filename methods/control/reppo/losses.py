"""The losses of REPPO, sample by sample: critic, policy with its switch at the KL bound, multipliers.

Critic, for a sample with target G, next embedding e' and reward r (no gradient through any of them):

    (1 - trunc) [ CE(HLGauss(G), logits) + c_aux mean_{H+1}( (1 - done) [(pred - e')², (pred_r - r)²] ) ]

Policy, with the critic held fixed, alpha and beta held fixed inside L_pi:

    J     = alpha log pi(a~ | s) - Q(s, a~),  a~ reparameterised
    L_pi  = mean( J where KL < bound else beta KL )
    total = L_pi + alpha mean(H - H_target) - beta mean(KL - bound),   alpha, beta alone trained by the last two
"""

import math
from typing import TypeVar

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from papyrax.jaxlib_ext.hl_gauss import hl_gauss_cross_entropy
from papyrax.methods.control.reppo import distributions as dist
from papyrax.methods.control.reppo.config import ReppoConfig
from papyrax.methods.control.reppo.networks import Params, actor_apply, critic_apply, embed_apply, q_apply
from papyrax.methods.objectives.duals import log_dual
from papyrax.methods.objectives.policy import clip_loss

__all__ = [
    "ActorNoise",
    "Rows",
    "actor_loss",
    "critic_loss",
    "leave_one_out",
    "policy_loss",
    "prediction_loss",
    "score_objective",
    "switched",
    "target_entropy",
]

Metrics = dict[str, Array]
T = TypeVar("T")


@flax.struct.dataclass
class Rows:
    """Samples as the losses read them. Discrete actions are one-hot, and ``old`` is then the old log probabilities.

    ``critic_obs`` is None where the critic sees what the actor sees; ``next_embed``, ``reward`` and ``done`` are None
    without the auxiliary loss, ``trunc`` without its mask, ``adv`` and ``logp_old`` unless the policy loss is
    "score_gae".
    """

    obs: Float[Array, "n o"]
    action: Float[Array, "n d"]
    target: Float[Array, " n"]
    old: tuple[Float[Array, "n d"], Float[Array, "n d"]] | Float[Array, "n a"]
    critic_obs: Float[Array, "n p"] | None = None
    next_embed: Float[Array, "n h"] | None = None
    reward: Float[Array, " n"] | None = None
    done: Float[Array, " n"] | None = None
    trunc: Float[Array, " n"] | None = None
    adv: Float[Array, " n"] | None = None
    logp_old: Float[Array, " n"] | None = None


@flax.struct.dataclass
class ActorNoise:
    """Standard normals behind the actor's samples: k actions of the new policy, m of the old one."""

    action: Float[Array, "k n d"]
    kl: Float[Array, "m n d"]


def _given(value: T | None, name: str) -> T:
    """The value, or ValueError where these settings need one and None came."""
    if value is None:
        raise ValueError(f"{name} is None, but the losses need it with these settings.")
    return value


def prediction_loss(
    pred: Float[Array, "*n h"],
    pred_r: Float[Array, "*n"],
    next_embed: Float[Array, "*n h"],
    reward: Float[Array, "*n"],
    done: Float[Array, "*n"],
) -> Float[Array, "*n"]:
    """Self-prediction: mean of the H + 1 squared errors of next embedding and reward, 0 where the episode ended."""
    errors = jnp.sum(jnp.square(pred - next_embed), axis=-1) + jnp.square(pred_r - reward)
    return (1 - done) * errors / (pred.shape[-1] + 1)


def critic_loss(params: Params, rows: Rows, config: ReppoConfig, *, discrete: bool) -> tuple[Float[Array, ""], Metrics]:
    """Mean over the samples of value regression plus self-prediction, masked as the module docstring says."""
    state = rows.obs if rows.critic_obs is None else rows.critic_obs
    out = critic_apply(params, state, rows.action, config, discrete=discrete)
    value, logits = out.value, out.logits
    if discrete:
        value = jnp.sum(value * rows.action, axis=-1)
        logits = jnp.sum(logits * rows.action[..., None], axis=-2)
    if config.critic == "hl_gauss":
        regression = hl_gauss_cross_entropy(
            logits, rows.target, config.vmin, config.vmax, implementation=config.implementation
        )
    else:
        regression = jnp.square(value - rows.target)
    metrics = {"critic_loss": jnp.mean(regression), "q": jnp.mean(value)}
    loss = regression
    if config.aux_weight:
        aux = prediction_loss(out.pred, out.pred_r, rows.next_embed, rows.reward, rows.done)
        metrics["aux_loss"] = jnp.mean(aux)
        loss = loss + config.aux_weight * aux
    if config.mask_truncated:
        loss = (1 - _given(rows.trunc, "rows.trunc")) * loss
    return jnp.mean(loss), metrics


def target_entropy(config: ReppoConfig, actions: int, *, discrete: bool) -> float:
    """What the temperature holds the entropy above: -h an action axis, h log n with n discrete actions."""
    return config.entropy_target * math.log(actions) if discrete else -config.entropy_target * actions


def switched(
    objective: Float[Array, "*n"], kl: Float[Array, "*n"], beta: Float[Array, ""], bound: float, mode: str
) -> Float[Array, "*n"]:
    """The objective below the KL bound and ``beta kl`` from it on ("clipped"), their sum ("full"), or it alone ("value")."""
    if mode == "clipped":
        return jnp.where(kl < bound, objective, beta * kl)
    return objective + beta * kl if mode == "full" else objective


def policy_loss(
    objective: Float[Array, " n"],
    entropy: Float[Array, " n"],
    kl: Float[Array, " n"],
    log_alpha: Float[Array, ""],
    log_beta: Float[Array, ""],
    config: ReppoConfig,
    goal: float,
) -> tuple[Float[Array, ""], Metrics]:
    """Total loss of policy and multipliers from per-sample objective J, entropy and KL; ``goal`` as `target_entropy`."""
    alpha, alpha_loss = log_dual(log_alpha, entropy - goal)
    beta, beta_loss = log_dual(log_beta, config.kl_bound - kl)
    loss = jnp.mean(switched(objective, kl, jax.lax.stop_gradient(beta), config.kl_bound, config.mode))
    metrics = {
        "policy_loss": loss,
        "entropy": jnp.mean(entropy),
        "kl": jnp.mean(kl),
        "kl_over": jnp.mean(kl >= config.kl_bound),
        "alpha": alpha,
        "beta": beta,
    }
    return loss + alpha_loss + beta_loss, metrics


def leave_one_out(q: Float[Array, "k n"]) -> Float[Array, "k n"]:
    """Advantage of each of k samples over the mean of the others."""
    k = q.shape[0]
    return (q - jnp.mean(q, axis=0)) * (k / (k - 1))


def score_objective(logp: Float[Array, "k n"], q: Float[Array, "k n"], alpha: Float[Array, ""]) -> Float[Array, " n"]:
    """REINFORCE with Q and a leave-one-out baseline: ``-mean_i log pi_i (A_i - alpha)``, A and alpha constants."""
    weight = jax.lax.stop_gradient(leave_one_out(q) - alpha)
    return -jnp.mean(logp * weight, axis=0)


def actor_loss(
    params: Params,
    critic: Params,
    rows: Rows,
    noise: ActorNoise | None,
    config: ReppoConfig,
    *,
    discrete: bool,
) -> tuple[Float[Array, ""], Metrics]:
    """Loss of actor and multipliers on samples, with the critic's parameters held fixed; exact when discrete."""
    critic = jax.lax.stop_gradient(critic)
    alpha = jnp.exp(jax.lax.stop_gradient(params["log_alpha"]))
    state = rows.obs if rows.critic_obs is None else rows.critic_obs
    new = actor_apply(params, rows.obs, config, discrete=discrete)
    goal = target_entropy(config, rows.action.shape[-1], discrete=discrete)

    def q_of(action):
        return q_apply(critic, embed_apply(critic, state, action, config), config)[0]

    if not isinstance(new, tuple):  # log probabilities of discrete actions
        q = q_apply(critic, embed_apply(critic, state, None, config), config, actions=new.shape[-1])[0]
        objective = jnp.sum(jnp.exp(new) * (alpha * new - q), axis=-1)
        entropy, kl = dist.categorical_entropy(new), dist.categorical_kl(rows.old, new)
    else:
        mean, std = new
        noise = _given(noise, "noise")
        kl = dist.kl_estimate(noise.kl, *rows.old, mean, std)
        if config.policy == "score_q":
            u = jax.lax.stop_gradient(mean + std * noise.action)
            logp = dist.gaussian_logp(u, mean, std) - dist.squash_correction(u)
            objective = score_objective(logp, jax.vmap(q_of)(jnp.tanh(u)), alpha)
            entropy = -jnp.mean(logp, axis=0)
        else:
            action, logp = dist.tanh_sample(noise.action[0], mean, std)
            entropy = -logp
            if config.policy == "pathwise":
                objective = alpha * logp - q_of(action)
            else:
                stored = dist.tanh_logp(mean, std, rows.action)
                clip = config.score_clip
                # A stored action lies on its clip, where a policy that has left it has next to no density.
                surrogate = clip_loss(stored, rows.logp_old, rows.adv, low=clip, high=clip, log_ratio_max=20.0)
                objective = surrogate + alpha * logp
    return policy_loss(objective, entropy, kl, params["log_alpha"], params["log_beta"], config, goal)
