"""Sampling, generation, beams and scoring with a decoder.

Order of sampling rules: rule mask, repetition penalty (Keskar et al. 2019), temperature, top-k, top-p (Holtzman et al. 2020), min-p (Nguyen et
al. 2024), then Gumbel-max. The key of row r at step s is ``fold_in(fold_in(key, r), s)``, so what a row says does not depend on its batch.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key, PyTree

from papyrax.jaxlib_ext.quant_matmul import Packed
from papyrax.jaxlib_ext.vocab import cross_entropy, vocab_stats
from papyrax.methods.nets.decoder.cache import Cache
from papyrax.methods.nets.decoder.config import Config
from papyrax.methods.nets.decoder.hooks import Edit
from papyrax.methods.nets.decoder.model import embed, head, head_table, places, run
from papyrax.methods.nets.lora import Lora
from papyrax.methods.nets.norm import rms_norm

__all__ = [
    "Beams",
    "Gen",
    "Rule",
    "SamplerConfig",
    "Top",
    "Until",
    "beam",
    "bucket",
    "choice_logp",
    "filter_logits",
    "generate",
    "pad_prompts",
    "perplexity",
    "sample",
    "score",
]

NEVER = -1e30


@dataclasses.dataclass(frozen=True)
class SamplerConfig:
    """How the next token is drawn. Temperature 0 is greedy (the lowest index of ties); top_k 0, top_p 1, min_p 0, repetition 1 are off.

    Raises:
      ValueError: a number out of its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition: float = 1.0

    def __post_init__(self):
        for name, ok, want in (
            ("temperature", self.temperature >= 0, "at least 0"),
            ("top_k", self.top_k >= 0, "at least 0"),
            ("top_p", 0 < self.top_p <= 1, "in (0, 1]"),
            ("min_p", 0 <= self.min_p < 1, "in [0, 1)"),
            ("repetition", self.repetition > 0, "positive"),
        ):
            if not ok:
                raise ValueError(f"SamplerConfig {name} must be {want}, but is {getattr(self, name)}.")


@flax.struct.dataclass
class Rule:
    """A constraint on what may come next, as arrays: ``step(state, token[b]) -> state`` and ``mask(state) -> allowed[b, v]``."""

    init: Any
    step: Callable[[PyTree, Array], PyTree] = flax.struct.field(pytree_node=False)
    mask: Callable[[PyTree], Array] = flax.struct.field(pytree_node=False)


class Top(NamedTuple):
    """The likeliest tokens of each step, best first, and their log-probabilities."""

    ids: Int[Array, "b n k"]
    logp: Float[Array, "b n k"]


@flax.struct.dataclass
class Gen:
    """What was generated. ``length`` counts a row's tokens up to and with the one that stopped it; beyond it tokens are -1 and logp 0.

    ``logp`` is under the model's own distribution, before any sampling rule. A row's last token is not in the cache yet: to go on, let
    the next call's x begin with it.
    """

    tokens: Int[Array, "b n"]
    logp: Float[Array, "b n"]
    length: Int[Array, " b"]
    stopped: Bool[Array, " b"]
    top: Top | None
    cache: Cache


def filter_logits(
    logits: Float[Array, "b v"], cfg: SamplerConfig, seen: Bool[Array, "b v"] | None = None
) -> Float[Array, "b v"]:
    """Logits after the rules of ``cfg``; what may not be drawn is -1e30. ``seen`` marks tokens that the repetition penalty weakens."""
    z = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    if cfg.repetition != 1.0 and seen is not None:
        z = jnp.where(seen, jnp.where(z > 0, z / cfg.repetition, z * cfg.repetition), z)
    if cfg.temperature == 0.0:
        return z
    z = z / cfg.temperature
    v = z.shape[-1]
    if 0 < cfg.top_k < v:
        kept = jax.lax.top_k(z, cfg.top_k)[1]  # ties go to the lower index, and exactly k stay
        z = jnp.where(jnp.zeros(z.shape, bool).at[jnp.arange(z.shape[0])[:, None], kept].set(True), z, NEVER)
    if cfg.top_p < 1.0:
        order = jnp.argsort(-z, axis=-1, stable=True)
        p = jax.nn.softmax(jnp.take_along_axis(z, order, axis=-1), axis=-1)
        inside = (
            jnp.cumsum(p, axis=-1) - p < cfg.top_p
        )  # the mass before a token is still short of p: the first always stays
        keep = jnp.zeros(z.shape, bool).at[jnp.arange(z.shape[0])[:, None], order].set(inside)
        z = jnp.where(keep, z, NEVER)
    if cfg.min_p > 0.0:
        p = jax.nn.softmax(z, axis=-1)
        z = jnp.where(p >= cfg.min_p * jnp.max(p, axis=-1, keepdims=True), z, NEVER)
    return z


