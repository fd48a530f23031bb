"""Frank-Wolfe and its baseline as a learner: named problems over named sets, arrays given as `frozen`.

| problem | frozen arrays | sets |
|---|---|---|
| sphere | a, target, centre | ball |
| hyperbolic | target, centre | ball |
| flat | a, target, centre | ball, box (low, high), l1, simplex |
| karcher | points, weights, centre | ball, interval (low, high; published or polished oracle) |
| free_energy | h, centre | ball, trust (ball around the iterate) |
"""

import dataclasses
from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Int, Key

from papyrax.methods.geometry.manifolds import Manifold, euclidean, hyperboloid, spd, sphere
from papyrax.methods.optimization.riemannian_frank_wolfe import objectives, oracles, solver, spd_oracles


@dataclasses.dataclass(frozen=True)
class Config:
    """One arm: problem, set, its radius (or scale), step rule, L, steps an `update` takes, and what takes them."""

    problem: Literal["sphere", "hyperbolic", "flat", "karcher", "free_energy"] = "sphere"
    set: Literal["ball", "box", "l1", "simplex", "interval", "interval_published", "trust"] = "ball"
    radius: float = 0.9
    step_rule: solver.StepRule = "short"
    smoothness: float = 1.0
    chunk: int = 1
    temperature: float = 1.0
    statistics: Literal["fermi", "positive"] = "fermi"
    method: Literal["frank_wolfe", "projected_gradient"] = "frank_wolfe"


class Task(NamedTuple):
    """A config with its arrays: manifold, value and gradient, oracle, and the repair of rounding (None where not
    needed)."""

    man: Manifold
    value_and_grad: Callable
    lmo: Callable
    restore: Callable | None


@struct.dataclass
class State:
    """Learner state: key (unused by the method, kept for the contract), update count, solver state."""

    key: Key[Array, ""]
    step: Int[Array, ""]
    solver: solver.State


def build(config: Config, frozen: dict[str, Array]) -> Task:
    """The task of a config. Raises ValueError when problem and set do not go together."""
    c, radius = frozen.get("centre"), config.radius
    if config.problem == "karcher":
        man, f = spd(), objectives.karcher_mean(spd(), frozen["points"], frozen["weights"])
    elif config.problem == "free_energy":
        man, f = spd(), objectives.free_energy(frozen["h"], config.temperature, config.statistics)
    elif config.problem == "hyperbolic":
        man, f = hyperboloid(), objectives.squared_distance(hyperboloid(), frozen["target"])
    elif config.problem == "sphere":
        man, f = sphere(), objectives.sphere_quadratic(frozen["a"], frozen["target"])
    else:
        man, f = euclidean(), objectives.flat_quadratic(frozen["a"], frozen["target"])

    def clamp(x):
        return oracles.clamp_to_ball(man, x, c, radius)

    kind = {"sphere": 1, "flat": 0, "hyperbolic": -1}.get(config.problem)
    if config.set == "trust":
        return Task(man, f, lambda x, g: oracles.lmo_centred(man, x, radius, g), None)
    if config.set == "ball" and kind is not None:
        return Task(man, f, lambda x, g: oracles.lmo_spaceform_ball(kind, x, c, radius, g), clamp)
    if config.set == "ball":
        return Task(man, f, lambda x, g: spd_oracles.lmo_spd_ball(x, c, radius, g), clamp)
    if config.set in ("interval", "interval_published") and man is spd():
        published = config.set == "interval_published"
        oracle = spd_oracles.spd_interval_oracle_published if published else spd_oracles.lmo_spd_interval
        return Task(man, f, lambda x, g: oracle(x, frozen["low"], frozen["high"], g), None)
    if config.problem == "flat":
        flat = {
            "box": lambda x, g: oracles.lmo_box(frozen["low"], frozen["high"], g),
            "l1": lambda x, g: oracles.lmo_l1_ball(c, radius, g),
            "simplex": lambda x, g: oracles.lmo_simplex(radius, g),
        }
        return Task(man, f, flat[config.set], None)
    raise ValueError(f"set {config.set!r} has no oracle for the problem {config.problem!r}.")


def init(key: Key[Array, ""], config: Config, x0) -> State:
    """A run at a start point of the set."""
    return State(key, jnp.zeros((), jnp.int32), solver.rfw_init(x0, config.smoothness))


def update(state: State, batch, config: Config, *, frozen: dict[str, Array]) -> tuple[State, dict[str, Array]]:
    """`config.chunk` steps. Metrics at the point before the last of them: f, gap, dist, eta, grad_norm; least
    grad_norm seen.

    The projected-gradient baseline walks with step 1/L on balls and reports its own gradient mapping length as `dist`.
    """
    del batch
    task = build(config, frozen)

    def projected(s):
        f, g = task.value_and_grad(s.x)
        x = oracles.clamp_to_ball(task.man, task.man.exp(s.x, -g / s.smoothness), frozen["centre"], config.radius)
        norm = jnp.sqrt(task.man.inner(s.x, g, g))
        zero = jnp.zeros_like(f)
        info = solver.Info(f, zero, task.man.dist(s.x, x), zero + 1, norm, s.smoothness)
        return solver.State(x, s.t + 1, s.smoothness), info

    def body(s, _):
        if config.method == "projected_gradient":
            return projected(s)
        return solver.rfw_step(s, task.value_and_grad, task.lmo, task.man, config.step_rule, task.restore)

    inner, infos = jax.lax.scan(body, state.solver, length=config.chunk)
    last = jax.tree.map(lambda a: a[-1], infos)
    metrics = {"t": inner.t, "f": last.f, "gap": last.gap, "dist": last.dist, "eta": last.eta}
    metrics |= {"grad_norm": last.grad_norm, "least_grad_norm": jnp.min(infos.grad_norm)}
    return state.replace(step=state.step + 1, solver=inner), metrics
