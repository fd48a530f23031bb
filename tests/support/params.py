"""Parameters drawn by numpy in the shapes that an `init` would give: compiling random draws costs more than most tests."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np


def drawn(init: Callable, seed: int = 0, spread: float = 0.1):
    """Kernels of variance 1/fan-in, entries named `scale` near 1, all other vectors near 0, `spread` away."""
    rng = np.random.default_rng(seed)

    def draw(path, leaf):
        noise = rng.normal(size=leaf.shape)
        if getattr(path[-1], "key", None) == "scale":
            value = 1 + spread * noise
        elif len(leaf.shape) > 1:
            value = noise / np.sqrt(np.prod(leaf.shape[:-1]))
        else:
            value = spread * noise
        return jnp.asarray(value, leaf.dtype)

    return jax.tree_util.tree_map_with_path(draw, jax.eval_shape(init))
