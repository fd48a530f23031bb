"""Universal Beta Splatting at the paper's scale: the step and the view that are compiled ahead of time."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from papyrax.methods.geometry.cameras import Camera
from papyrax.methods.rendering.universal_beta_splatting import learn
from papyrax.train.compile import Target
from papyrax.train.recipes.rendering.universal_beta_splatting_arms import Config, placement
from papyrax.train.sharding import shardings


def mesh_shape(config: Config, devices: int) -> dict[str, int]:
    """Half of the devices' exponents to views, half to primitives and tiles."""
    data = 1 << (max(devices.bit_length() - 1, 0) // 2)
    return {"data": data, "fsdp": devices // data}


def compile_targets(config: Config, mesh: Mesh) -> list[Target]:
    """One training step (a view for each device along `data`) with densification, and one full view, at the preset's scale."""
    batch, (w, h) = mesh.shape["data"], config.wh
    split, shard = placement(mesh, batch)
    model = dataclasses.replace(
        config.model, dims=6, render=dataclasses.replace(config.model.render, implementation="auto")
    )
    parts = int(np.prod(list(mesh.shape.values())))
    model = dataclasses.replace(model, cap=-(-model.cap // parts) * parts)

    def fresh():
        points = jnp.zeros((config.points, 3))
        return learn.init(jax.random.key(0), model, points, points, jnp.ones(config.points))

    def place(tree: Any, target: Any) -> Any:
        return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, target)

    state = jax.eval_shape(fresh)
    state = place(state, shardings(state, shard.state, mesh))
    number = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)  # noqa: E731
    camera = Camera(number(batch, 4), number(batch, 3, 3), number(batch, 3), "pinhole", (w, h), 0.5)
    views = {"camera": camera, "image": number(batch, h, w, 3), "time": number(batch)}
    views = place(views, jax.tree.map(lambda _: NamedSharding(mesh, shard.batch), views))

    def step(state, batch):
        return learn.update(state, batch, model, split=split)

    def view(state, batch):
        return learn.render_views(state.params, state.alive, batch, model, split)

    name = f"{model.cap:,} primitives, {batch} views of {w}x{h}"
    return [
        Target(f"training step ({name})", step, (state, views), donate=(0,)),
        Target(f"render ({name})", view, (state, views)),
    ]
