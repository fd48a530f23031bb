"""Tiles of an image and, for each, the list of primitives that may touch it, front to back, with static shapes.

Two ways to the same lists. `tile_lists` takes boxes in pixels: every box emits one (tile, rank) pair for each tile it
covers into a buffer of fixed size, one sort of packed integers orders them, and each tile reads its run. `hit_lists`
takes any (tile, primitive) incidence, for cameras whose tiles are no boxes. What does not fit is counted in
`overflow`, never dropped in silence.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jaxtyping import Array, Bool, Float, Int

NUDGE = 1e-3  # pixels; covers the rounding of a box's ends


@dataclasses.dataclass(frozen=True)
class Grid:
    """An image cut into square tiles; the last column and row of tiles may stick out of it."""

    width: int
    height: int
    size: int = 16

    def __post_init__(self):
        if min(self.width, self.height, self.size) < 1:
            raise ValueError(
                f"the grid is {self.width}x{self.height} with tiles of {self.size}, wanted positive sizes."
            )

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of tiles."""
        return -(-self.height // self.size), -(-self.width // self.size)

    @property
    def count(self) -> int:
        """Number of tiles."""
        return self.shape[0] * self.shape[1]


@struct.dataclass
class TileLists:
    """Primitives of each tile, front to back.

    Attributes:
        index: indices of primitives; entries at or past `counts` mean nothing.
        counts: how many entries count.
        wanted: how many there would be with unlimited capacity.
        overflow: pairs of tile and primitive that did not fit, 0 when the image is complete.
    """

    index: Int[Array, "tiles cap"]
    counts: Int[Array, "tiles"]
    wanted: Int[Array, "tiles"]
    overflow: Int[Array, ""]


def to_tiles(image: Float[Array, "h w *c"], grid: Grid) -> Float[Array, "tiles px *c"]:
    """Pixels of each tile, rows first; pixels beyond the image repeat its edge."""
    rows, columns = grid.shape
    pad = ((0, rows * grid.size - grid.height), (0, columns * grid.size - grid.width))
    image = jnp.pad(image, pad + ((0, 0),) * (image.ndim - 2), mode="edge")
    rest = image.shape[2:]
    image = image.reshape(rows, grid.size, columns, grid.size, *rest).swapaxes(1, 2)
    return image.reshape(rows * columns, grid.size**2, *rest)


def from_tiles(tiles: Float[Array, "tiles px *c"], grid: Grid) -> Float[Array, "h w *c"]:
    """The image whose tiles these are."""
    rows, columns = grid.shape
    rest = tiles.shape[2:]
    image = tiles.reshape(rows, columns, grid.size, grid.size, *rest).swapaxes(1, 2)
    return image.reshape(rows * grid.size, columns * grid.size, *rest)[: grid.height, : grid.width]


def tile_lists(
    boxes: Float[Array, "p 4"], depth: Float[Array, "p"], tiles: Grid, cap: int, *, pairs: int, center: float = 0.5
) -> TileLists:
    """Lists of the primitives whose boxes hold at least one pixel centre of a tile, by rising depth, ties by index.

    Args:
        boxes: (x0, y0, x1, y1) in pixel coordinates; a box with x1 < x0 or a NaN touches nothing.
        depth: the sort key.
        cap: capacity of one list.
        pairs: capacity of all lists together.
        center: coordinate of the first pixel's centre.
    """
    if cap < 1 or pairs < 1:
        raise ValueError(f"cap is {cap} and pairs is {pairs}, wanted positive capacities.")
    p, columns = len(boxes), tiles.shape[1]
    low = jnp.ceil(boxes[:, :2] - center - NUDGE)
    high = jnp.floor(boxes[:, 2:] - center + NUDGE)
    limit = jnp.asarray([tiles.width - 1, tiles.height - 1], boxes.dtype)
    # The comparison is false for NaN, so such a box touches nothing.
    touches = ((high >= low) & (high >= 0) & (low <= limit)).all(1) & jnp.isfinite(depth)
    low = jnp.where(touches[:, None], jnp.clip(low, 0, limit), 0).astype(jnp.int32) // tiles.size
    high = jnp.where(touches[:, None], jnp.clip(high, 0, limit), 0).astype(jnp.int32) // tiles.size
    span = high - low + 1
    count = jnp.where(touches, span[:, 0] * span[:, 1], 0)

    order = jnp.argsort(jnp.where(touches, depth, jnp.inf)).astype(jnp.int32)
    ends = jnp.cumsum(count[order])
    total = ends[-1]
    slot = jnp.arange(pairs, dtype=jnp.int32)
    rank = jnp.minimum(jnp.searchsorted(ends, slot, side="right").astype(jnp.int32), p - 1)
    owner = order[rank]
    local = slot - jnp.where(rank > 0, ends[rank - 1], 0)
    wide = span[owner, 0]
    tile = (low[owner, 1] + local // wide) * columns + low[owner, 0] + local % wide
    used = slot < total
    if tiles.count * p < 2**31 - 1:
        # One sort of one array: the tile leads, the rank follows, and both are read back by division.
        keys = jnp.sort(jnp.where(used, tile * p + rank, 2**31 - 1))
        starts = jnp.searchsorted(keys, jnp.arange(tiles.count + 1, dtype=jnp.int32) * p).astype(jnp.int32)
        ranks = keys % p
    else:
        keys, ranks = lax.sort((jnp.where(used, tile, tiles.count), rank), num_keys=1, is_stable=True)
        starts = jnp.searchsorted(keys, jnp.arange(tiles.count + 1, dtype=jnp.int32)).astype(jnp.int32)
    wanted = starts[1:] - starts[:-1]
    place = jnp.minimum(starts[:-1, None] + jnp.arange(cap, dtype=jnp.int32), pairs - 1)
    lost = jnp.maximum(total - pairs, 0) + jnp.maximum(wanted - cap, 0).sum()
    return TileLists(order[ranks[place]], jnp.minimum(wanted, cap), wanted, lost.astype(jnp.int32))


def hit_lists(hits: Bool[Array, "tiles p"], depth: Float[Array, "p"], cap: int) -> TileLists:
    """Lists of the primitives that `hits` gives each tile, by rising depth, ties by index."""
    if cap < 1:
        raise ValueError(f"cap is {cap}, wanted a positive capacity.")
    order = jnp.argsort(depth).astype(jnp.int32)
    seen = jnp.cumsum(hits[:, order], 1, dtype=jnp.int32)
    wanted = seen[:, -1]
    nth = jnp.arange(1, cap + 1, dtype=jnp.int32)
    place = jax.vmap(lambda row: jnp.searchsorted(row, nth))(seen)
    index = order[jnp.minimum(place, len(depth) - 1)]
    overflow = jnp.maximum(wanted - cap, 0).sum().astype(jnp.int32)
    return TileLists(index, jnp.minimum(wanted, cap), wanted, overflow)
