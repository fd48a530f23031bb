"""Functions of symmetric matrices with derivatives that exist at repeated eigenvalues.

f(A) = Q f(L) Q^T for A = Q L Q^T. The derivative in direction E is Q (F o (Q^T E Q)) Q^T with the divided differences
F_ij = (f(l_i) - f(l_j)) / (l_i - l_j) (Daleckii and Krein 1965). Automatic differentiation through the eigenvectors
divides by l_i - l_j and gives NaN at the identity, which is exactly where two coincident SPD points meet. Each F
below is written in a form without cancellation, so equal and nearly equal eigenvalues need no special case.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from papyrax.methods.geometry.smooth import atanhc_sq, sinhc_sq

Matrix = Float[Array, "... d d"]


def sym(a: Matrix) -> Matrix:
    """Symmetric part."""
    return (a + jnp.swapaxes(a, -1, -2)) / 2


def _compose(q: Matrix, values: Float[Array, "... d"]) -> Matrix:
    return jnp.einsum("...ik,...k,...jk->...ij", q, values, q)


def _exp_difference(a, b):
    return jnp.exp((a + b) / 2) * sinhc_sq(((a - b) / 2) ** 2)


def _log_difference(a, b):
    total = a + b
    return 2 / total * atanhc_sq(((a - b) / total) ** 2)


def _sqrt_difference(a, b):
    return 1 / (jnp.sqrt(a) + jnp.sqrt(b))


def _inverse_sqrt_difference(a, b):
    ra, rb = jnp.sqrt(a), jnp.sqrt(b)
    return -1 / (ra * rb * (ra + rb))


def _spectral(value: Callable, difference: Callable, name: str, doc: str) -> Callable[[Matrix], Matrix]:
    @jax.custom_jvp
    def function(a):
        values, q = jnp.linalg.eigh(a, symmetrize_input=False)
        return _compose(q, value(values))

    @function.defjvp
    def rule(primals, tangents):
        (a,), (e,) = primals, tangents
        values, q = jnp.linalg.eigh(a, symmetrize_input=False)
        qt = jnp.swapaxes(q, -1, -2)
        inside = qt @ sym(e) @ q * difference(values[..., :, None], values[..., None, :])
        return _compose(q, value(values)), q @ inside @ qt

    function.__name__, function.__doc__ = name, doc
    return function


sym_exp = _spectral(jnp.exp, _exp_difference, "sym_exp", "Exponential of a symmetric matrix.")
sym_log = _spectral(jnp.log, _log_difference, "sym_log", "Logarithm of a symmetric positive definite matrix.")
sym_sqrt = _spectral(jnp.sqrt, _sqrt_difference, "sym_sqrt", "Square root of a symmetric positive definite matrix.")
sym_inverse_sqrt = _spectral(
    jax.lax.rsqrt,
    _inverse_sqrt_difference,
    "sym_inverse_sqrt",
    "Inverse square root of a symmetric positive definite matrix.",
)


@jax.custom_jvp
def log_norm_squared(a: Matrix) -> Float[Array, "..."]:
    """|log A|_F^2 of a symmetric positive definite matrix; eigenvectors are computed only when a gradient is wanted."""
    return jnp.sum(jnp.log(jnp.linalg.eigvalsh(a, symmetrize_input=False)) ** 2, axis=-1)


@log_norm_squared.defjvp
def _log_norm_squared_rule(primals, tangents):
    (a,), (e,) = primals, tangents
    values, q = jnp.linalg.eigh(a, symmetrize_input=False)
    logs = jnp.log(values)
    return jnp.sum(logs**2, axis=-1), 2 * jnp.einsum("...ij,...ij->...", _compose(q, logs / values), sym(e))


def cholesky_factor(a: Matrix) -> Matrix:
    """Lower Cholesky factor of a matrix that is already symmetric."""
    return jnp.linalg.cholesky(a, symmetrize_input=False)


_left_solve = partial(jax.scipy.linalg.solve_triangular, lower=True)


def solve_lower(lower: Matrix, b: Matrix) -> Matrix:
    """L^-1 B, broadcast over leading axes."""
    batch = jnp.broadcast_shapes(lower.shape[:-2], b.shape[:-2])
    return _left_solve(jnp.broadcast_to(lower, batch + lower.shape[-2:]), jnp.broadcast_to(b, batch + b.shape[-2:]))


def whiten(lower: Matrix, a: Matrix) -> Matrix:
    """L^-1 A L^-T, symmetric for symmetric A."""
    half = solve_lower(lower, a)
    return sym(solve_lower(lower, jnp.swapaxes(half, -1, -2)))
