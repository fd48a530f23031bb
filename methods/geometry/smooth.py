"""Functions of a squared length that stay smooth where the length is zero.

Geodesic formulas are full of ratios such as sinh(r)/r that are even, analytic functions of r, while their usual code
divides 0 by 0 at r = 0 and has NaN gradients there. Written as functions of s = r^2, with the Taylor series near zero,
values and all derivatives exist at coincident points, in float32 and float64 alike.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Float

_SERIES = {
    "cos": (1.0, -1 / 2, 1 / 24, -1 / 720, 1 / 40320, -1 / 3628800),
    "cosh": (1.0, 1 / 2, 1 / 24, 1 / 720, 1 / 40320, 1 / 3628800),
    "sinc": (1.0, -1 / 6, 1 / 120, -1 / 5040, 1 / 362880, -1 / 39916800),
    "sinhc": (1.0, 1 / 6, 1 / 120, 1 / 5040, 1 / 362880, 1 / 39916800),
    "tanhc": (1.0, -1 / 3, 2 / 15, -17 / 315, 62 / 2835, -1382 / 155925),
    "asinc": (1.0, 1 / 6, 3 / 40, 15 / 336, 105 / 3456, 945 / 42240),
    "asinhc": (1.0, -1 / 6, 3 / 40, -15 / 336, 105 / 3456, -945 / 42240),
    "atanhc": (1.0, 1 / 3, 1 / 5, 1 / 7, 1 / 9, 1 / 11),
}


def _even(name: str, exact: Callable[[Array], Array]) -> Callable[[Array], Array]:
    coefficients = _SERIES[name][::-1]

    def function(s):
        s = jnp.asarray(s)
        # Six terms: the first one left out is below one rounding error of the dtype under these cuts.
        cut = 1e-3 if s.dtype == jnp.float64 else 1e-2
        small = s < cut
        near = jnp.where(small, s, 0.0)
        series = jnp.zeros_like(s)
        for c in coefficients:
            series = series * near + c
        return jnp.where(small, series, exact(jnp.sqrt(jnp.where(small, 1.0, s))))

    function.__name__ = name
    function.__doc__ = f"`{name}` of r = sqrt(s), as a smooth function of s >= 0 (a trailing c divides by r)."
    return function


cos_sq = _even("cos", jnp.cos)
cosh_sq = _even("cosh", jnp.cosh)
sinc_sq = _even("sinc", lambda r: jnp.sin(r) / r)
sinhc_sq = _even("sinhc", lambda r: jnp.sinh(r) / r)
tanhc_sq = _even("tanhc", lambda r: jnp.tanh(r) / r)
asinhc_sq = _even("asinhc", lambda r: jnp.arcsinh(r) / r)
# Past r = 1 (a rounding error outside the domain) the inverse sine stays finite; its branch near 1 is not used for
# gradients.
asinc_sq = _even("asinc", lambda r: jnp.arcsin(jnp.minimum(r, 1.0)) / r)
atanhc_sq = _even("atanhc", lambda r: jnp.arctanh(jnp.minimum(r, 1 - jnp.finfo(r.dtype).eps)) / r)


def nonnegative(s: Float[Array, "..."]) -> Float[Array, "..."]:
    """max(s, 0) whose derivative at 0 is 1: `jnp.maximum` halves it there, which spoils second derivatives at
    coincident points."""
    return jnp.where(s < 0, 0.0, s)


def safe_sqrt(s: Float[Array, "..."]) -> Float[Array, "..."]:
    """sqrt(max(s, 0)) whose derivative at 0 is 0 (a subgradient of every norm at the origin) in place of infinity."""
    positive = s > 0
    return jnp.where(positive, jnp.sqrt(jnp.where(positive, s, 1.0)), 0.0)


def safe_norm(v: Float[Array, "... d"], axis: int | tuple[int, ...] = -1, keepdims: bool = False) -> Array:
    """Euclidean norm over `axis` with derivative 0 at the zero vector."""
    return safe_sqrt(jnp.sum(v * v, axis=axis, keepdims=keepdims))
