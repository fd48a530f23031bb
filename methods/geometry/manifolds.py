"""Riemannian manifolds as records of pure functions: Euclidean, sphere, hyperboloid, Poincare ball, SPD, products.

Every function takes points and tangent vectors on trailing axes (vectors `[..., d]`, SPD matrices `[..., d, d]`),
broadcasts over leading axes and maps under vmap, follows its input's dtype, and is differentiable at coincident
points: `log` has its true derivative there, `dist` the subgradient 0. Distances come from differences of points
(arsinh and arctan forms), never from an arccosh or arccos of an inner product, so they keep their accuracy for close
points in float32.

Conventions: the sphere is |x| = 1; the hyperboloid is <x, x> = -1 with the time coordinate first and Lorentz product
-x_0 y_0 + <x', y'>; the Poincare ball has curvature -c; SPD carries the affine-invariant metric tr(X^-1 U X^-1 V). A
constructor called twice with equal arguments returns the same record, so records work as static arguments of jit.
"""

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, PyTree

from papyrax.methods.geometry import ball
from papyrax.methods.geometry.smooth import (
    asinc_sq,
    asinhc_sq,
    cos_sq,
    cosh_sq,
    nonnegative,
    safe_sqrt,
    sinc_sq,
    sinhc_sq,
)
from papyrax.methods.geometry.symmetric import (
    cholesky_factor,
    log_norm_squared,
    sym,
    sym_exp,
    sym_log,
    sym_sqrt,
    whiten,
)


class Manifold(NamedTuple):
    """Functions of one manifold; `point_ndim` trailing axes make a point (0: a tuple of points, one a factor).

    exp(x, u), log(x, y), dist(x, y), inner(x, u, v), transport(x, y, u) along the geodesic x to y, project_point(x),
    project_tangent(x, u), egrad_to_rgrad(x, g), random(key, shape, dtype), and midpoint(points [..., n, d], weights
    [..., m, n]) -> [..., m, d], the closed-form weighted centre for each row of weights. `pairwise` serves
    `pairwise_dist`; `curvature` bounds the sectional curvature from both sides.
    """

    name: str
    point_ndim: int
    curvature: tuple[float, float]
    exp: Callable
    log: Callable
    dist: Callable
    inner: Callable
    transport: Callable
    project_point: Callable
    project_tangent: Callable
    egrad_to_rgrad: Callable
    random: Callable
    midpoint: Callable
    pairwise: Callable


def _dot(u, v):
    return jnp.sum(u * v, axis=-1, keepdims=True)


def _checked(function: Callable, name: str, square: bool = False) -> Callable:
    """Refuses arguments of unequal width or of integer dtype by one sentence; shapes are static, at no
    cost."""

    def call(*args):
        for a in args:
            if not jnp.issubdtype(jnp.result_type(a), jnp.floating):
                raise ValueError(f"{name} needs floating-point arrays, got dtype {jnp.result_type(a)}.")
        widths = [jnp.shape(a)[-2:] if square else jnp.shape(a)[-1:] for a in args]
        if len(set(widths)) != 1 or (square and (len(widths[0]) != 2 or widths[0][0] != widths[0][1])) or not widths[0]:
            wanted = "square matrices of one size" if square else "vectors of one width"
            raise ValueError(f"{name} needs {wanted} on the trailing axes, got shapes {[jnp.shape(a) for a in args]}.")
        return function(*args)

    return call


def _gram_squared(x, y):
    """|x_i - y_j|^2 by one matrix product; absolute error is one rounding of |x|^2 + |y|^2."""
    cross = jnp.matmul(x, jnp.swapaxes(y, -1, -2), precision=jax.lax.Precision.HIGHEST)
    return jnp.maximum(_dot(x, x) + jnp.swapaxes(_dot(y, y), -1, -2) - 2 * cross, 0)


def _exact_squared(x, y):
    """|x_i - y_j|^2 from differences, one coordinate at a time so that no [n, m, d] array exists."""
    zero = jnp.zeros(jnp.broadcast_shapes(x.shape[:-1] + (1,), y.shape[:-2] + (1, y.shape[-2])), x.dtype)

    def add(total, columns):
        a, b = columns
        return total + (a[..., :, None] - b[..., None, :]) ** 2, None

    return jax.lax.scan(add, zero, (jnp.moveaxis(x, -1, 0), jnp.moveaxis(y, -1, 0)))[0]


def _squared(x, y, exact):
    return _exact_squared(x, y) if exact else _gram_squared(x, y)


