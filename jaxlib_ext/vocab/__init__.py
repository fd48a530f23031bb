"""Row statistics of a softmax over the vocabulary, without the matrix of probabilities in memory."""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from papyrax.jaxlib_ext import dispatch
from papyrax.jaxlib_ext.vocab import gpu, reference, tpu
from papyrax.jaxlib_ext.vocab.reference import Stats

__all__ = ["Stats", "cross_entropy", "divergence", "vocab_stats"]

BLOCK = 256


def vocab_stats(
    h: Float[Array, "n e"],
    w: Float[Array, "v e"] | None,
    *,
    pick: Int[Array, "n c"] | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    implementation: dispatch.Implementation = "auto",
    interpret: bool = False,
) -> Stats:
    """Maximum, argmax (lowest index of ties), log-sum-exp, entropy and picked logits of every row of softmax(h w^T).

    ``w`` None means that ``h`` are logits. At most 256 rows of logits live at once, forward and backward: 256 v floats instead of n v (50 MB
    instead of 3.2 GB for 16,384 rows of 49,152 words). ``2 n e v`` FLOPs forward, and ``6 n e v`` backward, which recomputes the logits.
    Everything but argmax has a gradient.

    Why a kernel pays: either way the table is read once a tile of rows, but plain code also writes and reads each logit about four times
    (16 n v bytes in float32, 12.9 GB for 16,384 rows of 49,152 words), which the kernels keep on the chip. Logits given (``w`` None) and
    float64 run the reference. Second derivatives and forward-mode need implementation="reference".

    Raises:
      ValueError: widths or rows that do not match, or a temperature that is not positive.
    """
    _check(h, w)
    if temperature <= 0:
        raise ValueError(f"vocab_stats wants a positive temperature, but got {temperature}.")
    if pick is not None and (pick.ndim != 2 or pick.shape[0] != h.shape[0]):
        raise ValueError(f"vocab_stats wants pick of shape ({h.shape[0]}, c), but got {pick.shape}.")
    dispatch.check_implementation(implementation)
    pick = jnp.zeros((h.shape[0], 0), jnp.int32) if pick is None else pick
    if w is None or implementation == "reference":

        def rows(h, pick):
            return reference.stats_rows(reference.logits(h, w, temperature, softcap), pick)

        return reference.block_rows(rows, (h, pick), BLOCK)
    _, argmax, lse, entropy = _stats(_Spec(temperature, softcap, implementation, interpret), h, w)
    # The few columns that are named (the largest among them) are plain products, which carry their own gradients.
    columns = jnp.concatenate([argmax[:, None], pick], axis=1)
    named = jax.vmap(lambda row, table: reference.logits(row[None], table, temperature, softcap)[0])(h, w[columns])
    return Stats(named[:, 0], argmax, lse, entropy, named[:, 1:])


@dataclasses.dataclass(frozen=True)
class _Spec:
    temperature: float
    softcap: float | None
    implementation: dispatch.Implementation
    interpret: bool

    def run(self, name: str, *args: Array):
        rule = (self.temperature, self.softcap)
        return dispatch.run(
            self.implementation,
            *args,
            reference=lambda *a: getattr(reference, name)(*a, *rule, block=BLOCK),
            tpu=lambda *a: getattr(tpu, name)(*a, *rule, interpret=self.interpret),
            gpu=lambda *a: getattr(gpu, name)(*a, *rule, interpret=self.interpret),
        )


def _rows(spec: _Spec, h, w) -> tuple[Array, Array, Array, Array]:
    return spec.run("forward", h, w)


_stats = jax.custom_vjp(_rows, nondiff_argnums=(0,))


def _forward(spec, h, w):
    out = _stats(spec, h, w)
    return out, (h, w, out[2], out[3])


def _backward(spec, kept, cotangents):
    # The maximum is taken from the named columns, so its cotangent here is zero.
    return spec.run("backward", *kept, cotangents[2], cotangents[3])


_stats.defvjp(_forward, _backward)


def cross_entropy(
    h: Float[Array, "n e"],
    w: Float[Array, "v e"] | None,
    target: Int[Array, " n"],
    *,
    softcap: float | None = None,
    implementation: dispatch.Implementation = "auto",
    interpret: bool = False,
) -> Float[Array, " n"]:
    """Negative log-probability of ``target`` in every row, in nats; see `vocab_stats`."""
    if target.shape != h.shape[:1]:
        raise ValueError(f"cross_entropy wants target of shape {h.shape[:1]}, but got {target.shape}.")
    options = {"softcap": softcap, "implementation": implementation, "interpret": interpret}
    stats = vocab_stats(h, w, pick=target[:, None], **options)
    return stats.lse - stats.picked[:, 0]


def divergence(
    ha: Float[Array, "n e"],
    hb: Float[Array, "n e"],
    w: Float[Array, "v e"] | None,
    *,
    kind: Literal["jsd", "jsd_swapped", "kl", "tv"],
) -> Float[Array, " n"]:
    """Divergence in nats between softmax(ha w^T) and softmax(hb w^T), row by row; ``w`` None: both are logits.

    Raises:
      ValueError: an unknown kind, or shapes that do not match.
    """
    _check(ha, w)
    if kind not in reference.KINDS:
        raise ValueError(f"divergence kind must be one of {', '.join(reference.KINDS)}, but is {kind!r}.")
    if ha.shape != hb.shape:
        raise ValueError(f"divergence wants two sets of rows of one shape, but got {ha.shape} and {hb.shape}.")

    def rows(ha, hb):
        return reference.divergence_rows(reference.logits(ha, w), reference.logits(hb, w), kind)

    return reference.block_rows(rows, (ha, hb), BLOCK)


def _check(h, w):
    if h.ndim != 2 or (w is not None and (w.ndim != 2 or w.shape[1] != h.shape[1])):
        raise ValueError(
            f"Rows (n, e) and a table (v, e) are wanted, but got {h.shape} and {None if w is None else w.shape}."
        )
