"""Oracles for sets of SPD matrices under the affine-invariant metric: balls and intervals, with the condition for
exactness.

At the identity (congruence by the Cholesky factor of X) with Q = L^-1 P L^-T and H = L^-1 G L^-T the task is to
minimise tr(H log V). Over the ball {d(V, Q) <= R} no closed form exists unless Q and H commute: then, in their common
eigenbasis, it is a Euclidean ball of log-eigenvalues and V = exp(log Q - R H/|H|). Otherwise it is solved by
projected gradient descent from that point. Over the interval {lower <= Z <= upper} Weber and Sra (2017) give a
formula that is optimal when H is definite or commutes with the bounds; between, better points exist, and the polished
oracle finds them by local search.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from papyrax.methods.geometry.manifolds import spd
from papyrax.methods.geometry.symmetric import (
    cholesky_factor,
    sym,
    sym_exp,
    sym_log,
    sym_sqrt,
    whiten,
)
from papyrax.methods.optimization.riemannian_frank_wolfe.oracles import clamp_to_ball

Matrix = Float[Array, "d d"]


def _frobenius(a):
    return jnp.sqrt(jnp.sum(a * a))


def _linear(h, v):
    return jnp.sum(h * sym_log(v))


def _commutator(a, b):
    return _frobenius(a @ b - b @ a) / jnp.maximum(_frobenius(a) * _frobenius(b), jnp.finfo(a.dtype).tiny)


def lmo_spd_ball(
    x: Matrix, centre: Matrix, radius: float, g: Matrix, *, iterations: int = 200, tol: float = 1e-13
) -> Matrix:
    """argmin of <g, Log_x V>_x over d(V, centre) <= R; g is the Riemannian gradient at x.

    Projected gradient descent with an adaptive step (doubled on success, quartered on failure), pulled back along
    geodesics to the centre, until ten trials in a row gain less than `tol` R or `iterations` are spent.
    `spd_ball_residual` certifies it.
    """
    man = spd()
    lower = cholesky_factor(x)
    q, h = whiten(lower, centre), whiten(lower, sym(g))
    size = _frobenius(h)
    h = h / jnp.where(size > 0, size, 1)
    first = clamp_to_ball(man, sym_exp(sym_log(q) - radius * h), q, radius)

    def step(carry):
        v, value, length, fails, i = carry
        gradient = man.egrad_to_rgrad(v, jax.grad(_linear, 1)(h, v))
        # A step beyond twice the diameter gains nothing and would overflow the exponential.
        norm = jnp.sqrt(man.inner(v, gradient, gradient))
        length = jnp.minimum(length, 4 * radius / jnp.maximum(norm, 1e-30))
        trial = clamp_to_ball(man, man.exp(v, -length * gradient), q, radius)
        new = _linear(h, trial)
        gained = value - new
        better = gained > 0
        fails = jnp.where(gained > tol * radius, 0, fails + 1)
        v, value = jnp.where(better, trial, v), jnp.where(better, new, value)
        return v, value, jnp.maximum(jnp.where(better, 2 * length, length / 4), 1e-8), fails, i + 1

    def going(carry):
        return (carry[3] < 10) & (carry[4] < iterations)

    zero = jnp.zeros((), jnp.int32)
    start = (first, _linear(h, first), jnp.asarray(radius, x.dtype), zero, zero)
    v = jax.lax.while_loop(going, step, start)[0]
    return jnp.where(size > 0, sym(lower @ v @ lower.T), x)


def spd_ball_residual(x: Matrix, centre: Matrix, g: Matrix, v: Matrix) -> Float[Array, ""]:
    """First-order residual of a point v of the ball: the part of the unit gradient at v that is not along the inward
    normal.

    0 at a stationary point, up to 1; a maximiser would be told by the sign and gives 2.
    """
    man = spd()
    lower = cholesky_factor(x)
    q, h, w = whiten(lower, centre), whiten(lower, sym(g)), whiten(lower, v)
    gradient = man.egrad_to_rgrad(w, jax.grad(_linear, 1)(h, w))
    inward = man.log(w, q)

    def unit(u):
        return u / jnp.sqrt(man.inner(w, u, u))

    rest = unit(gradient) - unit(inward)
    return jnp.sqrt(man.inner(w, rest, rest))


def spd_ball_is_closed_form(x: Matrix, centre: Matrix, g: Matrix, tol: float = 1e-10) -> Bool[Array, ""]:
    """Whether centre and gradient commute as seen from x, so that the first guess of the oracle is already the
    answer."""
    lower = cholesky_factor(x)
    return _commutator(whiten(lower, centre), whiten(lower, sym(g))) < tol


def _interval_frame(x, low, high, g):
    """Bounds and gradient seen from x, in the eigenbasis of the gradient (ascending eigenvalues)."""
    root = sym_sqrt(x)
    inverse = jnp.linalg.inv(root)
    values, q = jnp.linalg.eigh(sym(inverse @ sym(g) @ inverse))
    across = q.T @ inverse
    return values, sym(across @ low @ across.T), sym(across @ high @ across.T), root @ q


def spd_interval_oracle_published(x: Matrix, low: Matrix, high: Matrix, g: Matrix) -> Matrix:
    """The formula of Weber and Sra: Z = X^1/2 Q (P^T [D < 0] P + L^) Q^T X^1/2 with P upper triangular, P^T P = U^ -
    L^.

    Optimal under `spd_interval_is_exact`; elsewhere feasible, but a better point exists.
    """
    values, bottom, top, back = _interval_frame(x, low, high, g)
    upper = cholesky_factor(sym(top - bottom)).T
    inside = upper.T @ jnp.diag((values < 0).astype(x.dtype)) @ upper + bottom
    return sym(back @ inside @ back.T)


def spd_interval_is_exact(x: Matrix, low: Matrix, high: Matrix, g: Matrix, tol: float = 1e-10) -> Bool[Array, ""]:
    """Condition under which the published formula is optimal: the gradient seen from x is definite, or commutes with
    both bounds seen from x."""
    values, bottom, top, _ = _interval_frame(x, low, high, g)
    definite = (values[0] >= 0) | (values[-1] <= 0)
    d = jnp.diag(values)
    return definite | ((_commutator(d, bottom) < tol) & (_commutator(d, top) < tol))


def lmo_spd_interval(x: Matrix, low: Matrix, high: Matrix, g: Matrix, *, iterations: int = 30) -> Matrix:
    """The published point improved by local search over Z = low + C W C^T, C C^T = high - low, 0 <= W <= I.

    Conditional-gradient steps in W (the linearised best W is the projector on the negative eigenspace), each over a
    ladder of step lengths, from the published W, from 0, from I and from their mean; the best point found is
    returned, so it is never worse than the published one. Local search: exact where the published formula is, an
    upper bound elsewhere.
    """
    lower = cholesky_factor(x)
    bottom, top, h = whiten(lower, low), whiten(lower, high), whiten(lower, sym(g))
    factor = cholesky_factor(sym(top - bottom))
    eye = jnp.eye(x.shape[0], dtype=x.dtype)
    ladder = jnp.concatenate([jnp.ones(1, x.dtype), 0.5 ** jnp.arange(1, 11, dtype=x.dtype)])

    def point(w):
        return sym(bottom + factor @ w @ factor.T)

    def value(w):
        return _linear(h, point(w))

    def improve(w, _):
        slopes, q = jnp.linalg.eigh(sym(jax.grad(value)(w)))
        corner = (q * (slopes < 0)) @ q.T
        trials = w + ladder[:, None, None] * (corner - w)
        values = jax.vmap(value)(trials)
        best = jnp.argmin(values)
        return jnp.where(values[best] < value(w), trials[best], w), None

    published = whiten(lower, spd_interval_oracle_published(x, low, high, g))
    start = whiten(factor, sym(published - bottom))
    # Rounding may leave the published W a hair outside [0, I].
    values, q = jnp.linalg.eigh(start)
    start = (q * jnp.clip(values, 0, 1)) @ q.T
    starts = jnp.stack([start, 0 * eye, eye, (start + eye) / 3])
    ends = jax.vmap(lambda w: jax.lax.scan(improve, w, length=iterations)[0])(starts)
    best = ends[jnp.argmin(jax.vmap(value)(ends))]
    return sym(lower @ point(best) @ lower.T)


def interval_margin(low: Matrix, high: Matrix, z: Matrix) -> Float[Array, ""]:
    """Smallest eigenvalue of Z - low and high - Z: the interval holds Z when this is at least 0."""
    return jnp.minimum(jnp.linalg.eigvalsh(sym(z - low))[0], jnp.linalg.eigvalsh(sym(high - z))[0])


def check_interval(low: Matrix, high: Matrix) -> None:
    """Host check of concrete bounds: ValueError unless both are symmetric and low < high in the Loewner order."""
    for name, a in (("low", low), ("high", high)):
        if a.ndim != 2 or a.shape[0] != a.shape[1]:
            raise ValueError(f"{name} must be a square matrix, got shape {a.shape}.")
        if not bool(jnp.allclose(a, a.T, atol=float(jnp.finfo(a.dtype).eps) ** 0.5)):
            raise ValueError(f"{name} must be symmetric, got an asymmetry of {float(jnp.abs(a - a.T).max()):.2g}.")
    smallest = float(jnp.linalg.eigvalsh(high - low)[0])
    if not smallest > 0:
        raise ValueError(f"high - low must be positive definite, got a smallest eigenvalue of {smallest:.3g}.")
