"""What REPPO and its PPO baseline share around a rollout: keys a device, reward scaling, episode statistics."""

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Key

from papyrax.envs.rollout import Batch, Envs
from papyrax.methods.nets.normalizers import (
    Moments,
    moments_add,
    moments_init,
    moments_merge,
    moments_psum,
)

__all__ = ["ReturnScaler", "device_key", "episode_metrics", "merge_moments", "scale_rewards", "scaler_init"]

_PEAK_RATIO = 10.0


def device_key(key: Key[Array, ""], axis_name: str | None) -> Key[Array, ""]:
    """The key itself, or one of its own for each device along ``axis_name``."""
    return key if axis_name is None else jax.random.fold_in(key, jax.lax.axis_index(axis_name))


def merge_moments(
    moments: Moments, x: Float[Array, "*n d"], axis_name: str | None, fault: Bool[Array, "*n"] | None = None
) -> Moments:
    """Statistics with the rows of every device taken in, but for those acted on in a step that broke (``fault``): after a
    broken reset they are zeros that no world showed."""
    fresh = moments_add(moments_init(x.shape[-1]), x, None if fault is None else ~fault)
    return moments_merge(moments, fresh if axis_name is None else moments_psum(fresh, axis_name))


@flax.struct.dataclass
class ReturnScaler:
    """Running discounted return of each environment, and their spread and largest size so far."""

    running: Float[Array, " n"]
    moments: Moments
    peak: Float[Array, ""]


def scaler_init(n: int) -> ReturnScaler:
    """For n environments that have not earned anything yet."""
    return ReturnScaler(jnp.zeros(n), moments_init(1), jnp.zeros(()))


def scale_rewards(
    scaler: ReturnScaler,
    reward: Float[Array, "t n"],
    done: Float[Array, "t n"],
    gamma: float,
    axis_name: str | None = None,
) -> tuple[ReturnScaler, Float[Array, "t n"]]:
    """Rewards over ``max(std of running discounted returns, largest return / 10)``, statistics taken in first.

    The option of FastTD3 (Seo et al. 2025, arXiv 2505.22642); REPPO itself uses fixed value ranges.
    """

    def step(running, now):
        r, d = now
        total = r + gamma * running
        return (1 - d) * total, total

    running, totals = jax.lax.scan(step, scaler.running, (reward, done.astype(reward.dtype)))
    moments = merge_moments(scaler.moments, totals[..., None], axis_name)
    peak = jnp.max(jnp.abs(totals))
    if axis_name is not None:
        peak = jax.lax.pmax(peak, axis_name)
    peak = jnp.maximum(scaler.peak, peak)
    spread = jnp.maximum(jnp.sqrt(moments.m2[0] / moments.count), peak / _PEAK_RATIO)
    return ReturnScaler(running, moments, peak), reward / jnp.where(spread > 0, spread, 1.0)


def episode_metrics(envs: Envs, data: Batch, axis_name: str | None) -> dict[str, Array]:
    """Mean return of the last finished episodes (0 before the first), share of environments that have finished one, mean
    reward, share of broken steps."""
    known = jnp.isfinite(envs.last_return)
    sums = (jnp.sum(jnp.where(known, envs.last_return, 0.0)), jnp.sum(known))
    means = (jnp.mean(data.reward), jnp.mean(data.fault.astype(jnp.float32)), jnp.mean(known.astype(jnp.float32)))
    if axis_name is not None:
        sums, means = jax.lax.psum(sums, axis_name), jax.lax.pmean(means, axis_name)
    mean_return = sums[0] / jnp.maximum(sums[1], 1)
    return {"episode_return": mean_return, "finished": means[2], "reward": means[0], "fault": means[1]}
