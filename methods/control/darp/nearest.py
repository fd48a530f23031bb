"""The set of the k nearest rows, for readers who do not mind its order: what DARP's re-ranking needs of its candidates.

Processors without a kernel spend most of an exact search in sorting. A set needs none:

1. the k-th best score of a query is enclosed by bisection on the bits of the scores, which order as the scores do; it
   ends as soon as k scores lie above the bound, after about 15 counts;
2. membership is packed into words of 32 rows, and the j-th member of a query is read off the running counts of its words
   by halving;
3. where k is a small part of the rows, both steps first pick the k groups of neighbouring rows with the best maxima, then
   k rows inside them: a group left out has k better groups, hence k better rows.

FLOPs: 3 n d a query for the distances, which are sums of squared differences, so that equal rows score exactly 0. Bytes:
the n scores of a query are written once and read once (in groups) or about 15 times (where n is small enough to stay in
the cache).
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

WIDE = 32
"""Up to this many features squared differences are as cheap as a product."""
ROWS = 2**20
"""Up to this many rows a query's scores are held at once."""
_TILE = 2**21
_WORD = 32


def nearest_set(
    q: Float[Array, "b d"],
    x: Float[Array, "n d"],
    k: int,
    *,
    exclude: Int[Array, "b c"] | None = None,
    drop_equal: bool = True,
) -> Int[Array, "b k"]:
    """Ids of the k rows of x nearest to each q by the euclidean distance, ascending; among equal distances the lower
    ids. -1, in any place, stands where fewer than k rows may be returned.

    Args:
      exclude: ids that a query may not get, negative for none.
      drop_equal: never return a row that equals the query in every entry.

    Raises:
      ValueError: shapes that do not fit, or k outside [1, n].
    """
    if q.ndim != 2 or x.ndim != 2 or q.shape[1] != x.shape[1] or not 1 <= k <= x.shape[0]:
        raise ValueError(
            f"nearest_set: q and x must have shapes (b, d) and (n, d) and k lie in [1, n], got {q.shape}, {x.shape} and {k}."
        )
    if exclude is None:
        exclude = jnp.zeros((q.shape[0], 0), jnp.int32)
    tile = max(8, _TILE // x.shape[0])
    if q.shape[0] <= tile:
        return _tile(q, x, k, exclude, drop_equal)
    tiles = -(-q.shape[0] // tile)

    def cut(a):
        return jnp.pad(a, ((0, tiles * tile - a.shape[0]), (0, 0)), mode="edge").reshape(tiles, tile, a.shape[1])

    found = jax.lax.map(lambda part: _tile(part[0], x, k, part[1], drop_equal), (cut(q), cut(exclude)))
    return found.reshape(tiles * tile, k)[: q.shape[0]]


def _tile(q, x, k, exclude, drop_equal):
    score, columns = jnp.zeros((q.shape[0], x.shape[0]), x.dtype), x.T
    for j in range(q.shape[1]):
        score -= jnp.square(q[:, j, None] - columns[j])
    for c in range(exclude.shape[1]):
        score = jnp.where(jnp.arange(x.shape[0]) == exclude[:, c, None], -jnp.inf, score)
    # else the sums would be made again by each of their readers
    score = jax.lax.optimization_barrier(score)
    if drop_equal:

        def dropped(score):
            same = jnp.ones(score.shape, bool)
            for j in range(q.shape[1]):
                same &= q[:, j, None] == columns[j]
            return jnp.where(same, -jnp.inf, score)

        # only an equal row, or one whose distance underflows, scores 0
        score = jax.lax.cond(jnp.any(score == 0), dropped, lambda score: score, score)
    rows = largest_set(score, k)
    return jnp.where(jnp.take_along_axis(score, rows, axis=1) == -jnp.inf, -1, rows)


def largest_set(score: Float[Array, "b n"], k: int) -> Int[Array, "b k"]:
    """Columns of the k largest entries of every row, ascending; among equal entries the lower columns. No NaN.

    Raises:
      ValueError: k outside [1, n].
    """
    n = score.shape[1]
    if not 1 <= k <= n:
        raise ValueError(f"largest_set: k must lie in [1, {n}], got {k}.")
    group = 2 ** round(math.log2(max(1.0, math.sqrt(n / k))))
    if group < 4:
        return _largest(score, k)
    groups = jnp.pad(score, ((0, 0), (0, -n % group)), constant_values=-jnp.inf).reshape(score.shape[0], -1, group)
    chosen = _largest(jax.lax.optimization_barrier(jnp.max(groups, axis=2)), k)
    inside = jnp.take_along_axis(groups, chosen[:, :, None], axis=1).reshape(score.shape[0], -1)
    place = _largest(jax.lax.optimization_barrier(inside), k)
    # padding is never taken: it scores -inf, and among equals the k chosen groups hold k entries of lower columns
    return jnp.take_along_axis(chosen, place // group, axis=1) * group + place % group


def _largest(score, k):
    bits = _ordered(score)
    bound, above = _enclose(bits, k)

    def fewer(_):
        # entries equal to the k-th: the first of them fill up to k
        more, equal = bits > bound[:, None], bits == bound[:, None]
        room = k - jnp.sum(more, axis=1, keepdims=True)
        return more | (equal & (jnp.cumsum(equal, axis=1) <= room))

    member = jax.lax.cond(jnp.any(above != k), fewer, lambda _: bits >= bound[:, None], None)
    return _members(member, k)


def _ordered(score: Float[Array, "b n"]) -> Int[Array, "b n"]:
    """Integers in the order of the scores."""
    kind = jnp.int64 if score.dtype == jnp.float64 else jnp.int32
    bits = jax.lax.bitcast_convert_type(score.astype(jnp.promote_types(score.dtype, jnp.float32)), kind)
    return jnp.where(bits < 0, bits ^ jnp.iinfo(kind).max, bits)


def _enclose(bits: Int[Array, "b n"], k: int) -> tuple[Int[Array, " b"], Int[Array, " b"]]:
    """(bound, number of entries at or above it): the number is k, or, where equal entries forbid that, the bound is the
    k-th largest entry."""
    n = bits.shape[1]
    ones = jnp.ones((n, 1), jnp.float32)

    def count(bound):
        if n >= 2**24:
            return jnp.sum(bits >= bound[:, None], axis=1, dtype=jnp.int32)
        # a product sums rows faster than a reduction does, and counts below 2^24 are exact
        return jnp.matmul((bits >= bound[:, None]).astype(jnp.float32), ones)[:, 0].astype(jnp.int32)

    def unsettled(low, high, found):
        return (low < high) & (found != k)

    def halve(carry):
        low, high, found = carry
        middle = (low | high) - ((low ^ high) >> 1)  # the mean rounded up, without overflow
        got, live = count(middle), unsettled(*carry)
        up = live & (got >= k)
        return (
            jnp.where(up, middle, low),
            jnp.where(live & ~up, middle - 1, high),
            jnp.where(up, got, found),
        )

    start = jnp.min(bits, axis=1), jnp.max(bits, axis=1), jnp.full(bits.shape[0], n, jnp.int32)
    low, _, found = jax.lax.while_loop(lambda carry: jnp.any(unsettled(*carry)), halve, start)
    return low, found


def _members(member: Bool[Array, "b n"], k: int) -> Int[Array, "b k"]:
    """Columns of the k true entries of every row, ascending."""
    b, n = member.shape
    words = -(-n // _WORD)
    spread = jnp.pad(member, ((0, 0), (0, words * _WORD - n))).reshape(b, words, _WORD).astype(jnp.uint32)
    word = jnp.sum(spread << jnp.arange(_WORD, dtype=jnp.uint32), axis=2, dtype=jnp.uint32)
    size = jax.lax.population_count(word).astype(jnp.int32)
    ends = jnp.cumsum(size, axis=1)
    wanted = jnp.arange(1, k + 1, dtype=jnp.int32)
    at = jnp.minimum(jax.vmap(lambda e: jnp.searchsorted(e, wanted))(ends), words - 1).astype(jnp.int32)
    here = jnp.take_along_axis(word, at, axis=1)
    rank = wanted - jnp.take_along_axis(ends - size, at, axis=1)
    place = at * _WORD
    for half in (16, 8, 4, 2, 1):
        low = here & jnp.uint32((1 << half) - 1)
        count = jax.lax.population_count(low).astype(jnp.int32)
        up = rank > count
        here, rank = jnp.where(up, here >> half, low), jnp.where(up, rank - count, rank)
        place = place + jnp.where(up, half, 0)
    return place
