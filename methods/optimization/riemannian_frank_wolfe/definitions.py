"""Checkers of the paper's three definitions of a strongly convex set, the scaling inequality, and its approximate form.

A set is given by `margin(z)`: positive inside, zero on the boundary, negative outside (for a ball R - d(z, p)). A
checker draws pairs of points, moves off their geodesic by the vector that the definition allows, and reports the
smallest margin it met: below zero refutes the constant alpha, at or above zero certifies it on the sample. Half of
the moves go in random directions, half down the gradient of the margin, the way a boundary is left fastest. With
gamma the geodesic from x to y:

    geodesic (2.1)         every z with d(gamma(t), z) <= alpha t (1-t) d(x, y)^2 lies in the set
    Riemannian (2.2)       Log_x(set) is strongly convex in T_x for every x of the set
    double geodesic (2.3)  Exp_{gamma(t)}(z) lies in the set for |z| <= alpha t (1-t) d(x, y)^2
    RSI (2.4)              <w, Log_x v> >= alpha |w| |Log_x v|^2 with v = argmax over the set of <w, Log_x z>
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from papyrax.methods.geometry.manifolds import Manifold, double_exp

Sampler = Callable  # key -> point


def _unit(man, x, u):
    square = man.inner(x, u, u)
    norm = jnp.sqrt(jnp.where(square > 0, square, 1))
    return u / jnp.expand_dims(norm, tuple(range(-man.point_ndim, 0)))


def _random_unit(key, man, x):
    return _unit(man, x, man.project_tangent(x, jax.random.normal(key, x.shape, x.dtype)))


def _outward(man, margin, x):
    return _unit(man, x, -man.egrad_to_rgrad(x, jax.grad(margin)(x)))


def _worst(key, n, trial):
    return jax.vmap(trial)(jax.random.split(key, n)).min()


def _direction(key, man, x, outward):
    k1, k2 = jax.random.split(key)
    return jnp.where(jax.random.bernoulli(k1), _random_unit(k2, man, x), outward)


def check_double_geodesic(
    key: Key[Array, ""], man: Manifold, margin: Callable, pairs: Callable, alpha: float, n: int
) -> Float[Array, ""]:
    """Smallest margin of Exp_{gamma(t)}(z) over n draws of `pairs(key) -> (x, y)`, t and z (Definition 2.3)."""

    def trial(key):
        k1, k2, k3 = jax.random.split(key, 3)
        x, y = pairs(k1)
        t = jax.random.uniform(k2, (), x.dtype)
        middle = man.exp(x, t * man.log(x, y))
        e = _direction(k3, man, middle, _outward(man, margin, middle))
        return margin(man.exp(middle, alpha * t * (1 - t) * man.dist(x, y) ** 2 * e))

    return _worst(key, n, trial)


def check_geodesic(
    key: Key[Array, ""],
    man: Manifold,
    margin: Callable,
    pairs: Callable,
    alpha: float,
    n: int,
    distance: Callable | None = None,
) -> Float[Array, ""]:
    """Smallest margin over points at `distance` alpha t (1-t) d(x, y)^2 from gamma(t) (Definition 2.1).

    `distance` is the d of the definition (default: Riemannian, where 2.1 and 2.3 are one statement); it must grow along
    geodesics from gamma(t), on which the point at the wanted distance is found by bisection.
    """
    if distance is None:
        return check_double_geodesic(key, man, margin, pairs, alpha, n)

    def trial(key):
        k1, k2, k3 = jax.random.split(key, 3)
        x, y = pairs(k1)
        t = jax.random.uniform(k2, (), x.dtype)
        middle = man.exp(x, t * man.log(x, y))
        e = _direction(k3, man, middle, _outward(man, margin, middle))
        wanted = alpha * t * (1 - t) * distance(x, y) ** 2

        def halve(_, ends):
            low, high = ends
            half = (low + high) / 2
            short = distance(middle, man.exp(middle, half * e)) < wanted
            return jnp.where(short, half, low), jnp.where(short, high, half)

        low, _ = jax.lax.fori_loop(0, 50, halve, (jnp.zeros_like(wanted), 4 * wanted))
        return margin(man.exp(middle, low * e))

    return _worst(key, n, trial)


def check_riemannian(
    key: Key[Array, ""], man: Manifold, margin: Callable, base: Sampler, pairs: Callable, alpha: float, n: int
) -> Float[Array, ""]:
    """Smallest margin of Exp_x((1-t) u + t w + alpha t (1-t) |u - w|^2 e) with u, w in Log_x(set), x from `base`
    (2.2)."""

    def trial(key):
        k0, k1, k2, k3 = jax.random.split(key, 4)
        x, (y, z) = base(k0), pairs(k1)
        t = jax.random.uniform(k2, (), x.dtype)
        u, w = man.log(x, y), man.log(x, z)
        centre = (1 - t) * u + t * w
        pulled = jax.grad(lambda s: margin(man.exp(x, s)))(centre)
        e = _direction(k3, man, x, _unit(man, x, -man.egrad_to_rgrad(x, pulled)))
        return margin(man.exp(x, centre + alpha * t * (1 - t) * man.inner(x, u - w, u - w) * e))

    return _worst(key, n, trial)


def scaling_ratio(man: Manifold, x, w, v) -> Float[Array, "..."]:
    """<w, Log_x v> / (|w| |Log_x v|^2): the alpha that the scaling inequality allows at (x, w); infinite where v =
    x."""
    u = man.log(x, v)
    top, square = man.inner(x, w, u), man.inner(x, u, u)
    # Below this distance the ratio is rounding over rounding.
    usable = square > 1e4 * jnp.finfo(square.dtype).eps
    return jnp.where(usable, top / (jnp.sqrt(man.inner(x, w, w)) * jnp.where(usable, square, 1)), jnp.inf)


def estimate_rsi(key: Key[Array, ""], man: Manifold, sampler: Callable, lmo: Callable, n: int) -> Float[Array, ""]:
    """Largest alpha that the scaling inequality allows over n draws of `sampler(key) -> (x, w)`, w tangent at x.

    `lmo(x, g)` minimises <g, Log_x v>, so it is called with g = -w.
    """

    def trial(key):
        x, w = sampler(key)
        return scaling_ratio(man, x, w, lmo(x, -w))

    return _worst(key, n, trial)


def residual(man: Manifold, x, u, v):
    """R_x(u, v) = Log_x(Exp_x(u, v)) - u - v: zero in flat space, cubic in the lengths under curvature."""
    return man.log(x, double_exp(man, x, u, v)) - u - v


def approximate_rsi_slack(man: Manifold, x, w, v, alpha: float, t: float) -> Float[Array, "..."]:
    """Left minus right side of the approximate scaling inequality at the point t of the geodesic from x to v.

    In a double geodesically strongly convex set Exp_x(t Log_x v, b) with b = alpha t (1-t) d(x, v)^2 w/|w| is a point
    of the set, so the optimality of v gives <w, Log_x v> >= alpha t |w| d^2 + <w, R_x(t Log_x v, b)> / (1 - t).
    """
    if not 0 < t < 1:
        raise ValueError(f"t must lie strictly between 0 and 1, got {t}.")
    u = man.log(x, v)
    axes = tuple(range(-man.point_ndim, 0))
    square = man.inner(x, u, u)
    norm = jnp.sqrt(man.inner(x, w, w))
    b = jnp.expand_dims(alpha * t * (1 - t) * square / norm, axes) * w
    rest = man.inner(x, w, residual(man, x, t * u, b))
    return man.inner(x, w, u) - alpha * t * norm * square - rest / (1 - t)


def ball_margin(man: Manifold, centre, radius: float) -> Callable:
    """Margin of a geodesic ball, R - d(z, centre)."""
    return lambda z: radius - man.dist(centre, z)


def ball_pairs(man: Manifold, centre, radius: float) -> Callable:
    """Pairs on the boundary of a ball, from far apart to 1e-2 R close (where the constant is attained)."""

    def draw(key):
        k1, k2, k3 = jax.random.split(key, 3)
        a = _random_unit(k1, man, centre)
        spread = 10 ** jax.random.uniform(k3, (), centre.dtype, -2.0, 1.0)
        b = _unit(man, centre, a + spread * _random_unit(k2, man, centre))
        return man.exp(centre, radius * a), man.exp(centre, radius * b)

    return draw


def ball_points(man: Manifold, centre, radius: float) -> Callable:
    """Points of a ball, crowded towards its boundary and reaching it."""

    def draw(key):
        k1, k2 = jax.random.split(key)
        inside = 1 - 10 ** jax.random.uniform(k2, (), centre.dtype, -6.0, 0.0)
        return man.exp(centre, radius * inside * _random_unit(k1, man, centre))

    return draw


def ball_directions(man: Manifold, centre, radius: float) -> Callable:
    """(x, w): points of a ball as `ball_points` and unit tangent vectors there, half of them within 0.3 of the
    outward normal."""
    points = ball_points(man, centre, radius)

    def draw(key):
        k1, k2, k3, k4 = jax.random.split(key, 4)
        x = points(k1)
        free = _random_unit(k2, man, x)
        normal = -_unit(man, x, man.log(x, centre))
        size = 10 ** jax.random.uniform(k3, (), x.dtype, -2.5, -0.5)
        return x, jnp.where(jax.random.bernoulli(k4), free, _unit(man, x, normal + size * free))

    return draw
