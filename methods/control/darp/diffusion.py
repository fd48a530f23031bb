"""DARP on a diffusion policy: every retrieved neighbour conditions a denoiser of action sequences.

A row's target is its next `horizon` expert actions (the last one repeated past the end of its trajectory). Its condition,
for each neighbour, joins over `obs_horizon` steps the neighbour's states and their differences to the query's states, and
the neighbour's action. Everything is scaled to [-1, 1] by the range of the demonstrations; differences by +-(max - min).
In training each neighbour gives one denoising loss (noise prediction, squared cosine schedule); in acting the K denoised
sequences are averaged. All K start from the same noise (our choice, the paper is silent): from noises of their own they
would end in different modes, and the average of modes is an action that no expert took. AdamW with a cosine rate after a warm-up, and an average of the weights whose memory grows as
1 - (1 + step)^-power, which is what acts.
"""

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int, Key, PyTree

from papyrax.methods.control.darp import retrieval, unet
from papyrax.methods.control.darp.config import Config
from papyrax.methods.control.darp.demos import Demos, Scalers, fit_scalers, positions
from papyrax.methods.control.darp.learner import masked_mean
from papyrax.methods.diffusion.discrete import add_noise, alpha_bar, ddim_levels, ddim_step


@dataclasses.dataclass(frozen=True)
class DiffusionConfig:
    """The paper's diffusion head; `search` holds the retrieval settings, with a lookback of 2."""

    search: Config = dataclasses.field(default_factory=lambda: Config(k=16, lookback=2, ratio=0.5, decay=-1.0))
    obs_horizon: int = 2
    horizon: int = 16
    levels: int = 100
    steps: int = 20
    down: tuple[int, ...] = (256, 512, 1024)
    kernel: int = 5
    groups: int = 8
    time_dim: int = 256
    learning_rate: float = 1e-4
    weight_decay: float = 1e-6
    warmup: int = 500
    total_steps: int = 100_000
    clip_norm: float = 1.0
    ema_power: float = 0.75


@flax.struct.dataclass
class Ranges:
    """Smallest and largest value of every state and action dimension."""

    obs_low: Float[Array, " o"]
    obs_high: Float[Array, " o"]
    act_low: Float[Array, " a"]
    act_high: Float[Array, " a"]

    def obs(self, s: Float[Array, "*b o"]) -> Float[Array, "*b o"]:
        """States in [-1, 1]."""
        return _unit(s, self.obs_low, self.obs_high)

    def act(self, a: Float[Array, "*b a"]) -> Float[Array, "*b a"]:
        """Actions in [-1, 1]."""
        return _unit(a, self.act_low, self.act_high)

    def difference(self, d: Float[Array, "*b o"]) -> Float[Array, "*b o"]:
        """Differences of states, whose range is +-(max - min), in [-1, 1]."""
        return d / _spread(self.obs_low, self.obs_high)

    def raw_act(self, u: Float[Array, "*b a"]) -> Float[Array, "*b a"]:
        """Actions of the environment."""
        return (u + 1) * 0.5 * _spread(self.act_low, self.act_high) + self.act_low


def _spread(low, high):
    return jnp.where(high > low, high - low, 1)


def _unit(x, low, high):
    return 2 * (x - low) / _spread(low, high) - 1


@flax.struct.dataclass
class DiffusionMemory:
    """What training reads: the expert rows, both scalings, the neighbours, and the end of each row's trajectory."""

    demos: Demos
    scalers: Scalers
    ranges: Ranges
    cache: Int[Array, "n K"]
    first: Int[Array, " n"]
    last: Int[Array, " n"]


@flax.struct.dataclass
class DiffusionState:
    """Weights, their running average, optimiser, progress."""

    params: PyTree
    average: PyTree
    opt_state: PyTree
    key: Key[Array, ""]
    step: Int[Array, ""]


def fit_ranges(demos: Demos) -> Ranges:
    """Ranges over all rows."""
    return Ranges(demos.obs.min(0), demos.obs.max(0), demos.act.min(0), demos.act.max(0))


def prepare(demos: Demos, cfg: DiffusionConfig) -> DiffusionMemory:
    """Scalings and the neighbour cache (found in standardised space, as for the other heads)."""
    scalers = fit_scalers(demos)
    n = demos.obs.shape[0]
    row = jnp.arange(n)
    ends = jnp.append(demos.start[1:], n) - 1
    last = ends[jnp.searchsorted(demos.start, row, side="right") - 1]
    cache = retrieval.build_cache(demos, scalers, cfg.search)
    return DiffusionMemory(demos, scalers, fit_ranges(demos), cache, row - positions(demos.start, n), last)


def condition_size(o: int, a: int, cfg: DiffusionConfig) -> int:
    """Length of the condition of one neighbour."""
    return 2 * o * cfg.obs_horizon + a


def conditions(
    memory: DiffusionMemory, idx: Int[Array, "b K"], recent: Float[Array, "b h o"], cfg: DiffusionConfig
) -> Float[Array, "b K c"]:
    """Condition of every neighbour; `recent` are the query's last obs_horizon states, the oldest repeated if short."""
    demos, ranges = memory.demos, memory.ranges
    back = jnp.arange(cfg.obs_horizon)[::-1]
    past = jnp.maximum(idx[..., None] - back, memory.first[idx][..., None])
    states = demos.obs[past]
    parts = (ranges.obs(states), ranges.difference(states - recent[:, None]))
    flat = [p.reshape(*idx.shape, -1) for p in parts]
    return jnp.concatenate([*flat, ranges.act(demos.act)[idx]], axis=-1)


