"""REPPO's speed: our PPO beside Brax's, REPPO with rollout and update apart, several seeds in one program."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from papyrax.envs import physics
from papyrax.envs import rollout as worlds
from papyrax.methods.control.reppo import agent, ppo
from papyrax.methods.control.reppo.config import ReppoConfig
from papyrax.methods.control.reppo.ppo import PpoConfig
from papyrax.train.bench import Bench, BenchTable
from papyrax.train.recipes.control import spread
from papyrax.train.sharding import make_mesh, place_global, shardings

_ITERATIONS = 2
"""Training iterations a timed call of PPO."""


def bench(config: Any, bench: Bench) -> list[BenchTable]:
    """Three tables: PPO beside Brax, REPPO over sizes, seeds vmapped."""
    small = config.agent.num_envs < 64
    sizes = (16, 32, 64) if small else (64, 256, 1024)
    world = physics.make(config.env)
    return [
        _brax(bench, config.ppo, sizes),
        _sizes(world, config.agent, sizes, jax.random.key(config.seed)),
        _seeds(bench, world, config.agent),
    ]


def _brax(bench: Bench, config: PpoConfig, sizes: tuple[int, ...]) -> BenchTable:
    """Environment steps a second of PPO, updates included, on an environment that costs next to nothing."""
    from brax import envs

    world = physics.from_functional("brax:fast", envs.get_environment("fast"), episode_length=1000)
    shared = dataclasses.replace(config, norm="none", minibatches=min(config.minibatches, sizes[0]))

    def ours(size: int) -> Callable[[], Any]:
        now = dataclasses.replace(shared, num_envs=size)
        update = warm(lambda state: ppo.update(state, None, now), ppo.init(jax.random.key(0), now, world))

        def call():
            for _ in range(_ITERATIONS):
                metrics = update()
            steps = np.int64(size * now.steps * _ITERATIONS)
            return {"env_steps": steps, "finite": np.isfinite(float(metrics["policy_loss"]))}

        return call

    def inputs(size: int) -> dict[str, int]:
        return {
            "steps": shared.steps,
            "hidden": shared.hidden,
            "layers": shared.layers,
            "minibatches": shared.minibatches,
            "epochs": shared.epochs,
            "episode": world.episode_length,
            "iterations": _ITERATIONS,
        }

    table = bench.compare(
        "PPO, rollouts and updates",
        ours,
        bench.process("control", "brax_ppo").on(inputs),
        sizes,
        repeats=5,
        warm=2,
        same=lambda a, b: bool(a["env_steps"] == b["env_steps"] and a["finite"] and b["finite"]),
        peer_name="Brax PPO",
        unit="environments",
        note=(
            f"brax:fast, {_ITERATIONS} iterations a call of {shared.steps} steps, {shared.minibatches} minibatches and "
            f"{shared.epochs} epochs, {shared.layers} layers of {shared.hidden} in both networks"
        ),
    )
    steps = [size * shared.steps * _ITERATIONS for size in sizes]
    rows = [[*row, n / row[1], n / row[2]] for row, n in zip(table.rows, steps)]
    return dataclasses.replace(table, columns=(*table.columns, "ours (steps/s)", "Brax (steps/s)"), rows=rows)


def _sizes(world: Any, config: ReppoConfig, sizes: tuple[int, ...], key: Any) -> BenchTable:
    """REPPO over numbers of environments, minibatches of one size."""
    rows, batch = [], config.num_envs * config.steps // config.minibatches
    for size in sizes:
        now = dataclasses.replace(config, num_envs=size, minibatches=max(1, size * config.steps // batch))
        split = speed(world, now, key, repeats=5)
        rows.append([size, split["steps_per_s"], split["rollout_steps_per_s"], split["rollout_share"]])
    return BenchTable(
        "REPPO, rollouts and updates",
        ["environments", "steps/s", "steps/s of the rollout alone", "share of the rollout"],
        rows,
        f"{world.name}, {config.steps} steps, minibatches of {batch}, {config.epochs} epochs, width "
        f"{config.hidden_critic}, {config.value_samples} value samples, {config.kl_samples} KL samples; medians of 5",
        f"{rows[0][1]:.0f} environment steps a second with updates at {sizes[0]} environments",
    )


def _seeds(bench: Bench, world: Any, config: ReppoConfig, counts: tuple[int, ...] = (1, 2, 4)) -> BenchTable:
    """An iteration of several seeds in one program, put on this machine's devices as the experiment puts them."""
    rows: list[list[float]] = []
    for count in counts:
        mesh = make_mesh(jax.devices()[: spread.cpu_devices(count, len(jax.devices()))])
        keys = jax.random.split(jax.random.key(0), count)
        state = jax.jit(jax.vmap(lambda key: agent.init(key, config, world)))(keys)
        state = place_global(state, shardings(state, spread.shard(mesh, count).state, mesh))
        update = spread.many(agent, config, mesh, state, count)
        call = warm(lambda one, update=update: update(one, None, config), state)
        timing = bench.measure(call, repeats=5, warm=1)
        first = rows[0][2:4] if rows else (timing.seconds, timing.cpu_seconds)
        rows.append(
            [
                count,
                mesh.size,
                timing.seconds,
                timing.cpu_seconds,
                timing.seconds / first[0],
                timing.cpu_seconds / first[1],
            ]
        )
    return BenchTable(
        "REPPO, seeds in one program",
        ["seeds", "devices", "wall (s)", "CPU (s)", "wall, times one seed", "CPU, times one seed"],
        rows,
        f"{world.name}, one iteration of {config.num_envs} environments a seed; medians of 5",
        f"{counts[-1]} seeds take {rows[-1][4]:.2f} times the time of one",
    )


def warm(update: Callable[[Any], tuple[Any, Any]], state: Any) -> Callable[[], Any]:
    """The compiled update as a call that goes on from where the last one ended and returns its metrics."""
    compiled = jax.jit(update).lower(state).compile()
    held = [state]

    def call():
        held[0], metrics = compiled(held[0])
        return metrics

    return call


def speed(world: Any, config: ReppoConfig, key: Any, repeats: int = 7) -> dict[str, float]:
    """Environment steps a second of one seed, updates included, and how an iteration's time splits into rollout and
    update.
    """
    state = jax.jit(lambda key: agent.init(key, config, world))(key)
    whole = jax.jit(functools.partial(agent.update, config=config)).lower(state, None).compile()

    def only_rollout(state):
        return worlds.rollout(state.key, agent.behaviour(state, config), state.envs, config.steps)

    part = jax.jit(only_rollout).lower(state).compile()
    state, _ = jax.block_until_ready(whole(state, None))
    jax.block_until_ready(part(state))
    times: dict[str, list[float]] = {"whole": [], "rollout": []}
    for _ in range(repeats):
        for name, call in (("whole", lambda: whole(state, None)), ("rollout", lambda: part(state))):
            begun = time.perf_counter()
            jax.block_until_ready(call())
            times[name].append(time.perf_counter() - begun)
    total, rolled = float(np.median(times["whole"])), float(np.median(times["rollout"]))
    count = config.num_envs * config.steps
    return {"steps_per_s": count / total, "rollout_share": rolled / total, "rollout_steps_per_s": count / rolled}
