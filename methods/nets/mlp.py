"""Multilayer perceptrons: Linear, optional norm, activation, repeated, with or without a plain Linear at the end.

A layer is a dictionary: kernel ``w`` (in x out) and ``b``, then ``scale`` and ``bias`` where a layer norm follows,
``scale`` alone for a root-mean-square norm, and neither for no norm, so parameters tell how they are to be applied.
"""

from collections.abc import Callable, Sequence
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from papyrax.methods.nets.init import fan_in_uniform, lecun_normal
from papyrax.methods.nets.linear import dense
from papyrax.methods.nets.norm import layer_norm, rms_norm

__all__ = [
    "Init",
    "Layer",
    "Norm",
    "hidden_layer",
    "hidden_layers",
    "layer_init",
    "layer_normed",
    "layers_init",
    "mlp",
    "mlp_init",
]

Layer = dict[str, Array]
Norm = Literal["layer", "rms", "none"]
Init = Literal["lecun_normal", "fan_in_uniform"]


def layer_init(key: Key[Array, ""], n_in: int, n_out: int, *, norm: Norm, init: Init) -> Layer:
    """One layer from ``n_in`` to ``n_out``. Biases are 0 with "lecun_normal", drawn with "fan_in_uniform".

    Raises:
      ValueError: an unknown ``norm`` or ``init``.
    """
    if norm not in ("layer", "rms", "none"):
        raise ValueError(f'norm must be "layer", "rms" or "none", but is {norm!r}.')
    key_w, key_b = jax.random.split(key)
    if init == "lecun_normal":
        layer = {"w": lecun_normal(key_w, (n_in, n_out)), "b": jnp.zeros(n_out)}
    elif init == "fan_in_uniform":
        layer = {"w": fan_in_uniform(key_w, (n_in, n_out)), "b": fan_in_uniform(key_b, (n_out,), n_in)}
    else:
        raise ValueError(f'init must be "lecun_normal" or "fan_in_uniform", but is {init!r}.')
    if norm != "none":
        layer["scale"] = jnp.ones(n_out)
    if norm == "layer":
        layer["bias"] = jnp.zeros(n_out)
    return layer


def layers_init(key: Key[Array, ""], sizes: Sequence[int], *, norm: Norm, init: Init) -> tuple[Layer, ...]:
    """Layers ``sizes[0] -> sizes[1] -> …``, each with its norm."""
    keys = jax.random.split(key, max(len(sizes) - 1, 1))
    return tuple(layer_init(k, i, o, norm=norm, init=init) for k, i, o in zip(keys, sizes[:-1], sizes[1:]))


def mlp_init(key: Key[Array, ""], sizes: Sequence[int], *, norm: Norm, init: Init) -> tuple[Layer, ...]:
    """Like `layers_init`, but the last layer is a plain Linear."""
    if len(sizes) < 2:
        raise ValueError(f"mlp_init wants at least an input and an output size, but sizes is {tuple(sizes)}.")
    key_hidden, key_last = jax.random.split(key)
    last = layer_init(key_last, sizes[-2], sizes[-1], norm="none", init=init)
    return (*layers_init(key_hidden, sizes[:-1], norm=norm, init=init), last)


def layer_normed(layer: Layer, y: Float[Array, "... o"], *, eps: float) -> Float[Array, "... o"]:
    """The norm that the layer has parameters for, or ``y`` itself."""
    if "bias" in layer:
        return layer_norm(y, layer["scale"], layer["bias"], eps)
    return rms_norm(y, layer["scale"], eps) if "scale" in layer else y


def hidden_layer(
    layer: Layer, x: Float[Array, "... i"], *, eps: float, act: Callable[[Array], Array]
) -> Float[Array, "... o"]:
    """Linear, the norm that the layer has parameters for, activation."""
    return act(layer_normed(layer, dense(x, layer["w"], layer["b"]), eps=eps))


def hidden_layers(
    params: Sequence[Layer], x: Float[Array, "... i"], *, eps: float, act: Callable[[Array], Array]
) -> Float[Array, "... o"]:
    """`hidden_layer` for each of ``params`` in turn."""
    for layer in params:
        x = hidden_layer(layer, x, eps=eps, act=act)
    return x


def mlp(
    params: Sequence[Layer], x: Float[Array, "... i"], *, eps: float, act: Callable[[Array], Array]
) -> Float[Array, "... o"]:
    """Hidden layers, then the plain Linear that `mlp_init` puts last."""
    x = hidden_layers(params[:-1], x, eps=eps, act=act)
    return dense(x, params[-1]["w"], params[-1]["b"])
