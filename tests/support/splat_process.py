"""Draws a Beta and a Gaussian scene on one device and on all of this process' devices; writes values and gradients."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from papyrax.methods.geometry.cameras import beap_camera, make_camera
from papyrax.methods.rendering.geer import learn as geer_learn
from papyrax.methods.rendering.geer import render as geer_render
from papyrax.methods.rendering.universal_beta_splatting import learn as ubs_learn
from papyrax.methods.rendering.universal_beta_splatting import render as ubs_render


def main(out: str) -> None:
    """Both systems, 64 primitives over the devices."""
    rng = np.random.default_rng(0)
    xyz = jnp.asarray(rng.uniform(-1, 1, (64, 3)) + [0, 0, 3], jnp.float32)
    colors, spacing = jnp.asarray(rng.uniform(size=(64, 3)), jnp.float32), jnp.full(64, 0.3)
    beta, alive = ubs_learn.init_params(jax.random.key(0), xyz, colors, spacing, 6, 64, init_query="wide")
    gauss, _ = geer_learn.init_params(xyz, colors, spacing, 64, 1)
    # Gaussians start as spheres, whose rotation has no gradient.
    gauss["log_scale"] = gauss["log_scale"] + jnp.asarray(0.3 * rng.normal(size=(64, 3)), jnp.float32)
    pinhole = make_camera("pinhole", (40, 36), jnp.asarray([36.0, 36, 20, 18]))
    beap = beap_camera((1.2, 1.0), 0.03)
    ubs_cfg = ubs_render.RenderConfig(tile=8, cap=64, pairs=4000)
    geer_cfg = geer_render.RenderConfig(tile=8, cap=64, pairs=4000)
    bg = jnp.full(3, 0.3)
    scenes = {
        "ubs": (
            beta,
            lambda p, a, axis: ubs_render.render(p, a, pinhole, None, bg, cfg=ubs_cfg, axis_name=axis)["rgb"],
        ),
        "geer": (gauss, lambda p, a, axis: geer_render.render(p, a, beap, bg, cfg=geer_cfg, axis_name=axis)["rgb"]),
    }
    mesh = Mesh(np.asarray(jax.devices()), ("fsdp",))
    rows, whole = PartitionSpec("fsdp"), PartitionSpec()
    result = {"devices": np.asarray(len(jax.devices()))}
    for name, (params, draw) in scenes.items():
        target = jnp.asarray(rng.uniform(size=jax.eval_shape(draw, params, alive, None).shape), jnp.float32)

        def one(params, alive, draw=draw, target=target):
            return ((draw(params, alive, None) - target) ** 2).mean()

        def shared(params, alive, draw=draw, target=target):
            def local(params, alive):
                return jax.lax.pmean(((draw(params, alive, "fsdp") - target) ** 2).mean(), "fsdp")

            specs = {"mesh": mesh, "in_specs": (rows, rows), "out_specs": whole, "check_vma": False}
            return jax.shard_map(local, **specs)(params, alive)

        for kind, f in (("one", one), ("shared", shared)):
            value, grad = jax.jit(jax.value_and_grad(f))(params, alive)
            result[f"{name}.{kind}.value"] = np.asarray(value)
            result |= {f"{name}.{kind}.{k}": np.asarray(v) for k, v in grad.items()}
    np.savez(out, **result)


if __name__ == "__main__":
    main(sys.argv[1])
