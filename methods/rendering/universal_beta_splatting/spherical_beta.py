"""Colour by spherical Beta lobes, as in Deformable Beta Splatting, the three-dimensional baseline.

colour = max(0, 0.5 + 0.2820948 sh0 + sum_k rgb_k max(0, d . mu_k)^(4 exp(b_k))), each lobe six raw numbers
(r, g, b, theta, phi, b): mu = (sin theta cos phi, sin theta sin phi, cos theta), rgb_k a softplus of sharpness 10 log 2.
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from papyrax.methods.rendering.core.harmonics import DC

SHARPNESS = 10 * math.log(2)


def init_lobes(key: Key[Array, ""], p: int, lobes: int = 2, dtype=jnp.float32) -> Float[Array, "p k 6"]:
    """Dark lobes of exponent 4 in random directions: theta ~ U(0, pi), phi ~ U(0, 2 pi)."""
    a, b = jax.random.split(key)
    theta = jax.random.uniform(a, (p, lobes), dtype, 0, math.pi)
    phi = jax.random.uniform(b, (p, lobes), dtype, 0, 2 * math.pi)
    zero = jnp.zeros_like(theta)
    return jnp.stack([zero, zero, zero, theta, phi, zero], -1)


def lobe_colour(params: dict[str, Array], center: Float[Array, "3"]) -> Float[Array, "p 3"]:
    """Colour of every primitive seen from `center`: `rgb` is the raw base sh0, `lobes` (p k 6) the lobes."""
    offset = params["xyz"] - center
    d = offset / jnp.maximum(jnp.linalg.norm(offset, axis=-1, keepdims=True), 1e-12)
    raw, theta, phi, b = params["lobes"][..., :3], *(params["lobes"][..., i] for i in (3, 4, 5))
    side = jnp.sin(theta)
    mu = jnp.stack([side * jnp.cos(phi), side * jnp.sin(phi), jnp.cos(theta)], -1)
    cosine = jnp.einsum("pi,pki->pk", d, mu)
    lit = cosine > 1e-6
    weight = jnp.where(lit, jnp.exp(4 * jnp.exp(b) * jnp.log(jnp.where(lit, cosine, 1))), 0)
    colour = jax.nn.softplus(SHARPNESS * raw) / SHARPNESS
    return jnp.maximum(0.5 + DC * params["rgb"] + jnp.einsum("pk,pkc->pc", weight, colour), 0)
