"""Best rows of q.x + bias on the TPU (Pallas, Mosaic): a sorted running list a query, kept in VMEM.

A tile of queries walks over all rows of x. Scores of `width` rows (a power of two, at least the length of the list) go
to VMEM; then, eight queries at a time, they are sorted by a bitonic network over lanes and merged into the list, which
is one more half-cleaner and log2(width) stages. Eight queries whose scores all lie below their lists' ends skip both.
Order is (score descending, id ascending) everywhere, so ties need no care. Work a score: 2 d FLOPs on the matrix unit,
and on the vector unit about 15 operations in each of log2(width)^2 / 2 stages where the block is not skipped.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from papyrax.jaxlib_ext import dispatch

GROUP = 8
MAX_COUNT = 4096
MAX_FEATURES = 4096


def _before(s1, i1, s2, i2):
    """True where entry 1 comes before entry 2."""
    return (s1 > s2) | ((s1 == s2) & (i1 < i2))


def _exchange(s, i, distance, best_first):
    """One stage of a bitonic network: each lane meets the lane `distance` away; `best_first` is where the lower gets
    the better.
    """
    width = s.shape[1]
    lane = jax.lax.broadcasted_iota(jnp.int32, s.shape, 1)
    low = (lane & distance) == 0

    def partner(v):
        return jnp.where(low, pltpu.roll(v, width - distance, 1), pltpu.roll(v, distance, 1))

    other_s, other_i = partner(s), partner(i)
    # a lane that wants the better one takes the other if that comes before; one that wants the worse, if it does itself
    wants_better = jnp.where(low, best_first, 1 - best_first) == 1
    other_wins = jnp.where(_before(other_s, other_i, s, i), 1, 0) == 1
    own_wins = jnp.where(_before(s, i, other_s, other_i), 1, 0) == 1
    take = (wants_better & other_wins) | (~wants_better & own_wins)
    return jnp.where(take, other_s, s), jnp.where(take, other_i, i)


def _sort_worst_first(s, i):
    lane = jax.lax.broadcasted_iota(jnp.int32, s.shape, 1)

    def stage(number, carry):
        size = jnp.left_shift(1, number)
        best_first = jnp.where((lane & size) == 0, 0, 1)

        def part(step, carry):
            return _exchange(*carry, jnp.left_shift(1, number - 1 - step), best_first)

        return jax.lax.fori_loop(0, number, part, carry)

    return jax.lax.fori_loop(1, int(math.log2(s.shape[1])) + 1, stage, (s, i))


def _merge(best_s, best_i, s, i):
    """The best of two lists, one best first and one worst first, as a list best first."""
    keep = _before(best_s, best_i, s, i)
    carry = jnp.where(keep, best_s, s), jnp.where(keep, best_i, i)
    everywhere = jnp.ones(s.shape, jnp.int32)
    stages = int(math.log2(s.shape[1]))
    return jax.lax.fori_loop(
        0, stages, lambda step, c: _exchange(*c, jnp.left_shift(1, stages - 1 - step), everywhere), carry
    )


def _kernel(q_ref, x_ref, bias_ref, best_s_ref, best_i_ref, scores_ref, *, n):
    block, part = pl.program_id(1), pl.program_id(2)
    rows, width = scores_ref.shape
    step = x_ref.shape[0]

    @pl.when((block == 0) & (part == 0))
    def _():
        best_s_ref[...] = jnp.full(best_s_ref.shape, -jnp.inf, jnp.float32)
        best_i_ref[...] = jnp.full(best_i_ref.shape, jnp.iinfo(jnp.int32).max, jnp.int32)

    scores = jax.lax.dot_general(
        q_ref[...],
        x_ref[...],
        (((1,), (1,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    column = block * width + part * step + jax.lax.broadcasted_iota(jnp.int32, scores.shape, 1)
    # rows past the end of x may hold anything
    scores_ref[:, pl.ds(part * step, step)] = jnp.where(column < n, scores + bias_ref[...], -jnp.inf)

    @pl.when(part == width // step - 1)
    def _():
        @pl.loop(0, rows // GROUP)
        def _(g):
            group = pl.ds(g * GROUP, GROUP)
            s, best_s = scores_ref[group, :], best_s_ref[group, :]

            @pl.when(jnp.max(jnp.where(s > best_s[:, width - 1 :], 1.0, 0.0)) > 0.0)
            def _():
                i = block * width + jax.lax.broadcasted_iota(jnp.int32, s.shape, 1)
                merged_s, merged_i = _merge(best_s, best_i_ref[group, :], *_sort_worst_first(s, i))
                best_s_ref[group, :] = merged_s
                best_i_ref[group, :] = merged_i


@functools.partial(jax.jit, static_argnames=("count", "interpret"))
def candidates(q, x, bias, count, interpret=False):
    """(scores, ids) [m, count], best first, of q x^T + bias; see `reference.candidates`."""
    m, n, d = q.shape[0], x.shape[0], q.shape[1]
    width = max(128, pl.next_power_of_2(count))
    step = min(width, 512)
    rows = min(128 if width <= 1024 else 64, -(-m // GROUP) * GROUP)
    parts, last = width // step, pl.cdiv(n, step) - 1
    lists = pl.BlockSpec((rows, width), lambda r, b, p: (r, 0))
    s, i = pl.pallas_call(
        functools.partial(_kernel, n=n),
        out_shape=(dispatch.output((m, width), jnp.float32, q), dispatch.output((m, width), jnp.int32, q)),
        grid=(pl.cdiv(m, rows), pl.cdiv(n, width), parts),
        in_specs=[
            pl.BlockSpec((rows, d), lambda r, b, p: (r, 0)),
            pl.BlockSpec((step, d), lambda r, b, p: (jnp.minimum(b * parts + p, last), 0)),
            pl.BlockSpec((1, step), lambda r, b, p: (0, jnp.minimum(b * parts + p, last))),
        ],
        out_specs=(lists, lists),
        scratch_shapes=[pltpu.VMEM((rows, width), jnp.float32)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary"), vmem_limit_bytes=64 * 2**20
        ),
        interpret=interpret,
        name="topk",
    )(q.astype(jnp.float32), x.astype(jnp.float32), bias.astype(jnp.float32)[None])
    s, i = s[:, :count], i[:, :count]
    return s, jnp.where(s == -jnp.inf, -1, i)
