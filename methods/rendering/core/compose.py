"""From features and tile lists to an image: one compositor for every weight function of `splat_raster`."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from papyrax.jaxlib_ext.splat_raster import raster
from papyrax.methods.rendering.core.tiles import Grid, TileLists, from_tiles


def compose(
    prims: Float[Array, "p f"],
    colours: Float[Array, "p c"],
    lists: TileLists,
    pixels: Float[Array, "tiles px g"],
    grid: Grid,
    *,
    axis_name: str | tuple[str, ...] | None = None,
    **options,
) -> tuple[Float[Array, "h w c"], Float[Array, "h w"], Float[Array, "h w"]]:
    """Colour, transmittance and depth images; `options` go to `raster`.

    With `axis_name` (inside shard_map) every device draws its share of the tiles and all get the whole image. Each
    device then computes the same loss, so take its mean over the axis (lax.pmean) to get the gradient of one loss.
    """
    if axis_name is None:
        out = raster(prims, colours, lists.index, lists.counts, pixels, **options)
        colour, left, depth = (from_tiles(a, grid) for a in out)
        return colour, left, depth
    n = jax.lax.axis_size(axis_name)
    share = -(-grid.count // n)

    def own(a):
        a = jnp.pad(a, [(0, share * n - grid.count)] + [(0, 0)] * (a.ndim - 1), mode="edge")
        return jax.lax.dynamic_slice_in_dim(a, jax.lax.axis_index(axis_name) * share, share)

    out = raster(prims, colours, own(lists.index), own(lists.counts), own(pixels), **options)
    whole = (jax.lax.all_gather(a, axis_name, tiled=True)[: grid.count] for a in out)
    colour, left, depth = (from_tiles(a, grid) for a in whole)
    return colour, left, depth
