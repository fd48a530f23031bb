"""What the network sees of a neighbour, and the first layer on it in factored form.

For neighbour i of query q, with z standardised states and u standardised actions,

    x_i = [ z_i , u_i , (z_i - z_q) / sqrt(2) ]          length 2 o + a

sqrt(2) because two independent standardised variables differ with variance 2. Ablations: without u_i; with z_q in place
of the difference; with the norm of the difference in its place.

The first layer is linear, so W x_i splits into a part that depends on the expert row alone and one that depends on the
query alone,

    W x_i = [ z_i (W_z + W_d / sqrt(2)) + u_i W_u ]  -  z_q W_d / sqrt(2)

The expert part is N products instead of B K, and fixed while acting.
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from papyrax.methods.control.darp.config import Config
from papyrax.methods.control.darp.demos import Demos, Scalers

_HALF = 1 / math.sqrt(2)


def feature_size(o: int, a: int, cfg: Config) -> int:
    """Length of x_i."""
    return o + (a if cfg.neighbour_action else 0) + (1 if cfg.difference == "norm" else o)


def features(
    demos: Demos, scalers: Scalers, idx: Int[Array, "b K"], query: Float[Array, "b o"], cfg: Config
) -> Float[Array, "b K f"]:
    """x_i of every neighbour."""
    z, zq = scalers.obs(demos.obs[idx]), scalers.obs(query)[:, None]
    parts = [z, scalers.act(demos.act[idx])] if cfg.neighbour_action else [z]
    if cfg.difference == "vector":
        parts.append((z - zq) * _HALF)
    elif cfg.difference == "query":
        parts.append(jnp.broadcast_to(zq, z.shape))
    else:
        parts.append(_norm(z - zq))
    return jnp.concatenate(parts, axis=-1)


def expert_products(
    w: Float[Array, "f w"], b: Float[Array, " w"], demos: Demos, scalers: Scalers, cfg: Config
) -> Float[Array, "n w"]:
    """The part of the first layer that depends on the expert row alone, the bias included."""
    wz, wu, wd = split_kernel(w, demos.obs.shape[1], demos.act.shape[1], cfg)
    wz = wz + wd * _HALF if cfg.difference == "vector" else wz
    out = scalers.obs(demos.obs) @ wz + b
    return out + scalers.act(demos.act) @ wu if cfg.neighbour_action else out


def gather_add(
    table: Float[Array, "n w"],
    w: Float[Array, "f w"],
    demos: Demos,
    scalers: Scalers,
    idx: Int[Array, "b K"],
    query: Float[Array, "b o"],
    cfg: Config,
) -> Float[Array, "b K w"]:
    """The first layer before its norm, from the table of `expert_products`."""
    _, _, wd = split_kernel(w, demos.obs.shape[1], demos.act.shape[1], cfg)
    zq = scalers.obs(query)
    if cfg.difference == "vector":
        return table[idx] - ((zq * _HALF) @ wd)[:, None]
    if cfg.difference == "query":
        return table[idx] + (zq @ wd)[:, None]
    return table[idx] + _norm(scalers.obs(demos.obs)[idx] - zq[:, None]) * wd


def split_kernel(
    w: Float[Array, "f w"], o: int, a: int, cfg: Config
) -> tuple[Float[Array, "o w"], Float[Array, "c w"], Float[Array, "d w"]]:
    """The rows of the first kernel that act on the state, the action (none in that ablation) and the difference."""
    a = a if cfg.neighbour_action else 0
    return w[:o], w[o : o + a], w[o + a :]


@jax.custom_vjp
def factored_linear(
    w: Float[Array, "f w"], b: Float[Array, " w"], x: Float[Array, "m f"], pre: Float[Array, "m w"]
) -> Float[Array, "m w"]:
    """`pre`, known to equal x @ w + b, with the gradients of x @ w + b.

    The gradient of a gather is a scatter of m rows into the table, slow on CPUs; this one is the product x^T g instead,
    which is exact because `pre` is that linear map. The features x are data and get no gradient.
    """
    return pre


def _factored_fwd(w, b, x, pre):
    return pre, x


def _factored_bwd(x, g):
    return x.T @ g, jnp.sum(g, axis=0), jnp.zeros_like(x), jnp.zeros_like(g)


factored_linear.defvjp(_factored_fwd, _factored_bwd)


def _norm(delta: Float[Array, "*b o"]) -> Float[Array, "*b 1"]:
    return jnp.linalg.norm(delta, axis=-1, keepdims=True) * _HALF
