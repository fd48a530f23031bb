"""Two further experiments of DARP: imitating a REPPO expert from one demonstration, and held-out likelihood on Push-T.

The expert is trained here by our own REPPO, rolled out once, and imitated; the whole loop runs on the device, and what moves episodes off the
demonstration is noise on the state that they start from. On Push-T each aggregator has one Gaussian and a mixture of Gaussians for a head, all
trained by the likelihood of the actions, scales included, and held against each other on trajectories that training never saw.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from papyrax.envs import classic, physics
from papyrax.envs import rollout as worlds
from papyrax.methods.control.darp import bc, features, heads, learner, network, policy, retrieval
from papyrax.methods.control.darp.config import BCConfig
from papyrax.methods.control.darp.config import Config as DarpConfig
from papyrax.methods.control.darp.demos import make_demos
from papyrax.methods.control.reppo import agent
from papyrax.methods.control.reppo.config import ReppoConfig
from papyrax.train.data import demonstrations
from papyrax.train.recipes.control.reppo_tasks import SWINGUP_AGENT
from papyrax.train.report import Number, Table
from papyrax.train.run import Run


@dataclasses.dataclass(frozen=True)
class SwingUp:
    """A REPPO expert, one demonstration of it, and imitators with noise on the start state."""

    env: str = "cartpole_swingup"
    expert_steps: int = 393_216
    expert: ReppoConfig = dataclasses.field(default_factory=lambda: SWINGUP_AGENT)
    darp: DarpConfig = dataclasses.field(
        default_factory=lambda: DarpConfig(k=100, lookback=5, decay=-0.5, ratio=0.5, width=64, epochs=60)
    )
    bc: BCConfig = dataclasses.field(default_factory=lambda: BCConfig(width=64, epochs=120))
    seeds: int = 3
    """Training seeds of both methods; 0 leaves this experiment out."""
    episodes: int = 32
    steps: int = 0
    """Steps of the demonstration and of every evaluated episode; 0 for the world's own length."""
    noise: float = 0.3
    """Standard deviation of normal noise on every number of the state that an evaluated episode starts from (m, rad, m/s, rad/s)."""


