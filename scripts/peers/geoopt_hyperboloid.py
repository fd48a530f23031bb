"""The hyperboloid's log, half of it by exp, and dist, in geoopt."""

import geoopt
import torch
from _serve import serve, threads

torch.set_num_threads(threads())


def prepare(size, inputs):
    man = geoopt.Lorentz(k=1.0)
    x, y = torch.from_numpy(inputs["x"]), torch.from_numpy(inputs["y"])

    @torch.no_grad()
    def run():
        u = man.logmap(x, y)
        return {"half": man.expmap(x, u / 2).numpy(), "dist": man.dist(x, y).numpy()}

    return run


if __name__ == "__main__":
    serve(prepare, packages=("geoopt", "torch"))
