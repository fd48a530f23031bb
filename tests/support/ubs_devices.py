"""A training step of Beta splats on one device and shared over this process' devices: same loss, gradients and next state."""

import jax
import jax.numpy as jnp
import numpy as np

from papyrax.envs.scenes import worlds
from papyrax.methods.rendering.core.mcmc import McmcConfig
from papyrax.methods.rendering.universal_beta_splatting import learn
from papyrax.methods.rendering.universal_beta_splatting.render import RenderConfig
from papyrax.train.recipes.rendering.universal_beta_splatting_arms import placement
from papyrax.train.sharding import make_mesh


def main() -> None:
    """Two views over `data`, 48 primitives over `fsdp`; then one view, primitives over all devices."""
    config = learn.Config(
        dims=6,
        cap=48,
        init_query="wide",
        regularise_from=0,
        render=RenderConfig(tile=8, cap=48, pairs=2048),
        mcmc=McmcConfig(start=0, stop=10, every=1, grow=200, noise_lr=1.0),
    )
    rng = np.random.default_rng(0)
    xyz, colors = (
        jnp.asarray(rng.uniform(-1, 1, (40, 3)), jnp.float32),
        jnp.asarray(rng.uniform(size=(40, 3)), jnp.float32),
    )
    state = learn.init(jax.random.key(0), config, xyz, colors, jnp.full(40, 0.3))
    cameras = jax.tree.map(lambda *a: jnp.stack(a), *worlds.orbit(2, (24, 20)))
    batch = {
        "camera": cameras,
        "image": jnp.asarray(rng.uniform(size=(2, 20, 24, 3)), jnp.float32),
        "time": jnp.zeros(2),
    }
    mesh = make_mesh(data=2, fsdp=-1)
    for count in (2, 1):
        some = jax.tree.map(lambda a, count=count: a[:count], batch)
        split, _ = placement(mesh, count)
        assert split is not None and split.views == (("data",) if count == 2 else ()), split
        step = jnp.asarray(1)
        value = jax.jit(jax.value_and_grad(learn.loss, has_aux=True), static_argnums=(4, 5))
        (a, said_a), one = value(state.params, state.alive, some, step, config, None)
        (b, said_b), many = value(state.params, state.alive, some, step, config, split)
        np.testing.assert_allclose(b, a, rtol=1e-5)
        assert set(said_a) == set(said_b)
        for name in said_a:
            np.testing.assert_allclose(said_b[name], said_a[name], rtol=1e-4, err_msg=name)
        for name in one:
            scale = float(jnp.abs(one[name]).max())
            np.testing.assert_allclose(many[name], one[name], atol=2e-4 * scale + 1e-9, err_msg=name)
        next_one, _ = jax.jit(learn.update, static_argnums=2)(state, some, config)
        shared = jax.jit(lambda s, b, split=split: learn.update(s, b, config, split=split))
        next_many, _ = shared(state, some)
        np.testing.assert_array_equal(next_one.alive, next_many.alive)
        images = jax.jit(learn.render_views, static_argnums=(3, 4))
        np.testing.assert_allclose(
            images(state.params, state.alive, some, config, split)[0],
            images(state.params, state.alive, some, config, None)[0],
            atol=2e-5,
        )


if __name__ == "__main__":
    main()
