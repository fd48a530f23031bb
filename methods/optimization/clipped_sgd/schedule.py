"""Horizon-free step sizes gamma_k and clipping levels lambda_k of clipped SGD, with O(1) state, and the rates they
give.

Paper: High-Probability Bounds for the Last Iterate of Clipped SGD (ICLR 2026, OpenReview 4sGEvpwyxN). With
l_k = ln(6 (k+1)^2 / delta) and d_0 = 0, d_{k+1} = d_k + 2 gamma_k L:

    gamma_k  = min{ 1 / (c1 L l_k^a),  1 / (c2 p (k+1)^beta l_k^a) }
    lambda_k = R0 / (c gamma_k l_k^{1/2}) * min{ 1 / sqrt(d_k), 1 },  beta = (2 + alpha) / (3 alpha)
    p = max{ sigma/R0, L^{(alpha-1)/(3 alpha-1)} (sigma/R0)^{2 alpha/(3 alpha-1)}, L^{1/3} (sigma/R0)^{2/3} }

d_k is the weight of f(x_k) - f* in the potential, so f(x_k) - f* = O(1/d_k) and |grad f(x_k)| = O(1/sqrt(d_k)): the
level follows the shrinking true gradient. The paper prints lambda_k, beta and the recursion of d_k; gamma_k with its
constants is reconstructed from its rate table (R0^2 p is the D of that table).
"""

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

# (power a of the logarithm in gamma, clipping constant c, whether the logarithms are kept)
PRESETS = {
    "theory": (3.0, 80.0, True),
    "practical": (1.0, 4.0, True),
    "log1": (1.0, 80.0, True),
    "no_log": (1.0, 4.0, False),
}


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Constants of the schedule; hashable, so it can be a static argument.

    alpha in (1, 2]: order of the bounded noise moment; smoothness: L; radius: R0 >= |x_0 - x*|; sigma:
    (E|noise|^alpha)^(1/alpha); delta: failure probability. `log_power`, `step_constant`, `noise_constant`,
    `clip_constant` are a, c1, c2, c; `logs=False` puts 1 for l_k in gamma and lambda; `damped=False` drops
    min{1/sqrt(d_k), 1}; `beta` and `p` override the formulas above.
    """

    alpha: float
    smoothness: float
    radius: float
    sigma: float
    delta: float = 0.05
    log_power: float = 3.0
    step_constant: float = 1.0
    noise_constant: float = 1.0
    clip_constant: float = 80.0
    logs: bool = True
    damped: bool = True
    beta: float | None = None
    p: float | None = None

    def __post_init__(self):
        if not 1 < self.alpha <= 2:
            raise ValueError(f"alpha must lie in (1, 2], got {self.alpha}.")
        if not 0 < self.delta < 1:
            raise ValueError(f"delta must lie in (0, 1), got {self.delta}.")
        for name in ("smoothness", "radius", "step_constant", "noise_constant", "clip_constant"):
            if not (getattr(self, name) > 0 and math.isfinite(getattr(self, name))):
                raise ValueError(f"{name} must be positive and finite, got {getattr(self, name)}.")
        if not (self.sigma >= 0 and math.isfinite(self.sigma)):
            raise ValueError(f"sigma must be finite and at least 0, got {self.sigma}.")


class ScheduleState(NamedTuple):
    """Step k, d_k, and the rounding error that the sum d_k carries (Kahan), so that 1e6 steps in float32 stay exact."""

    k: Int[Array, ""]
    d: Float[Array, ""]
    error: Float[Array, ""]


def preset(name: str, *, alpha: float, smoothness: float, radius: float, sigma: float, delta: float = 0.05) -> Schedule:
    """The named set of constants: `theory`, `practical`, `log1` or `no_log`."""
    if name not in PRESETS:
        raise ValueError(f"preset must be one of {sorted(PRESETS)}, got {name!r}.")
    power, clip, logs = PRESETS[name]
    return Schedule(alpha, smoothness, radius, sigma, delta, log_power=power, clip_constant=clip, logs=logs)


def average_schedule(base: Schedule) -> Schedule:
    """The schedule made for the averaged iterate (Nguyen et al. 2023): gamma ~ k^(-1/alpha), lambda ~ 1/gamma."""
    return dataclasses.replace(base, beta=1 / base.alpha, p=base.sigma / base.radius, damped=False)


def optimal_beta(alpha: float) -> float:
    """Smallest decay exponent of gamma that the analysis allows, (2 + alpha) / (3 alpha)."""
    return (2 + alpha) / (3 * alpha)


def noise_ratio(alpha: float, smoothness: float, radius: float, sigma: float) -> float:
    """p of the schedule, in 1/(units of gamma); 0 without noise."""
    r = sigma / radius
    if r == 0:
        return 0.0
    middle = smoothness ** ((alpha - 1) / (3 * alpha - 1)) * r ** (2 * alpha / (3 * alpha - 1))
    return max(r, middle, smoothness ** (1 / 3) * r ** (2 / 3))


def init(dtype=None) -> ScheduleState:
    """State before step 0; `dtype` defaults to float64 where enabled, else float32."""
    zero = jnp.zeros((), dtype or jnp.result_type(float))
    return ScheduleState(jnp.zeros((), jnp.int32), zero, zero)


def log_term(k: Int[Array, ""], delta: float, dtype) -> Float[Array, ""]:
    """l_k = ln(6 (k+1)^2 / delta); the square would overflow int32 at k = 46341, its logarithm is a sum."""
    return math.log(6 / delta) + 2 * jnp.log((k + 1).astype(dtype))


def step(schedule: Schedule, state: ScheduleState) -> tuple[Float[Array, ""], Float[Array, ""], ScheduleState]:
    """(gamma_k, lambda_k, next state). Knows no horizon: the first steps are the same however many follow."""
    s, dtype = schedule, state.d.dtype
    logs = log_term(state.k, s.delta, dtype) if s.logs else jnp.ones((), dtype)
    damping = logs**s.log_power
    gamma = 1 / (s.step_constant * s.smoothness * damping)
    p = noise_ratio(s.alpha, s.smoothness, s.radius, s.sigma) if s.p is None else s.p
    beta = optimal_beta(s.alpha) if s.beta is None else s.beta
    if p > 0:
        growth = (state.k + 1).astype(dtype) ** beta
        gamma = jnp.minimum(gamma, 1 / (s.noise_constant * p * growth * damping))
    level = s.radius / (s.clip_constant * gamma * jnp.sqrt(logs))
    if s.damped:
        # d_0 = 0 stands for a factor of 1.
        level = level / jnp.sqrt(jnp.maximum(state.d, 1))
    added = 2 * gamma * s.smoothness - state.error
    d = state.d + added
    return gamma, level, ScheduleState(state.k + 1, d, (d - state.d) - added)


def rate(alpha: float) -> dict[str, float]:
    """Exponents of 1/K in the noise term of the three bounds of the paper's table."""
    return {
        "last, high probability (this paper)": (2 * alpha - 2) / (3 * alpha),
        "last, expectation (Liu and Zhou 2024)": (alpha - 1) / alpha,
        "average, high probability (Nguyen et al. 2023)": (alpha - 1) / alpha,
    }


