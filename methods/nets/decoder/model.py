"""The decoder: embed, run over any range of layers, head. Pre-norm blocks h = x + Attn(norm(x)), y = h + W_down(silu(W_gate u) * W_up u).

Vaswani et al. 2017; Llama (Touvron et al. 2023), Qwen2 (2024), Qwen3 (2025). Rotary layout "half". Norm and softmax statistics are float32,
logits are float32. Pass parameters as an argument of the jitted function: closed over, they become constants that XLA folds for seconds.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from papyrax.jaxlib_ext.attention import attention
from papyrax.jaxlib_ext.attention.reference import Mask, weights
from papyrax.jaxlib_ext.quant_matmul import Packed, dequant_matmul, unpack_rows
from papyrax.methods.nets.decoder.cache import Cache, append, reserve
from papyrax.methods.nets.decoder.config import Config
from papyrax.methods.nets.decoder.hooks import Edit, Taps
from papyrax.methods.nets.linear import dense
from papyrax.methods.nets.lora import Lora
from papyrax.methods.nets.norm import rms_norm
from papyrax.methods.nets.rope import frequencies, rotate, tables

__all__ = ["Attend", "Out", "Where", "embed", "forward", "head", "head_table", "places", "run"]


class Where(NamedTuple):
    """What a stand-in for attention is told beside q, k and v: positions and segments, the mask rule, and this call's unrotated keys."""

    mask: Mask
    causal: bool
    window: int | None
    scale: float
    k_raw: Float[Array, "b hkv t d"]


NOTHING = Taps()
Attend = Callable[[Array, Array, Array, Array, Where, PyTree], tuple[Array, Any, PyTree]]


@flax.struct.dataclass
class Out:
    """``x`` is the residual stream after the last layer run, before the final norm; ``taps`` maps names to arrays that lead with layers."""

    x: Float[Array, "b t e"]
    taps: dict[str, PyTree]
    cache: Cache | None
    state: PyTree = None


def places(mask: Bool[Array, "b t"]) -> tuple[Int[Array, "b t"], Int[Array, "b t"]]:
    """Positions and segments of rows padded on either side: real tokens count from 0, padding has segment -1."""
    mask = mask.astype(bool)
    pos = jnp.maximum(jnp.cumsum(mask, axis=1, dtype=jnp.int32) - 1, 0)
    return pos, jnp.where(mask, 0, -1)


def embed(params: PyTree, ids: Int[Array, "b t"]) -> Float[Array, "b t e"]:
    """Rows of the token table."""
    table = params["embed"]
    if isinstance(table, Packed):
        return unpack_rows(table, ids)
    if isinstance(table, Lora):
        return table.rows(ids)
    return jnp.take(table, ids, axis=0)


def head_table(params: PyTree) -> Float[Array, "v e"] | Packed:
    """The output table, which is the embedding itself when tied."""
    return params["head"] if "head" in params else params["embed"]


def head(params: PyTree, cfg: Config, x: Float[Array, "*n e"]) -> Float[Array, "*n v"]:
    """Final norm and logits in float32 of any rows of the residual stream, of any layer (the logit lens). Ask only for rows you need."""
    x = rms_norm(x, params["norm"], cfg.eps)
    table = head_table(params)
    if isinstance(table, Packed):
        return dequant_matmul(x.reshape(-1, x.shape[-1]), table).reshape(*x.shape[:-1], -1).astype(jnp.float32)
    if isinstance(table, Lora):
        table = table.merged()
    return jax.lax.dot_general(
        x, table, (((x.ndim - 1,), (1,)), ((), ())), preferred_element_type=jnp.promote_types(x.dtype, jnp.float32)
    )


def _split(x, heads):
    return jnp.swapaxes(x.reshape(*x.shape[:2], heads, -1), 1, 2)


