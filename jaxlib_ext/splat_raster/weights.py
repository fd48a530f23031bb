"""The weight functions of the compositor: opacity of one primitive at one pixel, and its pullback.

Every function takes the features of primitives and the coordinates of pixels as tuples of arrays that broadcast
against each other, so that the reference and both kernels share this one meaning.

| weight | features | pixel | opacity before the cap |
|---|---|---|---|
| beta2d | mx, my, A, B, C, o, beta, depth | x, y | o (1 - s)^beta where 0 <= s < 1 |
| gauss_ewa | mx, my, A, B, C, o, depth | x, y | o exp(-s / 2) |
| gauss_ray | M (9, row-major), p (3), o, depth | unit ray d | o exp(-D^2 / 2), D the distance of p from the line along M d |
| gauss_ray_half | as gauss_ray | unit ray d | the same, 0 where the point of the ray nearest to p lies before `near` |
| gauss_ray_erf | as gauss_ray | unit ray d | gauss_ray times the share of its mass in front, (1 + erf(tau / sqrt 2)) / 2 |

s = A dx^2 + 2 B dx dy + C dy^2 with (dx, dy) = mean - pixel (Universal Beta Splatting, arXiv 2510.03312, without the
Gaussian's factor 1/2). For rays (3DGEER, arXiv 2505.24053): e = M d / |M d|, tau = p . e, r = p - tau e, D^2 = |r|^2,
which is |e x p|^2 and costs the same rounding, and r is all that the pullback needs:
dD^2/dp = 2 r, dD^2/d(Md) = -2 tau r / |Md|.
"""

import math

import jax
import jax.numpy as jnp

FEATURES = {"beta2d": 8, "gauss_ewa": 7, "gauss_ray": 14, "gauss_ray_half": 14, "gauss_ray_erf": 14}
PIXEL = {"beta2d": 2, "gauss_ewa": 2, "gauss_ray": 3, "gauss_ray_half": 3, "gauss_ray_erf": 3}
OPACITY = {"beta2d": 5, "gauss_ewa": 5, "gauss_ray": 12, "gauss_ray_half": 12, "gauss_ray_erf": 12}
EDGE = 1e-6  # (1 - s)^(beta - 1) has an integrable singularity at s = 1 when beta < 1


def opacity(weight, f, pixel, near):
    """Opacity of every pair before cap and floor, and what `pullback` needs."""
    if weight in ("beta2d", "gauss_ewa"):
        dx, dy = f[0] - pixel[0], f[1] - pixel[1]
        s = f[2] * dx * dx + 2 * f[3] * dx * dy + f[4] * dy * dy
        if weight == "gauss_ewa":
            w = jnp.where(s >= 0, jnp.exp(-0.5 * jnp.maximum(s, 0)), 0)
            return f[5] * w, (dx, dy, w)
        inside = (s >= 0) & (s < 1)
        log = jnp.log(1 - jnp.where(inside, jnp.minimum(s, 1 - EDGE), 0))
        w = jnp.where(inside, jnp.exp(f[6] * log), 0)
        return f[5] * w, (dx, dy, w, log)
    d0, d1, d2 = pixel
    u = [f[3 * i] * d0 + f[3 * i + 1] * d1 + f[3 * i + 2] * d2 for i in range(3)]
    inverse = jax.lax.rsqrt(u[0] * u[0] + u[1] * u[1] + u[2] * u[2])
    e = [a * inverse for a in u]
    tau = f[9] * e[0] + f[10] * e[1] + f[11] * e[2]
    r = [f[9 + i] - tau * e[i] for i in range(3)]
    w = jnp.exp(-0.5 * (r[0] * r[0] + r[1] * r[1] + r[2] * r[2]))
    if weight == "gauss_ray_half":
        w = jnp.where(tau * inverse > near, w, 0)
    front = jnp.ones_like(w)
    if weight == "gauss_ray_erf":
        front = 0.5 * (1 + jax.lax.erf(tau * (1 / math.sqrt(2))))
    return f[12] * w * front, (e, inverse, tau, r, w, front)


def conic_pull(weight, f, saved, g):
    """For the flat weights: gradients by s, by o and (Beta) by beta of every pair."""
    w = saved[2]
    if weight == "gauss_ewa":
        return -0.5 * g * f[5] * w, g * w, None
    log = saved[3]
    gw = g * f[5] * w
    return -gw * f[6] * jnp.exp(-log), g * w, gw * log


def ray_pull(weight, f, saved, g):
    """For the ray weights: gradients by p (3 arrays), by M d (3 arrays) and by o of every pair."""
    e, inverse, tau, r, w, front = saved
    by_opacity = g * w * front
    q = -by_opacity * f[12]  # twice the gradient by D^2
    by_p = [q * a for a in r]
    along = -tau * inverse * q
    if weight == "gauss_ray_erf":
        by_tau = g * f[12] * w * jnp.exp(-0.5 * tau * tau) * (1 / math.sqrt(2 * math.pi))
        by_p = [a + by_tau * b for a, b in zip(by_p, e)]
        along = along + by_tau * inverse
    return by_p, [along * a for a in r], by_opacity


def pullback(weight, f, pixel, saved, g, absolute):
    """Gradients of every pair by every feature except depth, as a list; with `absolute` also |gradient by p|."""
    if weight in ("beta2d", "gauss_ewa"):
        dx, dy, *_ = saved
        by_s, by_o, by_beta = conic_pull(weight, f, saved, g)
        mean = [2 * by_s * (f[2] * dx + f[3] * dy), 2 * by_s * (f[3] * dx + f[4] * dy)]
        rest = [by_s * dx * dx, 2 * by_s * dx * dy, by_s * dy * dy, by_o]
        extra = [jnp.abs(a) for a in mean] if absolute else []
        return mean + rest + ([] if by_beta is None else [by_beta]) + extra
    by_p, by_u, by_o = ray_pull(weight, f, saved, g)
    matrix = [by_u[i] * pixel[j] for i in range(3) for j in range(3)]
    return matrix + by_p + [by_o] + ([jnp.abs(a) for a in by_p] if absolute else [])


def probes(weight):
    """Number of absolute gradients a primitive has: by its mean (2) or by p (3)."""
    return 2 if weight in ("beta2d", "gauss_ewa") else 3
