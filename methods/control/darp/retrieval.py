"""Which expert rows a query sees: exact nearest states, re-ranked along the history.

1. Distance of the query to every expert row in standardised space, euclidean or 1 - cosine. Rows equal to the query are
   left out, in training and in acting, so a training row never sees itself or a copy of itself.
2. The k nearest are candidates.
3. With lookback L > 1 candidate j, at place p of its trajectory, is scored by A_j = sum_i w_i d(q(t-i), j-i) over
   i = 0 .. l_j - 1, l_j = min(L, p + 1, h), h the valid steps of the query's history and w_i = (i + 1)^decay.
4. The floor(k ratio) candidates with the smallest score are kept.

The score is a sum, not a mean: a candidate near the start of its trajectory has fewer terms and is favoured, as in the
published code; `normalise=True` divides by l_j. Angles (`rotation`) are compared raw, |delta| wrapped to
min(|delta|, 2 pi - |delta|) / (2 pi), and enter as a second norm that is added to the first.
"""

import functools
import math
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from papyrax.jaxlib_ext import dispatch
from papyrax.jaxlib_ext.topk import topk
from papyrax.methods.control.darp import nearest
from papyrax.methods.control.darp.config import Config, kept
from papyrax.methods.control.darp.demos import Demos, Scalers, positions

# Training rows whose neighbours are found at once: bounds the memory of the cache's construction.
_BLOCK = 128


class Space(NamedTuple):
    """States in the space of distances: weighted standardised dimensions, and angles with their weights apart."""

    flat: Float[Array, "*b f"]
    turn: Float[Array, "*b r"]


class Metric(NamedTuple):
    """Static description of the distance."""

    kind: Literal["euclidean", "cosine"] = "euclidean"
    weights: tuple[float, ...] = ()
    rotation: tuple[int, ...] = ()


def embed(scalers: Scalers, s: Float[Array, "*b o"], metric: Metric) -> Space:
    """States in the space of distances.

    Raises:
      ValueError: an unknown metric, weights of the wrong number, angles out of range or with cosine.
    """
    o = s.shape[-1]
    if metric.kind not in ("euclidean", "cosine"):
        raise ValueError(f'retrieve: metric must be "euclidean" or "cosine", got {metric.kind!r}.')
    if metric.weights and len(metric.weights) != o:
        raise ValueError(
            f"retrieve: weights must hold one number for each of {o} dimensions, got {len(metric.weights)}."
        )
    if any(not 0 <= d < o for d in metric.rotation) or (metric.rotation and metric.kind == "cosine"):
        raise ValueError(
            f"retrieve: rotation must name dimensions below {o} and needs the euclidean metric, got {metric.rotation} "
            f"with {metric.kind}."
        )
    flat_dims = [d for d in range(o) if d not in metric.rotation]
    z = scalers.obs(s)
    if metric.weights:
        z = z * jnp.asarray(metric.weights, z.dtype)
    flat = z if not metric.rotation else z[..., jnp.asarray(flat_dims, int)]
    return Space(flat, s[..., jnp.asarray(metric.rotation, int)])


def distance(a: Space, b: Space, metric: Metric) -> Float[Array, "*b"]:
    """Distance of broadcast pairs of rows."""
    if metric.kind == "cosine":
        length = jnp.linalg.norm(a.flat, axis=-1) * jnp.linalg.norm(b.flat, axis=-1)
        return 1 - jnp.sum(a.flat * b.flat, axis=-1) / jnp.where(length > 0, length, 1)
    d = jnp.sqrt(jnp.sum(jnp.square(a.flat - b.flat), axis=-1))
    if not metric.rotation:
        return d
    delta = jnp.abs(a.turn - b.turn) % (2 * math.pi)
    wrapped = jnp.minimum(delta, 2 * math.pi - delta) / (2 * math.pi)
    if metric.weights:
        wrapped = wrapped * jnp.asarray([metric.weights[i] for i in metric.rotation], wrapped.dtype)
    return d + jnp.sqrt(jnp.sum(jnp.square(wrapped), axis=-1))


