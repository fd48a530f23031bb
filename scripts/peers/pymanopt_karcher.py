"""Karcher mean of SPD matrices by pymanopt's steepest descent, a given number of steps."""

import numpy as np
import pymanopt
from _serve import serve
from pymanopt.manifolds import SymmetricPositiveDefinite
from pymanopt.optimizers import SteepestDescent


def prepare(size, inputs):
    points, steps = inputs["points"], int(inputs["steps"])
    man = SymmetricPositiveDefinite(points.shape[-1])

    @pymanopt.function.numpy(man)
    def cost(x):
        return sum(man.dist(x, a) ** 2 for a in points) / (2 * len(points))

    @pymanopt.function.numpy(man)
    def gradient(x):
        return -sum(man.log(x, a) for a in points) / len(points)

    def run():
        problem = pymanopt.Problem(man, cost, riemannian_gradient=gradient)
        optimiser = SteepestDescent(max_iterations=steps, min_gradient_norm=0, min_step_size=0, verbosity=0)
        return {"mean": optimiser.run(problem, initial_point=np.eye(points.shape[-1])).point}

    return run


if __name__ == "__main__":
    serve(prepare, packages=("pymanopt", "numpy"))
