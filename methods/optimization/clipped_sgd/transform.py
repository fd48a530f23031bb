"""Clipped SGD as optax transformations: per-step clipping levels, per-step sizes, and an average kept beside the
iterate.

    optax.chain(clip_by_theory_level(s), scale_by_theory_step(s), average_iterates())  ==  clipped_sgd_theory(s)

Each piece carries its own O(1) copy of the schedule, so pieces may be placed anywhere in a chain: weight decay put
before the clip is clipped with the gradient, put after it is scaled by gamma alone. A gradient with an infinite or
NaN entry has no direction to keep: it becomes a zero step that is counted in `skipped`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int, PyTree

from papyrax.methods.optimization.clipped_sgd import schedule as theory
from papyrax.methods.optimization.clipped_sgd.schedule import Schedule, ScheduleState


def tree_norm(g: PyTree) -> Float[Array, ""]:
    """Euclidean norm over a pytree; finite whenever it fits the dtype, since squares are taken relative to the
    largest entry."""
    leaves = jax.tree.leaves(g)
    top = jnp.max(jnp.stack([jnp.max(jnp.abs(x), initial=0.0) for x in leaves]))
    usable = (top > 0) & jnp.isfinite(top)
    scale = jnp.where(usable, top, 1)
    total = sum(jnp.sum((x / scale.astype(x.dtype)) ** 2) for x in leaves)
    norm = scale * jnp.sqrt(jnp.where(usable, total, 1))
    return jnp.where(usable, norm, top)


def clip_tree(g: PyTree, level: Float[Array, ""] | float) -> PyTree:
    """min{1, level/|g|} g over the whole pytree: zero stays zero, |result| <= level, differentiable everywhere off
    |g| = level."""
    norm = tree_norm(g)
    active = norm > level
    factor = jnp.where(active, level / jnp.where(active, norm, 1), 1)
    return jax.tree.map(lambda x: x * factor.astype(x.dtype), g)


def finite_or_zero(g: PyTree) -> tuple[PyTree, Int[Array, ""]]:
    """(g, 0) if every entry is finite, else (zeros, 1)."""
    finite = jnp.all(jnp.stack([jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(g)]))
    return jax.tree.map(lambda x: jnp.where(finite, x, 0), g), 1 - finite.astype(jnp.int32)


class ClipState(NamedTuple):
    """Schedule, number of gradients skipped as not finite, number of gradients shortened."""

    schedule: ScheduleState
    skipped: Int[Array, ""]
    clipped: Int[Array, ""]


class AverageState(NamedTuple):
    """Mean of x_0 .. x_k and k."""

    count: Int[Array, ""]
    average: PyTree


def clip_by_theory_level(schedule: Schedule) -> optax.GradientTransformation:
    """Clips the k-th gradient to lambda_k by its global norm; non-finite gradients become zero and are counted."""

    def init(params):
        del params
        return ClipState(theory.init(), jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32))

    def update(updates, state, params=None):
        del params
        _, level, following = theory.step(schedule, state.schedule)
        updates, bad = finite_or_zero(updates)
        shortened = (tree_norm(updates) > level).astype(jnp.int32)
        return clip_tree(updates, level), ClipState(following, state.skipped + bad, state.clipped + shortened)

    return optax.GradientTransformation(init, update)


def scale_by_theory_step(schedule: Schedule) -> optax.GradientTransformation:
    """Multiplies the k-th update by -gamma_k."""

    def init(params):
        del params
        return theory.init()

    def update(updates, state, params=None):
        del params
        gamma, _, following = theory.step(schedule, state)
        return jax.tree.map(lambda g: -gamma.astype(g.dtype) * g, updates), following

    return optax.GradientTransformation(init, update)


def average_iterates() -> optax.GradientTransformation:
    """Leaves updates alone and keeps the mean of all iterates, x_0 included, in its state; needs params; goes last."""

    def init(params):
        return AverageState(jnp.zeros((), jnp.int32), jax.tree.map(jnp.asarray, params))

    def update(updates, state, params=None):
        if params is None:
            raise ValueError("average_iterates needs params in update, got None.")
        weight = 1 / (state.count + 2)
        mean = jax.tree.map(lambda m, x, u: m + (x + u - m) * weight.astype(m.dtype), state.average, params, updates)
        return updates, AverageState(state.count + 1, mean)

    return optax.GradientTransformation(init, update)


def clipped_sgd_theory(schedule: Schedule, *, average: bool = True) -> optax.GradientTransformation:
    """x_{k+1} = x_k - gamma_k clip(g_k, lambda_k) with the schedule of the paper; `average_of` reads the mean iterate.

    The last iterate is what the theorem is about: it is the parameters themselves. `average=False` drops the mean
    (one copy of the parameters) and the need for params in update.
    """
    parts = [clip_by_theory_level(schedule), scale_by_theory_step(schedule)]
    return optax.chain(*parts, average_iterates()) if average else optax.chain(*parts)


def average_of(opt_state: PyTree) -> PyTree:
    """Mean iterate inside the optimiser state of any chain that holds `average_iterates`."""
    found = optax.tree_utils.tree_get(opt_state, "average")
    if found is None:
        raise ValueError("opt_state holds no average: chain average_iterates() last.")
    return found


def skipped_of(opt_state: PyTree) -> Int[Array, ""]:
    """How many gradients were not finite and made no step."""
    return optax.tree_utils.tree_get(opt_state, "skipped")
