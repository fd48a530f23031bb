"""Runs the compile target of an optimisation recipe on all devices of this process: `python -m … SYSTEM OUT`."""

import importlib
import sys

import jax
import jax.numpy as jnp
import numpy as np

from papyrax.train.sharding import make_mesh


def concrete(system: str, recipe, config):
    """Arguments of the target, filled with numbers instead of shapes."""
    if system == "clipped_sgd":
        arm = recipe._quadratic_arm(config, "log1", tail=2.001, alpha=2.0, scale=0.1, kind="pareto_one_sided")
        return (recipe.init_all(jax.random.key(0), 1000, arm, jnp.ones(config.dim)),)
    from papyrax.methods.optimization.riemannian_frank_wolfe import learner

    rng = np.random.default_rng(0)
    arm = learner.Config("sphere", "ball", 0.9, "short", 4.0)
    a = rng.normal(size=(8, config.n // 2, config.n)) / config.n**0.5
    made = [recipe.sphere_arrays(a[i], recipe._unit(rng.normal(size=config.n)), 1.0, rng) for i in range(8)]
    arrays = {k: jnp.asarray(np.stack([m[k] for m in made]), jnp.float32) for k in made[0]}
    keys = jax.random.split(jax.random.key(0), 8)
    return jax.vmap(lambda k, x: learner.init(k, arm, x))(keys, arrays["centre"]), arrays


def metrics(system: str, config=None, mesh=None) -> dict[str, np.ndarray]:
    """Metrics of one call of the target's function, arguments placed as the target says."""
    recipe = importlib.import_module(f"papyrax.train.recipes.optimization.{system}")
    config = recipe.PRESETS["smoke"] if config is None else config
    mesh = make_mesh() if mesh is None else mesh
    target = recipe.compile_targets(config, mesh)[0]
    arguments = concrete(system, recipe, config)
    placed = jax.tree.map(
        lambda value, shape: jax.device_put(value, shape.sharding) if value.shape == shape.shape else value,
        arguments,
        target.args,
    )
    out = jax.jit(target.fn)(*placed)[1]
    return {k: np.asarray(v) for k, v in out.items()}


if __name__ == "__main__":
    np.savez(sys.argv[2], devices=jax.device_count(), **metrics(sys.argv[1]))
