"""Policies in closed loop: how DARP, clones and replayers act on a host world, and episodes kept in the run folder."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from papyrax.envs.gymnasium_host import host_rollout
from papyrax.methods.control.darp import bc, learner, policy
from papyrax.methods.control.darp.config import BCConfig
from papyrax.methods.control.darp.config import Config as DarpConfig
from papyrax.methods.control.darp.demos import Demos, Scalers, fit_scalers
from papyrax.train.run import Run

if TYPE_CHECKING:
    from papyrax.train.recipes.control.darp import Config

FILES = {
    "hopper": ("hopper-expert-v2_1.pkl", "Hopper-v4"),
    "walker": ("walker2d-expert-v2_1.pkl", "Walker2d-v4"),
    "halfcheetah": ("halfcheetah-expert-v2_2.pkl", "HalfCheetah-v4"),
    "ant": ("ant-expert-v2-clean_2.pkl", "Ant-v4"),
}
"""Demonstrations and the world of each task."""

_act = jax.jit(
    lambda ready, hist, valid, key, step, cfg: policy.act_ready(ready, hist, valid, jax.random.fold_in(key, step), cfg),
    static_argnames="cfg",
)
_bc_act = jax.jit(bc.act)
Policy = Callable[[np.ndarray, np.ndarray, int], np.ndarray]


def darp_policy(params: Any, memory: learner.Memory, cfg: DarpConfig) -> Policy:
    """The trained policy as `host_rollout` calls it."""
    ready = policy.prepare(params, memory.demos, memory.scalers, cfg)
    key = jax.random.key(0)
    return lambda hist, valid, step: np.asarray(_act(ready, hist, valid, key, step, cfg=cfg))


def bc_policy(params: Any, scalers: Scalers) -> Policy:
    """A clone as `host_rollout` calls it."""
    return lambda hist, valid, step: np.asarray(_bc_act(params, scalers, hist[:, -1]))


def replayed(fn: Callable[..., Any], demos: Demos, cfg: DarpConfig) -> Policy:
    """A baseline that reads its action off the expert rows, as `host_rollout` calls it."""
    scalers = fit_scalers(demos)
    call = jax.jit(lambda hist, valid: fn(demos, scalers, hist, valid, cfg))
    return lambda hist, valid, step: np.asarray(call(hist, valid))


@dataclasses.dataclass(frozen=True)
class Trained:
    """A training seed: returns of its last weights and of its selected checkpoint, both on the scored seeds, and how it was selected."""

    last: np.ndarray
    selected: np.ndarray
    selection: float
    epoch: int
    curve: np.ndarray
    loss: float
    params: Any


class Arena:
    """Closed-loop episodes of one task, kept in the run folder."""

    def __init__(self, run: Run, config: Config):
        self._run, self._config, self.env = run, config, FILES[config.task][1]

    def returns(self, name: str, act: Policy, seeds: range, history: int) -> np.ndarray:
        """Return of each seed's episode."""

        def roll():
            episodes = host_rollout(self.env, act, seeds, max_steps=self._config.max_steps, history=history)
            return episodes.returns

        return np.asarray(self._run.once(f"returns/{name}", roll))

    def score(self, name: str, act: Policy, history: int) -> np.ndarray:
        """On the scored seeds 0…."""
        return self.returns(f"{name}/score", act, range(self._config.rollouts), history)

    def train(
        self,
        name: str,
        update: Any,
        state: Any,
        cfg: DarpConfig | BCConfig,
        memory: Any,
        seed: int,
        act_of: Callable[[Any], Policy],
        history: int,
    ) -> Trained:
        """One training seed of one method: its epochs, its checkpoints rolled out, its last and its selected weights scored."""
        n = memory.demos.obs.shape[0]
        per_epoch = learner.epoch_steps(n, cfg.batch)
        steps = cfg.epochs * per_epoch
        every = max(1, -(-cfg.epochs // self._config.selections)) * per_epoch

        def evaluate(state):
            step = int(state.step)
            act = act_of(state.params)
            if step >= steps:
                self.score(f"{name}/last", act, history)
            chosen = self.returns(f"{name}/{step}", act, range(1000, 1000 + self._config.selection_rollouts), history)
            return {"return": chosen.mean()}

        fit = self._run.fit(
            update,
            state,
            lambda step: learner.batch_rows(seed, step, n, cfg.batch),
            name=name,
            steps=steps,
            config=cfg,
            frozen=memory,
            evaluate=evaluate,
            eval_every=every,
            select="best:return",
            scan=per_epoch,
            log_every=per_epoch,
            show="loss",
        )
        last = np.asarray(self._run.once(f"returns/{name}/last/score", lambda: np.zeros(0)))
        selected = self.score(f"{name}/selected", act_of(fit.state.params), history)
        return Trained(
            last,
            selected,
            float(fit.evals["return"].max()),
            fit.best_step // per_epoch,
            fit.evals["return"],
            float(fit.metrics["loss"][-5:].mean()),
            fit.state.params,
        )


def best(arms: list[Trained]) -> Trained:
    """The training seed with the greatest return on the selection rollouts."""
    return max(arms, key=lambda t: t.selection)