def _finish(name, point_ndim, curvature, square=False, **functions) -> Manifold:
    for key in ("exp", "log", "dist", "inner", "transport", "project_tangent", "egrad_to_rgrad"):
        functions[key] = _checked(functions[key], f"{name}.{key}", square)
    return Manifold(name=name, point_ndim=point_ndim, curvature=curvature, **functions)


@cache
def euclidean() -> Manifold:
    """Flat R^d."""
    return _finish(
        "euclidean",
        1,
        (0.0, 0.0),
        exp=lambda x, u: x + u,
        log=lambda x, y: y - x,
        dist=lambda x, y: safe_sqrt(_dot(y - x, y - x)[..., 0]),
        inner=lambda x, u, v: jnp.sum(u * v, -1),
        transport=lambda x, y, u: jnp.broadcast_to(u, jnp.broadcast_shapes(x.shape, y.shape, u.shape)),
        project_point=lambda x: x,
        project_tangent=lambda x, u: u,
        egrad_to_rgrad=lambda x, g: g,
        random=lambda key, shape, dtype=None: jax.random.normal(key, shape, dtype),
        midpoint=lambda points, weights: weights @ points / jnp.sum(weights, -1, keepdims=True),
        pairwise=lambda x, y, exact: safe_sqrt(_squared(x, y, exact)),
    )


@cache
def sphere() -> Manifold:
    """Unit sphere in R^d, curvature 1. `log` and `transport` are defined short of the antipode (at it `log` is 0)."""

    def normalise(x):
        norm = safe_sqrt(_dot(x, x))
        # The zero vector has no nearest point: the first axis stands for it.
        return jnp.where(norm > 0, x / jnp.where(norm > 0, norm, 1), jnp.zeros_like(x).at[..., 0].set(1))

    def chords(x, y):
        return _dot(y - x, y - x), _dot(x + y, x + y)

    def angle(m, n):
        # |x-y| = 2 sin(a/2), |x+y| = 2 cos(a/2): accurate for every angle; the series branch carries the derivative
        # at 0.
        near = m < n
        small = 2 * asinc_sq(jnp.where(near, m, 0) / 4) * safe_sqrt(m) / 2
        wide = 2 * jnp.arctan2(safe_sqrt(jnp.where(near, 1, m)), safe_sqrt(n))
        return jnp.where(near, small, wide)

    def log(x, y):
        m, n = chords(x, y)
        near = m < n
        small = asinc_sq(jnp.where(near, m, 0) / 4) / jnp.sqrt(jnp.where(near, n, 4) / 4)
        sines = jnp.sqrt(jnp.maximum(jnp.where(near, 1, m * n), jnp.finfo(m.dtype).tiny)) / 2
        ratio = jnp.where(near, small, angle(m, n) / sines)
        return (y - x + m / 2 * x) * ratio

    def transport(x, y, u):
        _, n = chords(x, y)
        return u - _dot(y, u) / jnp.maximum(n / 2, jnp.finfo(n.dtype).eps ** 2) * (x + y)

    def exp(x, u):
        s = _dot(u, u)
        return normalise(cos_sq(s) * x + sinc_sq(s) * u)

    def pairwise(x, y, exact):
        m = _squared(x, y, exact)
        return angle(m, jnp.maximum(4 - m, 0))

    return _finish(
        "sphere",
        1,
        (1.0, 1.0),
        exp=exp,
        log=log,
        dist=lambda x, y: angle(*chords(x, y))[..., 0],
        inner=lambda x, u, v: jnp.sum(u * v, -1),
        transport=transport,
        project_point=normalise,
        project_tangent=lambda x, u: u - _dot(x, u) * x,
        egrad_to_rgrad=lambda x, g: g - _dot(x, g) * x,
        random=lambda key, shape, dtype=None: normalise(jax.random.normal(key, shape, dtype)),
        midpoint=lambda points, weights: normalise(weights @ points),
        pairwise=pairwise,
    )


def lorentz(u: Float[Array, "... d"], v: Float[Array, "... d"]) -> Float[Array, "... 1"]:
    """Lorentz product -u_0 v_0 + <u', v'>, trailing axis of one."""
    return _dot(u, v) - 2 * u[..., :1] * v[..., :1]


