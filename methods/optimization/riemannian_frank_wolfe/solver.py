"""Riemannian Frank-Wolfe (Algorithm 1), its step rules and certificates, and the projected-gradient baselines.

    v_t = argmin_{v in C} <grad f(x_t), Log_{x_t} v>,  g_t = <-grad f(x_t), Log_{x_t} v_t>,  D_t = d(x_t, v_t)
    x_{t+1} = Exp_{x_t}(eta_t Log_{x_t} v_t)

Steps always follow the exponential map. `short` eta = min{1, g/(L D^2)}; `open` 2/(t+2); `search` minimises f along
the geodesic; `backtracking` is the short step with an L that is lowered by a tenth and doubled until the descent it
promises holds.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int, PyTree

from papyrax.methods.geometry.manifolds import Manifold
from papyrax.methods.optimization.riemannian_frank_wolfe.certificates import lower_bounds
from papyrax.methods.optimization.riemannian_frank_wolfe.oracles import clamp_to_ball

StepRule = Literal["short", "open", "search", "backtracking"]
STEP_RULES = ("short", "open", "search", "backtracking")
SECTIONS = 60
DOUBLINGS = 30


class State(NamedTuple):
    """Iterate, step count, and the estimate of L that backtracking keeps."""

    x: Any
    t: Int[Array, ""]
    smoothness: Float[Array, ""]


class Info(NamedTuple):
    """Of one step, at the point before it: value, Frank-Wolfe gap, distance to v, step, gradient norm, L in use."""

    f: Float[Array, "..."]
    gap: Float[Array, "..."]
    dist: Float[Array, "..."]
    eta: Float[Array, "..."]
    grad_norm: Float[Array, "..."]
    smoothness: Float[Array, "..."]


def rfw_init(x0, smoothness: float = 1.0) -> State:
    """State at a start point of the set; `smoothness` is L (the first guess of it under backtracking)."""
    return State(x0, jnp.zeros((), jnp.int32), jnp.asarray(smoothness, jax.tree.leaves(x0)[0].dtype))


def golden_section(f: Callable, sections: int = SECTIONS) -> Float[Array, ""]:
    """Minimiser on [0, 1] of a function with one valley; the ends count."""
    ratio = (5**0.5 - 1) / 2

    def narrow(_, ends):
        low, high = ends
        a, b = high - ratio * (high - low), low + ratio * (high - low)
        left = f(a) < f(b)
        return jnp.where(left, low, a), jnp.where(left, b, high)

    low, high = jax.lax.fori_loop(0, sections, narrow, (jnp.zeros(()), jnp.ones(())))
    candidates = jnp.stack([(low + high) / 2, jnp.ones_like(low)])
    return candidates[jnp.argmin(jax.vmap(f)(candidates))]


def step_size(
    rule: StepRule, man: Manifold, value_and_grad: Callable, x, u, f, gap, dist, t, smoothness
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """(eta, L afterwards) along u = Log_x v. eta = 0 where v = x, so that an optimal vertex stays where it is."""

    def short(l):
        curve = l * dist**2
        return jnp.where(curve > 0, jnp.clip(gap / jnp.where(curve > 0, curve, 1), 0, 1), 0)

    def along(eta):
        return value_and_grad(man.exp(x, eta * u))[0]

    if rule == "short":
        return short(smoothness), smoothness
    if rule == "open":
        return jnp.where(dist > 0, 2 / (t + 2), 0).astype(f.dtype), smoothness
    if rule == "search":
        return jnp.where(dist > 0, golden_section(along), 0).astype(f.dtype), smoothness
    if rule != "backtracking":
        raise ValueError(f"step_rule must be one of {STEP_RULES}, got {rule!r}.")

    def too_low(carry):
        l, tries = carry
        eta = short(l)
        promised = f - eta * gap + eta**2 * l * dist**2 / 2
        # Differences of f below its rounding say nothing about L.
        noise = 4 * jnp.finfo(f.dtype).eps * jnp.abs(f)
        # Outside the domain of f its value is NaN: such a step is too long as well.
        return ~(along(eta) <= promised + noise) & (tries < DOUBLINGS)

    l, _ = jax.lax.while_loop(too_low, lambda c: (2 * c[0], c[1] + 1), (0.9 * smoothness, jnp.zeros((), jnp.int32)))
    return short(l), l


def rfw_step(
    state: State,
    value_and_grad: Callable,
    lmo: Callable,
    man: Manifold,
    step_rule: StepRule = "short",
    restore: Callable | None = None,
) -> tuple[State, Info]:
    """One step. `lmo(x, g) -> v`; `restore(x)` undoes the rounding that may leave x an eps outside the set."""
    x = state.x
    f, g = value_and_grad(x)
    v = lmo(x, g)
    u = man.log(x, v)
    gap = -man.inner(x, g, u)
    dist = jnp.sqrt(jnp.maximum(man.inner(x, u, u), 0))
    eta, smoothness = step_size(step_rule, man, value_and_grad, x, u, f, gap, dist, state.t, state.smoothness)
    following = man.exp(x, eta * u)
    if restore is not None:
        following = restore(following)
    norm = jnp.sqrt(jnp.maximum(man.inner(x, g, g), 0))
    return State(following, state.t + 1, smoothness), Info(f, gap, dist, eta, norm, smoothness)


def rfw_run(
    x0,
    value_and_grad: Callable,
    lmo: Callable,
    man: Manifold,
    steps: int,
    step_rule: StepRule = "short",
    smoothness: float = 1.0,
    restore: Callable | None = None,
    tol: float = 0.0,
) -> tuple[Any, Info]:
    """`steps` steps as one scan; returns the last point and the Info of every step. Once gap <= tol the iterate
    rests."""

    def body(state, _):
        following, info = rfw_step(state, value_and_grad, lmo, man, step_rule, restore)
        done = info.gap <= tol
        kept = jax.tree.map(lambda a, b: jnp.where(done, a, b), state, following)
        return kept._replace(t=following.t), info

    state, infos = jax.lax.scan(body, rfw_init(x0, smoothness), length=steps)
    return state.x, infos


def certificate(infos: Info) -> tuple[Float[Array, "t"], Float[Array, "t"]]:
    """(upper bound on f(x_t) - f*, best lower bound on f* so far) from gaps; valid for geodesically convex f."""
    lower = lower_bounds(infos.f, infos.gap)
    return infos.f - lower, lower


def projected_gradient_run(
    x0, value_and_grad: Callable, man: Manifold, centre, radius: float, smoothness: float, steps: int
) -> tuple[Any, Float[Array, "t"]]:
    """Baseline: x <- P(Exp_x(-grad f / L)) with the metric projection onto a ball; returns the point and all values."""

    def body(x, _):
        f, g = value_and_grad(x)
        return clamp_to_ball(man, man.exp(x, -g / smoothness), centre, radius), f

    return jax.lax.scan(body, x0, length=steps)


def gradient_descent_run(
    x0, value_and_grad: Callable, man: Manifold, smoothness: float, steps: int
) -> tuple[Any, Float[Array, "t"]]:
    """Unconstrained Riemannian gradient descent, x <- Exp_x(-grad f / L)."""

    def body(x, _):
        f, g = value_and_grad(x)
        return man.exp(x, -g / smoothness), f

    return jax.lax.scan(body, x0, length=steps)


class FrankWolfeState(NamedTuple):
    """Step count of the optax transformation."""

    count: Int[Array, ""]


def frank_wolfe(manifold: Manifold, lmo: Callable, *, smoothness: float | None = None) -> optax.GradientTransformation:
    """Frank-Wolfe as an optax transformation for parameter trees whose leaves are points of one manifold, each in its
    set.

    `update` takes Euclidean gradients and params; `lmo(x, riemannian_gradient) -> v` serves every leaf. Steps are
    short with the given L, or open-loop 2/(t+2) without one. The update is the coordinate difference of new and old
    point, so `optax.apply_updates` lands on the geodesic up to rounding.
    """

    def init(params):
        del params
        return FrankWolfeState(jnp.zeros((), jnp.int32))

    def update(updates: PyTree, state: FrankWolfeState, params: PyTree = None):
        if params is None:
            raise ValueError("frank_wolfe needs params in update, got None.")

        def leaf(g, x):
            g = manifold.egrad_to_rgrad(x, g)
            u = manifold.log(x, lmo(x, g))
            square = manifold.inner(x, u, u)
            if smoothness is None:
                eta = (2 / (state.count + 2)).astype(x.dtype)
            else:
                moving = square > 0
                full = -manifold.inner(x, g, u) / (smoothness * jnp.where(moving, square, 1))
                eta = jnp.where(moving, jnp.clip(full, 0, 1), 0)
            return manifold.exp(x, eta * u) - x

        return jax.tree.map(leaf, updates, params), FrankWolfeState(state.count + 1)

    return optax.GradientTransformation(init, update)
