"""Two further experiments of DARP: imitating a REPPO expert from one demonstration, and held-out likelihood on Push-T.

The expert is trained here by our own REPPO, rolled out once, and imitated; the whole loop runs on the device. Push-T's actions have several modes,
so the mixture head is held against a single Gaussian by the likelihood of actions of trajectories that training never saw.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from papyrax.envs import physics
from papyrax.envs import rollout as worlds
from papyrax.methods.control.darp import bc, features, heads, learner, network, policy, retrieval
from papyrax.methods.control.darp.config import BCConfig
from papyrax.methods.control.darp.config import Config as DarpConfig
from papyrax.methods.control.darp.demos import make_demos
from papyrax.methods.control.reppo import agent
from papyrax.methods.control.reppo.config import ReppoConfig
from papyrax.train.data import demonstrations
from papyrax.train.report import Number, Table
from papyrax.train.run import Run

EXPERT = ReppoConfig(
    num_envs=64,
    steps=32,
    epochs=8,
    minibatches=8,
    lam=0.95,
    hidden_actor=64,
    hidden_critic=64,
    vmax=150.0,
    value_samples=4,
    lr=1e-3,
    multiplier_lr=1e-2,
    beta0=0.3,
)


@dataclasses.dataclass(frozen=True)
class SwingUp:
    """A REPPO expert, one demonstration of it, and imitators with noise on the start state."""

    env: str = "cartpole_swingup"
    expert_steps: int = 393_216
    expert: ReppoConfig = dataclasses.field(default_factory=lambda: EXPERT)
    darp: DarpConfig = dataclasses.field(
        default_factory=lambda: DarpConfig(k=100, lookback=5, decay=-0.5, ratio=0.5, width=64, epochs=60)
    )
    bc: BCConfig = dataclasses.field(default_factory=lambda: BCConfig(width=64, epochs=120))
    seeds: int = 3
    episodes: int = 32
    noise: float = 0.5
    """Standard deviation of noise on the actions of the first 20 of 1000 steps, which moves episodes off the demonstration."""


@dataclasses.dataclass(frozen=True)
class PushT:
    """The mixture head against a Gaussian of the mean head's residuals, on trajectories held out of the paper's file."""

    trajectories: int = 40
    held_out: int = 20
    policy: DarpConfig = dataclasses.field(
        default_factory=lambda: DarpConfig(
            k=64, lookback=8, decay=-1.498, ratio=0.5, width=64, epochs=12, weight_decay=0.0
        )
    )
    modes: int = 9


def _imitate(run: Run, name: str, module: Any, cfg: Any, demos: Any, seed: int) -> tuple[Any, Any]:
    memory = module.prepare(demos, cfg)
    n = demos.obs.shape[0]
    per_epoch = learner.epoch_steps(n, cfg.batch)
    fit = run.fit(
        module.update,
        module.init(jax.random.fold_in(run.key, 500 + seed), demos, cfg),
        lambda step: learner.batch_rows(seed, step, n, cfg.batch),
        name=name,
        steps=cfg.epochs * per_epoch,
        config=cfg,
        frozen=memory,
        scan=per_epoch,
        log_every=per_epoch,
        show="loss",
    )
    return fit.state.params, memory


def swingup(run: Run, setting: SwingUp) -> tuple[list[Number], Table]:
    """Expert, one demonstration, DARP and cloning over seeds; returns of fresh, disturbed episodes."""
    world = physics.make(setting.env)
    expert = setting.expert
    fit = run.fit(
        lambda s, b, c: agent.update(s, b, c),
        jax.jit(lambda k: agent.init(k, expert, world))(jax.random.fold_in(run.key, 10)),
        name="swingup/expert",
        steps=max(1, setting.expert_steps // (expert.num_envs * expert.steps)),
        config=expert,
        show="episode_return",
    )

    def act(obs):
        return agent.act(fit.state.params["actor"], fit.state.obs, obs, expert, discrete=False)

    def demonstrate():
        def score(key):
            states = worlds.record(key, world, act)
            obs = jax.vmap(world.observe)(states)
            return obs[:-1], act(obs[:-1])

        obs, action = jax.jit(score)(jax.random.fold_in(run.key, 11))
        returns = jax.jit(lambda k: worlds.evaluate(k, world, act, setting.episodes))(jax.random.fold_in(run.key, 12))
        return {"obs": obs, "act": action, "returns": returns}

    shown = run.once("swingup/demonstration", demonstrate)
    demos = make_demos(shown["obs"], shown["act"], [0])

    def closed_loop(choose, lookback):
        """Returns of disturbed episodes; `choose(hist, valid) -> action`."""

        def roll(key):
            key_start, key_noise = jax.random.split(key)
            state = jax.vmap(world.reset)(jax.random.split(key_start, setting.episodes))
            obs = jax.vmap(world.observe)(state)
            history = policy.history_push(policy.history_init(setting.episodes, world.obs_dim, lookback), obs)

            def one(carry, xs):
                state, history, total, alive = carry
                step, key = xs
                noise = setting.noise * jax.random.normal(key, (setting.episodes, world.act_dim))
                action = choose(history.states, history.valid) + jnp.where(step < 20, noise, 0.0)
                state, out = jax.vmap(world.step)(state, jnp.clip(action, -1, 1))
                total = total + jnp.where(alive, out.reward, 0.0)
                return (state, policy.history_push(history, out.next_obs), total, alive & ~out.done), None

            steps = jnp.arange(world.episode_length)
            start = (state, history, jnp.zeros(setting.episodes), jnp.ones(setting.episodes, bool))
            return jax.lax.scan(one, start, (steps, jax.random.split(key_noise, world.episode_length)))[0][2]

        return np.asarray(jax.jit(roll)(jax.random.fold_in(run.key, 13)))

    rows, means = [], {"DARP": [], "BC": []}
    for seed in range(setting.seeds):
        params, memory = _imitate(run, f"swingup/darp/{seed}", learner, setting.darp, demos, seed)
        ready = policy.prepare(params, memory.demos, memory.scalers, setting.darp)
        choose = functools.partial(_choose_darp, ready, setting.darp)
        ours = run.once(f"swingup/returns/darp/{seed}", lambda c=choose: closed_loop(c, setting.darp.lookback))
        params, memory = _imitate(run, f"swingup/bc/{seed}", bc, setting.bc, demos, seed)
        clone = functools.partial(_choose_bc, params, memory.scalers)
        theirs = run.once(f"swingup/returns/bc/{seed}", lambda c=clone: closed_loop(c, 1))
        means["DARP"].append(float(ours.mean()))
        means["BC"].append(float(theirs.mean()))
        rows.append([seed, means["DARP"][-1], means["BC"][-1]])
    expert_return = float(np.mean(shown["returns"]))
    note = f"expert {expert_return:.0f}; {setting.seeds} seeds, one demonstration of {demos.obs.shape[0]} steps, disturbed starts"
    ours, theirs = float(np.mean(means["DARP"])), float(np.mean(means["BC"]))
    number = Number(
        "imitating our REPPO expert: return", ours, theirs, target=">= baseline", met=ours >= theirs, note=note
    )
    return [number], Table(
        f"One demonstration of a REPPO expert on {setting.env}", ["seed", "DARP", "BC"], rows, note=note
    )


def _choose_darp(ready, cfg, hist, valid):
    return policy.act_ready(ready, hist, valid, None, cfg)


def _choose_bc(params, scalers, hist, valid):
    return bc.act(params, scalers, hist[:, -1])


def push_t(run: Run, setting: PushT) -> tuple[list[Number], Table]:
    """Mean log density (nats) of standardised held-out actions under the mixture head and under the mean head's Gaussian."""
    file = run.data("darp") / "push_t_parsed.pkl"
    both = demonstrations.load(file, limit=setting.trajectories + setting.held_out)
    cut = int(both.start[setting.trajectories])
    train = make_demos(both.obs[:cut], both.act[:cut], both.start[: setting.trajectories])
    rest = make_demos(both.obs[cut:], both.act[cut:], both.start[setting.trajectories :] - cut)
    point = setting.policy
    mixed = dataclasses.replace(
        point, head="gmm", modes=setting.modes, aggregator="set", set_dim=60, set_heads=3, set_inducing=12
    )

    def score(cfg, params, memory):
        scalers = memory.scalers
        hist, valid = _histories(rest, cfg.lookback)
        find = functools.partial(retrieval.retrieve, train, scalers, **retrieval.search_of(cfg))

        @jax.jit
        def outputs(hist, valid):
            idx = find(hist, valid)
            return network.apply(params, features.features(train, scalers, idx, hist[:, -1], cfg), cfg)

        out = np.concatenate(
            [np.asarray(outputs(hist[i : i + 256], valid[i : i + 256])) for i in range(0, len(hist), 256)]
        )
        u = np.asarray(scalers.act(rest.act))
        if cfg.head == "gmm":
            return float(jnp.mean(heads.mixture_log_prob(heads.mixture(jnp.asarray(out), cfg.modes), jnp.asarray(u))))
        # the mean head's own density: a Gaussian with the residual spread of the training rows
        fitted = np.asarray(
            jax.jit(lambda: network.apply_factored(params, train, scalers, memory.cache, train.obs, cfg))()
        )
        spread = (fitted - np.asarray(scalers.act(train.act))).std(0)
        return float(
            np.mean(np.sum(-0.5 * ((u - out) / spread) ** 2 - np.log(spread) - 0.5 * np.log(2 * np.pi), axis=1))
        )

    found = {}
    for name, cfg in (("mean", point), ("mixture", mixed)):
        params, memory = _imitate(run, f"push_t/{name}", learner, cfg, train, 0)
        found[name] = run.once(f"push_t/score/{name}", lambda c=cfg, p=params, m=memory: score(c, p, m))
    note = f"{setting.trajectories} trajectories to learn from, {rest.obs.shape[0]} actions held out"
    number = Number(
        "Push-T: held-out log density of the mixture head",
        found["mixture"],
        found["mean"],
        unit="nats",
        target="> baseline",
        met=found["mixture"] > found["mean"],
        note=note,
    )
    table = Table(
        "Push-T, held-out actions", ["head", "mean log density (nats)"], [[k, v] for k, v in found.items()], note=note
    )
    return [number], table


def _histories(demos: Any, lookback: int) -> tuple[np.ndarray, np.ndarray]:
    """The last states before and at every row, within its trajectory."""
    obs, start = np.asarray(demos.obs), np.asarray(demos.start)
    n = len(obs)
    first = start[np.searchsorted(start, np.arange(n), side="right") - 1]
    valid = np.minimum(np.arange(n) - first + 1, lookback).astype(np.int32)
    rows = np.arange(n)[:, None] + np.arange(-lookback + 1, 1)[None]
    return obs[np.maximum(rows, first[:, None])], valid