@dataclasses.dataclass(frozen=True)
class PushT:
    """Heads and aggregators by the likelihood of held-out actions; trajectories, neighbours and epochs are cut for CPUs."""

    trajectories: int = 40
    """Trajectories to learn from; 0 leaves this experiment out."""
    held_out: int = 20
    policy: DarpConfig = dataclasses.field(
        default_factory=lambda: DarpConfig(
            k=64, lookback=8, decay=-1.498, ratio=0.5, width=64, epochs=12, weight_decay=0.0, head="gmm"
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
            states = worlds.record(key, world, act, setting.steps or None)
            obs = jax.vmap(world.observe)(states)
            return obs[:-1], act(obs[:-1])

        obs, action = jax.jit(score)(jax.random.fold_in(run.key, 11))
        returns = jax.jit(lambda k: worlds.evaluate(k, world, act, setting.episodes, setting.steps or None))(
            jax.random.fold_in(run.key, 12)
        )
        return {"obs": obs, "act": action, "returns": returns}

    shown = run.once("swingup/demonstration", demonstrate)
    demos = make_demos(shown["obs"], shown["act"], [0])

    def closed_loop(choose, lookback):
        """Returns of disturbed episodes; `choose(hist, valid) -> action`."""

        def roll(key):
            key_start, key_noise = jax.random.split(key)
            state = jax.vmap(world.reset)(jax.random.split(key_start, setting.episodes))
            state = disturbed(key_noise, state, setting.noise)
            obs = jax.vmap(world.observe)(state)
            history = policy.history_push(policy.history_init(setting.episodes, world.obs_dim, lookback), obs)

            def one(carry, _):
                state, history, total, alive = carry
                action = choose(history.states, history.valid)
                state, out = jax.vmap(world.step)(state, jnp.clip(action, -1, 1))
                total = total + jnp.where(alive, out.reward, 0.0)
                return (state, policy.history_push(history, out.next_obs), total, alive & ~out.done), None

            start = (state, history, jnp.zeros(setting.episodes), jnp.ones(setting.episodes, bool))
            return jax.lax.scan(one, start, None, setting.steps or world.episode_length)[0][2]

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
    moved = run.once("swingup/returns/expert", lambda: closed_loop(lambda hist, valid: act(hist[:, -1]), 1))
    note = (
        f"the expert returns {expert_return:.0f}, and {float(np.mean(moved)):.0f} from the disturbed starts; {setting.seeds} training seeds, one "
        f"demonstration of {demos.obs.shape[0]} steps, {setting.episodes} episodes with noise of {setting.noise:g} on every number of the start "
        f"state; epochs: DARP {setting.darp.epochs}, BC {setting.bc.epochs}; last weights"
    )
    ours, theirs = float(np.mean(means["DARP"])), float(np.mean(means["BC"]))
    spread = float(np.std(means["DARP"], ddof=1)) if setting.seeds > 1 else None
    number = Number(
        "imitating our REPPO expert: return, mean of seeds",
        ours,
        theirs,
        target=">= baseline",
        met=ours >= theirs,
        spread=spread,
        note=note,
    )
    return [number], Table(
        f"One demonstration of a REPPO expert on {setting.env}", ["seed", "DARP", "BC"], rows, note=note
    )


def disturbed(key: Any, state: Any, noise: float) -> Any:
    """The states of `cartpole_swingup` with normal noise on every number.

    Raises ValueError for states of another world, whose numbers may not be free to move.
    """
    if not isinstance(state, classic.CartPole):
        raise ValueError(f"swingup.env gives states of {type(state).__name__}, wanted cartpole_swingup, a CartPole.")
    names = [f.name for f in dataclasses.fields(state)]
    return state.replace(
        **{
            name: getattr(state, name) + noise * jax.random.normal(k, getattr(state, name).shape)
            for name, k in zip(names, jax.random.split(key, len(names)))
        }
    )


def _choose_darp(ready, cfg, hist, valid):
    return policy.act_ready(ready, hist, valid, None, cfg)


def _choose_bc(params, scalers, hist, valid):
    return bc.act(params, scalers, hist[:, -1])


def push_t(run: Run, setting: PushT) -> tuple[list[Number], Table]:
    """Mean log density (nats) of standardised held-out actions, for the mean and the set aggregator, with one Gaussian and with a mixture."""
    file = run.data("darp") / "push_t_parsed.pkl"
    both = demonstrations.load(file, limit=setting.trajectories + setting.held_out)
    cut = int(both.start[setting.trajectories])
    train = make_demos(both.obs[:cut], both.act[:cut], both.start[: setting.trajectories])
    rest = make_demos(both.obs[cut:], both.act[cut:], both.start[setting.trajectories :] - cut)
    sizes = {"mean": {}, "set": {"set_dim": 60, "set_heads": 3, "set_inducing": 12}}

    def score(cfg, params, memory):
        hist, valid = _histories(rest, cfg.lookback)

        @jax.jit
        def density(memory, hist, valid, act):
            idx = retrieval.retrieve(memory.demos, memory.scalers, hist, valid, **retrieval.search_of(cfg))
            out = network.apply(params, features.features(memory.demos, memory.scalers, idx, hist[:, -1], cfg), cfg)
            return heads.mixture_log_prob(heads.mixture(out, cfg.modes), memory.scalers.act(act))

        blocks = [slice(i, i + 256) for i in range(0, len(hist), 256)]
        each = [np.asarray(density(memory, hist[b], valid[b], rest.act[b])) for b in blocks]
        return float(np.concatenate(each).mean())

    note = (
        f"{setting.trajectories} of 206 trajectories ({train.obs.shape[0]} rows) to learn from, {rest.obs.shape[0]} actions of "
        f"{setting.held_out} others held out, one training seed, {setting.policy.kept(train.obs.shape[0])} neighbours (paper 1725), "
        f"{setting.policy.epochs} epochs (paper 293), width {setting.policy.width} (paper 256); every head trained by its likelihood, scales included"
    )
    numbers, rows = [], []
    for aggregator, more in sizes.items():
        found = []
        for modes in (1, setting.modes):
            cfg = dataclasses.replace(setting.policy, head="gmm", modes=modes, aggregator=aggregator, **more)
            name = f"push_t/{aggregator}/{modes}"
            params, memory = _imitate(run, name, learner, cfg, train, 0)
            found.append(
                run.once(f"push_t/score/{aggregator}/{modes}", lambda c=cfg, p=params, m=memory: score(c, p, m))
            )
        numbers.append(
            Number(
                f"Push-T, {aggregator} aggregator: held-out log density of {setting.modes} Gaussians",
                found[1],
                found[0],
                unit="nats",
                target="> baseline",
                met=found[1] > found[0],
                note=f"baseline: one Gaussian; {note}",
            )
        )
        rows.append([aggregator, *found])
    columns = ["aggregator", "one Gaussian", f"{setting.modes} Gaussians"]
    return numbers, Table("Push-T, mean log density (nats) of held-out actions", columns, rows, note=note)


def _histories(demos: Any, lookback: int) -> tuple[np.ndarray, np.ndarray]:
    """The last states before and at every row, within its trajectory."""
    obs, start = np.asarray(demos.obs), np.asarray(demos.start)
    n = len(obs)
    first = start[np.searchsorted(start, np.arange(n), side="right") - 1]
    valid = np.minimum(np.arange(n) - first + 1, lookback).astype(np.int32)
    rows = np.arange(n)[:, None] + np.arange(-lookback + 1, 1)[None]
    return obs[np.maximum(rows, first[:, None])], valid
