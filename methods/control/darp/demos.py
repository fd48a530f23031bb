"""Expert rows and the two standardisations.

Rows of all trajectories lie one after another in file order. States are standardised with the unbiased deviation (N - 1)
and actions with the biased one (N), because the published code fits the first on torch tensors and the second on numpy
arrays; both are arguments. A dimension that does not vary is divided by 1.
"""

import flax.struct
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from papyrax.methods.nets.normalizers import moments_add, moments_init, moments_std


@flax.struct.dataclass
class Demos:
    """N expert states and actions, and the first row of each of J trajectories, ascending from 0."""

    obs: Float[Array, "n o"]
    act: Float[Array, "n a"]
    start: Int[Array, " j"]


@flax.struct.dataclass
class Scalers:
    """Means and deviations of states and actions."""

    obs_mean: Float[Array, " o"]
    obs_std: Float[Array, " o"]
    act_mean: Float[Array, " a"]
    act_std: Float[Array, " a"]

    def obs(self, s: Float[Array, "*b o"]) -> Float[Array, "*b o"]:
        """Standardised states."""
        return (s - self.obs_mean) / self.obs_std

    def act(self, a: Float[Array, "*b a"]) -> Float[Array, "*b a"]:
        """Standardised actions."""
        return (a - self.act_mean) / self.act_std

    def raw_act(self, u: Float[Array, "*b a"]) -> Float[Array, "*b a"]:
        """Actions of the environment; not clipped, environments clip."""
        return u * self.act_std + self.act_mean


def make_demos(
    obs: Float[Array | np.ndarray, "n o"], act: Float[Array | np.ndarray, "n a"], start: Int[Array | np.ndarray, " j"]
) -> Demos:
    """Demos from arrays.

    Raises:
      ValueError: shapes that do not fit, or fewer than two rows (a row retrieves another one).
    """
    obs, act, start = jnp.asarray(obs), jnp.asarray(act), jnp.asarray(start, jnp.int32)
    if obs.ndim != 2 or act.ndim != 2 or obs.shape[0] != act.shape[0] or obs.shape[0] < 2:
        raise ValueError(
            f"make_demos: obs and act must have the same two or more rows, got shapes {obs.shape} and {act.shape}."
        )
    if start.ndim != 1 or start.shape[0] < 1:
        raise ValueError(f"make_demos: start must list the first row of each trajectory, got shape {start.shape}.")
    return Demos(obs, act, start)


def fit_scalers(demos: Demos, ddof_obs: int = 1, ddof_act: int = 0) -> Scalers:
    """Means and deviations over all rows, each with its own degrees of freedom (0: divide by N, 1: by N - 1)."""
    obs_mean, obs_std = _moments(demos.obs, ddof_obs)
    act_mean, act_std = _moments(demos.act, ddof_act)
    return Scalers(obs_mean, obs_std, act_mean, act_std)


def _moments(x, ddof):
    # measured from the first row, so that a dimension that never varies has a spread of exactly 0, hence 1
    m = moments_add(moments_init(x.shape[1], x.dtype), x - x[0])
    return x[0] + m.mean, moments_std(m, ddof=ddof, eps=0.0)


def positions(start: Int[Array, " j"], n: int) -> Int[Array, " n"]:
    """Place of every row inside its trajectory, from 0."""
    row = jnp.arange(n, dtype=jnp.int32)
    return row - start[jnp.searchsorted(start, row, side="right") - 1]
