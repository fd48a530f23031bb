"""Acting: the states of the episode so far, retrieval, network, action.

`prepare` does once what does not depend on the query (the standardised expert rows and the expert part of the first
layer); `act_ready` on its result is one jit-able call for a batch of running episodes. `act` is the same from scratch.
"""

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key, PyTree

from papyrax.methods.control.darp import heads, network, retrieval
from papyrax.methods.control.darp.config import Config
from papyrax.methods.control.darp.demos import Demos, Scalers, positions


@flax.struct.dataclass
class History:
    """The last L states of every running episode, newest last, and how many of them are real."""

    states: Float[Array, "b l o"]
    valid: Int[Array, " b"]


def history_init(b: int, o: int, lookback: int) -> History:
    """No state yet."""
    return History(jnp.zeros((b, lookback, o)), jnp.zeros(b, jnp.int32))


def history_push(history: History, obs: Float[Array, "b o"], first: Bool[Array, " b"] | None = None) -> History:
    """Takes in the next state of every episode; `first` marks episodes that begin with it and forget the rest."""
    valid = history.valid if first is None else jnp.where(first, 0, history.valid)
    states = jnp.concatenate([history.states[:, 1:], obs[:, None].astype(history.states.dtype)], axis=1)
    return History(states, jnp.minimum(valid + 1, states.shape[1]))


@flax.struct.dataclass
class Ready:
    """A policy with everything precomputed that no query changes."""

    params: PyTree
    demos: Demos
    scalers: Scalers
    space: retrieval.Space
    place: Int[Array, " n"]
    table: Float[Array, "n w"]


def prepare(params: PyTree, demos: Demos, scalers: Scalers, cfg: Config) -> Ready:
    """Expert rows in the space of distances, their places, and their part of the first layer."""
    space = retrieval.embed(scalers, demos.obs, retrieval.metric_of(cfg))
    table = network.expert_table(params, demos, scalers, cfg)
    return Ready(params, demos, scalers, space, positions(demos.start, demos.obs.shape[0]), table)


def act_ready(
    ready: Ready, hist: Float[Array, "b h o"], valid: Int[Array, " b"], key: Key[Array, ""] | None, cfg: Config
) -> Float[Array, "b a"]:
    """Actions of the environment for a batch of episodes, not clipped.

    Args:
      hist: states so far, newest last, padded at the front with anything.
      valid: number of real states of each, at least 1.
      key: for the mixture head and for random neighbours; else None will do.
    """
    out = network.apply_table(
        ready.params,
        ready.table,
        ready.demos,
        ready.scalers,
        neighbours(ready, hist, valid, key, cfg),
        hist[:, -1],
        cfg,
    )
    return ready.scalers.raw_act(heads.action(None if key is None else jax.random.fold_in(key, 1), out, cfg))


def neighbours(
    ready: Ready, hist: Float[Array, "b h o"], valid: Int[Array, " b"], key: Key[Array, ""] | None, cfg: Config
) -> Int[Array, "b K"]:
    """The expert rows that `act_ready` uses."""
    n = ready.demos.obs.shape[0]
    if cfg.neighbours == "random":
        if key is None:
            raise ValueError("act: random neighbours need a key, got None.")
        return retrieval.random_rows(jax.random.fold_in(key, 0), jnp.full(hist.shape[0], -1), n, cfg.kept(n))
    metric = retrieval.metric_of(cfg)
    past = retrieval.embed(ready.scalers, retrieval.blank(hist, valid), metric)
    return retrieval.select(ready.space, ready.place, past, valid, metric, **retrieval.search_of(cfg))


def act(
    params: PyTree,
    demos: Demos,
    scalers: Scalers,
    hist: Float[Array, "b h o"],
    valid: Int[Array, " b"],
    key: Key[Array, ""] | None,
    cfg: Config,
) -> Float[Array, "b a"]:
    """`act_ready` from scratch."""
    return act_ready(prepare(params, demos, scalers, cfg), hist, valid, key, cfg)
