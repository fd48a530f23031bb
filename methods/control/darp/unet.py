"""Conditional U-Net over time for action sequences (Chi et al., "Diffusion Policy", 2023; Janner et al. 2022).

Layout (b, time, channels). A residual block is conv, group norm, Mish, feature-wise affine of the condition (FiLM: scale
and shift), conv, group norm, Mish, plus the input (through a 1x1 conv where widths differ). The condition is the time
embedding joined with the observation. Two blocks a level, strided conv down, transposed conv up, skips joined.
"""

import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key, PyTree

from papyrax.methods.nets.embed import time_embed
from papyrax.methods.nets.init import fan_in_uniform
from papyrax.methods.nets.linear import dense
from papyrax.methods.nets.mlp import layer_init
from papyrax.methods.nets.norm import group_norm

EPS = 1e-5
_DIMS = ("NWC", "WIO", "NWC")


def conv_init(key: Key[Array, ""], width: int, n_in: int, n_out: int) -> PyTree:
    """Kernel (width, in, out) and bias, both in torch's default range."""
    k_w, k_b = jax.random.split(key)
    return {"w": fan_in_uniform(k_w, (width, n_in, n_out)), "b": fan_in_uniform(k_b, (n_out,), width * n_in)}


def conv(p: PyTree, x: Float[Array, "b t c"], stride: int = 1) -> Float[Array, "b u d"]:
    """Convolution over time, padded by half the kernel."""
    half = p["w"].shape[0] // 2
    return jax.lax.conv_general_dilated(x, p["w"], (stride,), [(half, half)], dimension_numbers=_DIMS) + p["b"]


def up_conv(p: PyTree, x: Float[Array, "b t c"]) -> Float[Array, "b u d"]:
    """Transposed convolution that doubles the length (kernel 4, stride 2)."""
    return jax.lax.conv_transpose(x, p["w"], (2,), "SAME", dimension_numbers=_DIMS) + p["b"]


def _block_init(key, n_in, n_out, cond, kernel):
    keys = jax.random.split(key, 4)
    p = {
        "conv1": conv_init(keys[0], kernel, n_in, n_out),
        "conv2": conv_init(keys[1], kernel, n_out, n_out),
        "film": layer_init(keys[2], cond, 2 * n_out, norm="none", init="fan_in_uniform"),
        "norm1": {"scale": jnp.ones(n_out), "bias": jnp.zeros(n_out)},
        "norm2": {"scale": jnp.ones(n_out), "bias": jnp.zeros(n_out)},
    }
    if n_in != n_out:
        p["skip"] = conv_init(keys[3], 1, n_in, n_out)
    return p


def _block(p, x, cond, groups):
    def half(name, y):
        y, norm = conv(p["conv" + name], y), p["norm" + name]
        return jax.nn.mish(group_norm(y, groups, EPS, norm["scale"], norm["bias"]))

    scale, shift = jnp.split(dense(jax.nn.mish(cond), p["film"]["w"], p["film"]["b"])[:, None], 2, axis=-1)
    y = half("2", half("1", x) * scale + shift)
    return y + (conv(p["skip"], x) if "skip" in p else x)


def init(key: Key[Array, ""], a: int, cond: int, *, down: Sequence[int], kernel: int, time_dim: int) -> PyTree:
    """Parameters for sequences of a numbers a step, conditioned on vectors of size `cond`."""
    keys = iter(jax.random.split(key, 8 * len(down) + 8))
    whole = time_dim + cond
    widths = [a, *down]
    pairs = list(itertools.pairwise(widths))

    def two(n_in, n_out):
        return [
            _block_init(next(keys), n_in, n_out, whole, kernel),
            _block_init(next(keys), n_out, n_out, whole, kernel),
        ]

    downs = []
    for level, (n_in, n_out) in enumerate(pairs):
        p = {"blocks": two(n_in, n_out)}
        if level < len(pairs) - 1:
            p["down"] = conv_init(next(keys), 3, n_out, n_out)
        downs.append(p)
    ups = [{"blocks": two(2 * n_out, n_in), "up": conv_init(next(keys), 4, n_in, n_in)} for n_in, n_out in pairs[:0:-1]]
    return {
        "time": [
            layer_init(next(keys), time_dim, 4 * time_dim, norm="none", init="fan_in_uniform"),
            layer_init(next(keys), 4 * time_dim, time_dim, norm="none", init="fan_in_uniform"),
        ],
        "down": downs,
        "mid": two(down[-1], down[-1]),
        "up": ups,
        "last": {
            "conv": conv_init(next(keys), kernel, down[0], down[0]),
            "norm": {"scale": jnp.ones(down[0]), "bias": jnp.zeros(down[0])},
            "out": conv_init(next(keys), 1, down[0], a),
        },
    }


def apply(
    params: PyTree, x: Float[Array, "b t a"], level: Int[Array, " b"], cond: Float[Array, "b c"], *, groups: int
) -> Float[Array, "b t a"]:
    """Prediction for noisy sequences x at their noise levels.

    Raises:
      ValueError: a length that the levels of the U-Net cannot halve and double back.
    """
    fold = 2 ** (len(params["down"]) - 1)
    if x.shape[1] % fold:
        raise ValueError(f"unet: the sequence length must be a multiple of {fold}, got {x.shape[1]}.")
    first, second = params["time"]
    t = time_embed(level, first["w"].shape[0], order="sin_cos", max_period=10000.0)
    t = dense(jax.nn.mish(dense(t, first["w"], first["b"])), second["w"], second["b"])
    cond = jnp.concatenate([t, cond], axis=-1)
    skips = []
    for p in params["down"]:
        for block in p["blocks"]:
            x = _block(block, x, cond, groups)
        skips.append(x)
        x = conv(p["down"], x, 2) if "down" in p else x
    for block in params["mid"]:
        x = _block(block, x, cond, groups)
    for p in params["up"]:
        x = jnp.concatenate([x, skips.pop()], axis=-1)
        for block in p["blocks"]:
            x = _block(block, x, cond, groups)
        x = up_conv(p["up"], x)
    last = params["last"]
    x = jax.nn.mish(group_norm(conv(last["conv"], x), groups, EPS, last["norm"]["scale"], last["norm"]["bias"]))
    return conv(last["out"], x)
