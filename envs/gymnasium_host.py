"""Closed-loop episodes of Gymnasium environments on the host, all seeds in lockstep with one batched policy call a
step.

The evaluator of imitation policies (DARP, ICLR 2026, arXiv 2606.09758), for `Hopper-v4`, `Walker2d-v4`,
`HalfCheetah-v4`, `Ant-v4` and whatever else Gymnasium makes. Each seed owns an environment, reset with that seed. An
environment that has finished is not stepped again, but its row stays in the batch, so that a jitted policy sees one
shape only. Same seeds, same policy: same numbers, whatever the other seeds do.
"""

import dataclasses
import warnings
from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Bool, Float, Int

from papyrax.envs import bodies

HostPolicy = Callable[[np.ndarray, np.ndarray, int], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Episodes:
    """One episode a seed.

    Attributes:
        returns: sum of rewards.
        lengths: number of steps.
        terminated: ended by the environment and not by a time limit.
        obs, actions: what was seen and done at each step, NaN after the end; None unless recorded.
        frames: film of the first seed, None unless asked for.
    """

    returns: Float[np.ndarray, "s"]
    lengths: Int[np.ndarray, "s"]
    terminated: Bool[np.ndarray, "s"]
    obs: Float[np.ndarray, "s t o"] | None = None
    actions: Float[np.ndarray, "s t a"] | None = None
    frames: np.ndarray | None = None


def host_rollout(
    env_name: str,
    policy: HostPolicy,
    seeds: Sequence[int],
    *,
    max_steps: int = 1000,
    history: int = 1,
    record: bool = False,
    film_every: int = 0,
) -> Episodes:
    """Episodes of one environment under one policy.

    Args:
        env_name: Gymnasium's name, with continuous actions.
        policy: `policy(hist, valid, step) -> actions[s, a]` with `hist` float32 `[s, history, o]`, newest observation
            last, rows not yet seen 0 at the front; `valid` int32 `[s]`, how many of them have been seen; `step` counts
            from 0. Called once a step with all seeds. Actions are clipped to the environment's bounds.
        seeds: one episode each.
        max_steps: most steps an episode.
        history: observations kept.
        record: keep observations and actions of every step.
        film_every: draw the first seed's MuJoCo bodies every so many steps; 0 for none.

    Raises:
        ValueError: no seeds, an unknown environment or one without a box of actions, a wrong shape or NaN from the
            policy.
        ImportError: Gymnasium or MuJoCo is not installed.
    """
    seeds = [int(seed) for seed in seeds]
    if not seeds:
        raise ValueError("seeds is empty, wanted at least one.")
    if history < 1 or max_steps < 1:
        raise ValueError(f"history is {history} and max_steps {max_steps}, wanted at least 1.")
    envs = [_make(env_name) for _ in seeds]
    try:
        return _rollout(envs, policy, seeds, max_steps, history, record, film_every)
    finally:
        for env in envs:
            env.close()


def _rollout(envs, policy, seeds, max_steps, history, record, film_every) -> Episodes:
    space = envs[0].action_space
    count = len(seeds)
    first = np.stack([env.reset(seed=seed)[0] for env, seed in zip(envs, seeds)]).astype(np.float32)
    hist = np.zeros((count, history, first.shape[1]), np.float32)
    hist[:, -1] = first
    valid = np.ones(count, np.int32)
    alive = np.ones(count, bool)
    terminated = np.zeros(count, bool)
    returns = np.zeros(count)
    lengths = np.zeros(count, np.int64)
    seen, done_actions, frames = [], [], []

    for step in range(max_steps):
        # The policy gets copies: it may keep them, and nothing that it does to them reaches the evaluation.
        actions = np.asarray(policy(hist.copy(), valid.copy(), step), np.float32)
        if actions.shape != (count, *space.shape):
            raise ValueError(f"policy gave actions of shape {actions.shape}, wanted {(count, *space.shape)}.")
        if not np.isfinite(actions[alive]).all():
            raise ValueError(f"policy gave an action that is not finite at step {step}, wanted finite numbers.")
        actions = np.clip(actions, space.low, space.high)
        if record:
            seen.append(np.where(alive[:, None], hist[:, -1], np.nan))
            done_actions.append(np.where(alive[:, None], actions, np.nan))
        if film_every and alive[0] and step % film_every == 0:
            frames.append(_frame(envs[0]))
        for i in np.flatnonzero(alive):
            obs, reward, ended, cut, _ = envs[i].step(actions[i])
            returns[i] += reward
            lengths[i] += 1
            terminated[i] = ended
            alive[i] = not (ended or cut)
            hist[i, :-1] = hist[i, 1:]
            hist[i, -1] = obs
            valid[i] = min(valid[i] + 1, history)
        if not alive.any():
            break

    return Episodes(
        returns=returns,
        lengths=lengths,
        terminated=terminated,
        obs=np.stack(seen, axis=1) if record else None,
        actions=np.stack(done_actions, axis=1) if record else None,
        frames=np.stack(frames) if frames else None,
    )


def _make(env_name: str):
    try:
        import gymnasium
    except ImportError as error:
        raise ImportError(
            "package gymnasium is not installed; install it with: pip install 'papyrax[control]'"
        ) from error
    with warnings.catch_warnings():
        # The v4 tasks are the ones that published numbers are for; Gymnasium warns that v5 exists.
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.filterwarnings("ignore", message=".*out of date.*")
        try:
            env = gymnasium.make(env_name, disable_env_checker=True)
        except gymnasium.error.DependencyNotInstalled as error:
            raise ImportError(f"{env_name} needs MuJoCo; install it with: pip install 'papyrax[control]'") from error
        except gymnasium.error.UnregisteredEnv as error:
            raise ValueError(f"env_name is {env_name!r}, which Gymnasium does not know ({error}).") from error
    if not isinstance(env.action_space, gymnasium.spaces.Box):
        raise ValueError(
            f"env_name is {env_name!r} with actions {env.action_space}, wanted a box of continuous actions."
        )
    return env


def _frame(env) -> np.ndarray:
    """A picture of the environment's MuJoCo bodies."""
    bare = env.unwrapped
    if not hasattr(bare, "model"):
        raise ValueError(f"film_every is set for {env.spec.id}, wanted an environment with a MuJoCo model.")
    return bodies.draw_bodies(bare.data.xpos, bare.data.xmat.reshape(-1, 3, 3), bodies.shapes_of(bare.model))
