"""Two training steps of GEER on one device and spread over this process' devices: views over two, Gaussians over the others."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from papyrax.methods.geometry.cameras import beap_camera
from papyrax.methods.rendering.core.mcmc import McmcConfig
from papyrax.methods.rendering.geer import learn
from papyrax.methods.rendering.geer.render import RenderConfig


def main(out: str) -> None:
    """Both ways, 32 Gaussians, two views, one densification."""
    rng = np.random.default_rng(0)
    points = jnp.asarray(rng.uniform(-1, 1, (30, 3)) + [0, 0, 3], jnp.float32)
    colors = jnp.asarray(rng.uniform(size=(30, 3)), jnp.float32)
    config = learn.Config(
        cap=32, sh_degree=1, sh_every=1, horizon=10, mcmc=McmcConfig(start=1, stop=9, every=2, noise_lr=1.0, grow=100),
        render=RenderConfig(tile=8, cap=32, pairs=1000, cutoff="opacity", ray_side="half", near=0.05),
    )  # fmt: skip
    cameras = [beap_camera((1.0, 0.8), 0.05, t=jnp.asarray([0.2 * i, 0, 0])) for i in range(2)]
    w, h = cameras[0].wh
    batch = {
        "camera": jax.tree.map(lambda *a: jnp.stack(a), *cameras),
        "image": jnp.asarray(rng.uniform(size=(2, h, w, 3)), jnp.float32),
    }
    mesh = Mesh(np.asarray(jax.devices()).reshape(2, -1), ("data", "fsdp"))
    result = {"devices": np.asarray(len(jax.devices()))}
    for kind, over in (("one", None), ("shared", mesh)):
        step = jax.jit(lambda s, b, over=over: learn.update(s, b, config, mesh=over))
        state = learn.init(jax.random.key(0), config, points, colors, jnp.full(30, 0.3))
        for _ in range(2):
            state, metrics = step(state, batch)
        result |= {f"{kind}.{k}": np.asarray(v) for k, v in {**state.params, **metrics, "alive": state.alive}.items()}
    np.savez(out, **result)


if __name__ == "__main__":
    main(sys.argv[1])
