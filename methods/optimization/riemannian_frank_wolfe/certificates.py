"""Constants that certify how strongly convex a set is, and the rates that Frank-Wolfe owes to them.

Paper: Strongly Convex Sets in Riemannian Manifolds (ICLR 2026, OpenReview 4sDszSYKP6; arXiv 2312.03583): Lemma 4.1,
Theorems 4.2, 5.1, D.2, D.4. Convention: a Euclidean ball of radius R has alpha = 1/(2R).
"""

import math

import jax.numpy as jnp
from jaxtyping import Array, Float

from papyrax.methods.geometry.manifolds import Manifold


def hessian_bounds(kmin: float, kmax: float, r: float) -> tuple[float, float]:
    """Smallest and largest Hessian eigenvalue of d(x0, .)^2 / 2 at distance r under sectional curvature in [kmin,
    kmax].

    delta = r sqrt(kmax) cot(r sqrt(kmax)) for kmax > 0 else 1; zeta = r sqrt(-kmin) coth(r sqrt(-kmin)) for kmin < 0
    else 1.
    """
    if not r >= 0:
        raise ValueError(f"r must be at least 0, got {r}.")
    if kmin > kmax:
        raise ValueError(f"kmin must not be above kmax, got {kmin} and {kmax}.")
    above, below = r * math.sqrt(max(kmax, 0)), r * math.sqrt(max(-kmin, 0))
    if above >= math.pi:
        raise ValueError(f"r must be below the injectivity radius {math.pi / math.sqrt(kmax):.4g}, got {r}.")
    delta = above / math.tan(above) if above > 0 else 1.0
    zeta = below / math.tanh(below) if below > 0 else 1.0
    return delta, zeta


def alpha_sublevel(mu: float, smoothness: float, s: float, l_m: float = 1.0) -> float:
    """Theorem 4.2: {f - f* <= s} is geodesically strongly convex with alpha = mu / (2 sqrt(2 s L max{l_M^-2, 1})).

    f is geodesically L-smooth and mu-strongly convex on the set; l_M compares the distance used with the Riemannian
    one.
    """
    if not (mu > 0 and smoothness >= mu and s > 0 and l_m > 0):
        raise ValueError(f"mu, smoothness >= mu, s and l_m must be positive, got {mu}, {smoothness}, {s}, {l_m}.")
    return mu / (2 * math.sqrt(2 * s * smoothness * max(l_m**-2, 1.0)))


def alpha_ball(kmin: float, kmax: float, radius: float) -> float:
    """Strong convexity of a geodesic ball, delta(R) / (2 R sqrt(zeta(R))): flat 1/(2R), unit sphere cot(R)/2."""
    if not radius > 0:
        raise ValueError(f"radius must be positive, got {radius}.")
    delta, zeta = hessian_bounds(kmin, kmax, radius)
    if not delta > 0:
        raise ValueError(f"radius must be below {math.pi / 2 / math.sqrt(kmax):.4g} for a convex ball, got {radius}.")
    return alpha_sublevel(delta, zeta, radius**2 / 2)


def alpha_ball_on(manifold: Manifold, radius: float) -> float:
    """`alpha_ball` with the curvature bounds of a manifold."""
    return alpha_ball(*manifold.curvature, radius)


def gradient_bound(smoothness: float, gap: Float[Array, "..."]) -> Float[Array, "..."]:
    """Lemma 4.1: |grad f(x)| <= sqrt(2 L (f(x) - f*)) for the unconstrained minimum f*."""
    return jnp.sqrt(2 * smoothness * jnp.maximum(gap, 0))


def linear_factor(alpha: float, c: float, smoothness: float) -> float:
    """Theorem 5.1: f(x_{t+1}) - f* <= max{1/2, 1 - alpha c / (2L)} (f(x_t) - f*) where |grad f| >= c on the set."""
    return max(0.5, 1 - alpha * c / (2 * smoothness))


def step_bound(
    h: Float[Array, "..."], gap: Float[Array, "..."], dist: Float[Array, "..."], smoothness: float
) -> Float[Array, "..."]:
    """What a short step promises: h - gap/2 where gap >= L dist^2, else h - gap^2 / (2 L dist^2)."""
    curve = smoothness * dist**2
    return jnp.where(gap >= curve, h - gap / 2, h - gap**2 / (2 * jnp.where(curve > 0, curve, 1)))


def lower_bounds(values: Float[Array, "t"], gaps: Float[Array, "t"]) -> Float[Array, "t"]:
    """Best lower bound on f* so far, max over s <= t of f(x_s) - g_s: valid for geodesically convex f."""
    return jnp.maximum.accumulate(values - gaps)
