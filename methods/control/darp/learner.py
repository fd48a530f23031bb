"""Training of a DARP policy: `prepare` once, then `update` on batches of row numbers.

The loss is the mean over rows and action dimensions of the squared error of the *aggregated* output in standardised
action space (the average over neighbours lies inside the square), or minus the log density for the mixture head. AdamW
(betas 0.9 and 0.999, eps 1e-8) after a clip of the global gradient norm at 1.

Everything but the weights is in `Memory`, shared by all seeds: `jax.vmap` of `update` trains several in one call, each on
its own shuffle. The last batch of an epoch is padded with -1, and padding has no weight. With a validation loss `end_epoch`
halves the rate after 5 epochs without improvement and stops after 13; a stopped state does not move.
"""

import functools

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int, Key, PyTree

from papyrax.methods.control.darp import heads, network, retrieval
from papyrax.methods.control.darp.config import BCConfig, Config
from papyrax.methods.control.darp.demos import Demos, Scalers, fit_scalers

HALVE_AFTER, STOP_AFTER = 5, 13


@flax.struct.dataclass
class Memory:
    """What training reads and never changes: the expert rows, their scalers, the neighbours of every row."""

    demos: Demos
    scalers: Scalers
    cache: Int[Array, "n K"]


@flax.struct.dataclass
class Plateau:
    """Progress of the validation loss: factor of the learning rate, best loss, epochs since, and whether it is over."""

    factor: Float[Array, ""]
    best: Float[Array, ""]
    bad: Int[Array, ""]
    stopped: Bool[Array, ""]


@flax.struct.dataclass
class State:
    """Weights, optimiser, progress."""

    params: PyTree
    opt_state: PyTree
    plateau: Plateau
    key: Key[Array, ""]
    step: Int[Array, ""]


def prepare(demos: Demos, cfg: Config, key: Key[Array, ""] | None = None) -> Memory:
    """Scalers and the neighbour cache; no distance is computed after this. `key` is for random neighbours alone."""
    scalers = fit_scalers(demos)
    return Memory(demos, scalers, retrieval.build_cache(demos, scalers, cfg, key))


def init(key: Key[Array, ""], demos: Demos, cfg: Config) -> State:
    """A fresh State for these demonstrations."""
    key, key_params = jax.random.split(key)
    n, o = demos.obs.shape
    params = network.init(key_params, o, demos.act.shape[1], cfg, neighbours=cfg.kept(n))
    return fresh(key, params, cfg)


def fresh(key: Key[Array, ""], params: PyTree, cfg: Config | BCConfig) -> State:
    """A State around new parameters."""
    plateau = Plateau(jnp.ones(()), jnp.asarray(jnp.inf), jnp.zeros((), jnp.int32), jnp.zeros((), bool))
    return State(params, optimiser(cfg).init(params), plateau, key, jnp.zeros((), jnp.int32))


def optimiser(cfg: Config | BCConfig) -> optax.GradientTransformation:
    """Clip and AdamW; the plateau's factor is applied to what it returns."""
    return optax.chain(
        optax.clip_by_global_norm(cfg.clip_norm),
        optax.adamw(cfg.learning_rate, b1=0.9, b2=0.999, eps=1e-8, weight_decay=cfg.weight_decay),
    )


def loss(params: PyTree, memory: Memory, rows: Int[Array, " b"], cfg: Config) -> Float[Array, ""]:
    """Mean loss of expert rows; rows of -1 do not count."""
    at = jnp.maximum(rows, 0)
    demos, scalers = memory.demos, memory.scalers
    out = network.apply_factored(params, demos, scalers, memory.cache[at], demos.obs[at], cfg)
    each = heads.row_loss(out, scalers.act(demos.act[at]), cfg)
    return masked_mean(each, rows >= 0)


def update(state: State, batch: Int[Array, " b"], cfg: Config, *, frozen: Memory) -> tuple[State, dict[str, Array]]:
    """One optimiser step on a batch of row numbers."""
    return step(state, lambda params: loss(params, frozen, batch, cfg), cfg)


def step(state: State, loss_of, cfg: Config | BCConfig) -> tuple[State, dict[str, Array]]:
    """One optimiser step on a loss of the parameters, shared with the baselines."""
    value, grads = jax.value_and_grad(loss_of)(state.params)
    updates, opt_state = optimiser(cfg).update(grads, state.opt_state, state.params)
    plateau = state.plateau
    params = jax.tree.map(lambda p, u: p + plateau.factor * u, state.params, updates)
    new = state.replace(params=params, opt_state=opt_state, step=state.step + 1)
    keep = plateau.stopped
    new = jax.tree.map(
        lambda old, new: old if jnp.issubdtype(old.dtype, jax.dtypes.prng_key) else jnp.where(keep, old, new),
        state,
        new,
    )
    return new, {"loss": value, "grad_norm": optax.global_norm(grads)}


def end_epoch(state: State, validation: Float[Array, ""]) -> State:
    """Takes in the validation loss of an epoch: halves the rate after 5 bad epochs in a row, stops after 13."""
    p = state.plateau
    better = validation < p.best
    bad = jnp.where(better, 0, p.bad + 1)
    halve = (bad > 0) & (bad % HALVE_AFTER == 0)
    return state.replace(
        plateau=Plateau(
            jnp.where(halve, p.factor * 0.5, p.factor),
            jnp.where(better, validation, p.best),
            bad,
            p.stopped | (bad >= STOP_AFTER),
        )
    )


def masked_mean(x: Float[Array, " b"], valid: Bool[Array, " b"]) -> Float[Array, ""]:
    """Mean of the valid entries, 0 when there are none."""
    return jnp.sum(jnp.where(valid, x, 0)) / jnp.maximum(jnp.sum(valid), 1)


@functools.lru_cache(maxsize=64)
def _epoch(seed: int, epoch: int, n: int) -> np.ndarray:
    return np.random.default_rng((seed, epoch)).permutation(n).astype(np.int32)


def epoch_steps(n: int, batch: int) -> int:
    """Steps of an epoch; the last, shorter batch is kept."""
    return -(-n // batch)


def batch_rows(seed: int, step: int, n: int, batch: int) -> Int[np.ndarray, " b"]:
    """*host* Row numbers of a step: every epoch is a new shuffle of all n rows, the last batch padded with -1."""
    epoch, at = divmod(step, epoch_steps(n, batch))
    rows = _epoch(seed, epoch, n)[at * batch : (at + 1) * batch]
    return np.pad(rows, (0, batch - len(rows)), constant_values=-1)
