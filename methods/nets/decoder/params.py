"""The parameter tree of a decoder: initial values, and the form that decodes fastest on a CPU.

    embed       [v, e]      token table; also the head when tied
    head        [v, e]      only when not tied
    norm        [e]         final norm
    layers      one dict whose leaves lead with the layer axis l
      attn_norm, mlp_norm [l, e]     q [l, e, hq d]     k, v [l, e, hkv d]     o [l, hq d, e]     gate, up [l, e, f]     down [l, f, e]
      q_b, k_b, v_b (qwen2)          q_norm, k_norm [l, d] (qwen3)

A kernel may also be a `Lora` or a `Packed` leaf: `dense` understands both.
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Key, PyTree

from papyrax.methods.nets.decoder.config import Config

__all__ = ["init", "kernel_shapes", "layer_shapes", "stack", "unstack"]


def kernel_shapes(cfg: Config) -> dict[str, tuple[int, int]]:
    """(in, out) of every kernel of a block."""
    q, kv = cfg.heads * cfg.head_dim, cfg.kv_heads * cfg.head_dim
    return {
        "q": (cfg.dim, q),
        "k": (cfg.dim, kv),
        "v": (cfg.dim, kv),
        "o": (q, cfg.dim),
        "gate": (cfg.dim, cfg.ffn),
        "up": (cfg.dim, cfg.ffn),
        "down": (cfg.ffn, cfg.dim),
    }


def layer_shapes(cfg: Config) -> dict[str, tuple[int, ...]]:
    """Shape of every leaf of one block, without the layer axis."""
    shapes: dict[str, tuple[int, ...]] = {"attn_norm": (cfg.dim,), "mlp_norm": (cfg.dim,), **kernel_shapes(cfg)}
    if cfg.qkv_bias:
        shapes |= {f"{name}_b": (shapes[name][1],) for name in ("q", "k", "v")}
    if cfg.qk_norm:
        shapes |= {"q_norm": (cfg.head_dim,), "k_norm": (cfg.head_dim,)}
    return shapes


def init(
    key: Key[Array, ""], cfg: Config, *, std: float = 0.02, scale_residual: bool = False, dtype=jnp.float32
) -> PyTree:
    """Normal kernels and tables, unit norms, zero biases.

    ``scale_residual`` divides the kernels that write to the residual stream (o and down) by sqrt(2 layers), as GPT-2 did.
    """
    shapes = layer_shapes(cfg)
    keys = dict(zip((*kernel_shapes(cfg), "embed", "head"), jax.random.split(key, len(kernel_shapes(cfg)) + 2)))

    def leaf(name, shape):
        if name.endswith("_norm"):
            return jnp.ones((cfg.layers, *shape), dtype)
        if name.endswith("_b"):
            return jnp.zeros((cfg.layers, *shape), dtype)
        sigma = std / math.sqrt(2 * cfg.layers) if scale_residual and name in ("o", "down") else std
        return (sigma * jax.random.normal(keys[name], (cfg.layers, *shape))).astype(dtype)

    params = {
        "embed": (std * jax.random.normal(keys["embed"], (cfg.vocab, cfg.dim))).astype(dtype),
        "layers": {name: leaf(name, shape) for name, shape in shapes.items()},
        "norm": jnp.ones((cfg.dim,), dtype),
    }
    if not cfg.tied:
        params["head"] = (std * jax.random.normal(keys["head"], (cfg.vocab, cfg.dim))).astype(dtype)
    return params


def unstack(params: PyTree) -> PyTree:
    """The same tree with a tuple of blocks in place of stacked leaves: `run` then unrolls them.

    Compiling grows with depth, but no layer's weights are sliced out of a stack first, a copy as large as the weights that XLA makes at
    every decoding step on a CPU.
    """
    layers = params["layers"]
    if isinstance(layers, tuple):
        return params
    count = jax.tree.leaves(layers)[0].shape[0]
    return {**params, "layers": tuple(jax.tree.map(lambda x, i=i: x[i], layers) for i in range(count))}


def stack(params: PyTree) -> PyTree:
    """Undoes `unstack`."""
    layers = params["layers"]
    if not isinstance(layers, tuple):
        return params
    return {**params, "layers": jax.tree.map(lambda *xs: jnp.stack(xs), *layers)}
