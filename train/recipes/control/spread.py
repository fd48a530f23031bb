"""How learners whose worlds lie inside their State are put on a mesh: several seeds, and many environments, over the axis `data`.

When the seeds divide evenly they are dealt out, and devices never speak to each other. Else every device steps its own environments of
every seed, and gradients and statistics are merged. The seeds of one device run under `vmap`, on a CPU one after another: there a batched
small product is slower than the products one by one (`papyrax bench reppo` prints what seeds cost).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

from papyrax.methods.control.reppo import agent
from papyrax.train.loop import Shard


def cpu_devices(seeds: int, cores: int) -> int:
    """Virtual devices that a CPU of so many cores is best cut into: a divisor of the seeds, the one that keeps the cores busiest. Three seeds on
    two cores are three devices: the system shares the cores out among them."""
    cores = max(1, cores)
    divisors = [d for d in range(1, min(seeds, 4 * cores) + 1) if seeds % d == 0]
    return min(divisors, key=lambda d: (seeds / d * max(1.0, d / cores), d))


def layout(mesh: Mesh, seeds: int) -> str:
    """ "one" device, "seeds" dealt out, or "environments" of every seed cut."""
    data = mesh.shape["data"]
    return "one" if data == 1 else "seeds" if seeds % data == 0 else "environments"


def shard(mesh: Mesh, seeds: int) -> Shard:
    """Placement of a State with a leading axis of seeds."""
    return {
        "one": Shard(),
        "seeds": Shard(state=[("", PartitionSpec("data"))]),
        "environments": Shard(
            state=[("^envs/", PartitionSpec(None, "data")), ("^scaler/running", PartitionSpec(None, "data"))]
        ),
    }[layout(mesh, seeds)]


def _in_turn(mesh: Mesh, fn: Callable) -> Callable:
    if mesh.devices.flat[0].platform == "cpu":
        return lambda *args: jax.lax.map(lambda one: fn(*one), args)
    return jax.vmap(fn)


def start(module: Any, config: Any, world: Any, mesh: Mesh, keys: Any) -> Any:
    """A State for each key. It runs once, so on a CPU it is compiled with the least effort."""
    on_cpu = mesh.devices.flat[0].platform == "cpu"
    options = {"xla_backend_optimization_level": 0} if on_cpu else None
    return jax.jit(_in_turn(mesh, lambda key: module.init(key, config, world)), compiler_options=options)(keys)


def _specs(state: Any) -> Any:
    specs = agent.state_specs(state, "data")
    return jax.tree.map(lambda s: PartitionSpec(None, *s), specs, is_leaf=lambda s: isinstance(s, PartitionSpec))


def many(module: Any, config: Any, mesh: Mesh, state: Any, seeds: int) -> Callable:
    """`update(state, batch, config)` of all seeds; `module` has `update(state, None, config, axis_name=…)`."""
    update = functools.partial(module.update, config=config)
    each = _in_turn(mesh, lambda s: update(s, None))
    kind, along = layout(mesh, seeds), PartitionSpec("data")
    if kind == "one":
        return lambda state, batch, config: each(state)
    if kind == "seeds":
        dealt = jax.shard_map(each, mesh=mesh, in_specs=(along,), out_specs=(along, along), check_vma=False)
        return lambda state, batch, config: dealt(state)
    specs = _specs(state)
    merged = jax.shard_map(
        _in_turn(mesh, lambda s: update(s, None, axis_name="data")),
        mesh=mesh,
        in_specs=(specs,),
        out_specs=(specs, PartitionSpec()),
        check_vma=False,
    )
    return lambda state, batch, config: merged(state)


def evaluator(module: Any, config: Any, mesh: Mesh, state: Any, seeds: int, episodes: int) -> Callable:
    """`(keys[seeds], state) -> returns[seeds, episodes]`. Where environments are cut, each device plays its share (rounded up)."""
    each = _in_turn(mesh, lambda key, s: module.evaluate(key, s, config, episodes))
    kind, along = layout(mesh, seeds), PartitionSpec("data")
    if kind == "one":
        return each
    if kind == "seeds":
        return jax.shard_map(each, mesh=mesh, in_specs=(along, along), out_specs=along, check_vma=False)
    share = -(-episodes // mesh.shape["data"])

    def play(key, state):
        return module.evaluate(jax.random.fold_in(key, jax.lax.axis_index("data")), state, config, share)

    return jax.shard_map(
        _in_turn(mesh, play),
        mesh=mesh,
        in_specs=(PartitionSpec(), _specs(state)),
        out_specs=PartitionSpec(None, "data"),
        check_vma=False,
    )