def candidates(
    query: Space,
    expert: Space,
    k: int,
    metric: Metric,
    *,
    exclude: Int[Array, "b c"] | None = None,
    keep_equal: bool = False,
    axis_name: str | None = None,
) -> tuple[Float[Array, "b k"], Int[Array, "b k"]]:
    """(distances, rows) of the k nearest, nearest first; distance inf and row -1 where there are fewer."""
    if metric.rotation:
        return _dense_candidates(query, expert, k, metric, exclude, keep_equal, axis_name)
    kind = "l2" if metric.kind == "euclidean" else "cosine"
    scores, rows = topk(
        query.flat, expert.flat, k, metric=kind, exclude=exclude, drop_equal=not keep_equal, axis_name=axis_name
    )
    d = jnp.sqrt(jnp.maximum(-scores, 0)) if kind == "l2" else 1 - scores
    return jnp.where(rows < 0, jnp.inf, d), rows


def candidate_set(
    query: Space,
    expert: Space,
    k: int,
    metric: Metric,
    *,
    exclude: Int[Array, "b c"] | None = None,
    keep_equal: bool = False,
    axis_name: str | None = None,
) -> Int[Array, "b k"]:
    """Rows of `candidates` in any order, -1 where there are fewer: all that re-ranking needs. On CPUs it spares the sort."""

    def ordered(q, x, *own):
        here = Space(q, q[:, :0]), Space(x, x[:, :0])
        return candidates(*here, k, metric, exclude=own[0] if own else None, keep_equal=keep_equal)[1]

    def unordered(q, x, *own):
        return nearest.nearest_set(q, x, k, exclude=own[0] if own else None, drop_equal=not keep_equal)

    n, features = expert.flat.shape
    plain = metric.kind == "euclidean" and not metric.rotation and axis_name is None
    if not plain or features > nearest.WIDE or n > nearest.ROWS:
        found = candidates(query, expert, k, metric, exclude=exclude, keep_equal=keep_equal, axis_name=axis_name)
        return found[1]
    own = () if exclude is None else (exclude,)
    return dispatch.run("auto", query.flat, expert.flat, *own, reference=unordered, tpu=ordered, gpu=ordered)


def _dense_candidates(query, expert, k, metric, exclude, keep_equal, axis_name):
    """All distances, for the metrics that the top-k op has not."""
    if axis_name is not None:
        raise ValueError("retrieve: rotation dimensions are not supported with rows sharded over devices.")
    d = distance(Space(query.flat[:, None], query.turn[:, None]), Space(expert.flat[None], expert.turn[None]), metric)
    if not keep_equal:
        d = jnp.where(d == 0, jnp.inf, d)
    if exclude is not None:
        d = d.at[jnp.arange(d.shape[0])[:, None], exclude].set(jnp.inf)
    near, rows = jax.lax.top_k(-d, k)
    return -near, jnp.where(jnp.isinf(near), -1, rows.astype(jnp.int32))


def history_scores(
    expert: Space,
    place: Int[Array, " n"],
    rows: Int[Array, "b k"],
    hist: Space,
    valid: Int[Array, " b"],
    metric: Metric,
    *,
    lookback: int,
    decay: float,
    normalise: bool = False,
    axis_name: str | None = None,
) -> Float[Array, "b k"]:
    """A_j of every candidate; inf for row -1.

    Args:
      expert: all expert rows in the space of distances, or this device's part of them.
      place: place of each of these rows inside its trajectory.
      rows: candidates.
      hist: query states [b, h, .], newest last; entries before the last `valid` may be anything finite.
      valid: number of valid steps of each history, at least 1.
    """
    steps = min(lookback, hist.flat.shape[1])
    terms = jnp.minimum(jnp.minimum(_take(place, jnp.maximum(rows, 0), axis_name) + 1, valid[:, None]), steps)

    def one(total, part):
        i, past = part
        back = jnp.maximum(rows - i, 0)
        then = Space(*(_take(x, back, axis_name) for x in expert))
        d = distance(then, Space(past.flat[:, None], past.turn[:, None]), metric)
        weight = (i + 1).astype(d.dtype) ** decay
        return total + jnp.where(i < terms, weight * d, 0), None

    newest_first = Space(*(jnp.moveaxis(x[:, ::-1][:, :steps], 1, 0) for x in hist))
    total = jnp.zeros(rows.shape, expert.flat.dtype)
    total, _ = jax.lax.scan(one, total, (jnp.arange(steps), newest_first))
    if normalise:
        total = total / terms
    return jnp.where(rows < 0, jnp.inf, total)


