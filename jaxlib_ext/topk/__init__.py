"""Exact nearest rows of a matrix: the k best of n for every query, without the m by n scores in memory."""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from papyrax.jaxlib_ext.topk import reference


def topk(
    q: Float[Array, "m d"],
    x: Float[Array, "n d"],
    k: int,
    *,
    metric: Literal["ip", "cosine", "l2"],
    valid: Bool[Array, "n"] | None = None,
    exclude: Int[Array, "m c"] | None = None,
    drop_equal: bool = False,
    block: int | None = None,
    axis_name: str | None = None,
    implementation: Literal["auto", "reference", "tpu", "gpu"] = "auto",
    interpret: bool = False,
) -> tuple[Float[Array, "m k"], Int[Array, "m k"]]:
    """The k best rows of x for every row of q: (scores, ids), best first, larger is better."""
    if axis_name is None:
        return reference.topk(q, x, k, metric, valid, exclude, drop_equal, block)
    offset = jax.lax.axis_index(axis_name) * x.shape[0]
    scores, ids = reference.topk(q, x, k, metric, valid, exclude, drop_equal, block, offset)
    # shards lie in the order of their ids, so a stable top_k gives ties to the lower id
    scores = jax.lax.all_gather(scores, axis_name, axis=1, tiled=True)
    ids = jax.lax.all_gather(ids, axis_name, axis=1, tiled=True)
    scores, place = jax.lax.top_k(scores, k)
    return scores, jnp.take_along_axis(ids, place, axis=1)
