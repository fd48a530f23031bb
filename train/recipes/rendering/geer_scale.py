"""GEER's step at the paper's scale, for ahead-of-time compilation: a million Gaussians, pictures of full resolution."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from papyrax.methods.geometry.cameras import beap_camera
from papyrax.methods.rendering.geer import learn
from papyrax.train import sharding
from papyrax.train.compile import Target
from papyrax.train.recipes.rendering.geer_arms import ARMS, ROWS, model_config


def mesh_shape(config, devices: int) -> dict[str, int]:
    """Views over `data`, rows of Gaussians over `fsdp`, as square as can be."""
    del config
    rows = 1
    while rows * rows * 4 <= devices and devices % (rows * 2) == 0:
        rows *= 2
    return {"data": devices // rows, "fsdp": rows}


def compile_targets(config, mesh: Mesh) -> list[Target]:
    """A training step of the method: one full-resolution BEAP view a group of devices, rows of Gaussians over the group."""
    cap = -(-config.cap // mesh.shape["fsdp"]) * mesh.shape["fsdp"]
    model = dataclasses.replace(model_config(config, ARMS["exact"], 1.0, config.steps), cap=cap)
    views = mesh.shape["data"]
    beap = beap_camera((math.pi, math.pi), config.step)
    points = jax.ShapeDtypeStruct((min(config.points, cap), 3), jnp.float32)
    gaps = jax.ShapeDtypeStruct(points.shape[:1], jnp.float32)
    state = jax.eval_shape(lambda k, x, s: learn.init(k, model, x, x, s), jax.random.key(0), points, gaps)
    placed = sharding.shardings(state, ROWS, mesh)
    state = jax.tree.map(lambda s, p: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=p), state, placed)
    spread = NamedSharding(mesh, PartitionSpec("data"))

    def many(shape, dtype=jnp.float32):
        return jax.ShapeDtypeStruct((views, *shape), dtype, sharding=spread)

    w, h = beap.wh
    batch = {
        "camera": jax.tree.map(lambda a: many(a.shape, a.dtype), beap),
        "image": many((h, w, 3)),
        "mask": many((h, w), jnp.bool_),
    }
    step = functools.partial(learn.update, mesh=mesh)
    what = f"{cap:,} Gaussians, {views} views of {w}x{h}"
    return [Target(f"training step ({what})", lambda s, b: step(s, b, model), (state, batch), donate=(0,))]
