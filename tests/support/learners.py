"""A small noisy regression that tests of the loop train: its State has a key, so that a wrong resume shows."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct


@dataclasses.dataclass(frozen=True)
class Config:
    """What the tests' learner needs."""

    seed: int = 0
    rate: float = 0.05
    noise: float = 0.01


@struct.dataclass
class State:
    """Weights, key, step."""

    w: jax.Array
    b: jax.Array
    key: jax.Array
    step: jax.Array


def init(key, config: Config) -> State:
    """Zero weights of shape [8, 4]."""
    return State(jnp.zeros((8, 4)), jnp.zeros(4), key, jnp.zeros((), jnp.int32))


def update(state: State, batch, config: Config, *, frozen=None):
    """One noisy gradient step on mean squared error."""
    key, sub = jax.random.split(state.key)
    shift = 0.0 if frozen is None else frozen["shift"]

    def loss(w, b):
        return jnp.mean((batch["x"] @ w + b - batch["y"] - shift) ** 2)

    value, (dw, db) = jax.value_and_grad(loss, (0, 1))(state.w, state.b)
    noise = config.noise * jax.random.normal(sub, state.w.shape)
    return State(state.w - config.rate * (dw + noise), state.b - config.rate * db, key, state.step + 1), {"loss": value}


def batch(step: int) -> dict[str, np.ndarray]:
    """A batch of 16 rows that depends on the step alone."""
    rng = np.random.default_rng(step)
    x = rng.normal(size=(16, 8)).astype(np.float32)
    truth = np.linspace(-1, 1, 32, dtype=np.float32).reshape(8, 4)
    return {"x": x, "y": x @ truth + 0.5}


def grain_dataset(seed: int = 0):
    """The same kind of batch as a shuffled, repeating grain dataset with checkpointable iterators."""
    import grain

    rng = np.random.default_rng(seed)
    x = rng.normal(size=(256, 8)).astype(np.float32)
    truth = np.linspace(-1, 1, 32, dtype=np.float32).reshape(8, 4)
    rows = [{"x": a, "y": a @ truth + 0.5} for a in x]
    return grain.MapDataset.source(rows).shuffle(seed=seed).repeat().batch(16).to_iter_dataset()
