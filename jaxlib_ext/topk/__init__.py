"""Exact nearest rows of a matrix: the k best of n for every query, without the m by n scores in memory."""

import functools
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from papyrax.jaxlib_ext import dispatch
from papyrax.jaxlib_ext.topk import gpu, reference, tpu


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
    implementation: dispatch.Implementation = "auto",
    interpret: bool = False,
) -> tuple[Float[Array, "m k"], Int[Array, "m k"]]:
    """The k best rows of x for every row of q: (scores, ids), best first, larger is better.

    Scores: "ip" q.x; "cosine" q.x / (|q| |x|), 0 for a zero row; "l2" minus the squared distance, summed from
    differences (never |q|^2 - 2 q.x + |x|^2), so the order is honest and equal rows score exactly 0. Ties go to the
    lower id. Where fewer than k rows may be returned, scores end in -inf and ids in -1. k may exceed n.

    The search finds candidates by a matrix product; exact l2 scores of k + 32 candidates and a bound on the product's
    rounding then prove that no other row belongs in the answer, and a tile of queries for which they do not is
    searched exhaustively.

    Not differentiable: ids are integers and the scores' gradient is stopped. Take scores of x[ids] again for a
    gradient.

    Why a kernel pays: plain XLA writes and reads n scores a query (8 n bytes) and then sorts rows of n. FLOPs: 2 n d a
    query.
        TPU: x is read once for every 128 queries (64 for k over 1,024), 4 n d / 128 bytes a query, and 8 k bytes are
        written: at n = 1e6, d = 128, k = 10 4 MB a query instead of 8 MB, and the sort of n shrinks to blocks that
        hold a new best row.
        It pays for d up to about 256.
        GPU: 4 n d FLOPs (the products are made twice) and n / 16 + 16 k bytes a query to memory instead of 8 n; tiles
        of x are read twice for every 16 queries, mostly from the L2 cache. It pays while n is above about 64 k; below,
        nothing is left out and it writes what XLA would.

    Args:
        q: queries; computed in float32 (float64 only by the reference).
        x: rows to search, n >= 0.
        k: number of rows wanted, at least 1 (kernels: k + c + 32 up to 4,096).
        valid: rows that may be returned; None is all. Rows that may not can hold anything, NaN included.
        exclude: ids that a query may not get, negative for none, such as its own row.
        drop_equal: never return a row that equals the query in every entry.
        block: rows of x that the reference scores at once; bounds its memory (default 65,536).
        axis_name: inside shard_map, the mesh axis that x and valid are sharded over in the order of ids, with q and
            exclude the same on all shards: ids are global, and each shard sends m k pairs.
        implementation: "auto" takes the kernel of the platform, the reference on the CPU and where a kernel does not
            take the sizes.
        interpret: run the kernel named by `implementation` in Pallas' interpreter.

    Raises: ValueError for shapes that do not match, an unknown metric, or k < 1.
    Source: exact search as faiss IndexFlat; the running list is a bitonic merge (Batcher 1968) on TPU.
    """
    dispatch.check_implementation(implementation)
    if metric not in ("ip", "cosine", "l2"):
        raise ValueError(f"metric must be ip, cosine or l2, got {metric!r}.")
    if q.ndim != 2 or x.ndim != 2 or q.shape[1] != x.shape[1]:
        raise ValueError(f"q and x must have shapes [m, d] and [n, d], got {q.shape} and {x.shape}.")
    if k < 1:
        raise ValueError(f"k must be at least 1, got {k}.")
    if block is not None and block < 1:
        raise ValueError(f"block must be at least 1, got {block}.")
    if valid is not None and valid.shape != x.shape[:1]:
        raise ValueError(f"valid must have shape {x.shape[:1]} like the rows of x, got {valid.shape}.")
    if exclude is not None and (exclude.ndim != 2 or exclude.shape[0] != q.shape[0]):
        raise ValueError(f"exclude must have shape [{q.shape[0]}, c] like the rows of q, got {exclude.shape}.")
    q, x = jax.lax.stop_gradient(jnp.asarray(q)), jax.lax.stop_gradient(jnp.asarray(x))
    options = (metric, drop_equal, block, implementation, interpret)
    if axis_name is None:
        return _local(q, x, k, valid, exclude, *options)
    offset = jax.lax.axis_index(axis_name) * x.shape[0]
    exclude = None if exclude is None else jnp.where(exclude >= 0, exclude - offset, -1)
    scores, ids = _local(q, x, k, valid, exclude, *options)
    ids = jnp.where(ids >= 0, ids + offset, -1)
    # shards lie in the order of their ids, so a stable top_k gives ties to the lower id
    scores = jax.lax.all_gather(scores, axis_name, axis=1, tiled=True)
    ids = jax.lax.all_gather(ids, axis_name, axis=1, tiled=True)
    scores, place = jax.lax.top_k(scores, k)
    return scores, jnp.take_along_axis(ids, place, axis=1)


def _local(q, x, k, valid, exclude, metric, drop_equal, block, implementation, interpret):
    m, n = q.shape[0], x.shape[0]
    if m == 0 or n == 0 or q.shape[1] == 0:
        implementation = "reference"
    if n == 0:
        wide = jnp.promote_types(jnp.promote_types(q.dtype, x.dtype), jnp.float32)
        return jnp.full((m, k), -jnp.inf, wide), jnp.full((m, k), -1, jnp.int32)
    length = k + reference.MARGIN + (0 if exclude is None else exclude.shape[1])
    fits = length <= tpu.MAX_COUNT and q.shape[1] <= tpu.MAX_FEATURES
    if implementation == "tpu" and not fits:
        raise ValueError(
            f"the tpu kernel takes k + excluded + {reference.MARGIN} up to {tpu.MAX_COUNT} and {tpu.MAX_FEATURES} features, "
            f"got {length} and {q.shape[1]}."
        )
    arrays = dispatch.varying_together(q, x, *(mask for mask in (valid, exclude) if mask is not None))

    def with_find(find):
        def call(q, x, *masks):
            masks = list(masks)
            shown = masks.pop(0) if valid is not None else None
            hidden = masks.pop(0) if exclude is not None else None
            return reference.search(q, x, k, metric, shown, hidden, drop_equal, block, find)

        return call

    return dispatch.run(
        implementation,
        *arrays,
        reference=with_find(None),
        tpu=with_find(functools.partial(tpu.candidates, interpret=interpret)),
        gpu=with_find(functools.partial(gpu.candidates, interpret=interpret)),
        kernels=fits,
    )
