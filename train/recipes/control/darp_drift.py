"""Why a clone fails and DARP does not: along the clone's episodes the state leaves the data, differences to neighbours stay.

Where an episode fails is told without any density, or the finding would be its own premise. The world ends an episode by a few coordinates
alone (height and pitch of the torso); the failing step is the first of the steps at the end of the episode at which one of these
lies outside everything that the demonstrations ever show. Where there are none it is the last step before the world ended the episode.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from papyrax.envs.gymnasium_host import Episodes, host_rollout
from papyrax.methods.control.darp import divergence, learner, retrieval
from papyrax.methods.control.darp.config import Config as DarpConfig
from papyrax.methods.control.darp.demos import Scalers
from papyrax.train.recipes.control.darp_arena import Arena, Trained, bc_policy
from papyrax.train.run import Run

if TYPE_CHECKING:
    from papyrax.train.recipes.control.darp import Config

HEALTH: dict[str, tuple[int, ...]] = {"Hopper-v4": (0, 1), "Walker2d-v4": (0, 1), "HalfCheetah-v4": (), "Ant-v4": (0,)}
"""The observations by which each world ends an episode: height of the torso and, where it counts, its pitch."""


def failing_step(seen: np.ndarray, shown: np.ndarray) -> int:
    """First step of the last stretch, up to the end, at which a coordinate lies outside the demonstrations' range; else the last step.

    Args:
      seen: [t, h] coordinates of health along an episode that the world ended.
      shown: [n, h] the same of all expert rows.
    """
    inside = np.all((seen >= shown.min(0)) & (seen <= shown.max(0)), axis=1)
    regained = np.flatnonzero(inside)
    after = int(regained[-1]) + 1 if regained.size else 0
    return min(after, len(seen) - 1)


def drift(
    run: Run, arena: Arena, clone: Trained, bc_scalers: Scalers, memory: learner.Memory, cfg: DarpConfig, config: Config
) -> dict[str, Any]:
    """Log densities of states and of differences along the episodes of a clone's last weights: `rows` of (rollout, length, failing step, state
    out, differences in) for the episodes that the world ended, and `curve`, the densities along the first of them."""

    def measure():
        episodes: Episodes = host_rollout(
            arena.env,
            bc_policy(clone.last_params, bc_scalers),
            range(config.rollouts),
            max_steps=config.max_steps,
            record=True,
        )
        assert episodes.obs is not None

        @jax.jit
        def analyse(memory, states, hist, valid):
            idx = retrieval.retrieve(memory.demos, memory.scalers, hist, valid, **retrieval.search_of(cfg))
            return divergence.divergence(memory.demos, memory.scalers, memory.cache, states, idx)

        longest = int(episodes.lengths.max())
        steps, back = np.arange(longest)[:, None], np.arange(cfg.lookback)[::-1]
        valid = np.minimum(np.arange(longest) + 1, cfg.lookback).astype(np.int32)
        shown = np.asarray(memory.demos.obs)[:, list(HEALTH[arena.env])]
        rows, curve = [], None
        for i in range(config.rollouts):
            length = int(episodes.lengths[i])
            if not episodes.terminated[i]:
                continue
            # one length for all episodes: what lies past an episode's end is cut off again
            states = np.nan_to_num(episodes.obs[i])[:longest]
            found = analyse(memory, states, jnp.asarray(states[np.maximum(steps - back, 0)]), valid)
            at = failing_step(states[:length, list(HEALTH[arena.env])], shown)
            rows.append([i, length, at, bool(found.state_out[at]), bool(found.difference_in[at])])
            if curve is None:
                curve = {k: np.asarray(getattr(found, k))[:length] for k in ("state", "difference")}
                curve |= {k: float(getattr(found, k)) for k in ("state_threshold", "difference_threshold")}
                curve["failing_step"] = at
        return {"rows": rows, "curve": curve or {}}

    return run.once("drift", measure)