def select(
    expert: Space,
    place: Int[Array, " n"],
    hist: Space,
    valid: Int[Array, " b"],
    metric: Metric,
    *,
    k: int,
    ratio: float,
    lookback: int,
    decay: float,
    normalise: bool = False,
    exclude: Int[Array, "b c"] | None = None,
    keep_equal: bool = False,
    axis_name: str | None = None,
) -> Int[Array, "b K"]:
    """`retrieve` on states that lie in the space of distances already (best first)."""
    n = expert.flat.shape[0] * (1 if axis_name is None else jax.lax.axis_size(axis_name))
    k = max(1, min(k, n if keep_equal else n - 1))
    now = Space(*(x[:, -1] for x in hist))
    rerank = lookback > 1 and hist.flat.shape[1] > 1
    options = {"exclude": exclude, "keep_equal": keep_equal, "axis_name": axis_name}
    rows = (
        candidate_set(now, expert, k, metric, **options) if rerank else candidates(now, expert, k, metric, **options)[1]
    )
    keep = kept(k, ratio)
    if rerank:
        score = history_scores(
            expert,
            place,
            rows,
            hist,
            valid,
            metric,
            lookback=lookback,
            decay=decay,
            normalise=normalise,
            axis_name=axis_name,
        )
        _, order = jax.lax.top_k(-score, keep)
        rows = jnp.take_along_axis(rows, order, axis=1)
    rows = rows[:, :keep]
    # copies of the query leave fewer than K rows: the best one stands in for the missing ones
    return jnp.maximum(jnp.where(rows < 0, rows[:, :1], rows), 0)


def retrieve(
    demos: Demos,
    scalers: Scalers,
    hist: Float[Array, "b h o"],
    valid: Int[Array, " b"],
    *,
    k: int,
    lookback: int,
    decay: float,
    ratio: float,
    metric: str = "euclidean",
    normalise: bool = False,
    weights: tuple[float, ...] = (),
    rotation: tuple[int, ...] = (),
    keep_equal: bool = False,
    axis_name: str | None = None,
) -> Int[Array, "b K"]:
    """Rows of the K = floor(k ratio) neighbours of the newest state of each history, best first.

    Args:
      demos: expert rows; with `axis_name` this device's equal part of them (`start` stays that of all rows).
      hist: states of the episode so far, newest last, padded at the front with anything, NaN included.
      valid: number of states of each history that count, at least 1.
      k: candidates, clamped to N - 1.
      lookback, decay, ratio, metric, normalise, weights, rotation: see the module and `Config`.
      keep_equal: keep rows at distance 0 (the baselines that replay expert actions do).
      axis_name: mesh axis over which the expert rows are sharded.

    Raises:
      ValueError: shapes that do not fit, or a `ratio` outside (0, 1].
    """
    if hist.ndim != 3 or hist.shape[2] != demos.obs.shape[1] or valid.shape != hist.shape[:1] or not hist.shape[1]:
        raise ValueError(
            f"retrieve: hist must have shape (b, h, {demos.obs.shape[1]}) and valid (b,), got {hist.shape} and "
            f"{valid.shape}."
        )
    if k < 1 or lookback < 1 or not 0 < ratio <= 1:
        raise ValueError(f"retrieve: k and lookback must be >= 1, ratio in (0, 1], got {k}, {lookback}, {ratio}.")
    space = Metric(metric, tuple(weights), tuple(rotation))
    return select(
        embed(scalers, demos.obs, space),
        _places(demos, axis_name),
        embed(scalers, blank(hist, valid), space),
        valid,
        space,
        k=k,
        ratio=ratio,
        lookback=lookback,
        decay=decay,
        normalise=normalise,
        keep_equal=keep_equal,
        axis_name=axis_name,
    )


