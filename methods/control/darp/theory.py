"""The paper's two theorems as functions: smoothness bounds the drift, and averaging over neighbours is a low-pass filter.

T1  The smoothness term tends to a Dirichlet energy; a policy that is L_a-close and a world that is L_s-Lipschitz give
    delta_{t+1} <= L_s delta_t + L_a |pi(s_t) - f(s*_t)|.
T2  Averaging f over the k neighbours multiplies the component of f at eigenvalue mu of the normalised Laplacian
    L = I - D^-1 A of the neighbour graph by 1 - mu.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def laplacian(idx: Int[Array, "n k"]) -> Float[Array, "n n"]:
    """L = I - D^-1 A of the graph in which every row points to its k neighbours (repeats weigh more)."""
    n, k = idx.shape
    walk = jnp.zeros((n, n)).at[jnp.arange(n)[:, None], idx].add(1 / k)
    return jnp.eye(n) - walk


def average(idx: Int[Array, "n k"], f: Float[Array, "n a"]) -> Float[Array, "n a"]:
    """(I - L) f: the mean of f over the neighbours of every row."""
    return jnp.mean(f[idx], axis=1)


def attenuation(mu: Float[Array, "*b"]) -> Float[Array, "*b"]:
    """phi(mu) = 1 - mu, the factor of the component at eigenvalue mu."""
    return 1 - mu


def dirichlet_energy(idx: Int[Array, "n k"], f: Float[Array, "n a"]) -> Float[Array, ""]:
    """Mean over rows and neighbours of |f_i - f_j|^2 / 2; equals tr(f^T L f) / n on a symmetric graph."""
    return 0.5 * jnp.mean(jnp.sum(jnp.square(f[:, None] - f[idx]), axis=-1))


def local_lipschitz(idx: Int[Array, "n k"], x: Float[Array, "n o"], f: Float[Array, "n a"]) -> Float[Array, " n"]:
    """Largest |f_i - f_j| / |x_i - x_j| over the neighbours of every row, 0 where they coincide."""
    gap = jnp.linalg.norm(x[:, None] - x[idx], axis=-1)
    rise = jnp.linalg.norm(f[:, None] - f[idx], axis=-1)
    return jnp.max(jnp.where(gap > 0, rise / jnp.where(gap > 0, gap, 1), 0), axis=1)


def drift_bound(
    delta0: Float[Array, ""], l_s: float, l_a: float, policy_error: Float[Array, " t"]
) -> Float[Array, " t"]:
    """delta_1 .. delta_T of the recursion of T1, from the distance to the expert at the start and the policy's errors."""

    def step(delta, error):
        delta = l_s * delta + l_a * error
        return delta, delta

    return jax.lax.scan(step, jnp.asarray(delta0, policy_error.dtype), policy_error)[1]
