"""Objectives with their Riemannian gradients and smoothness constants: value_and_grad(x) -> (f, grad f in T_x M)."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from papyrax.methods.geometry.manifolds import Manifold, spd
from papyrax.methods.geometry.symmetric import sym, sym_exp, sym_log
from papyrax.methods.optimization.riemannian_frank_wolfe.certificates import hessian_bounds


def sphere_quadratic(a: Float[Array, "m n"], target: Float[Array, "n"]) -> Callable:
    """f(x) = |A (x - x*)|^2 / 2 on the sphere; not geodesically convex on every ball, so gap >= h is not promised."""

    def value_and_grad(x):
        r = a @ (x - target)
        g = a.T @ r
        return jnp.vdot(r, r) / 2, g - jnp.vdot(g, x) * x

    return value_and_grad


def sphere_quadratic_smoothness(a: Float[Array, "m n"], reach: float) -> Float[Array, ""]:
    """A valid L on points within the angle `reach` of the target: |A|^2 + max |A^T A (x - x*)| <= |A|^2 (1 + 2
    sin(reach/2)).

    The second term is the curvature of the sphere acting on the Euclidean gradient.
    """
    return jnp.linalg.norm(a, 2) ** 2 * (1 + 2 * jnp.sin(reach / 2))


def flat_quadratic(a: Float[Array, "m n"], target: Float[Array, "n"]) -> Callable:
    """f(x) = |A (x - x*)|^2 / 2 in flat space; L = |A|_2^2."""

    def value_and_grad(x):
        r = a @ (x - target)
        return jnp.vdot(r, r) / 2, a.T @ r

    return value_and_grad


def squared_distance(man: Manifold, target) -> Callable:
    """f(x) = d(x, target)^2 / 2 with gradient -Log_x target; L = zeta(largest distance), mu = delta."""

    def value_and_grad(x):
        u = man.log(x, target)
        return man.inner(x, u, u) / 2, -u

    return value_and_grad


def karcher_mean(man: Manifold, points: Float[Array, "k ..."], weights: Float[Array, "k"]) -> Callable:
    """f(X) = sum_i w_i d(X, A_i)^2 / 2 with gradient -sum w_i Log_X A_i."""

    def value_and_grad(x):
        u = jax.vmap(lambda a: man.log(x, a))(points)
        squares = jax.vmap(lambda v: man.inner(x, v, v))(u)
        return jnp.vdot(weights, squares) / 2, -jnp.tensordot(weights, u, axes=1)

    return value_and_grad


def distance_smoothness(man: Manifold, reach: float) -> float:
    """L of squared-distance objectives (weights summing to 1) on points within `reach` of all targets."""
    return hessian_bounds(*man.curvature, reach)[1]


def free_energy(h: Float[Array, "d d"], temperature: float, statistics: str = "fermi") -> Callable:
    """F(X) = tr(H X) - T S(X) on SPD matrices with the affine-invariant metric.

    `fermi`: S = -tr(X log X + (I - X) log(I - X)), occupations in (0, 1), minimised by (I + exp(H/T))^-1;
    `positive`: S = -tr(X log X), minimised by exp(-H/T - I). Raises ValueError for another name or T <= 0.
    """
    if statistics not in ("fermi", "positive"):
        raise ValueError(f"statistics must be 'fermi' or 'positive', got {statistics!r}.")
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}.")
    man = spd()

    def value_and_grad(x):
        logs = sym_log(x)
        entropy = jnp.sum(x * logs)
        slope = logs + jnp.eye(x.shape[0], dtype=x.dtype)
        if statistics == "fermi":
            rest = jnp.eye(x.shape[0], dtype=x.dtype) - x
            rest_logs = sym_log(rest)
            entropy, slope = entropy + jnp.sum(rest * rest_logs), logs - rest_logs
        return jnp.sum(h * x) + temperature * entropy, man.egrad_to_rgrad(x, h + temperature * slope)

    return value_and_grad


def free_energy_minimiser(h: Float[Array, "d d"], temperature: float, statistics: str = "fermi") -> Float[Array, "d d"]:
    """The unconstrained minimiser of `free_energy`."""
    eye = jnp.eye(h.shape[0], dtype=h.dtype)
    if statistics == "fermi":
        return sym(jnp.linalg.inv(eye + sym_exp(h / temperature)))
    return sym_exp(-h / temperature - eye)
