"""Uncertainty of a mean, of a score, of a difference: robust means, bootstrap intervals, bands over seeds.

Everything is traced, so an interval can be taken under `jit` and for many metrics at once under `vmap`. The bootstrap
is the percentile bootstrap (Efron, "Bootstrap methods", 1979). With `groups` whole groups are drawn (questions, papers,
seeds), because rows of one group are not independent and an interval over rows would be too narrow. The interquartile
mean follows Agarwal et al., "Deep RL at the Edge of the Statistical Precipice", 2021.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key, PyTree

# Resamples evaluated at once: bounds memory at this many copies of the data.
_CHUNK = 64


class Interval(NamedTuple):
    """A statistic of the data and its two-sided percentile interval."""

    estimate: Float[Array, "..."]
    low: Float[Array, "..."]
    high: Float[Array, "..."]


class PairedInterval(NamedTuple):
    """A difference of two statistics, its interval, and the two-sided bootstrap p value of "no difference"."""

    estimate: Float[Array, "..."]
    low: Float[Array, "..."]
    high: Float[Array, "..."]
    p: Float[Array, "..."]


def iqm(x: Float[Array, "..."], axis: int | None = None) -> Float[Array, "..."]:
    """Interquartile mean: the mean after dropping the floor(n/4) smallest and as many of the largest values.

    Args:
      x: values, at least one along `axis`.
      axis: axis to reduce; None takes all values together (runs x tasks, as in Agarwal et al.).

    Raises:
      ValueError: nothing to average.
    """
    x = jnp.ravel(x) if axis is None else x
    axis = -1 if axis is None else axis
    n = x.shape[axis]
    if n == 0:
        raise ValueError(f"iqm: x must hold at least one value along the reduced axis, got shape {x.shape}.")
    cut = n // 4
    ordered = jnp.sort(x, axis=axis)
    return jnp.mean(jax.lax.slice_in_dim(ordered, cut, n - cut, axis=axis), axis=axis)


def quantile_band(
    x: Float[Array, "..."], low: float = 0.05, high: float = 0.95, axis: int = 0
) -> tuple[Float[Array, "..."], Float[Array, "..."], Float[Array, "..."]]:
    """Lower quantile, median and upper quantile along an axis (of seeds, as a rule), for curves with bands.

    Raises:
      ValueError: quantiles that are not 0 <= low <= high <= 1.
    """
    if not 0 <= low <= high <= 1:
        raise ValueError(f"quantile_band: quantiles must satisfy 0 <= low <= high <= 1, got {low} and {high}.")
    lo, mid, hi = jnp.quantile(x, jnp.asarray([low, 0.5, high], x.dtype), axis=axis)
    return lo, mid, hi


def bootstrap(
    key: Key[Array, ""],
    stat: Callable[..., Float[Array, "..."]],
    data: PyTree,
    groups: Int[np.ndarray, " n"] | None = None,
    *,
    resamples: int = 2000,
    level: float = 0.95,
) -> Interval:
    """Percentile bootstrap interval of `stat`.

    Args:
      key: random key.
      stat: without groups `stat(data)`, with groups `stat(data, valid)`, where `valid` is boolean over the rows that it
        is given: groups differ in size, so a draw of groups is padded and the padding must not count. The detection
        metrics of this package take `valid` in that place.
      data: pytree of arrays that share their leading axis, the rows that are drawn.
      groups: group of each row (any integers), read on the host; whole groups are then drawn with replacement.
      resamples: number of draws.
      level: coverage of the interval.

    Returns:
      The statistic of the data themselves and its interval, each of the statistic's shape.

    Raises:
      ValueError: leading axes that differ, no rows, or a level outside (0, 1).
    """
    values, own = _resample("bootstrap", key, stat, data, groups, resamples, level)
    return Interval(own, *_percentiles(values, level))


def paired_bootstrap(
    key: Key[Array, ""],
    stat: Callable[..., Float[Array, "..."]],
    a: PyTree,
    b: PyTree,
    groups: Int[np.ndarray, " n"] | None = None,
    *,
    resamples: int = 2000,
    level: float = 0.95,
) -> PairedInterval:
    """Bootstrap of `stat(a) - stat(b)` where row i of `a` and row i of `b` are the same item: both are drawn together.

    The p value is twice the smaller share of draws on either side of zero (ties count on both sides), at most 1.
    Arguments and errors are those of `bootstrap`.
    """

    def difference(pair: tuple[PyTree, PyTree], *valid: Array) -> Array:
        return stat(pair[0], *valid) - stat(pair[1], *valid)

    values, own = _resample("paired_bootstrap", key, difference, (a, b), groups, resamples, level)
    below = jnp.mean((values <= 0).astype(values.dtype), axis=0)
    above = jnp.mean((values >= 0).astype(values.dtype), axis=0)
    p = jnp.minimum(1.0, 2 * jnp.minimum(below, above))
    return PairedInterval(own, *_percentiles(values, level), p)


def _percentiles(values: Float[Array, "r ..."], level: float) -> tuple[Array, Array]:
    tail = (1 - level) / 2
    low, high = jnp.quantile(values, jnp.asarray([tail, 1 - tail], values.dtype), axis=0)
    return low, high


def _resample(name, key, stat, data, groups, resamples, level):
    """The statistic of every resample, and that of the data as they are."""
    sizes = {leaf.shape[0] for leaf in jax.tree.leaves(data)}
    if len(sizes) != 1 or 0 in sizes:
        raise ValueError(f"{name}: all arrays of the data must share one leading axis of rows, got {sorted(sizes)}.")
    if not 0 < level < 1:
        raise ValueError(f"{name}: level must lie strictly between 0 and 1, got {level}.")
    if resamples < 1:
        raise ValueError(f"{name}: resamples must be at least 1, got {resamples}.")
    n = sizes.pop()
    table = None if groups is None else _members(name, groups, n)
    units = n if table is None else table.shape[0]

    def one(pick):
        if table is None:
            return stat(jax.tree.map(lambda leaf: leaf[pick], data))
        index = table[pick].ravel()
        return stat(jax.tree.map(lambda leaf: leaf[jnp.maximum(index, 0)], data), index >= 0)

    def chunk(key):
        return jax.vmap(one)(jax.random.randint(key, (_CHUNK, units), 0, units))

    values = jax.lax.map(chunk, jax.random.split(key, -(-resamples // _CHUNK)))
    values = values.reshape(-1, *values.shape[2:])[:resamples]
    return values, stat(data) if table is None else stat(data, jnp.ones(n, bool))


def _members(name, groups, n):
    """Rows of every group, padded with -1 to the largest group."""
    groups = np.asarray(groups)
    if groups.shape != (n,):
        raise ValueError(f"{name}: groups must hold one entry for each of the {n} rows, got shape {groups.shape}.")
    _, member = np.unique(groups, return_inverse=True)
    counts = np.bincount(member)
    table = np.full((len(counts), counts.max()), -1)
    order = np.argsort(member, kind="stable")
    table[member[order], np.arange(n) - np.repeat(np.cumsum(counts) - counts, counts)] = order
    return jnp.asarray(table)
