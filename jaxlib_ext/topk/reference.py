"""Exact nearest rows in plain jnp: the definition of `topk`, and what runs on the CPU.

Scores (larger is better): ip = q.x; cosine = q.x / (|q| |x|), 0 when either is a zero row; l2 = -sum (q - x)^2.

`exhaustive` is the definition, block by block. `topk` gives the same answer faster: a blocked search over a score that
is one matrix product, for a few candidates more than k, and `settle`, which computes exact scores and proves that no
row outside the candidates belongs in the answer, or falls back to `exhaustive`. The kernels only replace the search.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from papyrax.jaxlib_ext import dispatch

NEG = -jnp.inf
DIRECT = 32
"""Up to this many features l2 sums squared differences at once: as cheap as the product, and exact."""
MARGIN = 32
"""Candidates beyond k that pay for rows which `settle` removes or reorders."""
_TILE = 2**21


def unit(rows: jax.Array) -> jax.Array:
    """Rows divided by their length; zero rows stay zero."""
    length = jnp.sqrt(jnp.sum(rows * rows, axis=-1, keepdims=True))
    return rows / jnp.where(length > 0, length, 1.0)


def _sum_over_features(term: Callable, q: jax.Array, xt: jax.Array, start: jax.Array) -> jax.Array:
    """start [m, n] combined with term(acc, q_j [m, 1], x_j [1, n]) over the features j, one pass over memory when they
    are few.
    """
    if q.shape[1] <= DIRECT:
        for j in range(q.shape[1]):
            start = term(start, q[:, j, None], xt[j][None])
        return start
    return jax.lax.fori_loop(0, q.shape[1], lambda j, acc: term(acc, q[:, j][:, None], xt[j][None]), start)


def _minus_squares(q: jax.Array, xt: jax.Array) -> jax.Array:
    zeros = jnp.zeros((q.shape[0], xt.shape[1]), q.dtype)
    return _sum_over_features(lambda acc, a, b: acc - jnp.square(a - b), q, xt, zeros)


def equal_rows(q: jax.Array, xt: jax.Array) -> jax.Array:
    """True [m, n] where a row of q equals a column of xt in every entry."""
    return _sum_over_features(lambda acc, a, b: acc & (a == b), q, xt, jnp.ones((q.shape[0], xt.shape[1]), bool))


def best(scores: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """(scores, columns) of the k best of every row, ties to the lower column.

    Where k is a small part of a row, only the k groups of neighbouring columns with the best maxima are looked into: a
    group left out has k better groups, hence k better columns.
    """
    m, n = scores.shape
    group = 2 ** int(math.log2(max(1.0, math.sqrt(n / k) / 1.5)))
    if group < 8:
        # two independent calls run on two cores
        parts = [jax.lax.top_k(half, k) for half in jnp.array_split(scores, min(2, max(1, m)))]
        return jnp.concatenate([p[0] for p in parts]), jnp.concatenate([p[1] for p in parts])
    groups = jnp.pad(scores, ((0, 0), (0, -n % group)), constant_values=NEG).reshape(m, -1, group)
    _, chosen = jax.lax.top_k(jnp.max(groups, axis=2), k)
    chosen = jnp.sort(chosen, axis=1)
    top, place = jax.lax.top_k(jnp.take_along_axis(groups, chosen[:, :, None], axis=1).reshape(m, -1), k)
    return top, jnp.take_along_axis(chosen, place // group, axis=1) * group + place % group


def _blocked(q: jax.Array, xt: jax.Array, k: int, block: int, score: Callable) -> tuple[jax.Array, jax.Array]:
    """(scores, ids) [m, k] of score(q, columns of a block, their first id), block after block."""
    m, n = q.shape[0], xt.shape[1]
    block = max(1, min(block, n))
    pad = -n % block

    def fill(scores, ids):
        short = max(0, k - scores.shape[1])
        scores = jnp.pad(scores, ((0, 0), (0, short)), constant_values=NEG)
        return scores, jnp.where(scores == NEG, -1, jnp.pad(ids, ((0, 0), (0, short))))

    if pad == 0 and block == n:
        return fill(*best(score(q, xt, jnp.int32(0)), min(k, n)))
    columns = jnp.pad(xt, ((0, 0), (0, pad)))

    def step(carry, start):
        here = jax.lax.dynamic_slice_in_dim(columns, start, block, axis=1)
        inside = start + jnp.arange(block) < n
        scores, ids = best(jnp.where(inside[None], score(q, here, start), NEG), min(k, block))
        # the carry comes first and holds lower ids, so that ties go to it
        scores, place = jax.lax.top_k(jnp.concatenate([carry[0], scores], axis=1), k)
        ids = jnp.take_along_axis(jnp.concatenate([carry[1], ids + start], axis=1), place, axis=1)
        return (scores, ids), None

    empty = jnp.full((m, k), NEG, q.dtype), jnp.full((m, k), -1, jnp.int32)
    empty = tuple(dispatch.varying_as(part, columns) for part in empty)
    (scores, ids), _ = jax.lax.scan(step, empty, jnp.arange(0, n + pad, block, dtype=jnp.int32))
    return scores, jnp.where(scores == NEG, -1, ids)


def candidates(q: jax.Array, x: jax.Array, bias: jax.Array, count: int, *, block: int = 65536, direct: bool = False):
    """(scores, ids) [m, count], best first, ties to the lower id; -inf and -1 where fewer rows have a finite bias.

    The score is q x^T + bias, or bias - |q - x|^2 when `direct`. The rows of x never meet all at once: at most `block`
    do.
    """
    full = jnp.concatenate([x, bias[:, None].astype(x.dtype)], axis=1).T

    def score(q, columns, start):
        if direct:
            return _minus_squares(q, columns[:-1]) + columns[-1:]
        return jnp.matmul(q, columns[:-1], precision=jax.lax.Precision.HIGHEST) + columns[-1:]

    return _blocked(q, full, count, block, score)


def exhaustive(q, x, k, metric, valid, exclude, drop_equal, block=65536):
    """The definition: all scores, a block of rows at a time; excluded, invalid and equal rows score -inf."""
    n = x.shape[0]
    raw = x
    if metric == "cosine":
        x = unit(x)
    asked = unit(q) if metric == "cosine" else q
    lines = [x, raw] if metric == "cosine" and drop_equal else [x]
    if valid is not None:
        lines.append(valid[:, None].astype(x.dtype))
    full = jnp.concatenate(lines, axis=1).T
    d, rows = x.shape[1], jnp.arange(q.shape[0])[:, None]

    def score(_, columns, start):
        here = columns[:d]
        product = metric != "l2"
        s = jnp.matmul(asked, here, precision=jax.lax.Precision.HIGHEST) if product else _minus_squares(asked, here)
        if valid is not None:
            s = jnp.where(columns[-1:] > 0, s, NEG)
        if exclude is not None:
            local = exclude - start
            local = jnp.where((local >= 0) & (local < columns.shape[1]) & (exclude < n), local, columns.shape[1])
            s = s.at[rows, local].set(NEG, mode="drop")
        if drop_equal:
            s = jnp.where(equal_rows(q, columns[d : 2 * d] if metric == "cosine" else here), NEG, s)
        return s

    return _blocked(q, full, k, block, score)


def settle(q, x, found, k, *, metric, exclude, drop_equal, exact, error, fallback):
    """The k best of the candidates `found`, with exact scores, once they are proved to hold the answer.

    Args:
        found: (scores, ids) [m, count] of a search over all rows, best first.
        exact: whether the scores are final; else l2 is computed from the rows and `error` [m] bounds how far the true
            score of a row may lie above the one it was searched by.
        fallback: a function without arguments that gives the answer where the proof fails.
    """
    scores, ids = found
    count = scores.shape[1]
    # nothing is missing when the list holds every row that may be returned
    complete = (scores[:, -1] == NEG) | (count >= x.shape[0])
    limit = scores[:, -1]
    if not exact:
        order = jnp.argsort(ids, axis=1)
        ids = jnp.take_along_axis(ids, order, axis=1)
        near = x[ids]
        scores = jnp.where(ids >= 0, -jnp.sum(jnp.square(q[:, None] - near), axis=-1), NEG)
        limit = limit + error
        scores, place = jax.lax.top_k(scores, count)
        ids = jnp.take_along_axis(ids, place, axis=1)
    settled = jnp.ones_like(complete)
    if drop_equal and metric == "l2":
        # equal rows score 0 and so lead the list: step over them. Other rows score 0 only by underflow, which the
        # search by definition then sorts out
        front = min(count, MARGIN)
        same = jnp.all(x[ids[:, :front]] == q[:, None], axis=-1) & (ids[:, :front] >= 0)
        skip = jnp.sum(same, axis=1, keepdims=True)
        settled = jnp.all(same == (jnp.arange(front) < skip), axis=1)
        if front < count:
            settled &= scores[:, front] < 0
        place = jnp.arange(count) + skip
        scores = jnp.where(place < count, jnp.take_along_axis(scores, jnp.minimum(place, count - 1), axis=1), NEG)
        ids = jnp.take_along_axis(ids, jnp.minimum(place, count - 1), axis=1)
    elif drop_equal:
        scores = jnp.where(jnp.all(x[ids] == q[:, None], axis=-1) & (ids >= 0), NEG, scores)
    if exclude is not None:
        for c in range(exclude.shape[1]):
            scores = jnp.where(ids == exclude[:, c, None], NEG, scores)
    if exclude is not None or (drop_equal and metric != "l2"):
        scores, place = jax.lax.top_k(scores, k)
        ids = jnp.take_along_axis(ids, place, axis=1)
    scores, ids = scores[:, :k], jnp.where(scores[:, :k] == NEG, -1, ids[:, :k])
    enough = scores[:, -1] > (limit if not exact else NEG)
    proved = jnp.all((complete | enough) & settled)
    if exact and not drop_equal:
        return scores, ids  # the margin covers every excluded row
    return jax.lax.cond(proved, lambda: (scores, ids), fallback)


def in_tiles(fn: Callable, rows: int, first: jax.Array, *others: jax.Array | None):
    """fn over tiles of `rows` leading rows of all arrays (None passes through), one tile after the other."""
    arrays = (first, *others)
    m = first.shape[0]
    if m <= rows:
        return fn(*arrays)
    tiles = -(-m // rows)

    def cut(a):
        return jnp.pad(a, ((0, tiles * rows - m), *((0, 0),) * (a.ndim - 1)), mode="edge").reshape(
            tiles, rows, *a.shape[1:]
        )

    out = jax.lax.map(lambda parts: fn(*parts), jax.tree.map(cut, arrays))
    return jax.tree.map(lambda o: o.reshape(-1, *o.shape[2:])[:m], out)


def prepare(q, x, valid, metric):
    """(q', x', bias, error): search score q' x'^T + bias and, for l2, the bound `error` [m] that `settle` needs,
    |q'|^2 included.

    l2 is searched as 2 q.x - |x|^2 about the mean of x, which loses fewer digits. The bound covers the rounding of
    both products
    and of the shift: (d + 8) eps (|q'| + max |x'|)^2.
    """
    bias = jnp.zeros(x.shape[0], x.dtype) if valid is None else jnp.where(valid, 0.0, NEG).astype(x.dtype)
    if metric == "ip":
        return q, x, bias, None
    if metric == "cosine":
        return unit(q), unit(x), bias, None
    centre = jnp.mean(x, axis=0)
    q, x = q - centre, x - centre
    squares, own = jnp.sum(x * x, axis=1), jnp.sum(q * q, axis=1)
    reach = jnp.square(jnp.sqrt(own) + jnp.sqrt(jnp.max(squares, initial=0.0)))
    error = (q.shape[1] + 8) * jnp.finfo(x.dtype).eps * reach - own
    return 2.0 * q, x, bias - squares, error


def search(q, x, k, metric, valid, exclude, drop_equal, block, find: Callable | None):
    """`topk` with the search done by `find(q, x, bias, count)`; None is `candidates`, tile by tile."""
    wide = jnp.promote_types(jnp.promote_types(q.dtype, x.dtype), jnp.float32)
    q, x = q.astype(wide), x.astype(wide)
    n, d = x.shape
    if valid is not None:
        # rows that are never returned may hold anything
        x = jnp.where(valid[:, None], x, 0.0)
    margin = (0 if exclude is None else exclude.shape[1]) + (MARGIN if drop_equal or metric == "l2" else 0)
    direct = find is None and metric == "l2" and d <= DIRECT
    exact = metric != "l2" or direct
    count = min(k + margin, max(n, k)) if not direct or drop_equal or exclude is not None else k
    block = block or 65536
    if direct:
        asked, rows, bias, error = q, x, prepare(q[:0], x[:, :0], valid, "ip")[2], None
    else:
        asked, rows, bias, error = prepare(q, x, valid, metric)

    def finish(q, exclude, error, found):
        def fallback():
            return exhaustive(q, x, k, metric, valid, exclude, drop_equal, block)

        return settle(
            q,
            x,
            found,
            k,
            metric=metric,
            exclude=exclude,
            drop_equal=drop_equal,
            exact=exact,
            error=error,
            fallback=fallback,
        )

    if find is None:

        def tile(q, asked, exclude, error):
            return finish(q, exclude, error, candidates(asked, rows, bias, count, block=block, direct=direct))

        work = max(min(block, n), 0 if exact and not drop_equal else count * d // 4, 1)
        return in_tiles(tile, max(8, _TILE // work), q, asked, exclude, error)
    found = find(asked, rows, bias, count)
    work = count * d if not exact or drop_equal else count
    return in_tiles(finish, max(8, 4 * _TILE // work), q, exclude, error, found)
