"""Optimisers, schedules, averaging and precision by configuration, and the learner that a plain loss needs.

Everything is an optax transformation; a system that prescribes its own optimiser builds it itself, and this is for recipes whose paper only
says "AdamW, cosine, warm-up".
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jaxtyping import Array, Float, PyTree

from papyrax.train.sharding import path_name


@dataclasses.dataclass(frozen=True)
class OptimConfig:
    """An optimiser by name, with the extras that most training recipes use."""

    name: Literal["adam", "adamw", "sgd", "lion", "adafactor"] = "adamw"
    learning_rate: float = 3e-4
    schedule: Literal["constant", "cosine", "linear", "trapezoid"] = "constant"
    warmup_steps: int = 0
    total_steps: int = 0
    """Needed by every schedule but `constant`: the step at which the rate has fallen to `final_fraction` of its peak."""
    final_fraction: float = 0.0
    decay_fraction: float = 0.2
    """`trapezoid`: the last share of the steps over which the rate falls."""
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    decay_pattern: str = ".*"
    """Weight decay acts on parameters of two or more dimensions whose path holds this regular expression."""
    clip_norm: float = 0.0
    """0 leaves gradients unclipped."""
    accumulate: int = 1
    """Micro-batches whose gradients are averaged before one step."""
    ema_decay: float = 0.0
    """0 keeps no average of the parameters."""


def make_schedule(config: OptimConfig) -> optax.Schedule:
    """The learning rate as a function of the step. Raises ValueError when a decaying schedule has no `total_steps`."""
    peak, end = config.learning_rate, config.learning_rate * config.final_fraction
    if config.schedule != "constant" and config.total_steps <= config.warmup_steps:
        raise ValueError(
            f"total_steps is {config.total_steps}; the {config.schedule} schedule wants more than the {config.warmup_steps} warm-up steps"
        )
    left = config.total_steps - config.warmup_steps
    if config.schedule == "constant":
        after = optax.constant_schedule(peak)
    elif config.schedule == "cosine":
        after = optax.cosine_decay_schedule(peak, left, alpha=config.final_fraction)
    elif config.schedule == "linear":
        after = optax.linear_schedule(peak, end, left)
    else:
        fall = max(1, round(left * config.decay_fraction))
        after = optax.join_schedules(
            [optax.constant_schedule(peak), optax.linear_schedule(peak, end, fall)], [left - fall]
        )
    if not config.warmup_steps:
        return after
    return optax.join_schedules([optax.linear_schedule(0.0, peak, config.warmup_steps), after], [config.warmup_steps])


class EmaState(NamedTuple):
    """The running average of the parameters and the number of updates in it."""

    average: PyTree
    count: Float[Array, ""]


def params_ema(decay: float) -> optax.GradientTransformationExtraArgs:
    """Keeps a bias-corrected exponential average of the parameters after each update; put it last in a chain."""

    def init(params):
        return EmaState(jax.tree.map(jnp.zeros_like, params), jnp.zeros((), jnp.int32))

    def update(updates, state, params=None, **_):
        if params is None:
            raise ValueError("params is None; params_ema wants the parameters that the updates will be added to")
        new = optax.apply_updates(params, updates)
        average = jax.tree.map(lambda a, p: decay * a + (1 - decay) * p, state.average, new)
        return updates, EmaState(average, state.count + 1)

    return optax.GradientTransformationExtraArgs(init, update)


def ema_params(opt_state: PyTree, decay: float) -> PyTree:
    """The averaged parameters that `params_ema(decay)` keeps inside `opt_state`. Raises ValueError when there are none."""
    found = [
        s for s in jax.tree.leaves(opt_state, is_leaf=lambda s: isinstance(s, EmaState)) if isinstance(s, EmaState)
    ]
    if not found:
        raise ValueError("opt_state holds no parameter average; build the optimiser with ema_decay above 0")
    correction = 1 - jnp.power(jnp.float32(decay), found[0].count)
    return jax.tree.map(lambda a: (a / correction).astype(a.dtype), found[0].average)


def make_optimizer(config: OptimConfig) -> optax.GradientTransformation:
    """Clip, optimiser with decoupled weight decay, accumulation and parameter average, in that order."""
    rate = make_schedule(config)

    def mask(params):
        return jax.tree_util.tree_map_with_path(
            lambda path, leaf: leaf.ndim >= 2 and re.search(config.decay_pattern, path_name(path)) is not None, params
        )

    chain = [optax.clip_by_global_norm(config.clip_norm)] if config.clip_norm > 0 else []
    if config.name == "adam":
        chain.append(optax.adam(rate, config.b1, config.b2, config.eps))
    elif config.name == "adamw":
        chain.append(optax.adamw(rate, config.b1, config.b2, config.eps, weight_decay=config.weight_decay, mask=mask))
    elif config.name == "lion":
        chain.append(optax.lion(rate, config.b1, config.b2, weight_decay=config.weight_decay, mask=mask))
    elif config.name == "adafactor":
        chain.append(optax.adafactor(rate, weight_decay_rate=config.weight_decay or None, weight_decay_mask=mask))
    elif config.name == "sgd":
        chain.append(optax.sgd(rate, momentum=config.b1 or None))
    else:
        raise ValueError(f"optimiser name is {config.name!r}; wanted one of adam, adamw, sgd, lion, adafactor")
    if config.ema_decay > 0:
        chain.append(params_ema(config.ema_decay))
    optimizer = optax.chain(*chain)
    if config.accumulate > 1:
        optimizer = optax.MultiSteps(optimizer, every_k_schedule=config.accumulate)
        return optax.GradientTransformation(optimizer.init, optimizer.update)
    return optimizer


@dataclasses.dataclass(frozen=True)
class Policy:
    """Which dtype parameters are kept in and which one the forward and backward pass computes in."""

    param: str = "float32"
    compute: str = "float32"

    def cast_params(self, tree: PyTree) -> PyTree:
        """Floating leaves in the parameter dtype."""
        return _cast(tree, self.param)

    def cast_compute(self, tree: PyTree) -> PyTree:
        """Floating leaves in the compute dtype."""
        return _cast(tree, self.compute)


BF16 = Policy("float32", "bfloat16")


def _cast(tree: PyTree, dtype: str) -> PyTree:
    return jax.tree.map(lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree)


@struct.dataclass
class LearnerState:
    """What a learner made of a plain loss keeps between steps."""

    params: PyTree
    opt_state: PyTree
    key: Array
    step: Array


def learner(
    loss: Callable[..., tuple[Array, dict[str, Array]]],
    optimizer: optax.GradientTransformation,
    policy: Policy = Policy(),
) -> tuple[Callable, Callable]:
    """The pair (init, update) for `loss(params, batch, key, config, frozen) -> (scalar, metrics)`.

    `init(key, params) -> LearnerState`; `update(state, batch, config, *, frozen=None) -> (LearnerState, metrics)` adds `loss` and `grad_norm`.
    """

    def init(key: Array, params: PyTree) -> LearnerState:
        params = policy.cast_params(params)
        return LearnerState(params, optimizer.init(params), key, jnp.zeros((), jnp.int32))

    def update(
        state: LearnerState, batch: Any, config: Any, *, frozen: Any = None
    ) -> tuple[LearnerState, dict[str, Array]]:
        key, sub = jax.random.split(state.key)

        def objective(params):
            return loss(policy.cast_compute(params), policy.cast_compute(batch), sub, config, frozen)

        (value, metrics), grads = jax.value_and_grad(objective, has_aux=True)(state.params)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        metrics = {
            **metrics,
            "loss": value.astype(jnp.float32),
            "grad_norm": optax.global_norm(grads).astype(jnp.float32),
        }
        return LearnerState(params, opt_state, key, state.step + 1), metrics

    return init, update
