"""Best rows of q.x + bias on the GPU (Pallas, Triton): group maxima, a threshold, and the few scores above it.

Three steps. A kernel computes all scores and writes only the best of every `COLUMNS` neighbouring rows of x. The
count-th best of those maxima is a threshold that at least `count` scores reach. A second kernel computes the scores
again and appends those at or above the threshold to a list of fixed capacity, in the order of their ids. The list is
sorted by a plain top_k; where it overflows (many near-ties within few groups), the search is done by the reference, so
the answer is exact always.

A query writes n / 64 maxima and about `count` to 2 `count` entries instead of n scores, for 4 n d instead of 2 n d
FLOPs.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from papyrax.jaxlib_ext import dispatch
from papyrax.jaxlib_ext.topk import reference

ROWS, COLUMNS, FEATURES = 16, 64, 32


def _scores(q_ref, x_ref, bias_ref, row, column, m: int, n: int, d: int) -> jax.Array:
    """[ROWS, COLUMNS] scores from (row, column) on; -inf past the ends."""
    rows, columns = row + jnp.arange(ROWS), column + jnp.arange(COLUMNS)

    def step(j, acc):
        inside = j * FEATURES + jnp.arange(FEATURES) < d
        features = pl.ds(j * FEATURES, FEATURES)
        q = plgpu.load(q_ref.at[pl.ds(row, ROWS), features], mask=(rows < m)[:, None] & inside[None, :], other=0.0)
        x = plgpu.load(
            x_ref.at[pl.ds(column, COLUMNS), features], mask=(columns < n)[:, None] & inside[None, :], other=0.0
        )
        return acc + pl.dot(q, x, trans_b=True, precision=jax.lax.Precision.HIGHEST)

    acc = jax.lax.fori_loop(0, pl.cdiv(d, FEATURES), step, jnp.zeros((ROWS, COLUMNS), jnp.float32))
    bias = plgpu.load(bias_ref.at[pl.ds(column, COLUMNS)], mask=columns < n, other=-jnp.inf)
    return acc + bias[None, :]


def _maxima_kernel(q_ref, x_ref, bias_ref, maxima_ref, *, m, n, d):
    row, group = pl.program_id(0) * ROWS, pl.program_id(1)
    scores = _scores(q_ref, x_ref, bias_ref, row, group * COLUMNS, m, n, d)
    mask = (row + jnp.arange(ROWS) < m)[None, :]
    plgpu.store(maxima_ref.at[pl.ds(group, 1), pl.ds(row, ROWS)], jnp.max(scores, axis=1)[None, :], mask=mask)


def _collect_kernel(q_ref, x_ref, bias_ref, threshold_ref, scores_ref, ids_ref, fill_ref, *, m, n, d, capacity):
    row = pl.program_id(0) * ROWS
    rows = row + jnp.arange(ROWS)
    threshold = plgpu.load(threshold_ref.at[pl.ds(row, ROWS)], mask=rows < m, other=jnp.inf)
    # masked stores still need an address: the column past the capacity
    safe = jnp.broadcast_to(jnp.minimum(rows, m - 1)[:, None], (ROWS, COLUMNS))

    def step(block, fill):
        column = block * COLUMNS
        scores = _scores(q_ref, x_ref, bias_ref, row, column, m, n, d)
        take = (scores >= threshold[:, None]) & (scores > -jnp.inf)
        place = fill[:, None] + jnp.cumsum(take.astype(jnp.int32), axis=1) - 1
        ok = take & (place < capacity)
        place = jnp.where(ok, place, capacity)
        ids = jnp.broadcast_to((column + jnp.arange(COLUMNS, dtype=jnp.int32))[None, :], (ROWS, COLUMNS))
        plgpu.store(scores_ref.at[safe, place], scores, mask=ok)
        plgpu.store(ids_ref.at[safe, place], ids, mask=ok)
        return fill + jnp.sum(take.astype(jnp.int32), axis=1)

    fill = jax.lax.fori_loop(0, pl.cdiv(n, COLUMNS), step, jnp.zeros(ROWS, jnp.int32))
    plgpu.store(fill_ref.at[pl.ds(row, ROWS)], fill, mask=rows < m)


@functools.partial(jax.jit, static_argnames=("count", "interpret"))
def candidates(q, x, bias, count, interpret=False):
    """(scores, ids) [m, count], best first, of q x^T + bias; see `reference.candidates`."""
    q, x, bias = (a.astype(jnp.float32) for a in (q, x, bias))
    (m, d), n = q.shape, x.shape[0]
    groups, tiles = pl.cdiv(n, COLUMNS), pl.cdiv(m, ROWS)
    params = plgpu.CompilerParams(num_warps=4, num_stages=2)
    capacity = min(-(-n // 16) * 16, 2 * count + 128)
    threshold = dispatch.varying_as(jnp.full((m,), -jnp.inf, jnp.float32), q)
    if groups > count and capacity < n:
        maxima = pl.pallas_call(
            functools.partial(_maxima_kernel, m=m, n=n, d=d),
            out_shape=dispatch.output((groups, m), jnp.float32, q),
            grid=(tiles, groups),
            compiler_params=params,
            interpret=interpret,
            name="topk_maxima",
        )(q, x, bias)
        threshold = jax.lax.top_k(maxima.T, count)[0][:, -1]
    else:
        capacity = -(-n // 16) * 16
    scores, ids, fill = pl.pallas_call(
        functools.partial(_collect_kernel, m=m, n=n, d=d, capacity=capacity),
        out_shape=(
            dispatch.output((m, capacity + 16), jnp.float32, q),
            dispatch.output((m, capacity + 16), jnp.int32, q),
            dispatch.output((m,), jnp.int32, q),
        ),
        grid=(tiles,),
        compiler_params=params,
        interpret=interpret,
        name="topk_collect",
    )(q, x, bias, threshold)

    def sort():
        # the list is in the order of ids, so a stable top_k gives ties to the lower id
        listed = jnp.where(jnp.arange(capacity) < fill[:, None], scores[:, :capacity], -jnp.inf)
        listed = jnp.pad(listed, ((0, 0), (0, max(0, count - capacity))), constant_values=-jnp.inf)
        top, place = jax.lax.top_k(listed, count)
        return top, jnp.where(top == -jnp.inf, -1, jnp.take_along_axis(ids, place, axis=1))

    if capacity >= n:
        return sort()
    return jax.lax.cond(jnp.all(fill <= capacity), sort, lambda: reference.candidates(q, x, bias, count))
