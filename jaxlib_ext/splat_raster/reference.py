"""Front-to-back compositing of per-tile lists in jnp: the meaning of the op, and what runs on a CPU.

Tiles are sorted by the length of their lists and taken in groups of similar length; a group walks its lists in chunks
of CHUNK primitives inside a while loop, which ends when the longest list ends or when no pixel of the group still lets
light through. One chunk is a dense block (tiles, CHUNK, pixels), about BLOCK numbers, so memory does not grow with the
number of pairs. Products of (1 - alpha) along a chunk are sums of logarithms, one small triangular matrix product.

The backward pass walks the same chunks from the last contributing one to the first, from the stored transmittance
and the stored number of primitives that each pixel passed: nothing of size pairs is kept. Its per-pair gradients are
reduced over pixels by matrix products (the conic's against 1, x, y, x^2, xy, y^2 about the tile's middle) into one row
for each list entry; rows are then summed by primitive.
"""

import jax.numpy as jnp
from jax import lax

from papyrax.jaxlib_ext.splat_raster import weights as W

CHUNK = 32
BLOCK = 65536


def _groups(lists, counts, pixels):
    """Tiles sorted by count and cut into groups; the padding tiles are empty. Returns the permutation too."""
    tiles, px = lists.shape[0], pixels.shape[1]
    size = max(1, min(tiles, BLOCK // (CHUNK * px)))
    order = jnp.argsort(-counts)
    pad = -tiles % size
    capacity = -lists.shape[1] % CHUNK

    def cut(a):
        a = jnp.pad(a[order], [(0, pad)] + [(0, 0)] * (a.ndim - 1))
        return a.reshape(-1, size, *a.shape[1:])

    lists = jnp.pad(lists, ((0, 0), (0, capacity)))
    # Pixel coordinates lead, so that each is a dense row.
    return order, cut, (cut(lists), cut(jnp.minimum(counts, lists.shape[1])), cut(pixels.swapaxes(1, 2)))


def _chunk(table, opacity, lists, counts, start):
    """Features of a chunk as (tiles, CHUNK, 1) columns, with opacity 0 past the end of a list."""
    rows = table[lax.dynamic_slice_in_dim(lists, start, CHUNK, 1)]
    live = (start + jnp.arange(CHUNK))[None] < counts[:, None]
    f = [rows[..., i, None] for i in range(rows.shape[-1])]
    # Padding repeats primitive 0; its numbers are finite, and its opacity here is 0.
    f[opacity] = jnp.where(live[..., None], f[opacity], 0)
    return rows, f


def _batched(a, b):
    """(g, m, k) @ (g, k, n) in full precision."""
    return lax.dot_general(a, b, (((2,), (1,)), ((0,), (0,))), precision=lax.Precision.HIGHEST)


def _alpha(weight, f, pixels, near, low, high):
    pixel = [pixels[:, None, i] for i in range(pixels.shape[1])]
    raw, saved = W.opacity(weight, f, pixel, near)
    alpha = jnp.minimum(raw, high)
    return jnp.where(alpha >= low, alpha, 0), raw, saved


def forward(prims, colours, lists, counts, pixels, weight, low, high, stop, near):
    """(colour, transmittance, depth, passed): `passed` counts the list entries that each pixel let by."""
    table = jnp.concatenate([prims, colours], 1)
    nf, dtype = prims.shape[1], prims.dtype
    tiles, px = lists.shape[0], pixels.shape[1]
    order, _, groups = _groups(lists, counts, pixels)

    def group(args):
        lists, counts, pixels = args
        size = lists.shape[0]
        below = jnp.broadcast_to(jnp.tril(jnp.ones((CHUNK, CHUNK), dtype)), (size, CHUNK, CHUNK))
        longest = counts.max()

        def more(state):
            start, light, *_ = state
            return (start < longest) & jnp.any(light > 0)

        def step(state):
            start, light, final, passed, out = state
            rows, f = _chunk(table, W.OPACITY[weight], lists, counts, start)
            alpha, *_ = _alpha(weight, f, pixels, near, low, high)
            after = light[:, None] * jnp.exp(_batched(below, jnp.log(1 - alpha)))
            lets = after > stop
            w = jnp.where(lets, alpha * after / (1 - alpha), 0)
            out = out + _batched(rows[..., nf - 1 :].swapaxes(1, 2), w)
            final = jnp.minimum(final, jnp.where(lets, after, 1).min(1))
            passed = passed + lets.sum(1, dtype=jnp.int32)
            # A pixel that stopped stays dark: its light is 0 from here on.
            light = jnp.where(lets[:, -1], after[:, -1], 0)
            return start + CHUNK, light, final, passed, out

        one = jnp.ones((size, px), dtype)
        out = jnp.zeros((size, table.shape[1] - nf + 1, px), dtype)
        state = (jnp.zeros((), jnp.int32), one, one, jnp.zeros((size, px), jnp.int32), out)
        _, _, final, passed, out = lax.while_loop(more, step, state)
        return final, passed, out

    final, passed, out = (a.reshape(-1, *a.shape[2:])[:tiles] for a in lax.map(group, groups))
    back = jnp.argsort(order)
    final, passed, out = final[back], passed[back], out[back]
    return out[:, 1:].swapaxes(1, 2), final, out[:, 0], passed


def backward(prims, colours, lists, counts, pixels, final, passed, grads, weight, low, high, stop, near, absolute):
    """Gradients of each list entry, (tiles, cap, features + colours [+ probes]), from those of the three outputs."""
    by_colour, by_light, by_depth = grads
    table = jnp.concatenate([prims, colours], 1)
    nf, dtype = prims.shape[1], prims.dtype
    tiles, cap = lists.shape
    order, cut, groups = _groups(lists, counts, pixels)
    by_value = jnp.concatenate([by_depth[..., None], by_colour], -1).swapaxes(1, 2)
    width = table.shape[1] + (W.probes(weight) if absolute else 0)

    def group(args):
        lists, counts, pixels, light, passed, by_value, by_light = args
        size, padded = lists.shape
        above = jnp.triu(jnp.ones((CHUNK, CHUNK), dtype))
        above = jnp.broadcast_to(above, (size, CHUNK, CHUNK))
        strictly = above - jnp.eye(CHUNK, dtype=dtype)
        basis = _basis(weight, pixels)
        by_value_t = by_value.swapaxes(1, 2)
        last = jnp.minimum(passed.max(), counts.max())
        first = jnp.maximum((last + CHUNK - 1) // CHUNK - 1, -1) * CHUNK

        def step(state):
            start, light, behind, out = state
            rows, f = _chunk(table, W.OPACITY[weight], lists, counts, start)
            alpha, raw, saved = _alpha(weight, f, pixels, near, low, high)
            reached = (start + jnp.arange(CHUNK))[None, :, None] < passed[:, None]
            alpha = jnp.where(reached, alpha, 0)
            before = light[:, None] * jnp.exp(-_batched(above, jnp.log(1 - alpha)))
            w = alpha * before
            value = _batched(rows[..., nf - 1 :], by_value)
            wv = w * value
            rear = behind[:, None] + _batched(strictly, wv)
            by_alpha = before * value - rear / (1 - alpha)
            g = jnp.where((alpha > 0) & (raw <= high), by_alpha, 0)
            columns = _reduce(weight, f, pixels, basis, saved, g, absolute)
            by_table = _batched(w, by_value_t)
            ends = [columns[0], by_table] + columns[1:]
            out = lax.dynamic_update_slice_in_dim(out, jnp.concatenate(ends, -1), start, 1)
            return start - CHUNK, before[:, 0], behind + wv.sum(1), out

        out = jnp.zeros((size, padded, width), dtype)
        state = (first, light, light * by_light, out)
        return lax.while_loop(lambda s: s[0] >= 0, step, state)[3]

    more = (cut(final), cut(passed), cut(by_value), cut(by_light))
    out = lax.map(group, (*groups, *more))
    out = out.reshape(-1, *out.shape[2:])[:tiles, :cap]
    return out[jnp.argsort(order)]


def _basis(weight, pixels):
    """What the per-pair gradients are multiplied by before the sum over pixels, (tiles, pixels, terms), and origin."""
    if W.PIXEL[weight] == 3:
        one = jnp.ones_like(pixels[:, :1])
        return jnp.concatenate([one, pixels], 1).swapaxes(1, 2), None
    middle = pixels.mean(2, keepdims=True)
    x, y = (pixels - middle)[:, 0], (pixels - middle)[:, 1]
    return jnp.stack([jnp.ones_like(x), x, y, x * x, x * y, y * y], -1), middle


def _reduce(weight, f, pixels, basis, saved, g, absolute):
    """Sums over pixels: [features except depth (tiles, CHUNK, n), absolute gradients if asked]."""
    table, middle = basis
    total = lambda a: a.sum(-1, keepdims=True)  # noqa: E731
    if W.PIXEL[weight] == 2:
        by_s, by_o, by_beta = W.conic_pull(weight, f, saved, g)
        n, x, y, xx, xy, yy = (a[..., None] for a in jnp.moveaxis(_batched(by_s, table), -1, 0))
        mx, my = f[0] - middle[:, :1], f[1] - middle[:, 1:]
        dx, dy = mx * n - x, my * n - y
        dxx, dyy = mx * mx * n - 2 * mx * x + xx, my * my * n - 2 * my * y + yy
        dxy = mx * my * n - mx * y - my * x + xy
        mean = [2 * (f[2] * dx + f[3] * dy), 2 * (f[3] * dx + f[4] * dy)]
        rest = [dxx, 2 * dxy, dyy, total(by_o)] + ([] if by_beta is None else [total(by_beta)])
        out = [jnp.concatenate(mean + rest, -1)]
        if absolute:
            dx, dy, *_ = saved
            pair = (f[2] * dx + f[3] * dy, f[3] * dx + f[4] * dy)
            out.append(jnp.concatenate([total(jnp.abs(2 * by_s * a)) for a in pair], -1))
        return out
    by_p, by_u, by_o = W.ray_pull(weight, f, saved, g)
    matrix = [_batched(a, table)[..., 1:] for a in by_u]
    out = [jnp.concatenate(matrix + [total(a) for a in by_p] + [total(by_o)], -1)]
    if absolute:
        out.append(jnp.concatenate([total(jnp.abs(a)) for a in by_p], -1))
    return out
