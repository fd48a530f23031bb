"""Keys and values of the tokens read so far, in static arrays that know each row's position, segment and fill.

One call appends any number of rows. Rows of segment -1 (padding) are left out, so that a cache never holds padding: each sequence lies
without gaps from slot 0, wherever its padding was, and prefill, extension and decoding are the same write.
"""

from typing import NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from papyrax.methods.nets.decoder.config import Config

__all__ = ["Cache", "Plan", "append", "fork", "init_cache", "reserve"]


@flax.struct.dataclass
class Cache:
    """``k`` is as attention reads it: normed and rotated. Slots from ``fill`` on have segment -1. ``overflow`` tells rows that were lost."""

    k: Float[Array, "l b hkv s d"]
    v: Float[Array, "l b hkv s d"]
    pos: Int[Array, "b s"]
    seg: Int[Array, "b s"]
    fill: Int[Array, " b"]
    overflow: Bool[Array, " b"]

    @property
    def capacity(self) -> int:
        return self.k.shape[3]


class Plan(NamedTuple):
    """Where the new rows go: ``slots[b, t]`` (capacity = nowhere), and the inverse, ``source[b, s]`` (-1 = keep what is there)."""

    slots: Int[Array, "b t"]
    source: Int[Array, "b s"] | None


def init_cache(cfg: Config, b: int, s: int, *, layers: int | None = None, dtype=jnp.float32) -> Cache:
    """An empty cache for ``b`` sequences of at most ``s`` tokens; ``layers`` when it serves a part of the layers only."""
    shape = (cfg.layers if layers is None else layers, b, cfg.kv_heads, s, cfg.head_dim)
    return Cache(
        k=jnp.zeros(shape, dtype),
        v=jnp.zeros(shape, dtype),
        pos=jnp.zeros((b, s), jnp.int32),
        seg=jnp.full((b, s), -1, jnp.int32),
        fill=jnp.zeros((b,), jnp.int32),
        overflow=jnp.zeros((b,), bool),
    )


def reserve(cache: Cache, pos: Int[Array, "b t"], seg: Int[Array, "b t"]) -> tuple[Cache, Plan]:
    """Books slots for the new rows and records their positions and segments; keys and values follow layer by layer.

    Raises:
      ValueError: more rows than the cache holds at all, or (outside jit) more than are left.
    """
    s, t = cache.capacity, pos.shape[1]
    valid = seg >= 0
    count = jnp.sum(valid, axis=1, dtype=jnp.int32)
    if not isinstance(cache.fill, jax.core.Tracer) and not isinstance(count, jax.core.Tracer):
        most = int(jnp.max(cache.fill + count))
        if most > s:
            raise ValueError(f"The cache holds {s} tokens a sequence, but {most} are needed: make it longer.")
    slots = jnp.where(valid, cache.fill[:, None] + jnp.cumsum(valid, axis=1, dtype=jnp.int32) - 1, s)
    rows = jnp.arange(pos.shape[0])[:, None]
    # A few rows are scattered one by one; many are cheaper as one gather over all slots.
    source = None
    if 4 * t > s:
        iota = jnp.broadcast_to(jnp.arange(t, dtype=jnp.int32), slots.shape)
        source = jnp.full((pos.shape[0], s), -1, jnp.int32).at[rows, slots].set(iota, mode="drop")
    cache = cache.replace(
        pos=cache.pos.at[rows, slots].set(pos.astype(jnp.int32), mode="drop"),
        seg=cache.seg.at[rows, slots].set(seg.astype(jnp.int32), mode="drop"),
        fill=jnp.minimum(cache.fill + count, s),
        overflow=cache.overflow | (cache.fill + count > s),
    )
    return cache, Plan(slots, source)


def append(
    buffer: Float[Array, "l b hkv s d"], layer: Int[Array, ""] | int, new: Float[Array, "b hkv t d"], plan: Plan
) -> tuple[Float[Array, "l b hkv s d"], Float[Array, "b hkv s d"]]:
    """Writes the new rows of one layer; returns the buffer and that layer's part of it."""
    new = new.astype(buffer.dtype)
    if plan.source is None:
        rows = jnp.arange(new.shape[0])[:, None]
        buffer = buffer.at[layer, rows, :, plan.slots].set(jnp.swapaxes(new, 1, 2), mode="drop")
        return buffer, jax.lax.dynamic_index_in_dim(buffer, layer, keepdims=False)
    old = jax.lax.dynamic_index_in_dim(buffer, layer, keepdims=False)
    index = jnp.maximum(plan.source, 0)[:, None, :, None]
    whole = jnp.where(plan.source[:, None, :, None] >= 0, jnp.take_along_axis(new, index, axis=2), old)
    return jax.lax.dynamic_update_index_in_dim(buffer, whole, layer, 0), whole


def fork(cache: Cache, rows: Int[Array, " b2"]) -> Cache:
    """The cache whose sequence i is a copy of sequence ``rows[i]``: one prefix for many suffixes, beams."""
    take = lambda x, axis: jnp.take(x, rows, axis=axis)  # noqa: E731
    return Cache(
        take(cache.k, 1),
        take(cache.v, 1),
        take(cache.pos, 0),
        take(cache.seg, 0),
        take(cache.fill, 0),
        take(cache.overflow, 0),
    )
