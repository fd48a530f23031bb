"""REPPO (arXiv 2507.11019) on four torque-limited pendulums beside PPO and its own ablations, and on other tasks by name.

Each arm trains all its seeds in one fit. PPO is tuned over learning rates and rollout shapes, and its best setting is the baseline.
The maximum of the pendulums is computed by dynamic programming, so that returns are read against what can be reached at all.
"""

from __future__ import annotations

import dataclasses
import resource
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from papyrax.envs import physics
from papyrax.envs.protocol import World
from papyrax.methods.control.reppo import agent, ppo
from papyrax.methods.control.reppo.config import ReppoConfig
from papyrax.methods.control.reppo.ppo import PpoConfig
from papyrax.methods.metrics.intervals import iqm
from papyrax.train.compile import Target
from papyrax.train.recipes.control import reppo_figures, spread
from papyrax.train.recipes.control.reppo_arms import (
    Arm,
    Plan,
    cells,
    fitted,
    iterations,
    probe,
    reliability,
    train,
    train_agent,
)
from papyrax.train.recipes.control.reppo_bench import bench
from papyrax.train.recipes.control.reppo_tasks import (
    PENDULUM_AGENT,
    PENDULUM_PPO,
    TASKS,
    Task,
    pendulum_maximum,
    suite,
)
from papyrax.train.report import Number, Report, Table
from papyrax.train.run import Run
from papyrax.train.sharding import shardings

DATA: tuple[str, ...] = ()
__all__ = [
    "ABLATIONS",
    "DATA",
    "PRESETS",
    "Config",
    "Task",
    "bench",
    "check",
    "compile_targets",
    "cpu_devices",
    "mesh_shape",
    "run",
]

ABLATIONS: dict[str, dict[str, Any]] = {
    "no_kl": {"mode": "value"},
    "penalty": {"mode": "full"},
    "mse": {"critic": "mse"},
    "no_aux": {"aux_weight": 0.0},
    "no_norm": {"norm": "none"},
    "score_q": {"policy": "score_q"},
    "score_gae": {"policy": "score_gae"},
}
"""What each ablation changes in the agent."""


@dataclasses.dataclass(frozen=True)
class Config:
    """A comparison on one world (`--config.env brax:inverted_pendulum` takes any other), and further tasks."""

    seed: int = 0
    env: str = "pendulums:4"
    """A name that papyrax.envs.physics.make takes: pendulums:K, double_integrator, cartpole_swingup, brax:…, playground:…, gymnax:…."""
    seeds: int = 3
    env_steps: int = 589_824
    """Environment steps of REPPO and of PPO, each."""
    ablations: tuple[str, ...] = ("no_kl",)
    """Names of ABLATIONS, trained for `ablation_steps`."""
    ablation_steps: int = 294_912
    """At most `env_steps` count."""
    evaluations: int = 12
    eval_episodes: int = 64
    agent: ReppoConfig = PENDULUM_AGENT
    ppo: PpoConfig = PENDULUM_PPO
    ppo_rates: tuple[float, ...] = (3e-4, 1e-3)
    ppo_envs: tuple[int, ...] = (64, 256)
    """PPO is trained with every pair of `ppo_rates` and `ppo_envs` for `ablation_steps`; the best goes on to `env_steps` and is the baseline."""
    tasks: tuple[Task, ...] = ()

    def __post_init__(self):
        for name in ("seeds", "env_steps", "ablation_steps", "evaluations", "eval_episodes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, but is {getattr(self, name)}.")
        for name in self.ablations:
            if name not in ABLATIONS:
                raise ValueError(f"ablations holds {name!r}, wanted names of {', '.join(ABLATIONS)}.")
        for name in ("ppo_rates", "ppo_envs"):
            values = getattr(self, name)
            if not values or not all(value > 0 for value in values):
                raise ValueError(f"{name} must hold numbers above 0, at least one, but is {values}.")
        for name in ("ablations", "ppo_rates", "ppo_envs", "tasks"):
            values = [v.env if isinstance(v, Task) else v for v in getattr(self, name)]
            twice = next((v for v in values if values.count(v) > 1), None)
            if twice is not None:
                raise ValueError(f"{name} holds {twice!r} twice.")

    def ppo_settings(self) -> dict[tuple[float, int], PpoConfig]:
        """The settings among which PPO is tuned, by learning rate and number of environments."""
        return {
            (rate, envs): dataclasses.replace(self.ppo, lr=rate, num_envs=envs)
            for rate in self.ppo_rates
            for envs in self.ppo_envs
        }


