"""REPPO beside PPO on further tasks, each with the bounds that were set for it before any run."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from papyrax.envs import physics
from papyrax.envs.pendulums import optimal_return
from papyrax.methods.control.reppo import ppo
from papyrax.methods.control.reppo.config import ReppoConfig
from papyrax.methods.control.reppo.ppo import PpoConfig
from papyrax.train.recipes.control.reppo_arms import Plan, cells, train, train_agent
from papyrax.train.report import Number, Table
from papyrax.train.run import Run


@dataclasses.dataclass(frozen=True)
class Task:
    """A further comparison of REPPO and PPO.

    `maximum` is the return that the task allows, None for pendulums, where it is computed. A target of 0 is none. REPPO is read
    at its last evaluation or its best one; so is PPO, except that its target, with `ppo_steps`, counts its best evaluation by
    then.
    """

    env: str
    env_steps: int
    agent: ReppoConfig
    ppo: PpoConfig
    maximum: float | None = None
    reppo_target: float = 0.0
    ppo_target: float = 0.0
    ppo_steps: int = 0
    read: Literal["last", "best"] = "last"
    evaluations: int = 12
    episodes: int = 64

    def __post_init__(self):
        for name in ("env_steps", "evaluations", "episodes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} of the task {self.env} must be at least 1, but is {getattr(self, name)}.")


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

_vary = dataclasses.replace
_SLOW_AGENT = _vary(PENDULUM_AGENT, num_envs=256, minibatches=16, epochs=4, gamma=0.99, bins=151, vmax=150.0)
SWINGUP_AGENT = _vary(_SLOW_AGENT, num_envs=64, minibatches=8, epochs=8)
"""Also the expert whose demonstration DARP imitates."""
_SLOW_PPO = _vary(PENDULUM_PPO, num_envs=256, minibatches=16, epochs=4, gamma=0.99, reward_scale=0.1)


def _cheetah() -> Task:
    """CheetahRun at a budget that two cores train in minutes.

    Its contacts make it the slowest world here by far, so three seeds get fewer steps, evaluations and episodes than
    elsewhere; at this budget both agents are far from the end. The wider networks, the longer horizon and the slow
    multipliers are those that do better on it than the pendulums' settings. Its long run is `--preset paper
    --config.env playground:CheetahRun`.
    """
    shared: dict[str, Any] = {"num_envs": 128, "minibatches": 16, "gamma": 0.99}
    return Task(
        "playground:CheetahRun",
        196_608,
        _vary(
            PENDULUM_AGENT,
            **shared,
            hidden_actor=128,
            hidden_critic=128,
            bins=151,
            vmax=100.0,
            lr=5e-4,
            multiplier_lr=1e-3,
        ),
        _vary(PENDULUM_PPO, **shared, hidden=128, reward_scale=0.1),
        930.0,
        evaluations=4,
        episodes=32,
    )


TASKS: tuple[Task, ...] = (
    Task(
        "playground:CartpoleBalance",
        737_280,
        _SLOW_AGENT,
        _SLOW_PPO,
        1000.0,
        reppo_target=800.0,
        ppo_target=950.0,
        ppo_steps=300_000,
    ),
    Task("pendulums:1", 198_656, PENDULUM_AGENT, PENDULUM_PPO, reppo_target=168.0, ppo_target=168.0),
    Task("pendulums:8", 393_216, PENDULUM_AGENT, PENDULUM_PPO),
    Task(
        "gymnax:CartPole-v1",
        299_008,
        _vary(
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
        _vary(PENDULUM_PPO, num_envs=128, epochs=4, gamma=0.98, reward_scale=0.1),
        500.0,
        reppo_target=475.0,
        ppo_target=500.0,
        read="best",
    ),
    Task("double_integrator", 147_456, _vary(PENDULUM_AGENT, vmin=-40.0, vmax=10.0), PENDULUM_PPO, -5.1),
    Task("cartpole_swingup", 393_216, SWINGUP_AGENT, PENDULUM_PPO, 880.0),
    Task(
        "brax:inverted_pendulum",
        294_912,
        SWINGUP_AGENT,
        _vary(PENDULUM_PPO, gamma=0.99, reward_scale=0.1),
        1000.0,
    ),
    Task("playground:CartpoleSwingup", 294_912, _SLOW_AGENT, _SLOW_PPO, 880.0),
    Task("playground:ReacherEasy", 294_912, _SLOW_AGENT, _SLOW_PPO, 975.0),
    _cheetah(),
)


def pendulum_maximum(run: Run, env: str) -> float | None:
    """The best possible return of a pendulum task, computed once a run; None for other tasks."""
    if not env.startswith("pendulums"):
        return None
    return float(run.once("maximum", lambda: float(optimal_return())))


def suite(run: Run, tasks: tuple[Task, ...], seeds: int) -> tuple[list[Number], Table]:
    """REPPO beside PPO on each task, and who is ahead."""
    numbers, rows = [], []
    for task in tasks:
        world = physics.make(task.env)
        plan = Plan(seeds, task.env_steps, task.evaluations, task.episodes)
        name = f"task/{task.env}"
        ours = train_agent(run, f"{name}/reppo", task.agent, world, plan, task.env_steps)
        theirs = train(run, f"{name}/ppo", ppo, task.ppo, world, plan, task.env_steps)
        maximum = task.maximum if task.maximum is not None else pendulum_maximum(run, task.env)
        a, b = (arm.by(task.env_steps) if task.read == "best" else arm.at(task.env_steps) for arm in (ours, theirs))
        ahead = "REPPO" if a.mean() > b.mean() else "PPO"
        if abs(a.mean() - b.mean()) <= 0.01 * abs(a.mean() if maximum is None else maximum):
            ahead = "level"
        rows.append([task.env, f"{task.env_steps:,}", *cells(a), *cells(b), maximum, ahead])
        which = f"{task.read} evaluation within {task.env_steps:,} steps, mean of {seeds} seeds"
        if task.reppo_target:
            numbers.append(
                Number(
                    f"REPPO on {task.env}",
                    float(a.mean()),
                    float(b.mean()),
                    target=f">= {task.reppo_target:g}",
                    note=which,
                )
            )
        if task.ppo_target:
            if task.ppo_steps:
                b, which = theirs.by(task.ppo_steps), f"best evaluation within {task.ppo_steps:,} steps"
            numbers.append(Number(f"PPO on {task.env}", float(b.mean()), target=f">= {task.ppo_target:g}", note=which))
    columns = ["task", "steps", "REPPO", "seeds", "PPO", "seeds ", "maximum", "ahead"]
    note = "No win is claimed on these: with small rollouts and short budgets PPO is a strong baseline."
    return numbers, Table("Other tasks", columns, rows, note)
