"""Runs of clipped SGD and its baselines with the monitors of the analysis, made to be mapped over hundreds of seeds.

Monitors: the potential Phi_k = d_k (f(x_k) - f*) + L |x_k - x*|^2; the right side of the paper's deterministic
inequality

    Phi_K <= Phi_0 - sum 2 gamma L <x_k - x*, theta_k> - sum d_k gamma <grad f, theta_k> + sum (d_{k+1} + 1) L gamma^2
    |theta_k|^2,

theta_k = (what the step used as gradient) - grad f(x_k); and the reach sum gamma_k lambda_k, which bounds |x_K - x_0|
surely. The high-probability event is {Phi_k <= 2 Phi_0 ln(6 (k+1)^2 / delta) for all k}, kept explicit as `within`.
"""

import dataclasses
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int, Key

from papyrax.methods.optimization.clipped_sgd import schedule as theory
from papyrax.methods.optimization.clipped_sgd.objectives import Problem, Spec, build
from papyrax.methods.optimization.clipped_sgd.schedule import Schedule, ScheduleState
from papyrax.methods.optimization.clipped_sgd.transform import clip_tree, finite_or_zero, tree_norm

Method = Literal["clipped", "sgd", "constant", "normalised", "sign"]
METHODS = ("clipped", "sgd", "constant", "normalised", "sign")


class Walk(NamedTuple):
    """Where a run stands: last iterate, mean iterate, schedule, right side of the inequality, reach, counters,
    event."""

    x: Float[Array, "d"]
    average: Float[Array, "d"]
    schedule: ScheduleState
    bound: Float[Array, ""]
    reach: Float[Array, ""]
    skipped: Int[Array, ""]
    clipped: Int[Array, ""]
    within: Array


class Traj(NamedTuple):
    """Record of one run at `steps`: gaps f - f* of last and mean iterate, potential, slack of the inequality over
    Phi_0, reach minus distance travelled, and the event up to there; last and mean iterate at the end; counters."""

    steps: Int[Array, "t"]
    f_last: Float[Array, "t"]
    f_average: Float[Array, "t"]
    phi: Float[Array, "t"]
    slack: Float[Array, "t"]
    reach_left: Float[Array, "t"]
    within: Array
    last: Float[Array, "d"]
    average: Float[Array, "d"]
    skipped: Int[Array, ""]
    clipped: Int[Array, ""]


def direction(method: Method, g: Float[Array, "d"], level: Float[Array, ""], constant: float) -> Float[Array, "d"]:
    """What is multiplied by -gamma_k: every method but plain SGD and the constant level moves at most gamma_k
    lambda_k."""
    if method == "clipped":
        return clip_tree(g, level)
    if method == "sgd":
        return g
    if method == "constant":
        return clip_tree(g, constant)
    if method == "normalised":
        norm = tree_norm(g)
        return g * (level / jnp.where(norm > 0, norm, 1))
    if method == "sign":
        return jnp.sign(g) * level / g.size**0.5
    raise ValueError(f"method must be one of {METHODS}, got {method!r}.")


def known_minimiser(problem: Problem) -> Float[Array, "d"]:
    """x* of a problem.

    Raises:
        ValueError: it is unknown.
    """
    if problem.minimiser is None:
        raise ValueError("monitor needs a problem with a known minimiser, got None.")
    return problem.minimiser


def potential(problem: Problem, d: Float[Array, ""], x: Float[Array, "d"]) -> Float[Array, ""]:
    """Phi = d (f(x) - f*) + L |x - x*|^2."""
    return d * (problem.value(x) - problem.minimum) + problem.smoothness * jnp.sum((x - known_minimiser(problem)) ** 2)


def start(problem: Problem, x0: Float[Array, "d"], monitor: bool = True) -> Walk:
    """The walk before its first step."""
    zero = jnp.zeros((), x0.dtype)
    phi = potential(problem, zero, x0).astype(x0.dtype) if monitor else zero
    count = jnp.zeros((), jnp.int32)
    return Walk(x0, x0, theory.init(x0.dtype), phi, zero, count, count, jnp.ones((), bool))


def advance(
    walk: Walk,
    key: Key[Array, ""],
    problem: Problem,
    schedule: Schedule,
    phi0,
    *,
    method: Method,
    constant,
    monitor: bool,
) -> Walk:
    """One step; `key` belongs to this step alone."""
    gamma, level, following = theory.step(schedule, walk.schedule)
    g, bad = finite_or_zero(problem.sample_gradient(key, walk.x))
    used = direction(method, g, level, constant)
    x = walk.x - gamma * used
    average = walk.average + (x - walk.average) / (following.k + 1).astype(x.dtype)
    bound, within = walk.bound, walk.within
    if monitor:
        smooth = problem.smoothness
        exact = problem.gradient(walk.x)
        theta = used - exact
        bound = bound - 2 * gamma * smooth * jnp.vdot(walk.x - known_minimiser(problem), theta)
        bound = bound - walk.schedule.d * gamma * jnp.vdot(exact, theta)
        bound = bound + (following.d + 1) * smooth * gamma**2 * jnp.vdot(theta, theta)
        limit = 2 * phi0 * theory.log_term(following.k, schedule.delta, x.dtype)
        within = within & (potential(problem, following.d, x) <= limit)
    shortened = (tree_norm(g) > level).astype(jnp.int32)
    reach = walk.reach + gamma * level
    return Walk(x, average, following, bound, reach, walk.skipped + bad, walk.clipped + shortened, within)


