"""Behaviour cloning on the same rows, its smoothed variant MRIL, and the ensemble of clones.

The clone standardises states and actions with the biased deviation and is the same stack of Linear, LayerNorm, ReLU as
DARP's per-neighbour network. MRIL (Manifold-regularised imitation learning in the DARP paper) adds

    lambda E_s sum_i w_i(s) |f(s) - f(s_i)|^2 ,   w_i proportional to exp(-(|s_i - s| / h)^2 / 2), normalised,

over the nearest rows s_i, h the median over rows of the distance to the last of them. The paper leaves kernel, h and lambda
open; these are our choices, with lambda 1 and 10 neighbours.

Seeds are trained together by `jax.vmap(update, in_axes=(0, 0, None))` with a `BCMemory` given as `frozen`; ten of them
form the ensemble.
"""

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key, PyTree

from papyrax.methods.control.darp import learner, retrieval
from papyrax.methods.control.darp.config import BCConfig
from papyrax.methods.control.darp.demos import Demos, Scalers, fit_scalers
from papyrax.methods.control.darp.network import EPS
from papyrax.methods.nets.mlp import mlp, mlp_init


@flax.struct.dataclass
class BCMemory:
    """Expert rows, scalers, and for MRIL the neighbours of every row with their weights (no columns without it)."""

    demos: Demos
    scalers: Scalers
    near: Int[Array, "n k"]
    weight: Float[Array, "n k"]


def prepare(demos: Demos, cfg: BCConfig) -> BCMemory:
    """Scalers, and the weighted neighbours when the config smooths."""
    scalers = fit_scalers(demos, ddof_obs=0, ddof_act=0)
    n = demos.obs.shape[0]
    if cfg.smoothing == 0:
        return BCMemory(demos, scalers, jnp.zeros((n, 0), jnp.int32), jnp.zeros((n, 0)))
    near, weight = smoothing_weights(scalers.obs(demos.obs), min(cfg.neighbours, n - 1))
    return BCMemory(demos, scalers, near, weight)


def smoothing_weights(z: Float[Array, "n o"], k: int) -> tuple[Int[Array, "n k"], Float[Array, "n k"]]:
    """The k nearest other rows of every row and their Gaussian weights, which sum to 1."""
    space = retrieval.Space(z, z[:, :0])
    d, rows = retrieval.candidates(space, space, k, retrieval.Metric(), exclude=jnp.arange(z.shape[0])[:, None])
    # the last real neighbour: copies of a row leave it fewer than k
    last = jnp.max(jnp.where(jnp.isfinite(d), d, 0), axis=1)
    h = jnp.median(last)
    raw = jnp.exp(-0.5 * jnp.square(d / jnp.where(h > 0, h, 1)))
    total = jnp.sum(raw, axis=1, keepdims=True)
    return jnp.maximum(rows, 0), raw / jnp.where(total > 0, total, 1)


def init(key: Key[Array, ""], demos: Demos, cfg: BCConfig) -> learner.State:
    """A fresh State."""
    key, key_params = jax.random.split(key)
    sizes = (demos.obs.shape[1], *[cfg.width] * cfg.depth, demos.act.shape[1])
    return learner.fresh(key, mlp_init(key_params, sizes, norm="layer", init="fan_in_uniform"), cfg)


def apply(params: PyTree, z: Float[Array, "*b o"]) -> Float[Array, "*b a"]:
    """Standardised action of standardised states."""
    return mlp(params, z, eps=EPS, act=jax.nn.relu)


def loss(params: PyTree, memory: BCMemory, rows: Int[Array, " b"], cfg: BCConfig) -> Float[Array, ""]:
    """Mean squared error in standardised action space, plus MRIL's term; rows of -1 do not count."""
    at = jnp.maximum(rows, 0)
    z = memory.scalers.obs(memory.demos.obs)
    out = apply(params, z[at])
    each = jnp.mean(jnp.square(out - memory.scalers.act(memory.demos.act[at])), axis=-1)
    if cfg.smoothing:
        each = each + cfg.smoothing * smoothness(out, apply(params, z[memory.near[at]]), memory.weight[at])
    return learner.masked_mean(each, rows >= 0)


def smoothness(
    f: Float[Array, "b a"], f_near: Float[Array, "b k a"], weight: Float[Array, "b k"]
) -> Float[Array, " b"]:
    """sum_i w_i |f(s) - f(s_i)|^2 of every row: the discrete Dirichlet energy that MRIL penalises."""
    return jnp.sum(weight * jnp.sum(jnp.square(f[:, None] - f_near), axis=-1), axis=-1)


def update(
    state: learner.State, batch: Int[Array, " b"], cfg: BCConfig, *, frozen: BCMemory
) -> tuple[learner.State, dict[str, Array]]:
    """One optimiser step on a batch of row numbers, of behaviour cloning or of MRIL."""
    return learner.step(state, lambda params: loss(params, frozen, batch, cfg), cfg)


def act(params: PyTree, scalers: Scalers, obs: Float[Array, "b o"]) -> Float[Array, "b a"]:
    """Actions of the environment, not clipped."""
    return scalers.raw_act(apply(params, scalers.obs(obs)))


def act_ensemble(params: PyTree, scalers: Scalers, obs: Float[Array, "b o"]) -> Float[Array, "b a"]:
    """Mean action of the members, whose parameters carry a leading axis."""
    return jnp.mean(jax.vmap(act, in_axes=(0, None, None))(params, scalers, obs), axis=0)
