"""Particle bounding frustum: the exact interval of the two bipolar angles in which a Gaussian's ellipsoid is seen.

theta = atan2(x, z) and phi = atan2(y, z). A plane through the camera that holds the y axis touches the lambda-sigma
ellipsoid when n^T T n = 0, T = lambda^2 Sigma - c c^T, n = (1, 0, -tan theta); likewise for phi.

`pbf_tan` is the paper's quadratic in the tangent, for ellipsoids wholly in front. `pbf_angle` works for every
position. In the plane of an axis the centre has distance rho and angle theta_c; with the covariance turned so that
its second axis points to the centre, [[a, b], [b, d]] times lambda^2, the tangents lie at

    theta_c - atan2(a, q - b)  and  theta_c + atan2(a, q + b),    q^2 = b^2 + a (rho^2 - d) = a rho^2 - (a d - b^2)

each offset in (0, pi): past 90 degrees, behind the camera and through the plane z = 0 without a case distinction, and
without the cancellation of differences of angles. q^2 <= 0 says that the camera lies inside the ellipsoid's shadow;
then the interval is everything.

The other two boxes are the ablations: EWA (linearised projection) and UT (sigma points in angle).
"""

import math

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float

KINDS = ("pbf", "ewa", "ut")


@struct.dataclass
class AngleBox:
    """Intervals of theta and phi: middle, in (-2 pi, 2 pi), and half width; half widths of pi or more are everything."""

    middle: Float[Array, "p 2"]
    half: Float[Array, "p 2"]


def wrap(angle: Float[Array, "*b"]) -> Float[Array, "*b"]:
    """The angle modulo 2 pi in [-pi, pi]."""
    return angle - 2 * math.pi * jnp.round(angle / (2 * math.pi))


def cutoff_sigma(opacity: Float[Array, "p"], cutoff: str) -> Float[Array, "p"]:
    """Where the ellipsoid ends: 3 ("sigma3", the release's) or where alpha falls to 1/255 ("opacity", exact)."""
    if cutoff == "sigma3":
        return jnp.full_like(opacity, 3.0)
    if cutoff == "opacity":
        return jnp.sqrt(2 * jnp.log(jnp.maximum(255 * opacity, 1)))
    raise ValueError(f"cutoff is {cutoff!r}, wanted sigma3 or opacity.")


def pbf_angle(
    cov: Float[Array, "p 3 3"], c: Float[Array, "p 3"], sigma: Float[Array, "p"]
) -> tuple[Float[Array, "p 4"], Bool[Array, "p 2"]]:
    """(theta_lo, theta_hi, phi_lo, phi_hi) in radians and whether each axis sees everything.

    `sigma` is lambda. The ends may lie outside of [-pi, pi]; where an axis sees everything they are centre -+ pi.
    """
    ends, full = [], []
    scale2 = sigma * sigma
    for axis in (0, 1):
        m, z = c[:, axis], c[:, 2]
        rho2 = m * m + z * z
        rho = jnp.sqrt(jnp.maximum(rho2, 1e-30))
        sine, cosine = m / rho, z / rho
        s00, s02, s22 = cov[:, axis, axis], cov[:, axis, 2], cov[:, 2, 2]
        # Across the line of sight (cosine, -sine) and along it (sine, cosine).
        a = scale2 * (cosine * cosine * s00 - 2 * cosine * sine * s02 + sine * sine * s22)
        b = scale2 * ((s00 - s22) * sine * cosine + s02 * (cosine * cosine - sine * sine))
        q2 = a * rho2 - scale2 * scale2 * (s00 * s22 - s02 * s02)
        inside = q2 <= 0
        q = jnp.sqrt(jnp.where(inside, 0, q2))
        centre = jnp.arctan2(m, z)
        ends.append(jnp.where(inside, centre - math.pi, centre - jnp.arctan2(a, q - b)))
        ends.append(jnp.where(inside, centre + math.pi, centre + jnp.arctan2(a, q + b)))
        full.append(inside)
    return jnp.stack(ends, 1), jnp.stack(full, 1)