@cache
def hyperboloid() -> Manifold:
    """Upper sheet <x, x> = -1 of the hyperboloid in R^d (time first), curvature -1, of dimension d - 1."""

    def lift(x):
        space = x[..., 1:]
        return jnp.concatenate([jnp.sqrt(1 + _dot(space, space)), space], axis=-1)

    def chord(x, y):
        # <y-x, y-x> = 4 sinh^2(d/2); the time difference comes from the space parts, so it does not cancel.
        d, total = (y - x)[..., 1:], (x + y)[..., 1:]
        time = _dot(d, total) / (x[..., :1] + y[..., :1])
        return nonnegative(_dot(d, d) - time**2)

    def distance(m):
        return asinhc_sq(m / 4) * safe_sqrt(m)

    def log(x, y):
        m = chord(x, y)
        return (y - x - m / 2 * x) * asinhc_sq(m + m**2 / 4)

    def exp(x, u):
        s = nonnegative(lorentz(u, u))
        return lift(cosh_sq(s) * x + sinhc_sq(s) * u)

    def tangent(x, u):
        return u + lorentz(x, u) * x

    def egrad_to_rgrad(x, g):
        return tangent(x, jnp.concatenate([-g[..., :1], g[..., 1:]], axis=-1))

    def transport(x, y, u):
        return u + lorentz(y, u) / (2 + chord(x, y) / 2) * (x + y)

    def random(key, shape, dtype=None):
        u = jax.random.normal(key, shape, dtype).at[..., 0].set(0)
        return exp(jnp.zeros_like(u).at[..., 0].set(1), u)

    def midpoint(points, weights):
        s = weights @ points
        return lift(s / jnp.sqrt(jnp.maximum(-lorentz(s, s), jnp.finfo(s.dtype).tiny)))

    def pairwise(x, y, exact):
        d = _squared(x[..., 1:], y[..., 1:], exact)
        squares = _dot(x[..., 1:], x[..., 1:]), jnp.swapaxes(_dot(y[..., 1:], y[..., 1:]), -1, -2)
        time = (squares[1] - squares[0]) / (x[..., :1] + jnp.swapaxes(y[..., :1], -1, -2))
        return distance(nonnegative(d - time**2))

    return _finish(
        "hyperboloid",
        1,
        (-1.0, -1.0),
        exp=exp,
        log=log,
        dist=lambda x, y: distance(chord(x, y))[..., 0],
        inner=lambda x, u, v: lorentz(u, v)[..., 0],
        transport=transport,
        project_point=lift,
        project_tangent=tangent,
        egrad_to_rgrad=egrad_to_rgrad,
        random=random,
        midpoint=midpoint,
        pairwise=pairwise,
    )


@cache
def poincare(c: float = 1.0, eps: float | None = None) -> Manifold:
    """Poincare ball |x| < 1/sqrt(c) of curvature -c; the result of every map lies within (1 - eps)/sqrt(c).

    `eps` defaults by dtype (`ball.ball_eps`). `midpoint` is the gyromidpoint, which weighs points as the hyperboloid's
    centroid does. Raises ValueError unless c > 0.
    """
    if not c > 0:
        raise ValueError(f"poincare needs a curvature c > 0, got {c}.")

    def clip(x):
        return ball.clip_to_ball(x, c, eps)

    def inner(x, u, v):
        return (ball.conformal_factor(x, c) ** 2 * u * v).sum(-1)

    def random(key, shape, dtype=None):
        return clip(ball.exp0(jax.random.normal(key, shape, dtype) / 2, c))

    def pairwise(x, y, exact):
        gx, gy = (2 / ball.conformal_factor(z, c) for z in (x, y))
        q = c * _squared(x, y, exact) / (gx * jnp.swapaxes(gy, -1, -2))
        return 2 / c**0.5 * asinhc_sq(q) * safe_sqrt(q)

    return _finish(
        "poincare",
        1,
        (-c, -c),
        exp=lambda x, u: clip(ball.exp(x, u, c)),
        log=lambda x, y: ball.log(x, y, c),
        dist=lambda x, y: ball.dist(x, y, c),
        inner=inner,
        transport=lambda x, y, u: ball.transport(x, y, u, c),
        project_point=clip,
        project_tangent=lambda x, u: u,
        egrad_to_rgrad=lambda x, g: g / ball.conformal_factor(x, c) ** 2,
        random=random,
        midpoint=lambda points, weights: clip(ball.gyromidpoint(points, weights, c)),
        pairwise=pairwise,
    )


