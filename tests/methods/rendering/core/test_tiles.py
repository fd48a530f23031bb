import jax
import jax.numpy as jnp
import numpy as np
import pytest

from papyrax.methods.rendering.core.tiles import Grid, from_tiles, hit_lists, tile_lists, to_tiles

GRID = Grid(37, 21, 8)


def boxes(p=80, seed=0):
    rng = np.random.default_rng(seed)
    middle = rng.uniform(-4, 44, (p, 2)) * [1, 0.6]
    half = rng.uniform(0.1, 9, (p, 2))
    box = np.concatenate([middle - half, middle + half], 1)
    box[3] = np.nan
    box[4] = [10.6, 5.6, 10.9, 5.9]  # between pixel centres: touches nothing
    return jnp.asarray(box, jnp.float32), jnp.asarray(rng.integers(0, 20, p), jnp.float32)


def by_hand(box, depth):
    """Lists by a loop over pixel centres."""
    out = []
    for row in range(3):
        for column in range(5):
            xs = np.arange(8 * column, min(8 * column + 8, 37)) + 0.5
            ys = np.arange(8 * row, min(8 * row + 8, 21)) + 0.5
            inside = [
                i
                for i, (a, b, c, d) in enumerate(np.asarray(box))
                if ((xs >= a) & (xs <= c)).any() and ((ys >= b) & (ys <= d)).any()
            ]
            out.append(sorted(inside, key=lambda i: (depth[i], i)))
    return out


def test_lists_are_complete_sorted_and_stable():
    box, depth = boxes()
    lists = jax.jit(lambda b, d: tile_lists(b, d, GRID, 80, pairs=1000))(box, depth)
    want = by_hand(box, np.asarray(depth))
    for tile, entries in enumerate(want):
        assert lists.index[tile, : lists.counts[tile]].tolist() == entries
    assert lists.overflow == 0 and lists.wanted.tolist() == [len(w) for w in want]
    hits = jnp.zeros((15, 80), bool)
    for tile, entries in enumerate(want):
        hits = hits.at[tile, jnp.asarray(entries, int)].set(True)
    dense = jax.jit(lambda h, d: hit_lists(h, d, 80))(hits, depth)
    live = jnp.arange(80) < dense.counts[:, None]
    np.testing.assert_array_equal(jnp.where(live, dense.index, 0), jnp.where(live, lists.index, 0))


def test_what_does_not_fit_is_counted():
    box, depth = boxes()
    full = tile_lists(box, depth, GRID, 80, pairs=1000)
    total = int(full.wanted.sum())
    short = tile_lists(box, depth, GRID, 10, pairs=1000)
    assert short.overflow == int(jnp.maximum(full.wanted - 10, 0).sum()) and short.counts.max() == 10
    np.testing.assert_array_equal(short.index[:, :5], full.index[:, :5])
    assert tile_lists(box, depth, GRID, 80, pairs=total - 7).overflow == 7
    with pytest.raises(ValueError, match="cap is 0"):
        tile_lists(box, depth, GRID, 0, pairs=10)


def test_nothing_to_draw_gives_empty_lists():
    lists = tile_lists(jnp.full((5, 4), jnp.nan), jnp.zeros(5), GRID, 4, pairs=8)
    assert lists.counts.sum() == 0 and lists.overflow == 0


def test_tiles_and_images_are_inverse():
    image = jnp.arange(21 * 37 * 2.0).reshape(21, 37, 2)
    tiles = to_tiles(image, GRID)
    assert tiles.shape == (15, 64, 2)
    np.testing.assert_array_equal(from_tiles(tiles, GRID), image)
    np.testing.assert_array_equal(tiles[6, 9], image[9, 9])  # tile row 1, column 1; its pixel (1, 1)
    with pytest.raises(ValueError, match="wanted positive sizes"):
        Grid(0, 4)
