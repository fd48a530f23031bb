"""Attention with explicit positions and segments whose log-sum-exp is an output with a gradient, so that parts can be merged."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from papyrax.jaxlib_ext import dispatch
from papyrax.jaxlib_ext.attention import gpu, reference, tpu
from papyrax.jaxlib_ext.attention.reference import EMPTY

__all__ = ["EMPTY", "attention", "merge"]


def attention(
    q: Float[Array, "b hq t d"],
    k: Float[Array, "b hkv s d"],
    v: Float[Array, "b hkv s c"],
    *,
    q_pos: Int[Array, "b t"],
    k_pos: Int[Array, "b s"],
    q_seg: Int[Array, "b t"] | None = None,
    k_seg: Int[Array, "b s"] | None = None,
    causal: bool,
    window: int | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    implementation: dispatch.Implementation = "auto",
    interpret: bool = False,
) -> tuple[Float[Array, "b hq t c"], Float[Array, "b hq t"]]:
    """Softmax attention of grouped heads; query head h reads key head ``h // (hq / hkv)``.

    Query i sees key j when both carry the same segment (-1 is padding and sees nothing), ``k_pos[j] <= q_pos[i]`` if ``causal``, and
    ``|q_pos[i] - k_pos[j]| < window`` if a window is given. Order in memory means nothing, so left padding, right padding, packed
    documents and scattered rows are the same call. Logits are ``scale * q k`` (default 1/sqrt(d)), then ``softcap * tanh(. / softcap)``.

    Second derivatives and forward-mode need implementation="reference", whose gradients are JAX's own.

    Returns the output and, per row, the log of the sum of exponentials in float32. A row that sees no key gives 0 and -1e30. Both have
    gradients: the residual that JAX's own fused attention returns is cut off from differentiation, and merging with it gives wrong
    q and k gradients silently.

    Cost for t queries, s keys, per head: ``2 t s (d + c)`` FLOPs forward and 2.5 times that backward. Written out, scores move about
    ``16 t s`` bytes through memory in float32 (write, read for softmax, write, read); the kernels keep them on the chip and move
    ``4 (t d + s d + s c + t c)`` bytes per head, a factor of ``~ s / d`` less, and skip key blocks that no query of a block can see.

    Raises:
      ValueError: shapes that do not fit, segments given on one side only, a window or softcap that is not positive.
    """
    _check(q, k, v, q_pos, k_pos, q_seg, k_seg, window, softcap, implementation)
    b, _, t, d = q.shape
    if q_seg is None or k_seg is None:
        q_seg, k_seg = jnp.zeros((b, t), jnp.int32), jnp.zeros((b, k.shape[2]), jnp.int32)
    arrays = (q, k, v, *(x.astype(jnp.int32) for x in (q_pos, k_pos, q_seg, k_seg)))
    scale = 1.0 / math.sqrt(d) if scale is None else float(scale)
    if implementation == "reference":
        return reference.attention_forward(*arrays, causal=causal, window=window, softcap=softcap, scale=scale)
    return _attention(_Spec(causal, window, softcap, scale, implementation, interpret), *arrays)


def merge(
    outs: Float[Array, "p b hq t c"], lses: Float[Array, "p b hq t"]
) -> tuple[Float[Array, "b hq t c"], Float[Array, "b hq t"]]:
    """Joins attention over p disjoint sets of keys into attention over their union, exactly, with gradients."""
    if outs.shape[:-1] != lses.shape:
        raise ValueError(
            f"merge wants lses of shape {outs.shape[:-1]}, that of outs without its last axis, but got {lses.shape}."
        )
    top = jax.lax.stop_gradient(jnp.max(lses, axis=0))  # cancels; its gradient would only add rounding
    share = jnp.exp(lses - top)
    # A part whose row saw no key has log-sum-exp EMPTY; where all parts are empty the shares must not add up to p.
    share = jnp.where(lses > EMPTY / 2, share, 0.0)
    mass = jnp.sum(share, axis=0)
    seen = mass > 0
    safe = jnp.where(seen, mass, 1.0)
    out = jnp.sum(share[..., None] * outs.astype(share.dtype), axis=0) / safe[..., None]
    return out.astype(outs.dtype), jnp.where(seen, top + jnp.log(safe), EMPTY)


def _check(q, k, v, q_pos, k_pos, q_seg, k_seg, window, softcap, implementation):
    if q.ndim != 4 or k.ndim != 4 or v.ndim != 4:
        raise ValueError(
            f"attention wants q, k and v with four axes (batch, heads, rows, width), but got {q.shape}, {k.shape} and {v.shape}."
        )
    if k.shape[:3] != v.shape[:3] or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3] or q.shape[1] % k.shape[1]:
        raise ValueError(
            "attention wants one batch size, one width of q and k, equal rows of k and v, and heads of q in groups over those of k, "
            f"but got q {q.shape}, k {k.shape} and v {v.shape}."
        )
    want_q, want_k = (q.shape[0], q.shape[2]), (k.shape[0], k.shape[2])
    if (q_seg is None) != (k_seg is None):
        raise ValueError("attention wants both q_seg and k_seg or neither, but got one of them.")
    for name, x, want in (
        ("q_pos", q_pos, want_q),
        ("k_pos", k_pos, want_k),
        ("q_seg", q_seg, want_q),
        ("k_seg", k_seg, want_k),
    ):
        if x is not None and x.shape != want:
            raise ValueError(f"attention wants {name} of shape {want}, but got {x.shape}.")
    if window is not None and window < 1:
        raise ValueError(f"attention wants a window of at least 1 position, but got {window}.")
    if softcap is not None and softcap <= 0:
        raise ValueError(f"attention wants a positive softcap, but got {softcap}.")
    dispatch.check_implementation(implementation)


@dataclasses.dataclass(frozen=True)
class _Spec:
    causal: bool
    window: int | None
    softcap: float | None
    scale: float
    implementation: dispatch.Implementation
    interpret: bool

    def run(self, name: str, *args: Array):
        rule = {"causal": self.causal, "window": self.window, "softcap": self.softcap, "scale": self.scale}
        return dispatch.run(
            self.implementation,
            *args,
            reference=functools.partial(getattr(reference, name), **rule),
            tpu=functools.partial(getattr(tpu, name), interpret=self.interpret, **rule),
            gpu=functools.partial(getattr(gpu, name), interpret=self.interpret, **rule),
        )


def _attend(spec: _Spec, q, k, v, q_pos, k_pos, q_seg, k_seg) -> tuple[Array, Array]:
    return spec.run("attention_forward", q, k, v, q_pos, k_pos, q_seg, k_seg)


_attention = jax.custom_vjp(_attend, nondiff_argnums=(0,))


def _forward(spec, *args):
    out, lse = _attention(spec, *args)
    return (out, lse), (*args, out, lse)


def _backward(spec, kept, cotangents):
    d_out, d_lse = cotangents
    grads = spec.run("attention_backward", *kept, d_out, d_lse)
    return *grads, *(np.zeros(x.shape, jax.dtypes.float0) for x in kept[3:7])


_attention.defvjp(_forward, _backward)
