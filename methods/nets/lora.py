"""Low-rank deltas on the kernels of any net, chosen by path: W' = W + s A B with s = alpha/r, or alpha/sqrt(r) (rsLoRA).

Hu et al. 2021; rank-stabilised scale: Kalajdzievski 2023. Kernels lie in x out, so A is ``[i, r]`` and B ``[r, o]``; leading axes (stacked
layers) are shared. A is Kaiming-uniform with a = sqrt(5), that is uniform in ±1/sqrt(i), and B starts at zero.
"""

import dataclasses
import math
import re
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key, PyTree

from papyrax.jaxlib_ext.quant_matmul import Packed

__all__ = ["Delta", "Lora", "LoraSpec", "lora_bind", "lora_init", "lora_merge"]


@dataclasses.dataclass(frozen=True)
class LoraSpec:
    """Which kernels (a regular expression that must match the whole path, such as ``layers/(q|v)``), rank and scale.

    Raises:
      ValueError: a rank below 1 or a dropout outside [0, 1).
    """

    pattern: str
    rank: int
    alpha: float
    rs: bool = False
    dropout: float = 0.0

    def __post_init__(self):
        if self.rank < 1:
            raise ValueError(f"LoraSpec rank must be at least 1, but is {self.rank}.")
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"LoraSpec dropout must lie in [0, 1), but is {self.dropout}.")

    @property
    def scale(self) -> float:
        return self.alpha / (math.sqrt(self.rank) if self.rs else self.rank)


@flax.struct.dataclass
class Delta:
    """The trained part of one kernel, with what its spec said."""

    a: Float[Array, "... i r"]
    b: Float[Array, "... r o"]
    scale: float = flax.struct.field(pytree_node=False)
    dropout: float = flax.struct.field(pytree_node=False, default=0.0)


@flax.struct.dataclass
class Lora:
    """A kernel (dense or packed) with its delta; `dense` applies it. ``key`` is set only while training with dropout."""

    w: Any
    delta: Delta
    key: Any = None

    def apply(self, x: Float[Array, "... i"]) -> Float[Array, "... o"]:
        """What the low-rank path adds for input ``x``."""
        d = self.delta
        if self.key is not None and d.dropout > 0.0:
            keep = jax.random.bernoulli(self.key, 1.0 - d.dropout, x.shape)
            x = jnp.where(keep, x / (1.0 - d.dropout), 0.0).astype(x.dtype)
        return (x @ d.a.astype(x.dtype)) @ d.b.astype(x.dtype) * d.scale

    def merged(self) -> Float[Array, "... i o"]:
        """The plain kernel that gives the same map."""
        w = self.w.dense() if isinstance(self.w, Packed) else self.w
        wide = jnp.promote_types(w.dtype, jnp.float32)
        product = jnp.matmul(self.delta.a.astype(wide), self.delta.b.astype(wide))
        return (w + self.delta.scale * product).astype(w.dtype)

    def rows(self, ids: Int[Array, "..."]) -> Float[Array, "... o"]:
        """Rows of a table with a delta (token embeddings)."""
        low = jnp.take(self.delta.a, ids, axis=0) @ self.delta.b
        return jnp.take(self.w, ids, axis=0) + self.delta.scale * low.astype(self.w.dtype)


Deltas = dict[str, Delta]


def _flatten(params):
    leaves, treedef = jax.tree_util.tree_flatten_with_path(params, is_leaf=lambda x: isinstance(x, Packed))
    names = ["/".join(str(getattr(k, "key", getattr(k, "idx", k))) for k in path) for path, _ in leaves]
    return names, [leaf for _, leaf in leaves], treedef


def lora_init(key: Key[Array, ""], params: PyTree, spec: LoraSpec, dtype=jnp.float32) -> Deltas:
    """A delta for every kernel whose path matches: the only thing that a LoRA run trains and checkpoints.

    Raises:
      ValueError: no path matches, or a match is not a kernel.
    """
    lora = {}
    names, leaves, _ = _flatten(params)
    for name, w in zip(names, leaves):
        if not re.fullmatch(spec.pattern, name):
            continue
        if w.ndim < 2:
            raise ValueError(
                f"LoraSpec pattern {spec.pattern!r} matches {name}, whose shape {w.shape} is not that of a kernel."
            )
        key, sub = jax.random.split(key)
        *lead, i, o = w.shape
        bound = 1.0 / math.sqrt(i)
        a = jax.random.uniform(sub, (*lead, i, spec.rank), dtype, -bound, bound)
        lora[name] = Delta(a, jnp.zeros((*lead, spec.rank, o), dtype), spec.scale, spec.dropout)
    if not lora:
        raise ValueError(f"LoraSpec pattern {spec.pattern!r} matches no parameter.")
    return lora


def lora_bind(params: PyTree, lora: Deltas, key: Key[Array, ""] | None = None) -> PyTree:
    """The parameters with `Lora` leaves in place of the chosen kernels; a ``key`` turns dropout on, one draw a kernel and layer.

    Raises:
      ValueError: a delta whose kernel the parameters do not have, or whose shape differs.
    """
    names, leaves, treedef = _flatten(params)
    if missing := set(lora) - set(names):
        raise ValueError(f"lora names {sorted(missing)[0]}, which the parameters do not have.")
    for i, name in enumerate(names):
        if name not in lora:
            continue
        delta, w = lora[name], leaves[i]
        if (*delta.a.shape[:-1], delta.b.shape[-1]) != tuple(w.shape):
            raise ValueError(
                f"lora has a delta of {delta.a.shape} x {delta.b.shape} for {name}, whose shape is {w.shape}."
            )
        sub = None
        if key is not None and delta.dropout > 0.0:
            sub = jax.random.fold_in(key, i)
            sub = jax.random.split(sub, delta.a.shape[:-2]) if delta.a.ndim > 2 else sub
        leaves[i] = Lora(w, delta, sub)
    return jax.tree_util.tree_unflatten(treedef, leaves)


def lora_merge(params: PyTree, lora: Deltas) -> PyTree:
    """Plain parameters that give the same outputs without dropout; a packed kernel with a delta becomes dense."""
    is_lora = lambda x: isinstance(x, Lora)  # noqa: E731
    return jax.tree.map(lambda x: x.merged() if is_lora(x) else x, lora_bind(params, lora), is_leaf=is_lora)
