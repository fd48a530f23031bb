"""The two kinds of world: device worlds, traced and batched by `vmap`, and dialogue worlds, which hand out requests on
the host.

A device world is a record of pure functions for *one* environment:

    reset(key) -> state
    observe(state) -> obs
    step(state, action) -> (state, Step)

It neither resets itself nor counts time: `papyrax.envs.rollout` batches it, counts steps against `episode_length`,
    starts fresh episodes
and keeps the true next observation. Seen from there, `done` covers termination and time limits, `trunc` only time
limits.
"""

import dataclasses
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol, runtime_checkable

import flax.struct
import numpy as np
from jaxtyping import Array, Bool, Float, Key, PyTree

from papyrax.methods.text.messages import Reply, Request


@flax.struct.dataclass
class Step:
    """What one step gives, for one environment or with leading batch axes.

    Attributes:
        obs: what the agent acts on next: the first observation of a fresh episode where `done`.
        reward: reward of this step.
        cost: constraint costs of this step, or None in worlds without constraints.
        done: the episode is over, by termination or by time limit.
        trunc: the episode was cut by the time limit alone, so its value must be bootstrapped from `next_obs`.
        next_obs: the observation that this step really led to, before any reset.
        privileged, next_privileged: the same two for what only a critic may see, or None.
        fault: the simulation gave a number that is not finite; the episode is over, reward 0 (set by
            `papyrax.envs.rollout`).
    """

    obs: PyTree
    reward: Float[Array, "*b"]
    cost: Float[Array, "*b c"] | None
    done: Bool[Array, "*b"]
    trunc: Bool[Array, "*b"]
    next_obs: PyTree
    privileged: PyTree = None
    next_privileged: PyTree = None
    fault: Bool[Array, "*b"] | None = None


@dataclasses.dataclass(frozen=True)
class World:
    """A device world: pure functions for one environment, and its static facts. Hashable: it may be a static argument
    of `jit`.

    Attributes:
        name: as `papyrax.envs.physics.make` spells it.
        reset: `reset(key) -> state`, a fresh random start.
        observe: `observe(state) -> obs`, float array of `obs_dim` (worlds of other kinds may give a pytree).
        step: `step(state, action) -> (state, Step)` without reset, so `obs` is `next_obs`, and `done` is termination
            alone.
        obs_dim: length of an observation.
        act_dim: length of an action; every continuous world takes actions in [-1, 1] and clips them. 1 for discrete
            worlds.
        episode_length: time limit in steps.
        discrete: actions are integers in [0, n_actions).
        n_actions: number of discrete actions, 0 for continuous worlds.
        privileged: `privileged(state) -> array` for the critic alone, or None; `privileged_dim` is its length, 0 for
            none.
        cost_dim: number of constraint costs, 0 for none.
        draw: host function `draw(state) -> uint8[h, w, 3]` for films, or None.
        picture: (height, width, channels) where the observation is a picture, laid out flat in that order; else None.
    """

    name: str
    reset: Callable[[Key[Array, ""]], PyTree]
    observe: Callable[[PyTree], PyTree]
    step: Callable[[PyTree, Array], tuple[PyTree, Step]]
    obs_dim: int
    act_dim: int
    episode_length: int
    discrete: bool = False
    n_actions: int = 0
    privileged: Callable[[PyTree], Array] | None = None
    privileged_dim: int = 0
    cost_dim: int = 0
    draw: Callable[[PyTree], np.ndarray] | None = None
    picture: tuple[int, int, int] | None = None

    def __post_init__(self):
        if self.episode_length < 1:
            raise ValueError(f"episode_length is {self.episode_length}, wanted at least 1.")
        if self.discrete != (self.n_actions > 0):
            raise ValueError(
                f"n_actions is {self.n_actions} with discrete={self.discrete}, wanted > 0 for discrete worlds only."
            )
        if (self.privileged is None) != (self.privileged_dim == 0):
            raise ValueError(f"privileged_dim is {self.privileged_dim}, wanted > 0 exactly when privileged is given.")
        if self.picture is not None and math.prod(self.picture) != self.obs_dim:
            raise ValueError(f"picture is {self.picture}, wanted a shape of obs_dim = {self.obs_dim} numbers.")


@runtime_checkable
class DialogueWorld(Protocol):
    """A world on the host that asks for chat, search, code runs, … and never fetches anything itself.

    The state is a frozen, hashable value. Given the same items and the same replies a world goes through the same
    states and requests, so any run can be recorded, stopped and replayed. Requests are answered in order, one reply a
    request; an empty list of requests means that every item is closed. Items that are closed ask for nothing more.
    """

    def reset(self, items: Sequence[Any]) -> tuple[Hashable, list[Request]]:
        """The first state and the first requests for a batch of items."""
        ...

    def step(self, state: Hashable, replies: Sequence[Reply]) -> tuple[Hashable, list[Request]]:
        """The next state and requests, given one reply for each request of the step before."""
        ...

    def score(self, state: Hashable) -> dict[str, Any]:
        """The scores of the items, by name."""
        ...