PRESETS: dict[str, Config] = {
    "smoke": Config(
        seeds=2,
        env_steps=1024,
        ablation_steps=512,
        evaluations=2,
        eval_episodes=4,
        agent=dataclasses.replace(
            PENDULUM_AGENT,
            num_envs=16,
            steps=16,
            epochs=1,
            minibatches=2,
            hidden_actor=16,
            hidden_critic=16,
            kl_samples=2,
        ),
        ppo=dataclasses.replace(PENDULUM_PPO, num_envs=16, steps=16, epochs=1, minibatches=2, hidden=16),
        ppo_rates=(1e-3,),
        ppo_envs=(16,),
    ),
    "cpu": Config(),
    "study": Config(ablations=tuple(ABLATIONS), tasks=TASKS),
    "paper": Config(
        env="playground:HumanoidRun",
        seeds=1,
        env_steps=50_331_648,
        ablation_steps=50_331_648,
        evaluations=24,
        eval_episodes=128,
        agent=ReppoConfig(),
        ppo=PpoConfig(num_envs=1024, steps=128, minibatches=64),
        ppo_rates=(3e-4,),
        ppo_envs=(1024,),
    ),
}


def cpu_devices(config: Config, cores: int) -> int:
    """Virtual devices for the seeds, on a CPU."""
    return spread.cpu_devices(config.seeds, cores)


def check(config: Config) -> None:
    """Raises ValueError for an unknown world and for settings that do not fit their world, ImportError when the world's package
    is absent."""
    arms: list[tuple[str, str, Any, Any]] = [(config.env, "agent", agent, config.agent)]
    arms += [
        (config.env, f"ablations, {name!r}", agent, dataclasses.replace(config.agent, **ABLATIONS[name]))
        for name in config.ablations
    ]
    arms += [(config.env, "ppo", ppo, setting) for setting in config.ppo_settings().values()]
    for task in config.tasks:
        arms += [(task.env, "tasks, agent", agent, task.agent), (task.env, "tasks, ppo", ppo, task.ppo)]
    states: dict[str, Any] = {}
    for env, label, module, settings in arms:
        world = physics.make(env)
        if env not in states:
            states[env] = jax.eval_shape(world.reset, jax.random.key(0))
        probe(label, module, fitted(settings, world) if module is agent else settings, world, states[env])


def _tune(run: Run, config: Config, world: World, plan: Plan, half: int) -> tuple[dict[tuple[float, int], Arm], Any]:
    """PPO with every setting for `half` steps; the best one has gone on to `env_steps`. Returns all arms and the best one's key."""
    names = {key: f"ppo/lr{key[0]:g}/envs{key[1]}" for key in config.ppo_settings()}
    tuned = {
        key: train(run, names[key], ppo, setting, world, plan, half) for key, setting in config.ppo_settings().items()
    }
    best = max(tuned, key=lambda key: tuned[key].at(half).mean())
    setting = tuned[best].config
    if iterations(setting, config.env_steps) > iterations(setting, half):
        tuned[best] = train(run, names[best], ppo, setting, world, plan, config.env_steps)
    return tuned, best


def run(config: Config, run: Run) -> Report:
    """Trains all arms, then compares."""
    begun: list[bool] = []
    run.once("begun", lambda: begun.append(True) or time.time())
    world = physics.make(config.env)
    main = config.env == "pendulums:4"
    maximum = pendulum_maximum(run, config.env)
    plan = Plan(config.seeds, config.env_steps, config.evaluations, config.eval_episodes)
    half_steps = min(config.ablation_steps, config.env_steps)

    ours = train_agent(run, "reppo", config.agent, world, plan, config.env_steps)
    tuned, best = _tune(run, config, world, plan, half_steps)
    theirs = tuned[best]
    ablations = {
        name: train_agent(
            run,
            f"ablation/{name}",
            dataclasses.replace(config.agent, **ABLATIONS[name]),
            world,
            plan,
            half_steps,
        )
        for name in config.ablations
    }

    numbers = _numbers(config, ours, theirs, ablations, half_steps, maximum, main=main)
    numbers += _cost(run, ours, config.seeds)
    tables = [
        _arms(config, ours, tuned, best, ablations, half_steps),
        reppo_figures.traces(run, ours, world),
    ]
    series = {"REPPO": ours, f"PPO (best of {len(tuned)})": theirs}
    series |= {f"REPPO, {name}": arm for name, arm in ablations.items()}
    reppo_figures.learning(run, series, config.env, maximum)
    reppo_figures.episode(run, ours, world)
    if config.tasks:
        more, table = suite(run, config.tasks, config.seeds)
        numbers += more
        tables.append(table)
    numbers.append(_wall(run, config, whole=bool(begun)))
    return _report(config, ours, theirs, len(tuned), ablations, half_steps, maximum, numbers, tables, main=main)