def noise_coefficient(alpha: float, smoothness: float, radius: float, sigma: float) -> float:
    """D = R0^2 p, the coefficient of K^{-(2 alpha - 2)/(3 alpha)} in the bound (units of f)."""
    return radius**2 * noise_ratio(alpha, smoothness, radius, sigma)


def last_iterate_bound(schedule: Schedule, steps: float, delta: float | None = None) -> float:
    """Theorem 1 without its absolute constant: (L R0^2/K + D/K^{(2 alpha-2)/(3 alpha)}) ln^2(6 (K+1)^2 / delta)."""
    s = schedule
    d = noise_coefficient(s.alpha, s.smoothness, s.radius, s.sigma)
    decay = (2 * s.alpha - 2) / (3 * s.alpha)
    logs = math.log(6 / (s.delta if delta is None else delta)) + 2 * math.log(steps + 1)
    return (s.smoothness * s.radius**2 / steps + d / steps**decay) * logs**2


def almost_sure_bound(schedule: Schedule, steps: float) -> float:
    """Corollary 2: every update is at most gamma_k lambda_k <= R0, so f(x_K) - f* <= L (K R0)^2 / 2 always."""
    return schedule.smoothness * (schedule.radius * steps) ** 2 / 2


def hp_to_expectation(
    bound_hp: Callable[[float, float], float], bound_as: Callable[[float], float], steps: float
) -> float:
    """Bound in expectation for any method with almost surely bounded updates (clipped, normalised or sign SGD).

    E[gap] <= bound_hp(K, delta) + delta * bound_as(K) with delta = 1/K^3, which makes the second term vanish against
    the first while the first grows by logarithms only (Corollary 2).
    """
    if steps < 2:
        raise ValueError(f"steps must be at least 2, got {steps}.")
    delta = steps**-3.0
    return bound_hp(steps, delta) + delta * bound_as(steps)
