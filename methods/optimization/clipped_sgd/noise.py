"""Heavy-tailed zero-mean noise, the Hill estimate of its tail, and the moment that the schedule wants.

`tail` is the tail index a, P(|x| > t) ~ t^-a: moments below a exist, those above do not. Pareto noise is Lomax, s =
U^(-1/a) - 1 with mean 1/(a - 1). Uniforms keep 32 bits down to 1e-10 in float32 (`jax.random.uniform` stops at 1e-7
and returns 0), so the tail is not cut where it matters.
"""

import dataclasses
import math
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

Kind = Literal["pareto", "pareto_one_sided", "student_t", "alpha_stable", "gaussian", "none"]


@dataclasses.dataclass(frozen=True)
class Noise:
    """A noise law: `scale` times the named law with tail index `tail`; `radial` draws one length times a random
    direction."""

    kind: Kind = "pareto"
    tail: float = 2.001
    scale: float = 1.0
    radial: bool = False

    def __post_init__(self):
        if self.kind not in ("pareto", "pareto_one_sided", "student_t", "alpha_stable", "gaussian", "none"):
            raise ValueError(f"kind must name a noise law, got {self.kind!r}.")
        if self.kind == "alpha_stable" and not 1 < self.tail < 2:
            raise ValueError(f"tail of alpha-stable noise must lie in (1, 2), got {self.tail}.")
        if self.kind in ("pareto", "pareto_one_sided", "student_t") and not self.tail > 1:
            raise ValueError(f"tail must be above 1 so that the mean exists, got {self.tail}.")
        if not self.scale >= 0:
            raise ValueError(f"scale must be at least 0, got {self.scale}.")


def open_uniform(key: Key[Array, ""], shape: tuple[int, ...], dtype) -> Array:
    """Uniform on (0, 1], resolved to 2^-33 in float32 and 2^-53 in float64; never 0."""
    if jnp.dtype(dtype) == jnp.float64:
        return 1 - jax.random.uniform(key, shape, dtype)
    return (jax.random.bits(key, shape, jnp.uint32).astype(dtype) + 0.5) * 2.0**-32


def _sign(key, shape, dtype):
    return jax.random.rademacher(key, shape, dtype)


def lomax(key: Key[Array, ""], shape: tuple[int, ...], tail: float, dtype=jnp.float32) -> Array:
    """U^(-1/a) - 1 >= 0, by expm1 so that small values keep their digits."""
    return jnp.expm1(-jnp.log(open_uniform(key, shape, dtype)) / tail)


def pareto(
    key: Key[Array, ""],
    shape: tuple[int, ...],
    tail: float,
    mode: Literal["symmetric", "one_sided", "radial"] = "symmetric",
    dtype=jnp.float32,
) -> Array:
    """Zero-mean Pareto noise: random sign; or centred and one-sided (clipping it is biased); or radial over the last
    axis."""
    k1, k2 = jax.random.split(key)
    if mode == "symmetric":
        return lomax(k1, shape, tail, dtype) * _sign(k2, shape, dtype)
    if mode == "one_sided":
        return lomax(k1, shape, tail, dtype) - 1 / (tail - 1)
    if mode == "radial":
        return lomax(k1, shape[:-1], tail, dtype)[..., None] * direction(k2, shape, dtype)
    raise ValueError(f"mode must be symmetric, one_sided or radial, got {mode!r}.")


def student_t(key: Key[Array, ""], shape: tuple[int, ...], tail: float, dtype=jnp.float32) -> Array:
    """Student-t with `tail` degrees of freedom, sqrt(nu (U^(-2/nu) - 1)) cos(2 pi V): exact, without rejection
    (Bailey 1994)."""
    k1, k2 = jax.random.split(key)
    length = jnp.sqrt(tail * jnp.expm1(-2 / tail * jnp.log(open_uniform(k1, shape, dtype))))
    return length * jnp.cos(2 * math.pi * jax.random.uniform(k2, shape, dtype))


def alpha_stable(key: Key[Array, ""], shape: tuple[int, ...], tail: float, dtype=jnp.float32) -> Array:
    """Symmetric alpha-stable noise with characteristic function exp(-|t|^a) (Chambers, Mallows and Stuck 1976)."""
    k1, k2 = jax.random.split(key)
    angle = math.pi * (open_uniform(k1, shape, dtype) - 0.5)
    waiting = -jnp.log(open_uniform(k2, shape, dtype))
    waiting = jnp.maximum(waiting, jnp.finfo(dtype).tiny)
    # cos(angle) is 0 at the open ends of the interval; its floor bounds one draw in 2^32.
    width = jnp.maximum(jnp.cos(angle), jnp.finfo(dtype).eps)
    return jnp.sin(tail * angle) / width ** (1 / tail) * (jnp.cos((1 - tail) * angle) / waiting) ** ((1 - tail) / tail)


def direction(key: Key[Array, ""], shape: tuple[int, ...], dtype=jnp.float32) -> Array:
    """Uniform unit vectors over the last axis."""
    z = jax.random.normal(key, shape, dtype)
    return z / jnp.maximum(jnp.linalg.norm(z, axis=-1, keepdims=True), jnp.finfo(dtype).tiny)


def sample(key: Key[Array, ""], noise: Noise, shape: tuple[int, ...], dtype=jnp.float32) -> Array:
    """One draw of `shape` from a noise law."""
    if noise.kind == "none":
        return jnp.zeros(shape, dtype)
    if noise.radial:
        k1, k2 = jax.random.split(key)
        flat = dataclasses.replace(noise, radial=False)
        return sample(k1, flat, shape[:-1], dtype)[..., None] * direction(k2, shape, dtype)
    if noise.kind == "pareto":
        draw = pareto(key, shape, noise.tail, "symmetric", dtype)
    elif noise.kind == "pareto_one_sided":
        draw = pareto(key, shape, noise.tail, "one_sided", dtype)
    elif noise.kind == "student_t":
        draw = student_t(key, shape, noise.tail, dtype)
    elif noise.kind == "alpha_stable":
        draw = alpha_stable(key, shape, noise.tail, dtype)
    else:
        draw = jax.random.normal(key, shape, dtype)
    return noise.scale * draw


def hill(x: Float[Array, "n"], k: int) -> Float[Array, ""]:
    """Hill's estimate of the tail index from the k largest |x|: k / sum ln(|x|_(i) / |x|_(k+1))."""
    if not 0 < k < x.shape[0]:
        raise ValueError(f"k must lie between 1 and {x.shape[0] - 1}, got {k}.")
    top = jax.lax.top_k(jnp.abs(x), k + 1)[0]
    return 1 / jnp.mean(jnp.log(top[:-1] / top[-1]))


def moment_scale(key: Key[Array, ""], noise: Noise, alpha: float, dim: int, draws: int = 20_000) -> Float[Array, ""]:
    """(E|noise|^alpha)^(1/alpha) of the noise vector in R^dim by Monte Carlo: the schedule's sigma.

    Raises ValueError when alpha is not below the tail index: that moment is infinite and an estimate of it meaningless.
    """
    if noise.kind not in ("gaussian", "none") and not alpha < noise.tail:
        raise ValueError(f"alpha must be below the tail index {noise.tail} for its moment to exist, got {alpha}.")

    def add(total, key):
        x = sample(key, noise, (256, dim))
        return total + jnp.mean(jnp.linalg.norm(x, axis=-1) ** alpha), None

    blocks = -(-draws // 256)
    total, _ = jax.lax.scan(add, jnp.zeros(()), jax.random.split(key, blocks))
    return (total / blocks) ** (1 / alpha)
