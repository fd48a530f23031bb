"""Clipped SGD over many runs at once in torch, on given noise, levels and step sizes."""

import torch
from _serve import serve, threads

torch.set_num_threads(threads())


def prepare(size, inputs):
    noise, x0 = torch.from_numpy(inputs["noise"]), torch.from_numpy(inputs["x0"])
    gammas, levels = inputs["gammas"].tolist(), inputs["levels"].tolist()

    @torch.no_grad()
    def run():
        x = x0.expand(noise.shape[1:]).clone()
        for e, gamma, level in zip(noise, gammas, levels):
            g = x + e
            norm = torch.linalg.vector_norm(g, dim=1, keepdim=True)
            x -= gamma * (level / norm.clamp(min=1e-30)).clamp(max=1) * g
        return {"x": x.numpy()}

    return run


if __name__ == "__main__":
    serve(prepare, packages=("torch",))
