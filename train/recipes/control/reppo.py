"""REPPO (arXiv 2507.11019) on four torque-limited pendulums beside PPO and its own ablations, and on other tasks by name.

Each arm trains all its seeds in one fit. PPO is tuned over learning rates and rollout shapes, and its best setting is the baseline.
The maximum of the pendulums is computed by dynamic programming, so that returns are read against what can be reached at all.
"""

from __future__ import annotations

import dataclasses
import resource
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from papyrax.envs import draw, physics
from papyrax.envs import rollout as worlds
from papyrax.envs.pendulums import optimal_return
from papyrax.methods.control.reppo import agent, losses, ppo
from papyrax.methods.control.reppo.config import ReppoConfig
from papyrax.methods.control.reppo.ppo import PpoConfig
from papyrax.methods.metrics.intervals import iqm
from papyrax.train import figures
from papyrax.train.compile import Target
from papyrax.train.loop import Fit
from papyrax.train.recipes.control import spread
from papyrax.train.recipes.control.reppo_bench import bench, speed
from papyrax.train.report import Number, Report, Table
from papyrax.train.run import Run

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
    "reliability",
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
class Task:
    """A further comparison of REPPO and PPO: the world's name, environment steps, both agents, and the bounds set before any run."""

    env: str
    env_steps: int
    agent: ReppoConfig
    ppo: PpoConfig
    maximum: float
    reppo_target: float = 0.0
    ppo_target: float = 0.0
    read: Literal["last", "best"] = "last"


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
    evaluations: int = 12
    eval_episodes: int = 64
    agent: ReppoConfig = dataclasses.field(default_factory=lambda: PENDULUM_AGENT)
    ppo: PpoConfig = dataclasses.field(default_factory=lambda: PENDULUM_PPO)
    ppo_rates: tuple[float, ...] = (3e-4, 1e-3)
    ppo_envs: tuple[int, ...] = (64, 256)
    """PPO is trained with every pair of `ppo_rates` and `ppo_envs` for `ablation_steps`; the best goes on to `env_steps` and is the baseline."""
    tasks: tuple[Task, ...] = ()


PENDULUM_AGENT = ReppoConfig(
    num_envs=64,
    steps=32,
    epochs=8,
    minibatches=8,
    gamma=0.97,
    lam=0.95,
    hidden_actor=64,
    hidden_critic=64,
    bins=101,
    vmin=0.0,
    vmax=40.0,
    value_samples=4,
    kl_samples=16,
    lr=1e-3,
    multiplier_lr=1e-2,
    alpha0=0.01,
    beta0=0.3,
)
PENDULUM_PPO = PpoConfig(
    num_envs=64, steps=32, epochs=8, minibatches=8, gamma=0.97, hidden=64, lr=1e-3, entropy=3e-3, reward_scale=0.3
)

_SMALL = dataclasses.replace
_CARTPOLE = _SMALL(PENDULUM_AGENT, num_envs=256, minibatches=16, epochs=4, gamma=0.99, bins=151, vmax=150.0)
_TASKS = (
    Task(
        "playground:CartpoleBalance",
        737_280,
        _CARTPOLE,
        _SMALL(PENDULUM_PPO, num_envs=256, minibatches=16, epochs=4, gamma=0.99, reward_scale=0.1),
        1000.0,
        800.0,
        950.0,
    ),
    Task("pendulums:1", 198_656, PENDULUM_AGENT, PENDULUM_PPO, 186.6, 168.0, 168.0),
    Task(
        "gymnax:CartPole-v1",
        299_008,
        _SMALL(
            PENDULUM_AGENT,
            num_envs=128,
            epochs=4,
            multiplier_lr=3e-3,
            alpha0=0.1,
            kl_bound=0.03,
            gamma=0.98,
            bins=151,
            vmax=60.0,
            aux_weight=0.0,
        ),
        _SMALL(PENDULUM_PPO, num_envs=128, epochs=4, gamma=0.98, reward_scale=0.1),
        500.0,
        475.0,
        500.0,
        "best",
    ),
    Task(
        "double_integrator",
        147_456,
        _SMALL(PENDULUM_AGENT, vmin=-40.0, vmax=10.0),
        PENDULUM_PPO,
        -5.1,
    ),
    Task(
        "cartpole_swingup",
        393_216,
        _SMALL(_CARTPOLE, num_envs=64, minibatches=8, epochs=8, gamma=0.99),
        PENDULUM_PPO,
        880.0,
    ),
    Task(
        "brax:inverted_pendulum",
        294_912,
        _SMALL(_CARTPOLE, num_envs=64, minibatches=8, epochs=8, reward_scale=1.0),
        _SMALL(PENDULUM_PPO, gamma=0.99, reward_scale=0.1),
        1000.0,
    ),
)