def sample(
    key: Key[Array, ""],
    logits: Float[Array, "b v"],
    cfg: SamplerConfig,
    *,
    step: Int[Array, ""] | int = 0,
    seen: Bool[Array, "b v"] | None = None,
) -> Int[Array, " b"]:
    """One token a row. The key is folded by row, then by ``step``."""
    z = filter_logits(logits, cfg, seen)
    if cfg.temperature == 0.0:
        return jnp.argmax(z, axis=-1).astype(jnp.int32)
    rows = jnp.arange(z.shape[0])
    noise = jax.vmap(lambda r: jax.random.gumbel(jax.random.fold_in(jax.random.fold_in(key, r), step), z.shape[1:]))(
        rows
    )
    return jnp.argmax(jnp.where(z > NEVER / 2, z + noise, NEVER), axis=-1).astype(jnp.int32)


def bucket(length: int, smallest: int = 32) -> int:
    """The least of 32, 48, 64, 96, 128, 192, … that holds ``length``: few shapes to compile, at most half of one wasted."""
    size = smallest
    while size < length:
        size = size * 3 // 2 if size & (size - 1) == 0 else size * 4 // 3
    return size


def pad_prompts(prompts: list[list[int]], *, pad: int = 0, length: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """*host* Prompts of unequal length as ids and segments (-1 = padding), padded on the left to a `bucket`.

    Raises:
      ValueError: no prompt, an empty one, or one longer than ``length``.
    """
    if not prompts or not all(prompts):
        raise ValueError("pad_prompts wants at least one prompt and at least one token in each.")
    longest = max(map(len, prompts))
    length = bucket(longest) if length is None else length
    if longest > length:
        raise ValueError(f"pad_prompts was given a prompt of {longest} tokens, longer than length = {length}.")
    ids, seg = np.full((len(prompts), length), pad, np.int32), np.full((len(prompts), length), -1, np.int32)
    for row, prompt in enumerate(prompts):
        ids[row, length - len(prompt) :], seg[row, length - len(prompt) :] = prompt, 0
    return ids, seg


def _last(seg):
    """Index of the last real row of each sequence."""
    t = seg.shape[1]
    return t - 1 - jnp.argmax(seg[:, ::-1] >= 0, axis=1)


def generate(
    params: PyTree,
    cfg: Config,
    key: Key[Array, ""],
    cache: Cache,
    x: Int[Array, "b t"] | Float[Array, "b t e"],
    *,
    max_new: int,
    sampler: SamplerConfig = SamplerConfig(),
    stop: Int[Array, " c"] | tuple[int, ...] = (),
    seg: Int[Array, "b t"] | None = None,
    rule: Rule | None = None,
    edit: Edit | None = None,
    top: int = 0,
) -> Gen:
    """Reads a prompt into the cache and writes up to ``max_new`` tokens, in one compiled program a shape (see `bucket`).

    Args:
      cache: empty, or with what was said before; it is consumed (donated) and handed back.
      x: ids, or embeddings, of the rows that are not in the cache yet; ``seg`` -1 marks padding on either side.
      stop: ids that end a row. The loop ends when every row has.
      rule: what may come next. edit: interventions, in prefill and decoding alike. top: how many likeliest tokens to return a step.

    Raises:
      ValueError: max_new below 1, or a cache too small for the prompt and ``max_new`` tokens.
    """
    if max_new < 1:
        raise ValueError(f"generate wants max_new of at least 1, but got {max_new}.")
    seg = jnp.zeros(x.shape[:2], jnp.int32) if seg is None else jnp.asarray(seg)
    if not any(isinstance(a, jax.core.Tracer) for a in (cache.fill, seg)):
        most = int(np.max(np.asarray(cache.fill) + np.sum(np.asarray(seg) >= 0, axis=1))) + max_new - 1
        if most > cache.capacity:
            raise ValueError(f"The cache holds {cache.capacity} tokens a sequence, but prompt and max_new need {most}.")
    stop = jnp.asarray(stop, jnp.int32).reshape(-1)
    return _generate(params, cfg, key, cache, jnp.asarray(x), seg, stop, rule, edit, max_new, sampler, top)


@functools.partial(jax.jit, static_argnums=(1, 9, 10, 11), donate_argnums=(3,))
def _generate(params, cfg, key, cache, x, seg, stop, rule, edit, max_new, sampler, top):
    b = x.shape[0]
    rows = jnp.arange(b)
    seen = None
    if sampler.repetition != 1.0:
        seen = jnp.zeros((b, cfg.vocab), bool)
        if x.ndim == 2:
            seen = seen.at[rows[:, None], jnp.where(seg >= 0, x, cfg.vocab)].set(True, mode="drop")
    pos = jnp.maximum(cache.fill[:, None] + jnp.cumsum(seg >= 0, axis=1, dtype=jnp.int32) - 1, 0)
    start = embed(params, x) if x.ndim == 2 else x
    out = run(params, cfg, start, pos=pos, seg=seg, cache=cache, edit=edit)
    z = head(params, cfg, out.x[rows, _last(seg)])
    # The segment that a sequence goes on in is that of its last real token.
    going_on = jnp.take_along_axis(seg, _last(seg)[:, None], axis=1)

    def draw(z, step, rule_state, seen):
        allowed = z if rule is None else jnp.where(rule.mask(rule_state), z, NEVER)
        token = sample(key, allowed, sampler, step=step, seen=seen)
        logp = jax.nn.log_softmax(z, axis=-1)
        best = jax.lax.top_k(logp, top) if top else None
        return token, jnp.take_along_axis(logp, token[:, None], axis=1)[:, 0], best

    def record(carry, z, step):
        tokens, logps, tops, length, done, rule_state, seen = carry
        token, logp, best = draw(z, step, rule_state, seen)
        put = lambda buffer, value: jax.lax.dynamic_update_index_in_dim(buffer, value, step, 1)  # noqa: E731
        tokens, logps = put(tokens, jnp.where(done, -1, token)), put(logps, jnp.where(done, 0.0, logp))
        if best is not None:
            tops = Top(put(tops.ids, best[1].astype(jnp.int32)), put(tops.logp, best[0]))
        length = length + ~done
        if rule is not None:
            rule_state = rule.step(rule_state, token)
        if seen is not None:
            seen = seen.at[rows, jnp.where(done, cfg.vocab, token)].set(True, mode="drop")
        done = done | jnp.any(token[:, None] == stop[None, :], axis=1)
        return (tokens, logps, tops, length, done, rule_state, seen), token

    tops = Top(jnp.full((b, max_new, top), -1, jnp.int32), jnp.zeros((b, max_new, top), z.dtype)) if top else None
    carry = (
        jnp.full((b, max_new), -1, jnp.int32),
        jnp.zeros((b, max_new), z.dtype),
        tops,
        jnp.zeros((b,), jnp.int32),
        jnp.zeros((b,), bool),
        None if rule is None else rule.init,
        seen,
    )
    carry, token = record(carry, z, jnp.int32(0))

    def more(state):
        step, carry, _, _ = state
        return (step < max_new) & ~jnp.all(carry[4])

    def body(state):
        step, carry, token, cache = state
        here = jnp.where(carry[4][:, None], -1, going_on)  # rows that have ended write nothing to the cache
        out = run(params, cfg, embed(params, token[:, None]), pos=cache.fill[:, None], seg=here, cache=cache, edit=edit)
        carry, token = record(carry, head(params, cfg, out.x[:, 0]), step)
        return step + 1, carry, token, out.cache

    _, carry, _, cache = jax.lax.while_loop(more, body, (jnp.int32(1), carry, token, out.cache))
    tokens, logps, tops, length, done, _, _ = carry
    return Gen(tokens, logps, length, done, tops, cache)


class Until(NamedTuple):
    """When a beam ends: at any of these tokens, or after so many."""

    stop: tuple[int, ...]
    max_new: int


class Beams(NamedTuple):
    """Finished and cut-off sequences, best first: sums of log-probabilities, tokens (-1 beyond length)."""

    tokens: Int[Array, "w n"]
    logp: Float[Array, " w"]
    length: Int[Array, " w"]
    state: PyTree


def beam(
    step: Callable[[PyTree, Array], tuple[Array, PyTree]],
    logits: Float[Array, " v"],
    state: PyTree,
    width: int,
    until: Until,
    rule: Rule | None = None,
) -> Beams:
    """Beam search for one sequence, without length normalisation, by total log-probability.

    Args:
      step: ``(state, token[w]) -> (logits[w, v], state)``; every leaf of the state leads with the beam axis w.
      logits: of the first token. state: as it is before that token, for one beam (leading axis 1).
      rule: allowed tokens; its state, too, leads with the beam axis (1 at first). Masked before the log-softmax is cut, not renormalised.

    Raises:
      ValueError: a width below 1, or wider than the vocabulary.
    """
    v = logits.shape[-1]
    if not 1 <= width <= v:
        raise ValueError(f"beam wants a width between 1 and the vocabulary's {v}, but got {width}.")
    stop = jnp.asarray(until.stop, jnp.int32).reshape(-1)
    spread = lambda tree: jax.tree.map(lambda a: jnp.repeat(a, width, axis=0), tree)  # noqa: E731
    pick = lambda tree, rows: jax.tree.map(lambda a: jnp.take(a, rows, axis=0), tree)  # noqa: E731
    rule_state = None if rule is None else spread(rule.init)
    total = jnp.full((width,), NEVER).at[0].set(0.0)  # all beams are equal at first: only one of them may branch
    tokens = jnp.full((width, until.max_new), -1, jnp.int32)
    start = (tokens, total, jnp.zeros((width,), jnp.int32), jnp.zeros((width,), bool), rule_state, spread(state))

    def choose(carry, z, at):
        tokens, total, length, done, rule_state, state = carry
        logp = jax.nn.log_softmax(z.astype(jnp.float32), axis=-1)
        if rule is not None:
            logp = jnp.where(rule.mask(rule_state), logp, NEVER)
        stay = jnp.full((v,), NEVER).at[0].set(0.0)  # a finished beam competes as it is
        candidates = total[:, None] + jnp.where(done[:, None], stay, logp)
        total, flat = jax.lax.top_k(candidates.reshape(-1), width)
        rows, token = flat // v, (flat % v).astype(jnp.int32)
        tokens, length, done, rule_state, state = pick((tokens, length, done, rule_state, state), rows)
        tokens = tokens.at[:, at].set(jnp.where(done, -1, token))
        length = length + ~done
        if rule is not None:
            rule_state = rule.step(rule_state, token)
        done = done | jnp.any(token[:, None] == stop[None, :], axis=1)
        return (tokens, total, length, done, rule_state, state), token

    carry, token = choose(start, jnp.broadcast_to(logits, (width, v)), 0)

    def body(loop):
        at, carry, token = loop
        z, state = step(carry[5], token)
        carry, token = choose((*carry[:5], state), z, at)
        return at + 1, carry, token

    def more(loop):
        return (loop[0] < until.max_new) & ~jnp.all(loop[1][3])

    _, carry, _ = jax.lax.while_loop(more, body, (jnp.int32(1), carry, token))
    tokens, total, length, _, _, state = carry
    return Beams(tokens, total, length, state)


def _plain_table(params):
    table = head_table(params)
    if isinstance(table, Lora):
        return table.merged()
    return table.dense().T if isinstance(table, Packed) else table


def score(
    params: PyTree, cfg: Config, ids: Int[Array, "b t"], mask: Bool[Array, "b t"], *, edit: Edit | None = None
) -> Float[Array, "b t"]:
    """``logp[b, t]`` = log-probability of ``ids[b, t]`` given the tokens before it; 0 at the first real token and at padding.

    ``mask`` is True at real tokens, padded on either side. Logits are taken a few rows at a time (`vocab`), never ``[b, t, v]``.
    """
    pos, seg = places(mask)
    x = run(params, cfg, embed(params, ids), pos=pos, seg=seg, edit=edit).x
    h = rms_norm(x[:, :-1], params["norm"], cfg.eps)
    loss = cross_entropy(h.reshape(-1, cfg.dim), _plain_table(params), ids[:, 1:].reshape(-1))
    known = mask[:, 1:].astype(bool) & mask[:, :-1].astype(bool)
    return jnp.pad(jnp.where(known, -loss.reshape(ids.shape[0], -1), 0.0), ((0, 0), (1, 0)))


def perplexity(logp: Float[Array, "b t"], scored: Bool[Array, "b t"]) -> Float[Array, ""]:
    """exp of minus the mean log-probability over scored tokens."""
    return jnp.exp(-jnp.sum(jnp.where(scored, logp, 0.0)) / jnp.sum(scored))


def choice_logp(
    params: PyTree,
    cfg: Config,
    ids: Int[Array, "b t"],
    choices: Int[Array, " c"],
    *,
    mask: Bool[Array, "b t"] | None = None,
    edit: Edit | None = None,
) -> Float[Array, "b c"]:
    """Log-probability, over the full vocabulary, of each of ``choices`` as the token after the last real one."""
    pos, seg = places(jnp.ones(ids.shape, bool) if mask is None else mask)
    x = run(params, cfg, embed(params, ids), pos=pos, seg=seg, edit=edit).x
    h = rms_norm(x[jnp.arange(ids.shape[0]), _last(seg)], params["norm"], cfg.eps)
    pick = jnp.broadcast_to(choices, (ids.shape[0], choices.shape[0]))
    stats = vocab_stats(h, _plain_table(params), pick=pick)
    return stats.picked - stats.lse[:, None]
