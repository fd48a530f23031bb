"""View-dependent colour by real spherical harmonics up to degree 3, in the signs and order of 3D Gaussian splatting.

This is not the order of e3nn, which the molecular systems use.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

DC = 0.28209479177387814
MAX_DEGREE = 3


def sh_basis(d: Float[Array, "*b 3"], degree: int = MAX_DEGREE) -> Float[Array, "*b k"]:
    """The (degree + 1)^2 basis functions at unit directions d."""
    if not 0 <= degree <= MAX_DEGREE:
        raise ValueError(f"degree is {degree}, wanted 0 to {MAX_DEGREE}.")
    x, y, z = d[..., 0], d[..., 1], d[..., 2]
    xx, yy, zz = x * x, y * y, z * z
    a, b = 0.4886025119029199, 1.0925484305920792
    terms = [
        jnp.full_like(x, DC),
        *(-a * y, a * z, -a * x),
        *(b * x * y, -b * y * z, 0.31539156525252005 * (2 * zz - xx - yy), -b * x * z, 0.5462742152960396 * (xx - yy)),
        -0.5900435899266435 * y * (3 * xx - yy),
        2.890611442640554 * x * y * z,
        -0.4570457994644658 * y * (4 * zz - xx - yy),
        0.3731763325901154 * z * (2 * zz - 3 * xx - 3 * yy),
        -0.4570457994644658 * x * (4 * zz - xx - yy),
        1.445305721320277 * z * (xx - yy),
        -0.5900435899266435 * x * (xx - 3 * yy),
    ]
    return jnp.stack(terms[: (degree + 1) ** 2], -1)


def sh_colour(
    sh: Float[Array, "p k c"], d: Float[Array, "p 3"], active: Int[Array, ""] | int = MAX_DEGREE
) -> Float[Array, "p c"]:
    """max(0, 0.5 + sum_k Y_k(d) sh_k) for unit directions from the camera to each primitive.

    `active` (traced or not) switches off the coefficients above a degree, as training raises it step by step.
    """
    degree = round(sh.shape[1] ** 0.5) - 1
    if (degree + 1) ** 2 != sh.shape[1]:
        raise ValueError(f"sh has {sh.shape[1]} coefficients, wanted 1, 4, 9 or 16.")
    order = jnp.asarray([n for n in range(degree + 1) for _ in range(2 * n + 1)])
    basis = jnp.where(order <= active, sh_basis(d, degree), 0)
    return jnp.maximum(0.5 + jnp.einsum("pk,pkc->pc", basis, sh), 0)