@cache
def spd() -> Manifold:
    """Symmetric positive definite matrices, affine-invariant metric; sectional curvature within [-1/2, 0].

    All maps use the Cholesky factor X = L L^T: congruence by L^-1 moves X to the identity just as X^-1/2 does, at a
    fraction of the cost. `midpoint` is the log-Euclidean mean. `random` draws exp of a symmetric Gaussian matrix.
    """

    def exp(x, u):
        lower = cholesky_factor(x)
        return sym(lower @ sym_exp(whiten(lower, u)) @ jnp.swapaxes(lower, -1, -2))

    def log(x, y):
        lower = cholesky_factor(x)
        return sym(lower @ sym_log(whiten(lower, y)) @ jnp.swapaxes(lower, -1, -2))

    def dist(x, y):
        s = log_norm_squared(whiten(cholesky_factor(x), y))
        # Whitening a matrix by itself gives the identity up to rounding, whose gradient would be a random unit vector.
        same = jnp.all(x == y, axis=(-1, -2))
        return safe_sqrt(jnp.where(same, 0, s))

    def inner(x, u, v):
        lower = cholesky_factor(x)
        return jnp.sum(whiten(lower, sym(u)) * whiten(lower, sym(v)), axis=(-1, -2))

    def transport(x, y, u):
        lower = cholesky_factor(x)
        across = lower @ sym_sqrt(whiten(lower, y))
        return sym(across @ whiten(lower, u) @ jnp.swapaxes(across, -1, -2))

    def project_point(x):
        values, q = jnp.linalg.eigh(sym(x))
        floor = jnp.finfo(x.dtype).eps * jnp.maximum(jnp.max(jnp.abs(values), -1, keepdims=True), 1e-30)
        return jnp.einsum("...ik,...k,...jk->...ij", q, jnp.maximum(values, floor), q)

    def random(key, shape, dtype=None):
        return sym_exp(sym(jax.random.normal(key, shape, dtype)))

    def midpoint(points, weights):
        flat = sym_log(points).reshape(*points.shape[:-2], -1)
        mean = weights @ flat / jnp.sum(weights, -1, keepdims=True)
        return sym_exp(sym(mean.reshape(*mean.shape[:-1], *points.shape[-2:])))

    def pairwise(x, y, exact):
        del exact
        return dist(x[..., :, None, :, :], y[..., None, :, :, :])

    return _finish(
        "spd",
        2,
        (-0.5, 0.0),
        square=True,
        exp=exp,
        log=log,
        dist=dist,
        inner=inner,
        transport=transport,
        project_point=project_point,
        project_tangent=lambda x, u: sym(u),
        egrad_to_rgrad=lambda x, g: sym(x @ sym(g) @ x),
        random=random,
        midpoint=midpoint,
        pairwise=pairwise,
    )


@cache
def product(*factors: Manifold) -> Manifold:
    """Riemannian product: points and tangent vectors are tuples, one entry a factor; `random` takes shapes."""
    if not factors:
        raise ValueError("product needs at least one manifold, got none.")

    def each(name):
        def call(*args):
            for a in args:
                if len(a) != len(factors):
                    raise ValueError(f"product.{name} needs tuples of {len(factors)} entries, got one of {len(a)}.")
            return tuple(getattr(m, name)(*parts) for m, *parts in zip(factors, *args, strict=True))

        return call

    dists, inners, midpoints, pairs = (
        each("dist"),
        each("inner"),
        [m.midpoint for m in factors],
        [m.pairwise for m in factors],
    )

    def random(key, shapes, dtype=None):
        keys = jax.random.split(key, len(factors))
        return tuple(m.random(k, s, dtype) for m, k, s in zip(factors, keys, shapes, strict=True))

    low, high = (f(m.curvature[i] for m in factors) for i, f in enumerate((min, max)))
    mixed = len(factors) > 1
    return Manifold(
        name="product(" + ", ".join(m.name for m in factors) + ")",
        point_ndim=0,
        # A plane spanned by directions of two factors is flat.
        curvature=(min(low, 0.0), max(high, 0.0)) if mixed else (low, high),
        **{k: each(k) for k in ("exp", "log", "transport", "project_point", "project_tangent", "egrad_to_rgrad")},
        dist=lambda x, y: safe_sqrt(sum(d**2 for d in dists(x, y))),
        inner=lambda x, u, v: sum(inners(x, u, v)),
        random=random,
        midpoint=lambda points, weights: tuple(f(p, weights) for f, p in zip(midpoints, points, strict=True)),
        pairwise=lambda x, y, exact: safe_sqrt(sum(f(a, b, exact) ** 2 for f, a, b in zip(pairs, x, y, strict=True))),
    )


