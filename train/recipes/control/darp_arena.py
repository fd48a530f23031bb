"""Policies in closed loop: how DARP, clones and replayers act on a host world, and episodes kept in the run folder."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from papyrax.envs.gymnasium_host import host_rollout
from papyrax.methods.control.darp import bc, learner, policy
from papyrax.methods.control.darp.config import BCConfig
from papyrax.methods.control.darp.config import Config as DarpConfig
from papyrax.methods.control.darp.demos import Demos, Scalers, fit_scalers, make_demos
from papyrax.train.data import demonstrations
from papyrax.train.errors import RunFolderError
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


def demonstrations_of(folder: Path, task: str, rows: int = 0) -> Demos:
    """The task's demonstrations from the folder of the data set, the first `rows` rows of them unless 0."""
    obs, act, start = demonstrations.load(folder / FILES[task][0])
    if rows:
        obs, act, start = obs[:rows], act[:rows], start[start < rows]
    return make_demos(obs, act, start)


@functools.partial(jax.jit, static_argnames=("loss", "cfg"))
def loss_of_all(loss: Callable[..., Any], params: Any, memory: Any, cfg: DarpConfig | BCConfig) -> jax.Array:
    """A method's own training loss over all expert rows, taken batch by batch."""
    n = memory.demos.obs.shape[0]
    rows = jnp.pad(jnp.arange(n), (0, -n % cfg.batch), constant_values=-1).reshape(-1, cfg.batch)
    sums = jax.lax.map(lambda batch: loss(params, memory, batch, cfg) * jnp.sum(batch >= 0), rows)
    return jnp.sum(sums) / n


@dataclasses.dataclass(frozen=True)
class Trained:
    """A training seed: its last weights and its selected checkpoint, the returns of both on the scored seeds, how the checkpoint was selected
    (`curve` over `epochs`), and the loss of the last weights over all rows."""

    last: np.ndarray
    last_params: Any
    loss: float
    selected: np.ndarray
    params: Any
    selection: float
    epoch: int
    epochs: np.ndarray
    curve: np.ndarray


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
        method: Any,
        state: Any,
        cfg: DarpConfig | BCConfig,
        memory: Any,
        seed: int,
        act_of: Callable[[Any], Policy],
        history: int,
    ) -> Trained:
        """One training seed of one method (a module with `update` and `loss`): a checkpoint every `checkpoint_epochs` and after the last epoch
        is rolled out on the selection seeds; the last and the selected weights are scored.

        Raises RunFolderError: the run folder says that the training is over but has lost what its last weights gave.
        """
        n = memory.demos.obs.shape[0]
        per_epoch = learner.epoch_steps(n, cfg.batch)
        steps = cfg.epochs * per_epoch

        def evaluate(state):
            step = int(state.step)
            act = act_of(state.params)
            if step >= steps:
                kept = {
                    "returns": self.score(f"{name}/last", act, history),
                    "loss": float(loss_of_all(method.loss, state.params, memory, cfg)),
                    "params": state.params,
                }
                self._run.once(f"last/{name}", lambda: kept)
            chosen = self.returns(f"{name}/{step}", act, range(1000, 1000 + self._config.selection_rollouts), history)
            return {"return": chosen.mean()}

        fit = self._run.fit(
            method.update,
            state,
            lambda step: learner.batch_rows(seed, step, n, cfg.batch),
            name=name,
            steps=steps,
            config=cfg,
            frozen=memory,
            evaluate=evaluate,
            eval_every=self._config.checkpoint_epochs * per_epoch,
            select="best:return",
            scan=per_epoch,
            log_every=per_epoch,
            show="loss",
        )

        def lost():
            raise RunFolderError(
                f"{self._run.dir} holds the finished training {name!r} but not the score of its last weights; "
                "choose another folder"
            )

        last = self._run.once(f"last/{name}", lost)
        return Trained(
            last=last["returns"],
            last_params=last["params"],
            loss=last["loss"],
            selected=self.score(f"{name}/selected", act_of(fit.state.params), history),
            params=fit.state.params,
            selection=float(fit.evals["return"].max()),
            epoch=fit.best_step // per_epoch,
            epochs=fit.evals["step"] // per_epoch,
            curve=fit.evals["return"],
        )


def best(arms: list[Trained]) -> Trained:
    """The training seed with the greatest return on the selection rollouts."""
    return max(arms, key=lambda t: t.selection)
