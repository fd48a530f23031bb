"""The image branch: states are frozen visual features, 512 numbers a camera as R3M gives them.

Retrieval and differences live in feature space and are those of the other modules with the joined features as states.
Because they are long, state and difference are first projected, then fused with the action by a network of 1024, 512, 512
before the per-neighbour network:

    x_i = fuse([ P_s z_i , u_i , P_d (z_i - z_q) / sqrt(2) ])

The projections are linear, so they too split into an expert part (N rows) and a query part (B rows). The paper does not
give the size of the projections; 256 is our choice. The feature extractor is an argument and is not trained.
"""

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key, PyTree

from papyrax.methods.control.darp import heads, learner, network
from papyrax.methods.control.darp.config import Config
from papyrax.methods.control.darp.demos import Demos, Scalers
from papyrax.methods.nets.linear import dense
from papyrax.methods.nets.mlp import layer_init, mlp, mlp_init


@dataclasses.dataclass(frozen=True)
class VisualConfig:
    """A DARP policy on visual features."""

    policy: Config = dataclasses.field(default_factory=Config)
    project: int = 256
    fusion: tuple[int, ...] = (1024, 512, 512)

    def __post_init__(self):
        if self.policy.aggregator == "ordered" or self.policy.difference != "vector":
            raise ValueError(
                "VisualConfig: the ablations of the input and the aggregator exist for state policies alone."
            )
        if not self.fusion:
            raise ValueError("VisualConfig: fusion must name at least one width, got none.")


def camera_features(
    extract: Callable[[Float[Array, "m h w c"]], Float[Array, "m f"]], images: Float[Array, "b cameras h w c"]
) -> Float[Array, "b cf"]:
    """Features of all cameras of a row, joined in the order of the cameras; no gradient reaches the extractor."""
    b, cameras = images.shape[:2]
    return jax.lax.stop_gradient(extract(images.reshape(b * cameras, *images.shape[2:]))).reshape(b, -1)


def init(key: Key[Array, ""], o: int, a: int, cfg: VisualConfig) -> PyTree:
    """Parameters for joined features of size o and actions of size a."""
    keys = jax.random.split(key, 4)
    joined = 2 * cfg.project + (a if cfg.policy.neighbour_action else 0)
    return {
        "state": layer_init(keys[0], o, cfg.project, norm="none", init="fan_in_uniform"),
        "difference": layer_init(keys[1], o, cfg.project, norm="none", init="fan_in_uniform"),
        "fuse": mlp_init(keys[2], (joined, *cfg.fusion), norm="none", init="fan_in_uniform"),
        "policy": network.init_from(keys[3], cfg.fusion[-1], a, cfg.policy),
    }


def apply(
    params: PyTree,
    demos: Demos,
    scalers: Scalers,
    idx: Int[Array, "b K"],
    query: Float[Array, "b o"],
    cfg: VisualConfig,
) -> Float[Array, "b p"]:
    """Output for the head."""
    z, zq, half = scalers.obs(demos.obs), scalers.obs(query), 1 / math.sqrt(2)
    state, difference = params["state"], params["difference"]
    parts = [dense(z, state["w"], state["b"])[idx]]
    if cfg.policy.neighbour_action:
        parts.append(scalers.act(demos.act)[idx])
    expert = dense(z * half, difference["w"], difference["b"])
    parts.append(expert[idx] - dense(zq * half, difference["w"])[:, None])
    fused = jax.nn.relu(mlp(params["fuse"], jnp.concatenate(parts, -1), eps=network.EPS, act=jax.nn.relu))
    return network.apply(params["policy"], fused, cfg.policy)


def init_state(key: Key[Array, ""], demos: Demos, cfg: VisualConfig) -> learner.State:
    """A fresh State of the learner."""
    key, key_params = jax.random.split(key)
    return learner.fresh(key, init(key_params, demos.obs.shape[1], demos.act.shape[1], cfg), cfg.policy)


def loss(params: PyTree, memory: learner.Memory, rows: Int[Array, " b"], cfg: VisualConfig) -> Float[Array, ""]:
    """Mean loss of expert rows; rows of -1 do not count."""
    at = jnp.maximum(rows, 0)
    demos, scalers = memory.demos, memory.scalers
    out = apply(params, demos, scalers, memory.cache[at], demos.obs[at], cfg)
    return learner.masked_mean(heads.row_loss(out, scalers.act(demos.act[at]), cfg.policy), rows >= 0)


def update(
    state: learner.State, batch: Int[Array, " b"], cfg: VisualConfig, *, frozen: learner.Memory
) -> tuple[learner.State, dict[str, Array]]:
    """One optimiser step on a batch of row numbers; `frozen` is `learner.prepare(demos, cfg.policy)`."""
    return learner.step(state, lambda params: loss(params, frozen, batch, cfg), cfg.policy)


def act(
    params: PyTree,
    demos: Demos,
    scalers: Scalers,
    idx: Int[Array, "b K"],
    query: Float[Array, "b o"],
    key: Key[Array, ""] | None,
    cfg: VisualConfig,
) -> Float[Array, "b a"]:
    """Actions from the neighbours that `retrieval.retrieve` found in feature space."""
    return scalers.raw_act(heads.action(key, apply(params, demos, scalers, idx, query, cfg), cfg.policy))