PRESETS: dict[str, Config] = {
    "smoke": Config(
        seeds=2,
        env_steps=1024,
        ablation_steps=512,
        evaluations=2,
        eval_episodes=4,
        agent=_SMALL(
            PENDULUM_AGENT,
            num_envs=16,
            steps=16,
            epochs=1,
            minibatches=2,
            hidden_actor=16,
            hidden_critic=16,
            kl_samples=2,
        ),
        ppo=_SMALL(PENDULUM_PPO, num_envs=16, steps=16, epochs=1, minibatches=2, hidden=16),
        ppo_rates=(1e-3,),
        ppo_envs=(16,),
    ),
    "cpu": Config(),
    "study": Config(ablations=tuple(ABLATIONS), tasks=_TASKS),
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


def _train(run: Run, name: str, module: Any, config: Any, world: Any, settings: Config, env_steps: int) -> Fit:
    """One arm: every seed of one algorithm on one world."""
    per_iteration = config.num_envs * config.steps
    iterations = max(1, env_steps // per_iteration)
    every = max(1, max(env_steps, settings.env_steps) // per_iteration // settings.evaluations)
    keys = jax.random.split(jax.random.fold_in(run.key, 0), settings.seeds)
    state = spread.start(module, config, world, run.mesh, keys)
    starts = jax.random.split(jax.random.fold_in(run.key, 1), settings.seeds)

    play = jax.jit(spread.evaluator(module, config, run.mesh, state, settings.seeds, settings.eval_episodes))

    def returns(state):
        # the mean over episodes is taken on the devices: what comes back is whole on every process
        return jax.jit(lambda x: x.mean(-1), out_shardings=NamedSharding(run.mesh, PartitionSpec()))(
            play(starts, state)
        )

    return run.fit(
        spread.many(module, config, run.mesh, state, settings.seeds),
        state,
        name=name,
        steps=iterations,
        config=config,
        evaluate=lambda state: {"return": returns(state)},
        eval_every=every,
        shard=spread.shard(run.mesh, settings.seeds),
        show="episode_return",
    )


def _curve(fit: Fit, config: Any) -> tuple[np.ndarray, np.ndarray]:
    """(environment steps, returns [seeds, evaluations])."""
    return fit.evals["step"] * config.num_envs * config.steps, np.atleast_2d(fit.evals["return"].T)


def _at(fit: Fit, config: Any, env_steps: int) -> np.ndarray:
    """Returns of the seeds at the evaluation nearest to so many steps."""
    steps, returns = _curve(fit, config)
    return returns[:, int(np.argmin(np.abs(steps - env_steps)))]


def reliability(returns: np.ndarray, maximum: float, share: float = 0.9) -> float:
    """Share of seeds that reach `share` of the maximum and never fall below it at a later evaluation."""
    above = returns >= share * maximum
    kept = [bool(row.any() and row[int(np.argmax(row)) :].all()) for row in above]
    return float(np.mean(kept))


def _episode(run: Run, fit: Fit, config: ReppoConfig, world: Any) -> None:
    """A film of the trained agent, and the same episode as pictures of observations and actions."""
    state = jax.tree.map(lambda x: x[0], fit.state)

    def policy(obs):
        return agent.act(state.params["actor"], state.obs, obs, config, discrete=world.discrete)

    states = jax.jit(lambda key: worlds.record(key, world, policy))(jax.random.fold_in(run.key, 2))
    seen = np.asarray(jax.vmap(world.observe)(states))
    acts = np.asarray(policy(jax.vmap(world.observe)(states))).reshape(len(seen), -1)
    with figures.style():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(8, 4), layout="constrained")
        top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
        image = top.imshow(seen.T, aspect="auto", cmap="coolwarm", vmin=-np.abs(seen).max(), vmax=np.abs(seen).max())
        figure.colorbar(image, ax=top)
        top.set_ylabel("observation")
        top.grid(False)
        bottom.plot(acts, linewidth=0.8)
        bottom.set(xlabel="step", ylabel="action")
    run.figure(
        figure,
        "episode",
        "One episode: observations and actions",
        f"The first seed's deterministic policy on {world.name}.",
    )
    if world.draw is not None:
        every = max(1, len(seen) // 100)
        host = jax.tree.map(np.asarray, states)
        run.film(
            draw.film(world, host, every=every),
            "film",
            "The trained agent",
            f"The same episode, every {every} steps.",
            fps=20,
        )


def _traces(run: Run, fit: Fit, config: ReppoConfig, world: Any) -> Table:
    """KL against its bound, share above it, entropy against its target, the multipliers: figure and table."""
    metrics = fit.metrics
    x = metrics["step"] * config.num_envs * config.steps
    actions = world.n_actions if world.discrete else world.act_dim
    target = losses.target_entropy(config, actions, discrete=world.discrete)
    panels = (
        ("kl", "KL estimate", config.kl_bound),
        ("kl_over", "share above the bound", None),
        ("entropy", "entropy", target),
        ("alpha", "temperature alpha", None),
        ("beta", "KL weight beta", None),
        ("critic_loss", "critic loss", None),
    )
    panels = tuple(p for p in panels if p[0] in metrics)
    with figures.style():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(10, 5), layout="constrained")
        for ax, (name, label, line) in zip(figure.subplots(2, 3).ravel(), panels):
            y = np.atleast_2d(metrics[name].T)
            for row in y:
                ax.plot(x, row, linewidth=0.7, color=figures.COLORS[0], alpha=0.6)
            if line is not None:
                ax.axhline(line, color="#555555", linestyle="--", linewidth=1)
            if name in ("alpha", "beta"):
                ax.set_yscale("log")
            ax.set(title=label, xlabel="environment steps")
    run.figure(
        figure,
        "traces",
        "Bound, target and multipliers",
        "Each line a seed; dashed: the KL bound and the entropy target.",
    )
    rows = []
    for share in (0.1, 0.25, 0.5, 0.75, 1.0):
        i = min(len(x) - 1, max(0, round(share * len(x)) - 1))
        window = slice(max(0, i - 4), i + 1)
        rows.append([int(x[i]), *[float(np.mean(metrics[name][window])) for name, _, _ in panels]])
    return Table("Traces (means over seeds and five iterations)", ["environment steps", *[p[1] for p in panels]], rows)


def _maximum(env: str) -> float | None:
    return float(optimal_return()) if env.startswith("pendulums") else None


def cpu_devices(config: Config, cores: int) -> int:
    """Virtual devices for the seeds, on a CPU."""
    return spread.cpu_devices(config.seeds, cores)


def check(config: Config) -> None:
    """Raises ValueError for an unknown world or ablation, ImportError when the world's package is absent."""
    for name in config.ablations:
        if name not in ABLATIONS:
            raise ValueError(f"ablations holds {name!r}, wanted names of {', '.join(ABLATIONS)}")
    for env in (config.env, *(task.env for task in config.tasks)):
        physics.make(env)


def run(config: Config, run: Run) -> Report:
    """Trains all arms, then compares."""
    world = physics.make(config.env)
    main = config.env == "pendulums:4"
    maximum = run.once("maximum", lambda: _maximum(config.env))
    ours = _train(run, "reppo", agent, config.agent, world, config, config.env_steps)
    tuned: dict[tuple[float, int], tuple[Fit, PpoConfig]] = {}
    for rate in config.ppo_rates:
        for envs in config.ppo_envs:
            setting = dataclasses.replace(config.ppo, lr=rate, num_envs=envs)
            fit = _train(run, f"ppo/lr{rate:g}/envs{envs}", ppo, setting, world, config, config.ablation_steps)
            tuned[rate, envs] = (fit, setting)
    best = max(tuned, key=lambda k: _at(*tuned[k], config.ablation_steps).mean())
    best_setting = tuned[best][1]
    best_fit = _train(run, f"ppo/lr{best[0]:g}/envs{best[1]}", ppo, best_setting, world, config, config.env_steps)
    theirs = _at(best_fit, best_setting, config.env_steps)
    ablations = {}
    for name in config.ablations:
        changed = dataclasses.replace(config.agent, **ABLATIONS[name])
        ablations[name] = (
            _train(run, f"ablation/{name}", agent, changed, world, config, config.ablation_steps),
            changed,
        )

    final = _at(ours, config.agent, config.env_steps)
    half = _at(ours, config.agent, config.ablation_steps)
    returns = _curve(ours, config.agent)[1]
    split = run.once("speed", lambda: speed(world, config.agent, run.key) if not world.discrete else {})
    trained = config.seeds * config.env_steps / max(ours.seconds, 1e-9) if ours.resumed_from is None else None
    rate = run.once("training_rate", lambda: trained)
    memory = run.once("memory", lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20)

    on = f"{config.env}, {config.env_steps:,} steps, {config.seeds} seeds"
    numbers = [
        Number(
            "return, worst seed",
            float(final.min()),
            float(theirs.min()),
            target=">= 168" if main else "",
            note=f"{on}; maximum {maximum:.1f}" if maximum else on,
        ),
        Number("return, mean of seeds", float(final.mean()), float(theirs.mean()), spread=float(final.std())),
        Number(
            "PPO return, best of its settings",
            float(theirs.mean()),
            target="<= 140" if main else "",
            spread=float(theirs.std()),
            note=f"learning rate {best[0]:g}, {best[1]} environments, of {len(tuned)} settings at {config.ablation_steps:,} steps",
        ),
        Number(
            "interquartile mean of the last half of the evaluations",
            float(iqm(jnp.asarray(returns[:, returns.shape[1] // 2 :].ravel()))),
        ),
        Number("environment steps a second, all seeds, updates included", rate, unit="1/s"),
        Number("peak memory", float(memory), unit="GiB", target="<= 4"),
    ]
    if split:
        numbers += [
            Number("environment steps a second, one seed, updates included", float(split["steps_per_s"]), unit="1/s"),
            Number("share of the time in the rollout", float(split["rollout_share"])),
        ]
    if maximum:
        numbers.insert(
            3, Number("reliability (stays above 90 % of the maximum once there)", reliability(returns, maximum))
        )
    if "no_kl" in ablations:
        fit, changed = ablations["no_kl"]
        value = float(_at(fit, changed, config.ablation_steps).mean())
        numbers.insert(
            3,
            Number(
                "drop without the KL bound",
                1 - value / float(half.mean()),
                target=">= 0.25" if main else "",
                note=f"return {value:.1f} against {half.mean():.1f} at {config.ablation_steps:,} steps",
            ),
        )

    arms = [["REPPO", *_cells(half), *_cells(final)]]
    arms += [
        [
            f"PPO, lr {r:g}, {n} environments",
            *_cells(_at(*tuned[r, n], config.ablation_steps)),
            *(_cells(theirs) if (r, n) == best else [None, None]),
        ]
        for r, n in tuned
    ]
    arms += [[f"REPPO, {n}", *_cells(_at(f, c, config.ablation_steps)), None, None] for n, (f, c) in ablations.items()]
    tables = [
        Table(
            f"Arms on {config.env}",
            ["arm", f"mean at {config.ablation_steps:,}", "seeds", f"mean at {config.env_steps:,}", "seeds "],
            arms,
            note="Deterministic policy on fresh starts.",
        ),
        _traces(run, ours, config.agent, world),
    ]
    series = {"REPPO": (ours, config.agent), f"PPO (best of {len(tuned)})": (best_fit, best_setting)}
    series |= {f"REPPO, {n}": v for n, v in ablations.items()}
    run.figure(
        figures.curves(
            {k: _curve(*v)[0] for k, v in series.items()},
            {k: _curve(*v)[1] for k, v in series.items()},
            xlabel="environment steps",
            ylabel="return",
            title=config.env,
            band="range",
            lines={"maximum (dynamic programming)": maximum} if maximum else None,
        ),
        "learning",
        "Learning curves",
        "Mean over seeds; the band spans all seeds.",
    )
    _episode(run, ours, config.agent, world)
    if config.tasks:
        more, table = _suite(run, config)
        numbers += more
        tables.append(table)

    ahead = final.mean() > theirs.mean()
    met = [n for n in numbers if n.target]
    missed = [n.name for n in met if not n.reached]
    verdict = (
        f"On {config.env} REPPO ends at {final.mean():.1f} and the best of {len(tuned)} PPO settings at {theirs.mean():.1f}: "
        f"{'REPPO is ahead' if ahead else 'PPO is ahead'}."
    )
    if main:
        verdict += " Every bound set before the run is met." if not missed else f" Missed: {'; '.join(missed)}."
    return Report(
        claim="A policy improved through the gradient of Q, kept inside a KL bound, learns faster and more reliably than PPO on equal data.",
        shown=bool(ahead and not missed) if main else bool(ahead),
        verdict=verdict,
        numbers=numbers,
        tables=tables,
        figures=(),
        notes=(
            "The mean-squared-error critic and the missing auxiliary loss make no difference on this task; no claim is made for either here."
            if {"mse", "no_aux"} <= set(ablations)
            else "Ablations of the critic, the auxiliary loss and the estimators are in the study preset.",
        ),
    )


def _cells(values: np.ndarray) -> list[Any]:
    return [float(values.mean()), " ".join(f"{v:.4g}" for v in values)]


def _suite(run: Run, config: Config) -> tuple[list[Number], Table]:
    """REPPO beside PPO on further tasks, and who is ahead on each."""
    numbers, rows = [], []
    for task in config.tasks:
        world = physics.make(task.env)
        found = {}
        for label, module, settings in (("reppo", agent, task.agent), ("ppo", ppo, task.ppo)):
            fit = _train(run, f"task/{task.env}/{label}", module, settings, world, config, task.env_steps)
            curve = _curve(fit, settings)[1]
            found[label] = curve.max(1) if task.read == "best" else curve[:, -1]
        ours, theirs = found["reppo"], found["ppo"]
        ahead = "REPPO" if ours.mean() > theirs.mean() else "PPO"
        if abs(ours.mean() - theirs.mean()) <= 0.01 * abs(task.maximum):
            ahead = "level"
        rows.append([task.env, f"{task.env_steps:,}", *_cells(ours), *_cells(theirs), task.maximum, ahead])
        which = f"{task.env}, {task.env_steps:,} steps, {task.read} evaluation, mean of {config.seeds} seeds"
        if task.reppo_target:
            numbers.append(
                Number(
                    f"REPPO on {task.env}",
                    float(ours.mean()),
                    float(theirs.mean()),
                    target=f">= {task.reppo_target:g}",
                    note=which,
                )
            )
        if task.ppo_target:
            numbers.append(
                Number(f"PPO on {task.env}", float(theirs.mean()), target=f">= {task.ppo_target:g}", note=which)
            )
    columns = ["task", "steps", "REPPO", "seeds", "PPO", "seeds ", "maximum", "ahead"]
    note = "No win is claimed on these: with small rollouts and short budgets PPO is a strong baseline."
    return numbers, Table("Other tasks", columns, rows, note)


def mesh_shape(config: Config, devices: int) -> dict[str, int]:
    """Environments over all devices."""
    return {"data": devices}


def compile_targets(config: Config, mesh: jax.sharding.Mesh) -> list[Target]:
    """One training iteration and one evaluation at the preset's scale, environments over `data`; every device keeps at least one environment,
    so a mesh larger than `num_envs` raises the number of environments to one a device."""
    devices = mesh.shape["data"]
    count = -(-config.agent.num_envs // devices) * devices
    settings = dataclasses.replace(config.agent, num_envs=count)
    world = physics.make(config.env)
    state = jax.eval_shape(
        lambda: jax.vmap(lambda k: agent.init(k, settings, world))(jax.random.split(jax.random.key(0), config.seeds))
    )
    shard = spread.shard(mesh, config.seeds)
    from papyrax.train.sharding import shardings

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