def _block(cfg, p, x, layer, index, shared, kv, state, want):
    """One block. ``layer`` is the absolute number, ``index`` the row of the cache; returns (x, kv, state, tapped arrays)."""
    rope, q_mask, plan, causal, edit, attend = shared
    seen = {}

    def edited(site, value):
        return edit.fn(site, layer, value, edit.args) if edit is not None and site in edit.sites else value

    def tap(name, value):
        if name in want:
            seen[name] = value

    u = edited("attn_in", rms_norm(x, p["attn_norm"], cfg.eps))
    q = _split(dense(u, p["q"], p.get("q_b")), cfg.heads)
    k = _split(dense(u, p["k"], p.get("k_b")), cfg.kv_heads)
    v = _split(dense(u, p["v"], p.get("v_b")), cfg.kv_heads)
    if cfg.qk_norm:
        q, k = rms_norm(q, p["q_norm"], cfg.eps), rms_norm(k, p["k_norm"], cfg.eps)
    tap("k_raw", k)
    k_raw = k
    q = edited("q", rotate(q, *rope, "half"))
    k = edited("k", rotate(k, *rope, "half"))
    v = edited("v", v)
    for name, value in (("q", q), ("k", k), ("v", v)):
        tap(name, value)

    mask = Mask(q_mask[0], q_mask[0], q_mask[1], q_mask[1])
    if kv is not None:
        k_buffer, k = append(kv[0], index, k, plan)
        v_buffer, v = append(kv[1], index, v, plan)
        kv = (k_buffer, v_buffer)
        mask = Mask(q_mask[0], q_mask[2], q_mask[1], q_mask[3])
    k, v = k.astype(q.dtype), v.astype(q.dtype)
    rule = {"causal": causal, "window": cfg.window, "scale": 1.0 / math.sqrt(cfg.head_dim)}
    if attend is None:
        y, _ = attention(q, k, v, q_pos=mask.q_pos, k_pos=mask.k_pos, q_seg=mask.q_seg, k_seg=mask.k_seg, **rule)
        if "attn" in want:
            tap("attn", weights(q, k, mask, softcap=None, **rule))
    else:
        y, aux, state = attend(layer, q, k, v, Where(mask, k_raw=k_raw, **rule), state)
        tap("aux", aux)
    y = edited("head", y)
    per_head = "head_out" in want or (edit is not None and "head_out" in edit.sites)
    if per_head:
        o = p["o"]
        o = o.dense() if isinstance(o, Packed) else o.merged() if isinstance(o, Lora) else o
        heads = edited("head_out", jnp.einsum("bhtd,hde->bthe", y, o.reshape(cfg.heads, cfg.head_dim, -1)))
        tap("head_out", heads)
        y = jnp.sum(heads, axis=2)
    else:
        y = dense(jnp.swapaxes(y, 1, 2).reshape(*x.shape[:2], -1), p["o"])
    y = edited("attn_out", y)
    tap("attn_out", y)
    x = edited("mid", x + y)
    tap("mid", x)
    u = edited("mlp_in", rms_norm(x, p["mlp_norm"], cfg.eps))
    y = dense(jax.nn.silu(dense(u, p["gate"])) * dense(u, p["up"]), p["down"])
    y = edited("mlp_out", y)
    tap("mlp_out", y)
    x = edited("resid", x + y)
    tap("resid", x)
    return x, kv, state, seen


def _runs(start: int, stop: int, chosen: frozenset[int] | None) -> list[tuple[int, int, bool]]:
    """Maximal ranges of layers that are all tapped or all not."""
    out: list[tuple[int, int, bool]] = []
    for layer in range(start, stop):
        on = chosen is None or layer in chosen
        if out and out[-1][2] == on:
            out[-1] = (out[-1][0], layer + 1, on)
        else:
            out.append((layer, layer + 1, on))
    return out


def _check(cfg, params, x, pos, seg, start, stop, cache, attend, taps):
    if x.dtype == jnp.float16:
        raise ValueError(
            "run refuses float16 activations, because residual streams reach 2.5e4 and overflow: use bfloat16."
        )
    if x.ndim != 3 or x.shape[-1] != cfg.dim:
        raise ValueError(f"run wants x of shape (batch, tokens, {cfg.dim}), but got {x.shape}.")
    for name, value in (("pos", pos), ("seg", seg)):
        if value is not None and value.shape != x.shape[:2]:
            raise ValueError(f"run wants {name} of shape {x.shape[:2]}, but got {value.shape}.")
    if not 0 <= start < stop <= cfg.layers:
        raise ValueError(f"run wants layers (first, last + 1) within (0, {cfg.layers}), but got ({start}, {stop}).")
    if cache is not None and (cache.k.shape[0] != stop - start or cache.k.shape[1] != x.shape[0]):
        raise ValueError(
            f"run wants a cache of {stop - start} layers and {x.shape[0]} sequences, but got one of "
            f"{cache.k.shape[0]} and {cache.k.shape[1]}."
        )
    if cache is not None and x.shape[1] > cache.capacity:
        raise ValueError(
            f"The cache holds {cache.capacity} tokens a sequence, fewer than the {x.shape[1]} rows of this call."
        )
    if "attn" in taps.names and attend is not None:
        raise ValueError(
            "The tap 'attn' belongs to ordinary attention: with attend given, return it as aux and tap 'aux'."
        )
    if "aux" in taps.names and attend is None:
        raise ValueError("The tap 'aux' is what attend returns, but attend is not given.")