def pbf_tan(
    cov: Float[Array, "p 3 3"], c: Float[Array, "p 3"], sigma: Float[Array, "p"]
) -> tuple[Float[Array, "p 4"], Bool[Array, "p"]]:
    """(tan theta lo, hi, tan phi lo, hi) by the quadratic, and where it holds: ellipsoid wholly before the camera."""
    t = (sigma * sigma)[:, None, None] * cov - c[:, :, None] * c[:, None, :]
    ends, valid = [], c[:, 2] > 0
    for axis in (0, 1):
        a, b, d = t[:, 2, 2], t[:, axis, 2], t[:, axis, axis]
        disc = b * b - a * d
        ok = (a < 0) & (disc >= 0)
        root = jnp.sqrt(jnp.where(ok, disc, 0))
        divisor = jnp.where(ok, a, -1)
        ends += [(b + root) / divisor, (b - root) / divisor]
        valid = valid & ok
    return jnp.stack(ends, 1), valid


def ewa_tan(
    cov: Float[Array, "p 3 3"], c: Float[Array, "p 3"], sigma: Float[Array, "p"], tight: bool = False
) -> tuple[Float[Array, "p 4"], Bool[Array, "p"]]:
    """The box of the linearised projection in tangents: a square about the ellipse, or with `tight` its own extents."""
    x, y, z = c[:, 0], c[:, 1], c[:, 2]
    valid = z > 1e-6
    w = 1 / jnp.where(valid, z, 1)
    u, v = x * w, y * w
    s00 = w * w * (cov[:, 0, 0] - 2 * u * cov[:, 0, 2] + u * u * cov[:, 2, 2])
    s11 = w * w * (cov[:, 1, 1] - 2 * v * cov[:, 1, 2] + v * v * cov[:, 2, 2])
    s01 = w * w * (cov[:, 0, 1] - u * cov[:, 1, 2] - v * cov[:, 0, 2] + u * v * cov[:, 2, 2])
    middle = 0.5 * (s00 + s11)
    largest = middle + jnp.sqrt(jnp.maximum(0.25 * (s00 - s11) ** 2 + s01 * s01, 0))
    ex, ey = (s00, s11) if tight else (largest, largest)
    ex, ey = (sigma * jnp.sqrt(jnp.maximum(e, 0)) for e in (ex, ey))
    return jnp.stack([u - ex, u + ex, v - ey, v + ey], 1), valid


def ut_angle(
    axes: Float[Array, "p 3 3"], c: Float[Array, "p 3"], sigma: Float[Array, "p"]
) -> tuple[Float[Array, "p 4"], Bool[Array, "p"]]:
    """The box of the unscented transform: seven sigma points c, c -+ sqrt(3) s_i r_i (columns of `axes` are s_i r_i).

    Mapped to (atan(x/z), atan(y/z)); weights 0 for the centre and 1/6 else, the centre's covariance weight 2; the box
    is the mean -+ lambda times the root of the largest eigenvalue.
    """
    steps = math.sqrt(3) * axes.mT
    points = jnp.concatenate([c[:, None], c[:, None] + steps, c[:, None] - steps], 1)
    z = points[..., 2]
    angle = jnp.arctan(points[..., :2] / jnp.where(jnp.abs(z) > 1e-9, z, 1e-9)[..., None])
    mean = angle[:, 1:].mean(1)
    offset = angle - mean[:, None]
    weight = jnp.asarray([2.0] + [1 / 6] * 6, c.dtype)
    cov = jnp.einsum("k,pki,pkj->pij", weight, offset, offset)
    middle = 0.5 * (cov[:, 0, 0] + cov[:, 1, 1])
    spread = jnp.sqrt(jnp.maximum(0.25 * (cov[:, 0, 0] - cov[:, 1, 1]) ** 2 + cov[:, 0, 1] ** 2, 0))
    reach = (sigma * jnp.sqrt(jnp.maximum(middle + spread, 0)))[:, None]
    low, high = mean - reach, mean + reach
    return jnp.stack([low[:, 0], high[:, 0], low[:, 1], high[:, 1]], 1), c[:, 2] > 1e-6


def angle_box(ends: Float[Array, "p 4"]) -> AngleBox:
    """Middle and half width of (theta_lo, theta_hi, phi_lo, phi_hi)."""
    low, high = ends[:, 0::2], ends[:, 1::2]
    return AngleBox(0.5 * (low + high), 0.5 * (high - low))