def pairwise_dist(manifold: Manifold, x: PyTree, y: PyTree, *, exact: bool = False) -> Float[Array, "... n m"]:
    """All distances between n points x and m points y, without an array of n * m differences.

    By default through one matrix product, which leaves an absolute error of about sqrt(eps) in the distance of nearly
    coincident points (in the Poincare ball times lambda: choose `exact` for nearest points near the boundary).
    `exact` sums squared differences coordinate by coordinate instead: as accurate as `dist`, about ten times the
    time.
    """
    return manifold.pairwise(x, y, exact)


def mobius_add(x: Float[Array, "... d"], y: Float[Array, "... d"], c: float, eps: float | None = None) -> Array:
    """Moebius sum x (+)_c y in the Poincare ball, projected inside it (`ball.mobius_add` is the bare formula)."""
    return ball.clip_to_ball(ball.mobius_add(x, y, c), c, eps)


def double_exp(manifold: Manifold, x: PyTree, u: PyTree, v: PyTree) -> PyTree:
    """Exp_x(u, v) = Exp_y(transport of v from x to y) with y = Exp_x(u): walk u, then v carried along."""
    y = manifold.exp(x, u)
    return manifold.exp(y, manifold.transport(x, y, v))


def check_point(manifold: Manifold, x: PyTree, *, argument: str = "x", tol: float | None = None) -> None:
    """Host check of concrete points: raises ValueError, in one sentence, for NaN or for points off the manifold.

    A point is off when projecting it moves it by more than `tol` of its size (default: eps^(1/2) of its dtype); an
    SPD point also when it is not symmetric.
    """
    projected = jax.tree.leaves(manifold.project_point(x))
    for part, moved in zip(jax.tree.leaves(x), projected, strict=True):
        if not np.all(np.isfinite(np.asarray(part))):
            raise ValueError(f"{argument} must be finite, got NaN or infinity.")
        scale = max(1.0, float(jnp.max(jnp.abs(part))))
        gap = float(jnp.max(jnp.abs(part - moved))) / scale
        limit = float(jnp.finfo(moved.dtype).eps) ** 0.5 if tol is None else tol
        if not gap <= limit:
            raise ValueError(
                f"{argument} must lie on the manifold {manifold.name}, got a point {gap:.2g} away from it."
            )


class RiemannianAdamState(NamedTuple):
    """Step count, transported first moments (tangent at the present point), second moments (one scalar a point)."""

    count: Array
    mu: PyTree
    nu: PyTree


def riemannian_adam(
    manifold: Manifold, learning_rate: float | Callable, b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8
) -> optax.GradientTransformation:
    """Riemannian Adam (Becigneul and Ganea 2019) for parameter trees whose leaves are points of one manifold.

    Takes Euclidean gradients, keeps one second moment a point (the squared Riemannian norm), walks by the exponential
    map and carries the first moment along by parallel transport. The update is the coordinate difference of new and
    old point, so `optax.apply_updates` lands on the manifold up to one rounding. For a product give each factor its
    own transformation through `optax.partition`.
    """
    if manifold.point_ndim < 1:
        raise ValueError(f"riemannian_adam needs a manifold whose points are arrays, got {manifold.name}.")
    axes = tuple(range(-manifold.point_ndim, 0))

    def init(params):
        nu = jax.tree.map(lambda p: jnp.zeros(p.shape[: -manifold.point_ndim], p.dtype), params)
        return RiemannianAdamState(jnp.zeros((), jnp.int32), jax.tree.map(jnp.zeros_like, params), nu)

    def update(grads, state, params=None):
        if params is None:
            raise ValueError("riemannian_adam needs params in update, got None.")
        count = state.count + 1
        rate = learning_rate(state.count) if callable(learning_rate) else learning_rate

        def leaf(g, m, v, x):
            g = manifold.egrad_to_rgrad(x, g)
            m = b1 * m + (1 - b1) * g
            v = b2 * v + (1 - b2) * manifold.inner(x, g, g)
            m_hat = m / (1 - b1 ** count.astype(x.dtype))
            v_hat = v / (1 - b2 ** count.astype(x.dtype))
            step = -rate * m_hat / jnp.expand_dims(jnp.sqrt(v_hat) + eps, axes)
            y = manifold.project_point(manifold.exp(x, step))
            return y - x, manifold.transport(x, y, m), v

        out = jax.tree.map(leaf, grads, state.mu, state.nu, params)
        updates, mu, nu = jax.tree.transpose(jax.tree.structure(grads), jax.tree.structure((0, 0, 0)), out)
        return updates, RiemannianAdamState(count, mu, nu)

    return optax.GradientTransformation(init, update)