def recent_states(hist: Float[Array, "b l o"], valid: Int[Array, " b"], cfg: DiffusionConfig) -> Float[Array, "b h o"]:
    """The last obs_horizon states, the oldest real one standing in for those before the episode."""
    newest = hist.shape[1] - 1
    back = jnp.minimum(jnp.arange(cfg.obs_horizon)[::-1], valid[:, None] - 1)
    return jnp.take_along_axis(hist, jnp.maximum(newest - back, 0)[..., None], axis=1)


def target_actions(memory: DiffusionMemory, rows: Int[Array, " b"], cfg: DiffusionConfig) -> Float[Array, "b t a"]:
    """The next `horizon` expert actions in [-1, 1]."""
    ahead = jnp.minimum(rows[:, None] + jnp.arange(cfg.horizon), memory.last[rows][:, None])
    return memory.ranges.act(memory.demos.act)[ahead]


def init(key: Key[Array, ""], demos: Demos, cfg: DiffusionConfig) -> DiffusionState:
    """A fresh State."""
    key, key_params = jax.random.split(key)
    o, a = demos.obs.shape[1], demos.act.shape[1]
    params = unet.init(
        key_params, a, condition_size(o, a, cfg), down=cfg.down, kernel=cfg.kernel, time_dim=cfg.time_dim
    )
    return fresh(key, params, cfg)


def fresh(key: Key[Array, ""], params: PyTree, cfg: DiffusionConfig) -> DiffusionState:
    """A State around new parameters."""
    average = jax.tree.map(jnp.copy, params)
    return DiffusionState(params, average, _optimiser(cfg).init(params), key, jnp.zeros((), jnp.int32))


def _optimiser(cfg):
    rate = optax.warmup_cosine_decay_schedule(0.0, cfg.learning_rate, cfg.warmup, cfg.total_steps)
    return optax.chain(optax.clip_by_global_norm(cfg.clip_norm), optax.adamw(rate, weight_decay=cfg.weight_decay))


def loss(
    params: PyTree, key: Key[Array, ""], memory: DiffusionMemory, rows: Int[Array, " b"], cfg: DiffusionConfig
) -> Float[Array, ""]:
    """Mean squared error of the predicted noise, one noise level and one noise for every neighbour of every row."""
    at = jnp.maximum(rows, 0)
    back = jnp.maximum(at[:, None] - jnp.arange(cfg.obs_horizon)[::-1], memory.first[at][:, None])
    cond = conditions(memory, memory.cache[at], memory.demos.obs[back], cfg)
    b, k = cond.shape[:2]
    target = jnp.repeat(target_actions(memory, at, cfg), k, axis=0)
    key_level, key_noise = jax.random.split(key)
    level = jax.random.randint(key_level, (b * k,), 0, cfg.levels)
    noise = jax.random.normal(key_noise, target.shape, target.dtype)
    noisy = add_noise(target, noise, level, alpha_bar("cosine", cfg.levels))
    pred = unet.apply(params, noisy, level, cond.reshape(b * k, -1), groups=cfg.groups)
    each = jnp.mean(jnp.square(pred - noise), axis=(1, 2))
    return masked_mean(each, jnp.repeat(rows >= 0, k))


def update(
    state: DiffusionState, batch: Int[Array, " b"], cfg: DiffusionConfig, *, frozen: DiffusionMemory
) -> tuple[DiffusionState, dict[str, Array]]:
    """One optimiser step on a batch of row numbers, and the running average of the weights."""
    key, key_loss = jax.random.split(state.key)
    value, grads = jax.value_and_grad(loss)(state.params, key_loss, frozen, batch, cfg)
    updates, opt_state = _optimiser(cfg).update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    decay = ema_decay(state.step, cfg.ema_power)
    average = jax.tree.map(lambda old, new: decay * old + (1 - decay) * new, state.average, params)
    metrics = {"loss": value, "grad_norm": optax.global_norm(grads)}
    return DiffusionState(params, average, opt_state, key, state.step + 1), metrics


def ema_decay(step: Int[Array, ""], power: float) -> Float[Array, ""]:
    """Share of the old average that is kept: 1 - (1 + step)^-power, at most 0.9999."""
    return jnp.minimum(1 - (1.0 + step) ** -power, 0.9999)


def act(
    params: PyTree,
    memory: DiffusionMemory,
    hist: Float[Array, "b l o"],
    valid: Int[Array, " b"],
    key: Key[Array, ""],
    cfg: DiffusionConfig,
) -> Float[Array, "b t a"]:
    """The next `horizon` actions: the mean of the K sequences that DDIM denoises from one noise, one for each neighbour."""
    s = cfg.search
    idx = retrieval.retrieve(
        memory.demos,
        memory.scalers,
        hist,
        valid,
        metric=s.metric,
        weights=s.weights,
        rotation=s.rotation,
        **retrieval.search_of(s),
    )
    clean = retrieval.blank(hist, valid)
    cond = conditions(memory, idx, recent_states(clean, valid, cfg), cfg)
    b, k = idx.shape
    cond = cond.reshape(b * k, -1)
    table = alpha_bar("cosine", cfg.levels)

    def step(x, pair):
        level, to = (jnp.full(b * k, v) for v in pair)
        eps = unet.apply(params, x, level, cond, groups=cfg.groups)
        return ddim_step(x, eps, level, to, table, clip=1.0), None

    x = jnp.repeat(jax.random.normal(key, (b, cfg.horizon, memory.demos.act.shape[1])), k, axis=0)
    x, _ = jax.lax.scan(step, x, ddim_levels(cfg.levels, cfg.steps))
    return memory.ranges.raw_act(jnp.mean(x.reshape(b, k, *x.shape[1:]), axis=1))