def run(
    params: PyTree,
    cfg: Config,
    x: Float[Array, "b t e"],
    *,
    pos: Int[Array, "b t"],
    seg: Int[Array, "b t"] | None = None,
    causal: bool = True,
    layers: tuple[int, int] | None = None,
    cache: Cache | None = None,
    taps: Taps = NOTHING,
    edit: Edit | None = None,
    attend: Attend | None = None,
    state: PyTree = None,
    remat: str | None = None,
) -> Out:
    """Runs rows of the residual stream through layers ``(first, last + 1)``, all of them by default.

    Args:
      pos: position of each row, for rotation and for the causal rule; order in memory does not matter.
      seg: segment of each row; rows see their own segment only, -1 is padding. All zero by default.
      causal: False for bidirectional attention (masked diffusion, encoders).
      cache: rows are appended to it and attend to all it holds; it has exactly the layers that are run. Prefill, extension and decoding
        are this one call. Frequencies that depend on length ("dynamic", "longrope") are taken at its capacity, else at t.
      taps: what to return from inside. edit: what to change inside. Both follow `papyrax.methods.nets.decoder.hooks`.
      attend: ``fn(layer, q, k, v, where, state) -> (out, aux, state)`` in place of attention; with a cache, k and v are all it holds.
      state: first value of the state that ``attend`` hands from layer to layer.
      remat: "full" recomputes each block in the backward pass, "dots" keeps the results of its matrix products.

    Raises:
      ValueError: shapes, layers or cache that do not fit, or float16 activations.
    """
    start, stop = layers or (0, cfg.layers)
    _check(cfg, params, x, pos, seg, start, stop, cache, attend, taps)
    if remat not in (None, "full", "dots"):
        raise ValueError(f'remat must be None, "full" or "dots", but is {remat!r}.')
    seg = jnp.zeros(pos.shape, jnp.int32) if seg is None else seg
    plan, kv = None, None
    q_mask = (pos, seg)
    if cache is not None:
        cache, plan = reserve(cache, pos, seg)
        kv = (cache.k, cache.v)
        q_mask = (pos, seg, cache.pos, cache.seg)
    freq, factor = frequencies(cfg.rope, x.shape[1] if cache is None else cache.capacity)
    rope = tables(pos[..., None], freq, None, factor)
    shared = (rope, q_mask, plan, causal, edit, attend)

    def block(p, x, layer, kv, state, want):
        x, kv, state, seen = _block(cfg, p, x, layer, layer - start, shared, kv, state, want)
        if taps.reduce is not None:
            seen = {name: taps.reduce(layer, name, value) for name, value in seen.items()}
        return x, kv, state, seen

    first = x
    collected: dict[str, list] = {}
    chosen = None if taps.layers is None else frozenset(taps.layers)
    blocks = params["layers"]
    ranges = _runs(start, stop, chosen if taps.names else frozenset())
    for lo, hi, on in ranges:
        want = taps.names if on else ()

        def step(carry, inputs, want=want):
            x, kv, state = carry
            p, layer = inputs
            x, kv, state, seen = block(p, x, layer, kv, state, want)
            return (x, kv, state), seen

        if remat is not None:
            policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable if remat == "dots" else None
            step = jax.checkpoint(step, policy=policy, prevent_cse=False)
        if isinstance(blocks, tuple):
            rows = []
            for layer in range(lo, hi):
                (x, kv, state), seen = step((x, kv, state), (blocks[layer], jnp.int32(layer)))
                rows.append(seen)
            seen = jax.tree.map(lambda *r: jnp.stack(r), *rows)
        else:
            part = blocks if (lo, hi) == (0, cfg.layers) else jax.tree.map(lambda a, lo=lo, hi=hi: a[lo:hi], blocks)
            (x, kv, state), seen = jax.lax.scan(step, (x, kv, state), (part, jnp.arange(lo, hi, dtype=jnp.int32)))
        for name, value in seen.items():
            collected.setdefault(name, []).append(value)
    if "resid" in taps.names and chosen is None:
        row = first if taps.reduce is None else taps.reduce(jnp.int32(start - 1), "resid", first)
        collected["resid"].insert(0, jax.tree.map(lambda a: a[None], row))
    out = {name: jax.tree.map(lambda *a: jnp.concatenate(a), *parts) for name, parts in collected.items()}
    if cache is not None and kv is not None:
        cache = cache.replace(k=kv[0], v=kv[1])
    return Out(x, out, cache, state)


def forward(
    params: PyTree,
    cfg: Config,
    ids: Int[Array, "b t"],
    *,
    mask: Bool[Array, "b t"] | None = None,
    causal: bool = True,
    taps: Taps = NOTHING,
    edit: Edit | None = None,
    remat: str | None = None,
) -> tuple[Float[Array, "b t v"], dict[str, PyTree]]:
    """Logits of every row and the taps: `embed`, `run` and `head` in one. ``mask`` is True at real tokens, padded on either side."""
    pos, seg = places(jnp.ones(ids.shape, bool) if mask is None else mask)
    out = run(params, cfg, embed(params, ids), pos=pos, seg=seg, causal=causal, taps=taps, edit=edit, remat=remat)
    return head(params, cfg, out.x), out.taps