def run(
    key: Key[Array, ""],
    x0: Float[Array, "d"],
    problem: Problem,
    schedule: Schedule,
    *,
    record_at: tuple[int, ...],
    method: Method = "clipped",
    constant: float = 1.0,
    monitor: bool = True,
) -> Traj:
    """One run, recorded after the step counts `record_at` (rising; the last one is the length). Map it over keys.

    Step k draws from fold_in(key, k), so a longer run repeats a shorter one exactly. `constant` is the level of the
    method `constant`. Without `monitor` potential, slack and event are not computed (they cost one exact gradient a
    step).
    """
    if not record_at or list(record_at) != sorted(set(record_at)) or record_at[0] < 1:
        raise ValueError(f"record_at must be rising step counts from 1, got {record_at[:5]}.")
    first = start(problem, x0, monitor)
    phi0 = first.bound

    def one(k, walk):
        step_key = jax.random.fold_in(key, k)
        return advance(walk, step_key, problem, schedule, phi0, method=method, constant=constant, monitor=monitor)

    def segment(carry, target):
        walk, k = carry
        walk = jax.lax.fori_loop(k, target, one, walk)
        phi = potential(problem, walk.schedule.d, walk.x) if monitor else jnp.zeros((), x0.dtype)
        record = (
            problem.value(walk.x) - problem.minimum,
            problem.value(walk.average) - problem.minimum,
            phi,
            (walk.bound - phi) / jnp.where(phi0 > 0, phi0, 1),
            walk.reach - jnp.linalg.norm(walk.x - x0),
            walk.within,
        )
        return (walk, target), record

    targets = jnp.asarray(record_at, jnp.int32)
    (walk, _), record = jax.lax.scan(segment, (first, jnp.int32(0)), targets)
    return Traj(targets, *record, walk.x, walk.average, walk.skipped, walk.clipped)


def quantiles(
    runs: Float[Array, "r t"], qs: tuple[float, ...], key: Key[Array, ""], resamples: int = 200
) -> tuple[Float[Array, "q t"], Float[Array, "2 q t"]]:
    """Quantiles over runs and their 95 % bootstrap band (runs resampled whole; losses are never averaged first)."""
    levels = jnp.asarray(qs)
    count = runs.shape[0]

    def resample(key):
        return jnp.quantile(runs[jax.random.randint(key, (count,), 0, count)], levels, axis=0)

    drawn = jax.lax.map(resample, jax.random.split(key, resamples))
    return jnp.quantile(runs, levels, axis=0), jnp.quantile(drawn, jnp.asarray([0.025, 0.975]), axis=0)


def potential_gap(traj: Traj, schedule: Schedule, phi0: Float[Array, "..."]) -> Float[Array, "... t"]:
    """Phi_k / (2 Phi_0 ln(6 (k+1)^2 / delta)) at the recorded steps: below 1 while the event of the theorem holds."""
    logs = theory.log_term(traj.steps, schedule.delta, traj.phi.dtype)
    return traj.phi / (2 * jnp.asarray(phi0)[..., None] * logs)


def fit_rate(steps: Float[Array, "t"], values: Float[Array, "t"]) -> Float[Array, ""]:
    """Least-squares slope of ln(values) on ln(steps)."""
    k, v = jnp.log(jnp.asarray(steps, values.dtype)), jnp.log(values)
    k = k - jnp.mean(k)
    return jnp.sum(k * (v - jnp.mean(v))) / jnp.sum(k * k)


@dataclasses.dataclass(frozen=True)
class Config:
    """One arm of an experiment: objective, schedule, method, and how many SGD steps one `update` takes."""

    objective: Spec
    schedule: Schedule
    method: Method = "clipped"
    constant: float = 1.0
    chunk: int = 100
    monitor: bool = True


@struct.dataclass
class State:
    """Learner state: key of the run, update count, the walk, start point and Phi_0."""

    key: Key[Array, ""]
    step: Int[Array, ""]
    walk: Walk
    x0: Float[Array, "d"]
    phi0: Float[Array, ""]


def init(key: Key[Array, ""], config: Config, x0: Float[Array, "d"], *, frozen: dict | None = None) -> State:
    """A run at its start point; `frozen` holds the arrays of table objectives."""
    walk = start(build(config.objective, frozen), x0, config.monitor)
    return State(key, jnp.zeros((), jnp.int32), walk, x0, walk.bound)


def update(state: State, batch, config: Config, *, frozen: dict | None = None) -> tuple[State, dict[str, Array]]:
    """`config.chunk` SGD steps. Metrics: `f_last`, `f_average`, `slack`, `within`, `reach_left`, `skipped`,
    `clipped`, `k`."""
    del batch
    problem = build(config.objective, frozen)
    options = {"method": config.method, "constant": config.constant, "monitor": config.monitor}

    def one(_, walk):
        key = jax.random.fold_in(state.key, walk.schedule.k)
        return advance(walk, key, problem, config.schedule, state.phi0, **options)

    walk = jax.lax.fori_loop(0, config.chunk, one, state.walk)
    metrics = {
        "k": walk.schedule.k,
        "f_last": problem.value(walk.x) - problem.minimum,
        "f_average": problem.value(walk.average) - problem.minimum,
        "reach_left": walk.reach - jnp.linalg.norm(walk.x - state.x0),
        "skipped": walk.skipped,
        "clipped": walk.clipped,
    }
    if config.monitor:
        phi = potential(problem, walk.schedule.d, walk.x)
        metrics |= {
            "slack": (walk.bound - phi) / jnp.where(state.phi0 > 0, state.phi0, 1),
            "within": walk.within.astype(jnp.float32),
        }
    return state.replace(step=state.step + 1, walk=walk), metrics
