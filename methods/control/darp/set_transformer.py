"""Set Transformer: attention from a set of vectors to one vector, indifferent to their order (Lee et al. 2019).

    MAB(Q, K)  = O + relu(O W_o + b_o),   O = q + softmax(q k^T / sqrt(V)) v   per head, heads joined
    SAB(X)     = MAB(X, X)
    ISAB(X)    = MAB(X, MAB(I, X))        I: m learned points, so that cost grows with K m instead of K^2
    PMA(X)     = MAB(S, X)                S: one learned seed

with q, k, v linear in Q, K, K and of width V. Scores are divided by sqrt of the full V, not of the head's share, and there
is no layer norm. The aggregator is ISAB, ISAB, PMA, SAB, SAB, Linear; after PMA the set has one member.
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key, PyTree

from papyrax.methods.nets.linear import dense
from papyrax.methods.nets.mlp import layer_init


def mab_init(key: Key[Array, ""], n_q: int, n_k: int, dim: int) -> PyTree:
    """Parameters of one block: the maps of Q, K (to keys and to values) and the output."""
    keys = jax.random.split(key, 4)
    sizes = {"q": n_q, "k": n_k, "v": n_k, "o": dim}
    return {
        name: layer_init(k, n, dim, norm="none", init="fan_in_uniform") for k, (name, n) in zip(keys, sizes.items())
    }


def mab(params: PyTree, q: Float[Array, "b m i"], k: Float[Array, "b n j"], heads: int) -> Float[Array, "b m v"]:
    """Multihead attention block."""
    dim = params["q"]["w"].shape[1]

    def split(name, x):
        y = dense(x, params[name]["w"], params[name]["b"])
        return y.reshape(*y.shape[:-1], heads, dim // heads)

    qh, kh, vh = split("q", q), split("k", k), split("v", k)
    weight = jax.nn.softmax(jnp.einsum("bmhd,bnhd->bhmn", qh, kh) / math.sqrt(dim), axis=-1)
    out = qh + jnp.einsum("bhmn,bnhd->bmhd", weight, vh)
    out = out.reshape(*out.shape[:-2], dim)
    return out + jax.nn.relu(dense(out, params["o"]["w"], params["o"]["b"]))


def isab(params: PyTree, x: Float[Array, "b n i"], heads: int) -> Float[Array, "b n v"]:
    """Induced set attention."""
    points = jnp.broadcast_to(params["points"], (x.shape[0], *params["points"].shape))
    return mab(params["out"], x, mab(params["in"], points, x, heads), heads)


def init(key: Key[Array, ""], n_in: int, n_out: int, *, dim: int, inducing: int) -> PyTree:
    """Parameters of the whole aggregator.

    Learned points are Xavier-uniform as torch counts the fans of a (1, m, V) tensor: bound sqrt(6 / (V (m + 1))).
    """
    keys = jax.random.split(key, 10)

    def points(key, m):
        bound = math.sqrt(6 / (dim * (m + 1)))
        return jax.random.uniform(key, (m, dim), minval=-bound, maxval=bound)

    def induced(key, n):
        k_points, k_in, k_out = jax.random.split(key, 3)
        return {
            "points": points(k_points, inducing),
            "in": mab_init(k_in, dim, n, dim),
            "out": mab_init(k_out, n, dim, dim),
        }

    return {
        "encode": [induced(keys[0], n_in), induced(keys[1], dim)],
        "seed": points(keys[2], 1),
        "pool": mab_init(keys[3], dim, dim, dim),
        "decode": [mab_init(keys[4], dim, dim, dim), mab_init(keys[5], dim, dim, dim)],
        "last": layer_init(keys[6], dim, n_out, norm="none", init="fan_in_uniform"),
    }


def apply(params: PyTree, x: Float[Array, "b n i"], heads: int) -> Float[Array, "b o"]:
    """One vector for each set.

    Raises:
      ValueError: heads that do not divide the width.
    """
    dim = params["seed"].shape[1]
    if heads < 1 or dim % heads:
        raise ValueError(f"set_transformer: heads must divide the width {dim}, got {heads}.")
    for block in params["encode"]:
        x = isab(block, x, heads)
    seed = jnp.broadcast_to(params["seed"], (x.shape[0], 1, dim))
    x = mab(params["pool"], seed, x, heads)
    for block in params["decode"]:
        x = mab(block, x, x, heads)
    return dense(x[:, 0], params["last"]["w"], params["last"]["b"])
