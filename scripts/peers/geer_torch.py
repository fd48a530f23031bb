"""Gaussians by their exact integral along rays in plain torch: frustum boxes, tile by tile, gradients by autograd."""

import torch
from _serve import serve, threads

torch.set_num_threads(threads())
TILE, FLOOR, NEAR = 16, 1e-7, 0.01
NAMES = ("xyz", "log_scale", "quat", "opacity_raw", "sh")


def rotations(q):
    w, x, y, z = torch.nn.functional.normalize(q, dim=1).unbind(1)
    rows = [
        (1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)),
        (2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)),
        (2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)),
    ]
    return torch.stack([torch.stack(row, 1) for row in rows], 1)


@torch.no_grad()
def boxes(turn, wide, c, opacity, lens):
    """Pixel boxes by the quadratic in the tangent; all Gaussians lie wholly in front."""
    sigma2 = 2 * torch.log((255 * opacity).clamp(min=1))
    half = turn * wide[:, None]
    t = sigma2[:, None, None] * (half @ half.mT) - c[:, :, None] * c[:, None]
    ends = []
    for axis in (0, 1):
        a, b, d = t[:, 2, 2], t[:, axis, 2], t[:, axis, axis]
        root = (b * b - a * d).clamp(min=0).sqrt()
        ends += [(b + root) / a * lens[axis] + lens[2 + axis], (b - root) / a * lens[axis] + lens[2 + axis]]
    x0, x1, y0, y1 = ends
    return x0 - 1, y0 - 1, x1 + 1, y1 + 1


def draw(params, lens, w, h):
    c, scale = params["xyz"], params["log_scale"].exp()
    wide = (scale * scale + FLOOR).sqrt()
    turn = rotations(params["quat"])
    matrix = turn.mT / wide[:, :, None]
    opacity = torch.sigmoid(params["opacity_raw"]) * (scale / wide).prod(1)
    colour = (0.5 + 0.28209479177387814 * params["sh"][:, 0]).clamp(min=0)
    p = (matrix @ c[:, :, None])[..., 0]
    x0, y0, x1, y1 = boxes(turn, wide, c, opacity, lens)
    order = torch.argsort(c.detach().square().sum(1))
    x0, y0, x1, y1 = (v[order] for v in (x0, y0, x1, y1))
    shown = opacity.detach()[order] >= 1 / 255
    rows = []
    for top in range(0, h, TILE):
        row = []
        for left in range(0, w, TILE):
            bottom, right = min(top + TILE, h), min(left + TILE, w)
            met = shown & (x1 >= left) & (x0 <= right) & (y1 >= top) & (y0 <= bottom)
            index = order[met]
            v, u = torch.meshgrid(torch.arange(top, bottom) + 0.5, torch.arange(left, right) + 0.5, indexing="ij")
            ray = torch.stack([(u - lens[2]) / lens[0], (v - lens[3]) / lens[1], torch.ones_like(u)], -1)
            ray = torch.nn.functional.normalize(ray, dim=-1).reshape(-1, 3)
            along = torch.einsum("gij,rj->gri", matrix[index], ray)
            length = along.norm(dim=-1, keepdim=True)
            unit = along / length
            centre = p[index][:, None]
            tau = (unit * centre).sum(-1)
            d2 = (centre - tau[..., None] * unit).square().sum(-1)
            alpha = (opacity[index][:, None] * torch.exp(-0.5 * d2)).clamp(max=0.99)
            alpha = torch.where((alpha >= 1 / 255) & (tau / length[..., 0] > NEAR), alpha, 0)
            after = torch.cumprod(1 - alpha, 0)
            weight = torch.where(after > 1e-4, alpha * after / (1 - alpha), 0)
            row.append((weight.T @ colour[index]).reshape(bottom - top, right - left, 3))
        rows.append(torch.cat(row, 1))
    return torch.cat(rows, 0)


def prepare(size, inputs):
    lens, weight = torch.from_numpy(inputs["lens"]), torch.from_numpy(inputs["weight"])
    h, w = weight.shape[:2]
    train = bool(inputs["train"])
    given = {name: torch.from_numpy(inputs[name]) for name in NAMES}

    def run():
        if not train:
            with torch.no_grad():
                return {"rgb": draw(given, lens, w, h).numpy()}
        params = {name: value.clone().requires_grad_() for name, value in given.items()}
        rgb = draw(params, lens, w, h)
        (rgb * weight).sum().backward()
        grads = {"by_xyz": "xyz", "by_scale": "log_scale", "by_sh": "sh"}
        return {"rgb": rgb.detach().numpy()} | {k: params[v].grad.numpy() for k, v in grads.items()}

    return run


if __name__ == "__main__":
    serve(prepare, packages=("torch",))