def blank(hist: Float[Array, "b h o"], valid: Int[Array, " b"]) -> Float[Array, "b h o"]:
    """The histories with zeros in place of their padding, so that NaN cannot reach a sum through 0 * NaN."""
    old = jnp.arange(hist.shape[1])[None, :] < hist.shape[1] - valid[:, None]
    return jnp.where(old[..., None], 0, hist)


@functools.partial(jax.jit, static_argnames="cfg")
def build_cache(demos: Demos, scalers: Scalers, cfg: Config, key: Key[Array, ""] | None = None) -> Int[Array, "n K"]:
    """Neighbours of every expert row, its history being its own trajectory up to it. Computed once before training.

    Args:
      key: needed by `cfg.neighbours == "random"`, which draws K different other rows for each row.
    """
    n = demos.obs.shape[0]
    if cfg.neighbours == "random":
        if key is None:
            raise ValueError('build_cache: key is needed to draw neighbours when cfg.neighbours is "random", got None.')
        return random_rows(key, jnp.arange(n), n, cfg.kept(n))
    metric = metric_of(cfg)
    expert, place = embed(scalers, demos.obs, metric), positions(demos.start, n)
    blocks = -(-n // _BLOCK)
    row = jnp.minimum(jnp.arange(blocks * _BLOCK), n - 1).reshape(blocks, _BLOCK)

    def block(row):
        past = jnp.maximum(row[:, None] - jnp.arange(cfg.lookback)[::-1], 0)
        hist = Space(*(x[past] for x in expert))
        valid = jnp.minimum(place[row] + 1, cfg.lookback)
        return select(expert, place, hist, valid, metric, exclude=row[:, None], **search_of(cfg))

    return jax.lax.map(block, row).reshape(blocks * _BLOCK, -1)[:n]


def random_rows(key: Key[Array, ""], own: Int[Array, " b"], n: int, keep: int) -> Int[Array, "b K"]:
    """`keep` different rows of n for each query, never `own` (-1: no own row); the ablation "random neighbours"."""

    def one(key, own):
        weight = jax.random.uniform(key, (n,))
        return jax.lax.top_k(jnp.where(jnp.arange(n) == own, -1.0, weight), keep)[1].astype(jnp.int32)

    return jax.vmap(one)(jax.random.split(key, own.shape[0]), own)


def metric_of(cfg: Config) -> Metric:
    """The distance that a config describes."""
    return Metric(cfg.metric, cfg.weights, cfg.rotation)


def search_of(cfg: Config) -> dict:
    """The keyword arguments of `select` that a config sets."""
    return dict(k=cfg.k, ratio=cfg.ratio, lookback=cfg.lookback, decay=cfg.decay, normalise=cfg.normalise)


def _places(demos: Demos, axis_name: str | None) -> Int[Array, " n"]:
    n = demos.obs.shape[0]
    if axis_name is None:
        return positions(demos.start, n)
    every = positions(demos.start, n * jax.lax.axis_size(axis_name))
    return jax.lax.dynamic_slice_in_dim(every, jax.lax.axis_index(axis_name) * n, n)


def _take(x, rows, axis_name):
    """x[rows], where with an axis each device holds an equal run of x and the owner of a row sends it to all."""
    if axis_name is None:
        return x[rows]
    local = rows - jax.lax.axis_index(axis_name) * x.shape[0]
    mine = (local >= 0) & (local < x.shape[0])
    found = x[jnp.clip(local, 0, x.shape[0] - 1)]
    mine = mine.reshape(mine.shape + (1,) * (found.ndim - mine.ndim))
    return jax.lax.psum(jnp.where(mine, found, 0), axis_name)
