"""Beta kernels of six dimensions in torch: slice, gsplat's own projection, tile lists by one sort, a compositor for each tile.

gsplat's compiled rasteriser wants CUDA, and so do the pieces under its `_rasterize_to_pixels` and nerfacc's; its
projection runs here as it is. Its `_isect_tiles` loops over pairs in Python: `lists` "gsplat" takes it, "sorted" a
vectorised form with the same result.
"""

import torch
from _serve import serve, threads
from gsplat.cuda._torch_impl import _fully_fused_projection, _isect_offset_encode, _isect_tiles

torch.set_num_threads(threads())
NAMES = ("xyz", "mean_q", "scale_raw", "l_tri", "rgb", "opacity_raw", "b")


def factor(scale, tri):
    """The spatial-orthogonal Cholesky factor with first-order rotation, (n, 6, 6)."""
    n = len(scale)
    zero = torch.zeros(n)
    a, b, c = tri[:, 0], tri[:, 1], tri[:, 2]
    skew = torch.stack([zero, a, b, -a, zero, c, -b, -c, zero], 1).reshape(n, 3, 3)
    spatial = (torch.eye(3) + skew) * scale[:, None, :3]
    low = torch.diag_embed(torch.cat([torch.zeros(n, 3), scale[:, 3:]], 1))
    rows, columns = zip(*[(i, j) for i in range(3, 6) for j in range(i)])
    low = low.index_put((torch.arange(n)[:, None], torch.tensor(rows), torch.tensor(columns)), tri[:, 3:])
    return torch.cat([torch.cat([spatial, torch.zeros(n, 3, 3)], 2), low[:, 3:]], 1)


def sliced(p, center):
    """Mean, covariance and opacity of each kernel at its view direction."""
    low = factor(torch.nn.functional.softplus(p["scale_raw"]), p["l_tri"])
    sigma = low @ low.mT
    sx, sxq, sq = sigma[:, :3, :3], sigma[:, :3, 3:], sigma[:, 3:, 3:]
    x = torch.nn.functional.normalize(p["xyz"] - center, dim=1) - p["mean_q"]
    root = torch.linalg.cholesky(sq)
    gain = torch.cholesky_solve(sxq.mT, root).mT * torch.exp(p["b"][:, 1:]).clamp(max=1)[:, None]
    mean = p["xyz"] + (gain @ x[:, :, None])[:, :, 0]
    cov = sx - gain @ sxq.mT
    cov = torch.triu(cov) + torch.triu(cov, 1).mT
    y = torch.linalg.solve_triangular(root, x[:, :, None], upper=False)[:, :, 0]
    decay = (4 * torch.exp(p["b"][:, 1:]) * (0.6931471805599453 - torch.nn.functional.softplus(2 * y * y))).sum(1)
    return mean, cov, torch.sigmoid(p["opacity_raw"]) * torch.exp(decay)


@torch.no_grad()
def tile_lists(means, radii, depths, size, columns, rows):
    """Primitives of each tile, front to back, flattened, and where each tile's begin."""
    low, high = ((means + s * radii) / size for s in (-1, 1))
    low = torch.stack([low[:, 0].floor().clamp(0, columns), low[:, 1].floor().clamp(0, rows)], 1).long()
    high = torch.stack([high[:, 0].ceil().clamp(0, columns), high[:, 1].ceil().clamp(0, rows)], 1).long()
    span = (high - low) * (radii > 0).all(1, keepdim=True)
    count = span.prod(1)
    order = torch.argsort(depths)
    owner = torch.repeat_interleave(order, count[order])
    local = torch.arange(len(owner)) - torch.repeat_interleave(count[order].cumsum(0) - count[order], count[order])
    wide = span[owner, 0].clamp(min=1)
    tile = (low[owner, 1] + local // wide) * columns + low[owner, 0] + local % wide
    tile, at = torch.sort(tile, stable=True)
    return owner[at], torch.searchsorted(tile, torch.arange(columns * rows + 1))


def prepare(size, inputs):
    p = {name: torch.from_numpy(inputs[name]) for name in NAMES}
    view, K = torch.from_numpy(inputs["view"])[None], torch.from_numpy(inputs["K"])[None]
    width, height, tile = (int(inputs[name]) for name in ("width", "height", "tile"))
    center = -view[0, :3, :3].mT @ view[0, :3, 3]
    columns, rows = -(-width // tile), -(-height // tile)
    weight = torch.from_numpy(inputs["weight"])
    backward, own = bool(inputs["backward"]), bool(inputs["own_lists"])
    v, u = torch.meshgrid(torch.arange(tile) + 0.5, torch.arange(tile) + 0.5, indexing="ij")

    def render(p):
        mean, cov, opacity = sliced(p, center)
        _, means, depths, conics, _ = _fully_fused_projection(mean, cov, view, K, width, height)
        means, depths, conics = means[0], depths[0], conics[0]
        det = conics[:, 0] * conics[:, 2] - conics[:, 1] ** 2
        # one standard deviation, where the kernel ends; gsplat's own radius is three
        reach = torch.sqrt(torch.stack([conics[:, 2], conics[:, 0]], 1).detach() / det.detach()[:, None])
        reach = torch.where((depths > 0.01)[:, None], reach, 0)
        if own:
            radii = torch.ceil(reach.amax(1)).int()[None]
            shape = {"tile_size": tile, "tile_width": columns, "tile_height": rows}
            _, keys, flat = _isect_tiles(
                means.detach()[None], radii.unsqueeze(-1).expand(-1, -1, 2), depths.detach()[None], **shape
            )
            starts = torch.cat([_isect_offset_encode(keys, 1, columns, rows).flatten(), torch.tensor([len(flat)])])
            flat = flat.long()
        else:
            flat, starts = tile_lists(means.detach(), reach, depths.detach(), tile, columns, rows)
        beta = 4 * torch.exp(p["b"][:, 0])
        tiles = []
        for i in range(columns * rows):
            pick = flat[starts[i] : starts[i + 1]]
            if not len(pick):
                tiles.append(torch.zeros(tile, tile, 3))
                continue
            dx = means[pick, 0, None, None] - (i % columns * tile + u)
            dy = means[pick, 1, None, None] - (i // columns * tile + v)
            A, B, C = (conics[pick, k, None, None] for k in range(3))
            s = A * dx * dx + 2 * B * dx * dy + C * dy * dy
            inside = s < 1
            fall = torch.exp(beta[pick, None, None] * torch.log1p(-torch.where(inside, s.clamp(0, 1 - 1e-6), 0)))
            alpha = torch.where(inside, (opacity[pick, None, None] * fall).clamp(max=0.999), 0)
            after = torch.cumprod(1 - alpha, 0)
            w = torch.where(after > 1e-4, alpha * after / (1 - alpha), 0)
            tiles.append(torch.einsum("phw,pc->hwc", w, p["rgb"][pick]))
        image = torch.stack(tiles).reshape(rows, columns, tile, tile, 3).permute(0, 2, 1, 3, 4)
        return image.reshape(rows * tile, columns * tile, 3)[:height, :width]

    def run():
        if not backward:
            with torch.no_grad():
                return {"image": render(p).numpy()}
        leaves = {name: value.clone().requires_grad_() for name, value in p.items()}
        image = render(leaves)
        (image * weight).sum().backward()
        return {"image": image.detach().numpy()} | {name: leaf.grad.numpy() for name, leaf in leaves.items()}

    return run


if __name__ == "__main__":
    serve(prepare, packages=("gsplat", "torch"))
