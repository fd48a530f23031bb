"""The N-dimensional Beta kernel: activations, spatial-orthogonal Cholesky factor, slice at a query, query builder.

A primitive has D = 3, 6 or 7 dimensions: position x (3) and query q (view direction 3, then time 1). Its covariance is
Sigma = L L^T with

    L = [ R diag(s_x)   0  ]      R = I + A, A skew from the first three entries of l_tri
        [ L_qx         L_q ]      L_q lower triangular with diag(s_q); the other entries of l_tri fill L_qx and L_q

in row-major order of the strict lower triangle without its three spatial entries. Slicing at a query gives a 3-D mean,
covariance and opacity, modulated by beta_q = 4 exp(b_q) for each query dimension (the paper's section on
Beta-modulated conditional slicing; exponents as in the authors' release).

Matrices this small are kept as nested tuples of (p,) arrays: every operation is elementwise over primitives, which
fuses on a CPU and fills the lanes of a TPU.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from papyrax.methods.geometry.rotations import MAPS, skew, so3_map

SLICES = ("paper", "whitened")
FLOOR = 1e-20


def scale_of(raw: Float[Array, "*b"]) -> Float[Array, "*b"]:
    """Scales from raw numbers: softplus."""
    return jax.nn.softplus(raw)


def scale_inverse(scale: Float[Array, "*b"]) -> Float[Array, "*b"]:
    """Raw numbers of positive scales."""
    return scale + jnp.log(-jnp.expm1(-scale))


def opacity_of(raw: Float[Array, "*b"]) -> Float[Array, "*b"]:
    """Opacities from raw numbers: sigmoid."""
    return jax.nn.sigmoid(raw)


def opacity_inverse(opacity: Float[Array, "*b"]) -> Float[Array, "*b"]:
    """Raw numbers of opacities between 0 and 1."""
    return jax.scipy.special.logit(opacity)


def beta_of(b: Float[Array, "*b"]) -> Float[Array, "*b"]:
    """Exponents of the falloff: 4 exp(b). b < 0 is flat, b > 0 peaked, b = 0 nearly a Gaussian."""
    return 4 * jnp.exp(b)


def beta_inverse(beta: Float[Array, "*b"]) -> Float[Array, "*b"]:
    """b of positive exponents."""
    return jnp.log(beta / 4)


def factor(scale: Float[Array, "p d"], l_tri: Float[Array, "p m"], rotation: str = "first_order"):
    """The blocks (L_x, L_qx, L_q) of the spatial-orthogonal Cholesky factor, as rows of (p,) arrays.

    `rotation` is "first_order" (I + A, the paper's), "second_order" or "exact".
    """
    d = scale.shape[-1]
    if d not in (3, 6, 7):
        raise ValueError(f"scale has {d} dimensions, wanted 3, 6 or 7.")
    if l_tri.shape[-1] != d * (d - 1) // 2:
        raise ValueError(f"l_tri has {l_tri.shape[-1]} entries, {d} dimensions want {d * (d - 1) // 2}.")
    if rotation not in MAPS:
        raise ValueError(f"rotation is {rotation!r}, wanted one of {', '.join(MAPS)}.")
    s = [scale[..., i] for i in range(d)]
    a01, a02, a12 = (l_tri[..., i] for i in range(3))
    # skew(v) holds -v_z, v_y and -v_x above its diagonal.
    turn = so3_map(skew(jnp.stack([-a12, a02, -a01], -1)), rotation)
    l_x = tuple(tuple(turn[..., i, j] * s[j] for j in range(3)) for i in range(3))
    l_qx, l_q, entry = [], [], 3
    for i in range(3, d):
        row = [l_tri[..., entry + j] for j in range(i)]
        entry += i
        l_qx.append(tuple(row[:3]))
        zero = jnp.zeros_like(s[0])
        l_q.append((*row[3:], s[i], *[zero] * (d - 1 - i)))
    return l_x, tuple(l_qx), tuple(l_q)


def covariance(
    scale: Float[Array, "p d"], l_tri: Float[Array, "p m"], rotation: str = "first_order"
) -> Float[Array, "p d d"]:
    """Sigma = L L^T of every primitive."""
    l_x, l_qx, l_q = factor(scale, l_tri, rotation)
    zero = jnp.zeros_like(l_x[0][0])
    n = len(l_q)
    rows = [jnp.stack([*row, *[zero] * n], -1) for row in l_x]
    rows += [jnp.stack([*left, *right], -1) for left, right in zip(l_qx, l_q)]
    full = jnp.stack(rows, -2)
    return jnp.einsum("pik,pjk->pij", full, full)


def spatial_covariance(
    scale: Float[Array, "p d"], l_tri: Float[Array, "p m"], rotation: str = "first_order"
) -> Float[Array, "p 3 3"]:
    """R diag(s_x^2) R^T of every primitive, as the exploration noise uses."""
    return covariance(scale[..., :3], l_tri[..., :3], rotation)


def view_query(
    xyz: Float[Array, "p 3"], center: Float[Array, "3"], dims: int, time: Float[Array, ""] | float | None = None
) -> Float[Array, "p q"]:
    """Query of every primitive: unit direction from the camera to its unsliced position, and the time when dims is 7.

    Gradients flow into the positions through the direction. A primitive at the camera itself has direction 0.
    """
    offset = xyz - center
    length2 = jnp.sum(offset * offset, -1, keepdims=True)
    d = offset * jnp.where(length2 > 0, jnp.where(length2 > 0, length2, 1) ** -0.5, 0)
    if dims == 3:
        return d[:, :0]
    if dims == 6:
        return d
    if time is None:
        raise ValueError("time is missing, primitives of 7 dimensions want the frame's time between 0 and 1.")
    return jnp.concatenate([d, jnp.broadcast_to(jnp.asarray(time, xyz.dtype), (len(xyz), 1))], 1)


def _cholesky(m):
    """Rows (up to the diagonal) of the lower factor of a small symmetric matrix given as rows, with pivots floored."""
    low = []
    for i in range(len(m)):
        row = []
        for j in range(i):
            row.append((m[i][j] - sum((row[k] * low[j][k] for k in range(j)), 0 * m[i][j])) / low[j][j])
        pivot = m[i][i] - sum((x**2 for x in row), 0 * m[i][i])
        low.append([*row, jnp.sqrt(jnp.maximum(pivot, FLOOR))])
    return low


def _forward(low, rhs):
    """Solves low y = rhs."""
    y = []
    for i, r in enumerate(rhs):
        y.append((r - sum((low[i][k] * y[k] for k in range(i)), 0 * r)) / low[i][i])
    return y


def _backward(low, rhs):
    """Solves low^T y = rhs."""
    n = len(rhs)
    y = []  # entries i + 1 to n - 1
    for i in reversed(range(n)):
        known = sum((low[k][i] * value for k, value in enumerate(y, i + 1)), 0 * rhs[i])
        y.insert(0, (rhs[i] - known) / low[i][i])
    return y


def slice_blocks(sigma_x, sigma_xq, sigma_q, mean_x, x, log_opacity, beta_q, mode):
    """The slice on rows of (p,) arrays: sliced mean (3 arrays), covariance (6: 00, 01, 02, 11, 12, 22), log opacity.

    sigma_x lists the six upper entries, x = query - mean_q. See `slice_at`.
    """
    n = len(x)
    low = _cholesky(sigma_q)
    y = _forward(low, x)
    share = [jnp.minimum(beta / 4, 1) for beta in beta_q]
    upper = [(0, 0), (0, 1), (0, 2), (1, 1), (1, 2), (2, 2)]
    whitened = [_forward(low, row) for row in sigma_xq]  # Sigma_xq Lc^-T, row by row
    if mode == "paper":
        left = [[w * s for w, s in zip(_backward(low, row), share)] for row in whitened]  # (Sigma_xq Sigma_q^-1) bt
        right, step = sigma_xq, x
    else:
        left = [[w * s for w, s in zip(row, share)] for row in whitened]
        right, step = whitened, y
    mean = [m + sum(left[i][k] * step[k] for k in range(n)) for i, m in enumerate(mean_x)]
    cov = [s - sum(left[i][k] * right[j][k] for k in range(n)) for s, (i, j) in zip(sigma_x, upper)]
    # log(1 - tanh z) = log 2 - softplus(2 z): exact, and finite gradients where 1 - tanh underflows.
    for beta, value in zip(beta_q, y):
        log_opacity = log_opacity + beta * (jnp.log(2.0) - jax.nn.softplus(2 * value * value))
    return mean, cov, log_opacity


def slice_at(
    mean: Float[Array, "p d"],
    cov: Float[Array, "p d d"],
    opacity: Float[Array, "p"],
    beta_q: Float[Array, "p q"],
    query: Float[Array, "p q"],
    mode: str = "paper",
) -> tuple[Float[Array, "p 3"], Float[Array, "p 3 3"], Float[Array, "p"]]:
    """3-D mean, covariance and opacity of each kernel at its query.

    With x = query - mean_q, W = Sigma_xq Sigma_q^-1, bt = min(beta_q / 4, 1) and Lc = cholesky(Sigma_q), y = Lc^-1 x:

        mean    = mean_x + (W bt) x
        cov     = Sigma_x - (W bt) Sigma_qx            upper triangle, mirrored
        opacity = o prod_i (1 - tanh(y_i^2))^beta_i

    Mode "paper" is the release's. Its covariance is not symmetric when Sigma_q is not diagonal and bt not constant;
    keeping the upper triangle can leave a matrix that is not positive, and the primitive vanishes. Mode "whitened"
    applies bt to the whitened query, Y = Sigma_xq Lc^-T, mean_x + (Y bt) y and Sigma_x - (Y bt) Y^T: always positive,
    and the same at bt = 1 or with diagonal Sigma_q.
    """
    if mode not in SLICES:
        raise ValueError(f"mode is {mode!r}, wanted one of {', '.join(SLICES)}.")
    d, n = cov.shape[-1], query.shape[-1]
    if mean.shape[-1] != d or d != 3 + n or beta_q.shape[-1] != n:
        raise ValueError(
            f"mean, cov, beta_q and query have {mean.shape[-1]}, {d}, {beta_q.shape[-1]} and {n} dimensions."
        )
    if n == 0:
        return mean, cov, opacity
    at = lambda i, j: cov[..., i, j]  # noqa: E731
    sigma_x = [at(i, j) for i in range(3) for j in range(i, 3)]
    sigma_xq = [[at(i, 3 + k) for k in range(n)] for i in range(3)]
    sigma_q = [[at(3 + i, 3 + j) for j in range(n)] for i in range(n)]
    x = [query[..., k] - mean[..., 3 + k] for k in range(n)]
    beta = [beta_q[..., k] for k in range(n)]
    m, c, log_o = slice_blocks(
        sigma_x, sigma_xq, sigma_q, [mean[..., i] for i in range(3)], x, jnp.log(opacity), beta, mode
    )
    full = jnp.stack([jnp.stack(r, -1) for r in ((c[0], c[1], c[2]), (c[1], c[3], c[4]), (c[2], c[4], c[5]))], -2)
    return jnp.stack(m, -1), full, jnp.exp(log_o)


def slice_params(params: dict[str, Array], center, time, *, rotation: str, mode: str, falloff: str = "beta"):
    """Sliced mean (3 arrays), covariance (6 arrays) and opacity (p,) of all primitives for one camera and time.

    The covariance is never formed: only the products of the factor's blocks that the slice reads. `falloff` is "beta"
    or "gauss" (6DGS and 7DGS: opacity times exp(-0.35 x^T Sigma_q^-1 x) and the plain conditional).
    """
    d = 3 + params["mean_q"].shape[1]
    scale, opacity = scale_of(params["scale_raw"]), opacity_of(params["opacity_raw"])
    l_x, l_qx, l_q = factor(scale, params["l_tri"], rotation)
    dot = lambda a, b: sum(u * v for u, v in zip(a, b))  # noqa: E731
    sigma_x = [dot(l_x[i], l_x[j]) for i in range(3) for j in range(i, 3)]
    mean_x = [params["xyz"][:, i] for i in range(3)]
    if d == 3:
        return mean_x, sigma_x, opacity
    query = view_query(params["xyz"], center, d, time)
    x = [query[:, k] - params["mean_q"][:, k] for k in range(d - 3)]
    sigma_xq = [[dot(l_x[i], row) for row in l_qx] for i in range(3)]
    sigma_q = [[dot(l_qx[i], l_qx[j]) + dot(l_q[i], l_q[j]) for j in range(d - 3)] for i in range(d - 3)]
    if falloff == "gauss":
        four = [jnp.full_like(opacity, 4.0)] * (d - 3)
        mean, cov, _ = slice_blocks(sigma_x, sigma_xq, sigma_q, mean_x, x, jnp.zeros_like(opacity), four, "paper")
        y = _forward(_cholesky(sigma_q), x)
        return mean, cov, opacity * jnp.exp(-0.35 * sum(v * v for v in y))
    beta = [beta_of(params["b"][:, 1 + k]) for k in range(d - 3)]
    log_opacity = jax.nn.log_sigmoid(params["opacity_raw"])
    mean, cov, log_o = slice_blocks(sigma_x, sigma_xq, sigma_q, mean_x, x, log_opacity, beta, mode)
    return mean, cov, jnp.exp(log_o)
