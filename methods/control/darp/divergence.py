"""Do states leave the data while differences stay inside? The paper's analysis of why DARP drifts less.

A Gaussian is fitted to the expert's standardised states, another to the differences between every expert row and its
neighbours. Where behaviour cloning first fails in closed loop, the state should be unlikely under the first and the
differences to its neighbours likely under the second; "unlikely" is below the first percentile of the expert's own rows.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import jax.scipy.linalg
from jaxtyping import Array, Bool, Float, Int

from papyrax.methods.control.darp.demos import Demos, Scalers


class Gaussian(NamedTuple):
    """Mean and lower Cholesky factor of the covariance."""

    mean: Float[Array, " d"]
    chol: Float[Array, "d d"]


class Divergence(NamedTuple):
    """Log densities of T steps (nats), the thresholds of the expert's own rows, and both verdicts for every step."""

    state: Float[Array, " t"]
    difference: Float[Array, " t"]
    state_threshold: Float[Array, ""]
    difference_threshold: Float[Array, ""]
    state_out: Bool[Array, " t"]
    difference_in: Bool[Array, " t"]


def fit_gaussian(x: Float[Array, "m d"], ridge: float = 1e-4) -> Gaussian:
    """Maximum-likelihood Gaussian; `ridge` times the mean variance is added to the diagonal for constant dimensions."""
    mean = jnp.mean(x, axis=0)
    centred = x - mean
    cov = jnp.matmul(centred.T, centred, precision=jax.lax.Precision.HIGHEST) / x.shape[0]
    level = jnp.trace(cov) / x.shape[1]
    return Gaussian(
        mean, jnp.linalg.cholesky(cov + ridge * jnp.maximum(level, 1e-12) * jnp.eye(x.shape[1], dtype=x.dtype))
    )


def log_density(g: Gaussian, x: Float[Array, "*b d"]) -> Float[Array, "*b"]:
    """Log density in nats."""
    flat = (x - g.mean).reshape(-1, x.shape[-1])
    white = jax.scipy.linalg.solve_triangular(g.chol, flat.T, lower=True)
    half_log_det = jnp.sum(jnp.log(jnp.diag(g.chol)))
    value = -0.5 * jnp.sum(jnp.square(white), axis=0) - half_log_det - 0.5 * x.shape[-1] * jnp.log(2 * jnp.pi)
    return value.reshape(x.shape[:-1])


def neighbour_differences(
    demos: Demos, scalers: Scalers, idx: Int[Array, "b K"], query: Float[Array, "b o"]
) -> Float[Array, "b K o"]:
    """z_i - z_q of every neighbour."""
    return scalers.obs(demos.obs)[idx] - scalers.obs(query)[:, None]


def divergence(
    demos: Demos,
    scalers: Scalers,
    cache: Int[Array, "n K"],
    states: Float[Array, "t o"],
    idx: Int[Array, "t K"],
    percentile: float = 1.0,
) -> Divergence:
    """The analysis along one closed-loop episode.

    Args:
      cache: neighbours of the expert rows.
      states: states that the cloned policy visits.
      idx: neighbours that DARP would retrieve at each of them.
      percentile: what counts as unlikely among the expert's own rows; the difference score of a row is the mean log
        density of its K differences.
    """
    z, d = scalers.obs(demos.obs), neighbour_differences(demos, scalers, cache, demos.obs)
    of_states, of_differences = fit_gaussian(z), fit_gaussian(d.reshape(-1, d.shape[-1]))
    state = log_density(of_states, scalers.obs(states))
    difference = jnp.mean(log_density(of_differences, neighbour_differences(demos, scalers, idx, states)), axis=1)
    state_floor = jnp.percentile(log_density(of_states, z), percentile)
    difference_floor = jnp.percentile(jnp.mean(log_density(of_differences, d), axis=1), percentile)
    return Divergence(
        state, difference, state_floor, difference_floor, state < state_floor, difference >= difference_floor
    )
