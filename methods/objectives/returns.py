"""Lambda returns and generalised advantages over time-major rollouts that keep the true next state.

Conventions: ``v_next[t]`` is the value of the state that step t led to, before any reset. ``done`` is 1 where an
episode ended for whatever reason, ``trunc`` only where a time limit ended it: there the return goes on with the value
of the true next state.

Sources: Sutton and Barto 2018, section 12.1; Schulman et al. 2016 (arXiv 1506.02438) for the advantage.
"""

import jax
from jaxtyping import Array, Bool, Float

__all__ = ["gae", "lambda_returns"]

Flags = Float[Array, "t *n"] | Bool[Array, "t *n"]


def lambda_returns(
    r: Float[Array, "t *n"],
    v_next: Float[Array, "t *n"],
    done: Flags,
    trunc: Flags,
    gamma: float,
    lam: float,
) -> Float[Array, "t *n"]:
    """TD(lambda) targets, in the units of the reward.

    ``G_t = r_t + gamma v_t`` where truncated, else ``G_t = r_t + gamma (1 - done_t) (lam G_{t+1} + (1 - lam) v_t)``,
    with ``v_t = v_next[t]`` and ``G_T = v_{T-1}``. No gradient is stopped.

    Raises:
      ValueError: the four arrays differ in shape, or are empty in time.
    """
    shapes = {"r": r.shape, "v_next": v_next.shape, "done": done.shape, "trunc": trunc.shape}
    if len(set(shapes.values())) > 1 or not r.ndim or not r.shape[0]:
        raise ValueError(f"r, v_next, done and trunc must have one shape with at least one step, but are {shapes}.")
    done, trunc = done.astype(r.dtype), trunc.astype(r.dtype)
    # One affine map of G_{t+1} a step: the ends of episodes only choose its coefficients.
    go_on = (1 - done) * (1 - trunc)
    slope = gamma * lam * go_on
    offset = r + gamma * v_next * (trunc + (1 - lam) * go_on)

    def back(following, step):
        a, b = step
        here = b + a * following
        return here, here

    _, returns = jax.lax.scan(back, v_next[-1], (slope, offset), reverse=True)
    return returns


def gae(
    r: Float[Array, "t *n"],
    v: Float[Array, "t *n"],
    v_next: Float[Array, "t *n"],
    done: Flags,
    trunc: Flags,
    gamma: float,
    lam: float,
) -> Float[Array, "t *n"]:
    """Generalised advantage: `lambda_returns` minus ``v``, the value of the state that step t started from."""
    if v.shape != r.shape:
        raise ValueError(f"v must have the shape {r.shape} of r, but has {v.shape}.")
    return lambda_returns(r, v_next, done, trunc, gamma, lam) - v
