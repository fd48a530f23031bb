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
from jaxtyping import Array, Bool, Float, Int, PyTree

from papyrax.methods.optimization.clipped_sgd import schedule as theory
from papyrax.methods.optimization.clipped_sgd.schedule import Schedule, ScheduleState


def norm_and_finite(g: PyTree) -> tuple[Float[Array, ""], Bool[Array, ""]]:
    """Euclidean norm over a pytree, and whether every entry is finite, in one pass over the entries almost always.

    Where the plain sum of squares leaves the range of the dtype, a second pass takes the entries times 2^-s and 2^s (Blue
    1978), so the norm is right whenever it fits the dtype. Under vmap the second pass runs only if some row needs it. The
    derivative at the zero gradient is 0.
    """
    norm, finite = _norm(g)
    return norm, finite > 0


@jax.custom_jvp
def _norm(g):
    leaves = jax.tree.leaves(g)
    dtype = jnp.promote_types(jnp.result_type(*leaves), jnp.float32)
    power = 500 if dtype == jnp.float64 else 60
    entries = [x.astype(dtype) for x in leaves]

    def root(factor):
        return jnp.sqrt(sum(jnp.sum((x * factor) ** 2) for x in entries)) / factor

    plain = sum(jnp.sum(x * x) for x in entries)
    usual = (plain > jnp.finfo(dtype).tiny / jnp.finfo(dtype).eps) & jnp.isfinite(plain)

    def again(_):
        large, small = root(jnp.asarray(2.0**-power, dtype)), root(jnp.asarray(2.0**power, dtype))
        # An entry that is not finite keeps even the shrunk sum from being finite.
        return jnp.where(jnp.isfinite(plain), small, large), jnp.isfinite(large).astype(dtype), jnp.ones((), bool)

    first = (jnp.sqrt(plain), jnp.ones_like(plain), usual)
    norm, finite, _ = jax.lax.while_loop(lambda carry: ~carry[2], again, first)
    return norm, finite


@_norm.defjvp
def _norm_rule(primals, tangents):
    (g,), (e,) = primals, tangents
    norm, finite = _norm(g)
    safe = jnp.where((norm > 0) & (finite > 0), norm, 1)
    pairs = zip(jax.tree.leaves(g), jax.tree.leaves(e), strict=True)
    slope = sum(jnp.sum(x / safe.astype(x.dtype) * t) for x, t in pairs)
    return (norm, finite), (slope.astype(norm.dtype), jnp.zeros_like(finite))


def tree_norm(g: PyTree) -> Float[Array, ""]:
    """Euclidean norm over a pytree; infinite or NaN only where the entries or the norm itself are."""
    return norm_and_finite(g)[0]


def _scaled(g, norm, level):
    active = norm > level
    factor = jnp.where(active, level / jnp.where(active, norm, 1), 1)
    return jax.tree.map(lambda x: x * factor.astype(x.dtype), g)


def clip_tree(g: PyTree, level: Float[Array, ""] | float) -> PyTree:
    """min{1, level/|g|} g over the whole pytree: zero stays zero, |result| <= level, differentiable everywhere off
    |g| = level."""
    return _scaled(g, tree_norm(g), level)


def clip_or_drop(g: PyTree, level: Float[Array, ""] | float) -> tuple[PyTree, Int[Array, ""], Int[Array, ""]]:
    """(clipped gradient, 1 if it was not finite and became zero, 1 if it was shortened)."""
    norm, finite = norm_and_finite(g)
    clipped = jax.tree.map(lambda x: jnp.where(finite, x, 0), _scaled(g, norm, level))
    return clipped, 1 - finite.astype(jnp.int32), (finite & (norm > level)).astype(jnp.int32)


def finite_or_zero(g: PyTree) -> tuple[PyTree, Int[Array, ""]]:
    """(g, 0) if every entry is finite, else (zeros, 1)."""
    finite = norm_and_finite(g)[1]
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
        updates, bad, shortened = clip_or_drop(updates, level)
        return updates, ClipState(following, state.skipped + bad, state.clipped + shortened)

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
