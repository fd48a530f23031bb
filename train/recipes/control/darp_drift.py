"""Why a clone fails and DARP does not: along the clone's episodes the state leaves the data, differences to neighbours stay."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from papyrax.envs.gymnasium_host import Episodes, host_rollout
from papyrax.methods.control.darp import divergence, learner, retrieval
from papyrax.methods.control.darp.config import Config as DarpConfig
from papyrax.methods.control.darp.demos import Scalers
from papyrax.train.recipes.control.darp_arena import Arena, Trained, bc_policy
from papyrax.train.run import Run

if TYPE_CHECKING:
    from papyrax.train.recipes.control.darp import Config


def drift(
    run: Run, arena: Arena, clone: Trained, bc_scalers: Scalers, memory: learner.Memory, cfg: DarpConfig, config: Config
) -> dict[str, Any]:
    """Log densities of states and of differences along the clone's episodes, and how often, where it first fails, the state is out while the
    differences are in. An episode fails at the step that ends it before the time limit; its first failing step is the earliest of the
    last stretch of steps whose state is out."""

    def measure():
        episodes: Episodes = host_rollout(
            arena.env,
            bc_policy(clone.params, bc_scalers),
            range(config.rollouts),
            max_steps=config.max_steps,
            record=True,
        )
        assert episodes.obs is not None
        space = jax.jit(
            lambda hist, valid: retrieval.retrieve(
                memory.demos, memory.scalers, hist, valid, **retrieval.search_of(cfg)
            )
        )
        longest = int(episodes.lengths.max())
        rows, curve = [], None
        for i in range(config.rollouts):
            length = int(episodes.lengths[i])
            seen = np.nan_to_num(episodes.obs[i, :length])
            padded = np.zeros((longest, cfg.lookback, seen.shape[1]), np.float32)
            for t in range(length):
                part = seen[max(0, t - cfg.lookback + 1) : t + 1]
                padded[t, cfg.lookback - len(part) :] = part
            valid = np.minimum(np.arange(longest) + 1, cfg.lookback).astype(np.int32)
            idx = np.asarray(space(padded, valid))[:length]
            found = divergence.divergence(memory.demos, memory.scalers, memory.cache, seen, idx)
            out = np.asarray(found.state_out)
            failed = bool(episodes.terminated[i]) and length < config.max_steps
            if failed and out.any():
                stretch = np.flatnonzero(~out)
                first = int(stretch[-1] + 1) if stretch.size and stretch[-1] + 1 < length else int(np.argmax(out))
                rows.append([i, length, first, bool(out[first]), bool(np.asarray(found.difference_in)[first])])
            elif failed:
                rows.append([i, length, length - 1, False, bool(np.asarray(found.difference_in)[-1])])
            if curve is None and failed:
                curve = {
                    k: np.asarray(getattr(found, k))
                    for k in ("state", "difference", "state_threshold", "difference_threshold")
                }
        return {"rows": rows, "curve": curve or {}}

    return run.once("drift", measure)
