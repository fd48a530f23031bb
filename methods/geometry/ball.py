"""The Poincare ball of curvature -c as plain functions of coordinates: the gyrovector formulas, none of them projected.

Metric lambda_x^2 <u, v> with lambda_x = 2 / (1 - c |x|^2) (Ungar 2008; Ganea et al. 2018). Differences y - x are kept
whole: -x (+) y is written as [(1 - c|x|^2)(y - x) - c|y - x|^2 x] / [(1 - c|x|^2)(1 - c|y|^2) + c|y - x|^2], the same
point without the cancellation that the textbook form has for close points and near the boundary. `manifolds.poincare`
joins these to a manifold and projects every result inside the ball.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from papyrax.methods.geometry.smooth import asinhc_sq, atanhc_sq, safe_norm, safe_sqrt, tanhc_sq

Point = Float[Array, "... d"]


def _dot(x, y):
    return jnp.sum(x * y, axis=-1, keepdims=True)


def _gap(x, c):
    # The smallest positive gap keeps points that rounding put on the boundary finite.
    return jnp.maximum(1 - c * _dot(x, x), jnp.finfo(x.dtype).tiny ** 0.25)


def ball_eps(dtype) -> float:
    """Margin that keeps projected points off the boundary: 4e-3 in float32 and narrower types, 1e-5 in float64."""
    return 1e-5 if jnp.dtype(dtype) == jnp.float64 else 4e-3


def clip_to_ball(x: Point, c: float, eps: float | None = None) -> Point:
    """Pulls points with |x| > (1 - eps)/sqrt(c) back to that radius along their ray."""
    limit = (1 - (ball_eps(x.dtype) if eps is None else eps)) / c**0.5
    norm = safe_norm(x, keepdims=True)
    outside = norm > limit
    return jnp.where(outside, x * (limit / jnp.where(outside, norm, 1.0)), x)


def conformal_factor(x: Point, c: float) -> Float[Array, "... 1"]:
    """lambda_x = 2 / (1 - c |x|^2), with a trailing axis of one to multiply vectors."""
    return 2 / _gap(x, c)


def mobius_add(x: Point, y: Point, c: float) -> Point:
    """x (+)_c y = [(1 + 2c<x,y> + c|y|^2) x + (1 - c|x|^2) y] / (1 + 2c<x,y> + c^2 |x|^2 |y|^2)."""
    xx, yy, xy = _dot(x, x), _dot(y, y), _dot(x, y)
    top = (1 + 2 * c * xy + c * yy) * x + (1 - c * xx) * y
    return top / jnp.maximum(1 + 2 * c * xy + c * c * xx * yy, jnp.finfo(x.dtype).tiny ** 0.5)


def mobius_scale(r: Float[Array, "..."] | float, x: Point, c: float) -> Point:
    """r (x)_c x: the point at r times the distance of x from the origin, on the same ray."""
    return exp0(r * log0(x, c), c)


def mobius_difference(x: Point, y: Point, c: float) -> Point:
    """-x (+)_c y, accurate when x and y are close or near the boundary."""
    d = y - x
    dd, gx, gy = _dot(d, d), _gap(x, c), _gap(y, c)
    return (gx * d - c * dd * x) / (gx * gy + c * dd)


def _half_angle_sq(x, y, c):
    """sinh^2(sqrt(c) d(x, y) / 2), trailing axis of one."""
    d = y - x
    return c * _dot(d, d) / (_gap(x, c) * _gap(y, c))


def exp0(u: Point, c: float) -> Point:
    """Exponential map at the origin, tanh(sqrt(c)|u|) u / (sqrt(c)|u|)."""
    return tanhc_sq(c * _dot(u, u)) * u


def log0(y: Point, c: float) -> Point:
    """Inverse of `exp0`."""
    return atanhc_sq(c * _dot(y, y)) * y


def exp(x: Point, u: Point, c: float) -> Point:
    """Exponential map, x (+) tanh(sqrt(c) lambda_x |u| / 2) u / (sqrt(c)|u|)."""
    half = conformal_factor(x, c) * u / 2
    return mobius_add(x, tanhc_sq(c * _dot(half, half)) * half, c)


def log(x: Point, y: Point, c: float) -> Point:
    """Inverse of `exp`: (2 / (sqrt(c) lambda_x)) artanh(sqrt(c)|w|) w / |w| with w = -x (+) y."""
    q = _half_angle_sq(x, y, c)
    return mobius_difference(x, y, c) * (2 * asinhc_sq(q) * jnp.sqrt(1 + q) / conformal_factor(x, c))


def dist(x: Point, y: Point, c: float) -> Float[Array, "..."]:
    """Geodesic distance (2/sqrt(c)) arsinh sqrt(c|x-y|^2 / ((1-c|x|^2)(1-c|y|^2))); gradient 0 at coincident points."""
    q = _half_angle_sq(x, y, c)[..., 0]
    return 2 / c**0.5 * asinhc_sq(q) * safe_sqrt(q)


def gyration(a: Point, b: Point, w: Point, c: float) -> Point:
    """gyr[a, b] w: the rotation by which Moebius addition fails to be associative."""
    aa, bb, ab, aw, bw = _dot(a, a), _dot(b, b), _dot(a, b), _dot(a, w), _dot(b, w)
    ka = -c * c * aw * bb + c * bw + 2 * c * c * ab * bw
    kb = -c * c * bw * aa - c * aw
    return w + 2 * (ka * a + kb * b) / (1 + 2 * c * ab + c * c * aa * bb)


def transport(x: Point, y: Point, u: Point, c: float) -> Point:
    """Parallel transport of u from x to y along their geodesic, (lambda_x / lambda_y) gyr[y, -x] u."""
    return gyration(y, -x, u, c) * (_gap(y, c) / _gap(x, c))


def gyromidpoint(
    points: Float[Array, "... n d"], weights: Float[Array, "... m n"], c: float
) -> Float[Array, "... m d"]:
    """Weighted gyromidpoints: one point for each row of non-negative weights, by two matrix products.

    s = sum a_i lambda_i x_i / sum |a_i| (lambda_i - 1), m = s / (1 + sqrt(1 - c|s|^2)) (Ungar 2008), which is the
    Einstein midpoint in ball coordinates. Rows without weight give the origin.
    """
    factor = conformal_factor(points, c)
    total = jnp.abs(weights) @ (factor - 1)
    s = weights @ (factor * points) / jnp.maximum(total, 1e-10)
    return s / (1 + safe_sqrt(1 - c * _dot(s, s)))


def to_hyperboloid(x: Point, c: float) -> Float[Array, "... e"]:
    """Isometry to the unit hyperboloid (time coordinate first); lengths there are sqrt(c) times those of the ball."""
    x = c**0.5 * x
    xx = _dot(x, x)
    gap = _gap(x, 1.0)
    return jnp.concatenate([(1 + xx) / gap, 2 * x / gap], axis=-1)


def from_hyperboloid(x: Float[Array, "... e"], c: float) -> Point:
    """Inverse of `to_hyperboloid`."""
    return x[..., 1:] / ((1 + x[..., :1]) * c**0.5)