def _numbers(
    config: Config,
    ours: Arm,
    theirs: Arm,
    ablations: dict[str, Arm],
    half_steps: int,
    maximum: float | None,
    *,
    main: bool,
) -> list[Number]:
    """Returns, reliability, what the bound brings, and whether the critic's range held the targets."""
    final, half, other = ours.at(config.env_steps), ours.at(half_steps), theirs.at(config.env_steps)
    on = f"{config.env}, {config.env_steps:,} steps, {config.seeds} seeds"
    numbers = [
        Number(
            "return, worst seed",
            float(final.min()),
            float(other.min()),
            target=">= 168" if main else "",
            note=f"{on}; maximum {maximum:.1f}" if maximum else on,
        ),
        Number(
            "return, mean of seeds",
            float(final.mean()),
            float(other.mean()),
            spread=float(final.std()),
            note="spread: standard deviation over seeds",
        ),
        Number(
            "PPO return, best of its settings",
            float(other.mean()),
            target="<= 140" if main else "",
            spread=float(other.std()),
            note=(
                f"learning rate {theirs.config.lr:g}, {theirs.config.num_envs} environments, of "
                f"{len(config.ppo_settings())} settings at {half_steps:,} steps"
            ),
        ),
    ]
    if "no_kl" in ablations:
        value = float(ablations["no_kl"].at(half_steps).mean())
        numbers.append(
            Number(
                "drop without the KL bound",
                (float(half.mean()) - value) / max(abs(float(half.mean())), 1e-9),
                target=">= 0.25" if main else "",
                note=f"return {value:.1f} against {half.mean():.1f} at {half_steps:,} steps",
            )
        )
    if maximum:
        numbers.append(
            Number(
                "reliability (stays above 90 % of the maximum once there)",
                reliability(ours.returns, maximum),
                reliability(theirs.returns, maximum),
                note="share of seeds",
            )
        )
    numbers.append(Number("interquartile mean of the last half of the evaluations", _late_iqm(ours), _late_iqm(theirs)))
    if ours.config.critic == "hl_gauss":
        outside = ours.fit.metrics["target_outside"]
        share = float(np.mean(outside[-max(1, len(outside) // 4) :]))
        c = ours.config
        note = "" if main else f"vmin {c.vmin:g}, vmax {c.vmax:g}, gamma {c.gamma:g}, reward scale {c.reward_scale:g}"
        if share > 0.05:
            advice = (
                "the critic can't learn these: widen config.agent.vmin and config.agent.vmax, or lower "
                "config.agent.reward-scale or config.agent.gamma"
            )
            note = f"{note}; {advice}" if note else advice
        numbers.append(Number("share of targets outside [vmin, vmax], last quarter of the training", share, note=note))
    return numbers


def _late_iqm(arm: Arm) -> float:
    returns = arm.returns
    return float(iqm(jnp.asarray(returns[:, returns.shape[1] // 2 :].ravel())))


def _cost(run: Run, ours: Arm, seeds: int) -> list[Number]:
    """Speed and memory, measured once a run; `papyrax bench reppo` splits the time into rollout and update."""
    trained = run.once("training_rate", lambda: float(seeds * ours.steps[-1] / max(ours.fit.seconds, 1e-9)))
    memory = run.once("memory", lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20)
    return [
        Number(
            "environment steps a second, all seeds, updates included",
            float(trained),
            unit="1/s",
            note="evaluations included, compilation left out",
        ),
        Number("peak memory", float(memory), unit="GiB", target="<= 4"),
    ]


def _wall(run: Run, config: Config, *, whole: bool) -> Number:
    """Seconds since this process opened the run; `whole` says that no earlier process had begun it."""
    seconds = run.once("wall", lambda: run.wall_seconds() if whole else None)
    own = dataclasses.replace(config, seed=0) == PRESETS["cpu"]
    note = "compilation included" if seconds is not None else "the run was interrupted and went on in another process"
    return Number(
        "wall time of the whole run",
        None if seconds is None else float(seconds),
        unit="s",
        target="<= 360" if own else "",
        note=f"{note}; the bound is for two idle cores" if own else note,
    )


def _arms(
    config: Config,
    ours: Arm,
    tuned: dict[tuple[float, int], Arm],
    best: tuple[float, int],
    ablations: dict[str, Arm],
    half_steps: int,
) -> Table:
    rows = [["REPPO", *cells(ours.at(half_steps)), *cells(ours.at(config.env_steps))]]
    for key, arm in tuned.items():
        last = cells(arm.at(config.env_steps)) if key == best else [None, None]
        rows.append([f"PPO, lr {key[0]:g}, {key[1]} environments", *cells(arm.at(half_steps)), *last])
    rows += [[f"REPPO, {name}", *cells(arm.at(half_steps)), None, None] for name, arm in ablations.items()]
    columns = ["arm", f"mean at {half_steps:,}", "seeds", f"mean at {config.env_steps:,}", "seeds "]
    return Table(f"Arms on {config.env}", columns, rows, note="Deterministic policy on fresh starts.")


def _differences(config: Config, ours: Arm, ablations: dict[str, Arm], half_steps: int) -> str:
    """What the critic's loss and the auxiliary loss change, beside the spread over seeds."""
    half = ours.at(half_steps)
    labels = {"mse": "with the mean-squared-error critic", "no_aux": "without the auxiliary loss"}
    told = [
        f"{abs(change):.3g} {'lower' if change < 0 else 'higher'} {label}"
        for name, label in labels.items()
        if name in ablations
        for change in [float(ablations[name].at(half_steps).mean() - half.mean())]
    ]
    if not told:
        return "Ablations of the critic, the auxiliary loss and the estimators are in the study preset."
    return (
        f"On {config.env} at {half_steps:,} steps the mean return is {' and '.join(told)}; the standard deviation over "
        f"the {config.seeds} seeds of REPPO is {half.std():.3g}."
    )


def _report(
    config: Config,
    ours: Arm,
    theirs: Arm,
    settings: int,
    ablations: dict[str, Arm],
    half_steps: int,
    maximum: float | None,
    numbers: list[Number],
    tables: list[Table],
    *,
    main: bool,
) -> Report:
    final, other = ours.at(config.env_steps).mean(), theirs.at(config.env_steps).mean()
    ahead = bool(final > other)
    verdict = (
        f"On {config.env} REPPO ends at {final:.1f} and the best of {settings} PPO settings at {other:.1f}: "
        f"{'REPPO is ahead' if ahead else 'PPO is ahead'}."
    )
    steady = True
    if maximum:
        a, b = (reliability(arm.returns, maximum) for arm in (ours, theirs))
        steady = a >= b
        verdict += f" {a:.0%} of REPPO's seeds reach 90 % of the maximum and stay there, and {b:.0%} of PPO's."
    missed = [n.name for n in numbers if n.reached is False]
    if main:
        verdict += " Every bound set before the run is met." if not missed else f" Missed: {'; '.join(missed)}."
    return Report(
        claim="A policy improved through the gradient of Q, kept inside a KL bound, learns faster and more reliably than PPO on equal data.",
        shown=ahead and steady and not (main and missed),
        verdict=verdict,
        numbers=numbers,
        tables=tables,
        figures=(),
        notes=(_differences(config, ours, ablations, half_steps),),
    )


def mesh_shape(config: Config, devices: int) -> dict[str, int]:
    """Environments over all devices."""
    return {"data": devices}


def compile_targets(config: Config, mesh: jax.sharding.Mesh) -> list[Target]:
    """One training iteration and one evaluation at the preset's scale, environments over `data`; every device keeps at least one environment,
    so a mesh larger than `num_envs` raises the number of environments to one a device."""
    devices = mesh.shape["data"]
    count = -(-config.agent.num_envs // devices) * devices
    world = physics.make(config.env)
    settings = dataclasses.replace(fitted(config.agent, world), num_envs=count)
    state = jax.eval_shape(
        lambda: jax.vmap(lambda k: agent.init(k, settings, world))(jax.random.split(jax.random.key(0), config.seeds))
    )
    shard = spread.shard(mesh, config.seeds)
    placed = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), state, shardings(state, shard.state, mesh)
    )
    update = spread.many(agent, settings, mesh, state, config.seeds)
    whole = NamedSharding(mesh, PartitionSpec())
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), config.seeds))

    evaluation = spread.evaluator(agent, settings, mesh, state, config.seeds, config.eval_episodes)
    return [
        Target(
            f"train iteration ({config.env}, {count} environments)",
            lambda s: update(s, None, settings),
            (placed,),
            donate=(0,),
        ),
        Target("evaluation", evaluation, (jax.ShapeDtypeStruct(keys.shape, keys.dtype, sharding=whole), placed)),
    ]
