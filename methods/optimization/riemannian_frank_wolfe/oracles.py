"""Linear minimisation oracles: v = argmin over the set of <g, Log_x v>_x, with the logarithm of the iterate x itself.

In a space of constant curvature the best point of a ball lies in the plane of x, the centre p and g, on the boundary
circle. With delta = d(x, p), tau the angle at p from x to v, and phi the angle at x between -g and the direction to
p, the triangle gives

    sin^2(theta/2) = sin^2((delta - R)/2) + sin(delta) sin(R) sin^2(tau/2)        theta = d(x, v)
    <-g/|g|, Log_x v> = theta/sin(theta) [cos(phi) (cos R sin delta - sin R cos delta cos tau) + sin(phi) sin R sin tau]

(k = 1; hyperbolic functions for k = -1; in the flat limit v = p - R g/|g|). This is smooth in tau on [0, pi], unlike
the same quantity as a function of theta, so a bracket and a bisection of its derivative find v to the last digits
with work O(n).
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from papyrax.methods.geometry import ball
from papyrax.methods.geometry.manifolds import Manifold, euclidean, hyperboloid, sphere
from papyrax.methods.geometry.smooth import asinc_sq, asinhc_sq

Vector = Float[Array, "d"]
GRID, HALVINGS = 64, 52


def _unit(man, x, u):
    square = man.inner(x, u, u)
    positive = square > 0
    return jnp.where(positive, u / jnp.sqrt(jnp.where(positive, square, 1)), 0)


def clamp_to_ball(man: Manifold, x, centre, radius: float):
    """x if within the ball, else the point of its boundary on the geodesic to x: the metric projection onto the ball in
    constant curvature (ball below the convexity radius) and on Hadamard manifolds."""
    distance = man.dist(centre, x)
    factor = radius / jnp.where(distance > radius, distance, 1)
    return jnp.where(distance > radius, man.exp(centre, factor * man.log(centre, x)), x)


def lmo_centred(man: Manifold, x, radius: float, g):
    """Ball around the iterate itself (trust region), any manifold: Exp_x(-R g/|g|); x where g = 0."""
    return man.exp(x, -radius * _unit(man, x, g))


def _triangle(k: int, delta, radius, tau):
    """Components of Log_x v towards p and across it, from the angle tau at p."""
    half = jnp.sin(tau / 2) ** 2
    if k == 1:
        s = jnp.sin((delta - radius) / 2) ** 2 + jnp.sin(delta) * jnp.sin(radius) * half
        # theta / sin(theta) with sin(theta/2)^2 = s.
        ratio = asinc_sq(s) / jnp.sqrt(jnp.maximum(1 - s, jnp.finfo(s.dtype).tiny))
        along = jnp.cos(radius) * jnp.sin(delta) - jnp.sin(radius) * jnp.cos(delta) * jnp.cos(tau)
        return ratio * along, ratio * jnp.sin(radius) * jnp.sin(tau)
    s = jnp.sinh((delta - radius) / 2) ** 2 + jnp.sinh(delta) * jnp.sinh(radius) * half
    ratio = asinhc_sq(s) / jnp.sqrt(1 + s)
    along = jnp.cosh(radius) * jnp.sinh(delta) - jnp.sinh(radius) * jnp.cosh(delta) * jnp.cos(tau)
    return ratio * along, ratio * jnp.sinh(radius) * jnp.sin(tau)


def best_angle(k: int, delta: Float[Array, ""], radius, cos_phi: Float[Array, ""], sin_phi: Float[Array, ""]):
    """tau in [0, pi] that maximises the objective above: best of a grid, then bisection of its derivative."""

    def value(tau):
        along, across = _triangle(k, delta, radius, tau)
        return cos_phi * along + sin_phi * across

    grid = jnp.linspace(0, jnp.pi, GRID, dtype=delta.dtype)
    best = jnp.argmax(jax.vmap(value)(grid))
    slope = jax.grad(value)

    def halve(_, ends):
        low, high = ends
        middle = (low + high) / 2
        rising = slope(middle) > 0
        return jnp.where(rising, middle, low), jnp.where(rising, high, middle)

    ends = grid[jnp.maximum(best - 1, 0)], grid[jnp.minimum(best + 1, GRID - 1)]
    low, high = jax.lax.fori_loop(0, HALVINGS, halve, ends)
    found = (low + high) / 2
    return jnp.where(value(found) >= value(grid[best]), found, grid[best])


def lmo_spaceform_ball(k: int, x: Vector, centre: Vector, radius: float, g: Vector) -> Vector:
    """Exact oracle of the ball B(centre, R) in the space of constant curvature k: 1 sphere, 0 flat, -1 hyperboloid.

    x must lie in the ball and g be the Riemannian gradient at x. Where g = 0 every point is optimal and x is
    returned. Needs R < pi/2 on the sphere. Raises ValueError for another k or such an R.
    """
    if k not in (1, 0, -1):
        raise ValueError(f"k must be 1, 0 or -1, got {k}.")
    if isinstance(radius, (int, float)) and not 0 < radius < (jnp.pi / 2 if k == 1 else jnp.inf):
        raise ValueError(f"radius must be positive (below pi/2 on the sphere), got {radius}.")
    man = {1: sphere, 0: euclidean, -1: hyperboloid}[k]()
    w = -_unit(man, x, g)
    still = jnp.all(w == 0)
    if k == 0:
        return jnp.where(still, x, centre + radius * w)
    delta = man.dist(x, centre)
    at_centre = delta < 1e-9
    q = _unit(man, x, man.log(x, centre))
    cos_phi = jnp.clip(man.inner(x, w, q), -1, 1)
    across = _perpendicular(man, x, q, w - cos_phi * q)
    sin_phi = jnp.maximum(man.inner(x, w, across), 0)
    tau = best_angle(k, delta, radius, cos_phi, sin_phi)
    along, side = _triangle(k, delta, radius, tau)
    u = jnp.where(at_centre, radius * w, along * q + side * across)
    return jnp.where(still, x, clamp_to_ball(man, man.exp(x, u), centre, radius))


def _perpendicular(man, x, q, rest):
    """Unit of the part of w across q; where w is parallel to q, some unit tangent vector across q."""
    square = man.inner(x, rest, rest)
    usable = square > (16 * jnp.finfo(x.dtype).eps) ** 2
    axis = jnp.zeros_like(x).at[jnp.argmin(jnp.abs(x) + jnp.abs(q))].set(1)
    spare = man.project_tangent(x, axis)
    other = _unit(man, x, spare - man.inner(x, spare, q) * q)
    clean = rest - man.inner(x, rest, q) * q
    return jnp.where(usable, _unit(man, x, jnp.where(usable, clean, other)), other)


def lmo_poincare_ball(c: float, x: Vector, centre: Vector, radius: float, g: Vector) -> Vector:
    """The same in ball coordinates of curvature -c: reduced on the hyperboloid, where close points keep their
    digits."""
    lifted, push = jax.jvp(lambda z: ball.to_hyperboloid(z, c), (x,), (g,))
    v = lmo_spaceform_ball(-1, lifted, ball.to_hyperboloid(centre, c), radius * c**0.5, push)
    return jnp.where(jnp.all(g == 0), x, ball.from_hyperboloid(v, c))


def lmo_l1_ball(centre: Vector, radius: float, g: Vector) -> Vector:
    """Flat l1 ball: the vertex against the largest entry of g."""
    i = jnp.argmax(jnp.abs(g))
    return centre.at[i].add(-radius * jnp.sign(g[i]))


def lmo_box(low: Vector, high: Vector, g: Vector) -> Vector:
    """Flat box: the corner against g."""
    return jnp.where(g > 0, low, high)


def lmo_simplex(scale: float, g: Vector) -> Vector:
    """Flat simplex {v >= 0, sum v = scale}: the vertex of the smallest entry of g."""
    return scale * jax.nn.one_hot(jnp.argmin(g), g.shape[0], dtype=g.dtype)
