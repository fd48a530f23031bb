"""REPPO's speed: our PPO beside Brax's, REPPO with rollout and update apart, several seeds in one program, and the time that REPPO
and PPO take to a return."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from papyrax.envs import pendulums, physics
from papyrax.envs import rollout as worlds
from papyrax.methods.control.reppo import agent, ppo
from papyrax.methods.control.reppo.config import ReppoConfig
from papyrax.methods.control.reppo.ppo import PpoConfig
from papyrax.train.bench import Bench, BenchTable
from papyrax.train.recipes.control import spread
from papyrax.train.recipes.control.reppo_tasks import PENDULUM_AGENT, PENDULUM_PPO
from papyrax.train.sharding import make_mesh, place_global, shardings

_ITERATIONS = 2
"""Training iterations a timed call of PPO."""


def bench(config: Any, bench: Bench) -> list[BenchTable]:
    """Four tables: PPO beside Brax, REPPO over sizes, seeds in one program, time to a return on one pendulum."""
    small = config.agent.num_envs < 64
    sizes = (16, 32, 64) if small else (64, 256, 1024)
    world = physics.make(config.env)
    return [
        _brax(bench, config.ppo, sizes),
        _sizes(world, config.agent, sizes, jax.random.key(config.seed)),
        _seeds(bench, world, config.agent),
        _reach(config.agent, config.ppo, 4) if small else _reach(PENDULUM_AGENT, PENDULUM_PPO, 100),
    ]


def _brax(bench: Bench, config: PpoConfig, sizes: tuple[int, ...]) -> BenchTable:
    """Environment steps a second of PPO, updates included, on an environment that costs next to nothing."""
    from brax import envs

    world = physics.from_functional("brax:fast", envs.get_environment("fast"), episode_length=1000)
    shared = dataclasses.replace(config, norm="none", minibatches=min(config.minibatches, sizes[0]))

    def ours(size: int) -> Callable[[], Any]:
        now = dataclasses.replace(shared, num_envs=size)
        state = ppo.init(jax.random.key(0), now, world)
        weights = {name: np.int64(sum(x.size for x in jax.tree.leaves(tree))) for name, tree in state.params.items()}
        update = warm(lambda state: ppo.update(state, None, now), state)

        def call():
            for _ in range(_ITERATIONS):
                metrics = update()
            return {
                "env_steps": np.int64(size * now.steps * _ITERATIONS),
                "updates": np.int64(now.epochs * now.minibatches * _ITERATIONS),
                "policy_params": weights["actor"],
                "value_params": weights["value"],
                "finite": np.isfinite(float(metrics["policy_loss"])),
            }

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
        same=_equal_work,
        peer_name="Brax PPO",
        unit="environments",
        note=(
            f"brax:fast, {_ITERATIONS} iterations a call of {shared.steps} steps, {shared.minibatches} minibatches and "
            f"{shared.epochs} epochs, {shared.layers} layers of {shared.hidden} in both networks; equal in both: environment "
            "steps, gradient steps, parameters of policy and value network, normalised observations, a tanh Gaussian, the norm "
            "of gradients clipped at 0.5; ours has no layer norm here, because Brax's PPO has none; not compared: what is "
            "learnt, as this world's reward does not depend on the action"
        ),
    )
    steps = [size * shared.steps * _ITERATIONS for size in sizes]
    rows = [[*row, n / row[1], n / row[2]] for row, n in zip(table.rows, steps)]
    return dataclasses.replace(table, columns=(*table.columns, "ours (steps/s)", "Brax (steps/s)"), rows=rows)


def _equal_work(ours: dict[str, Any], peer: dict[str, Any]) -> bool:
    counts = ("env_steps", "updates", "policy_params", "value_params")
    return all(int(ours[name]) == int(peer[name]) for name in counts) and bool(ours["finite"] and peer["finite"])


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
        f"{counts[-1]} seeds take {rows[-1][4]:.2f} times the wall time of one, and {rows[-1][5]:.2f} times its CPU time",
    )


def _reach(reppo: ReppoConfig, baseline: PpoConfig, iterations: int, seeds: int = 3) -> BenchTable:
    """Training time until the deterministic policy reaches 90 % of the maximum on one pendulum, for at most so many iterations."""
    world, goal = pendulums.pendulums(1), 168.0
    rows, said = [], []
    for name, module, config in (("REPPO", agent, reppo), ("PPO", ppo, baseline)):
        first = jax.jit(lambda key, module=module, config=config: module.init(key, config, world))
        state = first(jax.random.key(0))
        update = jax.jit(lambda s, module=module, config=config: module.update(s, None, config)).lower(state).compile()
        play = jax.jit(lambda key, s, module=module, config=config: module.evaluate(key, s, config, 64).mean())
        took: list[tuple[float, int]] = []
        for seed in range(seeds):
            state, seconds = jax.block_until_ready(first(jax.random.key(seed))), 0.0
            for i in range(1, iterations + 1):
                begun = time.perf_counter()
                state, _ = jax.block_until_ready(update(state))
                seconds += time.perf_counter() - begun
                if i % 4 == 0 and float(play(jax.random.key(99), state)) >= goal:
                    took.append((seconds, i * config.num_envs * config.steps))
                    break
        middle = [float(x) for x in np.median(took, axis=0)] if took else [None, None]
        rows.append([name, len(took), *middle])
        said.append(f"{name} {middle[0]:.1f} s" if took else f"{name} not at all")
    return BenchTable(
        f"Training time to a return of {goal:g} on one pendulum",
        ["algorithm", f"of {seeds} seeds got there", "training time (s)", "environment steps"],
        rows,
        f"one seed at a time, medians over the seeds that got there within {iterations} iterations; compilation and the "
        "evaluation after every fourth iteration left out",
        f"to {goal:g} on one pendulum: {', '.join(said)}",
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
