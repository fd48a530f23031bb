"""Training: 3DGS initialisation, masked photometric loss, Adam with one rate a group, either densifier.

Views may come from any camera; the paper trains on BEAP images (see `papyrax.methods.geometry.cameras.resample`).
With a mesh, rows of Gaussians are spread over one of its axes and the views of a batch over another.
"""

import dataclasses

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Bool, Float, Int, Key, PyTree

from papyrax.methods.geometry.rotations import quat_to_matrix
from papyrax.methods.rendering.core import clone_split as cs
from papyrax.methods.rendering.core.harmonics import DC
from papyrax.methods.rendering.core.losses import inverse_depth_l1, photometric
from papyrax.methods.rendering.core.mcmc import McmcConfig, due, exploration_noise, mcmc_densify
from papyrax.methods.rendering.geer.render import RenderConfig, gradient_statistic, render

DENSIFIERS = ("mcmc", "clone_split", "none")


@dataclasses.dataclass(frozen=True)
class Config:
    """A model and its training.

    Attributes:
        cap: rows of Gaussians, in use or not.
        sh_degree: highest degree of colour; degree n is switched on after n times sh_every steps.
        densifier: "mcmc", "clone_split" (3DGS with the 3-D gradient statistic) or "none".
        extent: 1.1 times the largest distance of a camera from the mean camera.
        depth_weight, depth_weight_end: weight of the inverse-depth L1 where the batch holds `inv_depth`, log-linear.
    """

    cap: int = 500_000
    sh_degree: int = 3
    sh_every: int = 1_000
    render: RenderConfig = dataclasses.field(default_factory=RenderConfig)
    densifier: str = "mcmc"
    mcmc: McmcConfig = dataclasses.field(default_factory=lambda: McmcConfig(noise_lr=5e5))
    clone_split: cs.CloneSplitConfig = dataclasses.field(default_factory=cs.CloneSplitConfig)
    extent: float = 1.0
    horizon: int = 30_000
    rate_xyz: float = 1.6e-4
    rate_xyz_end: float = 1.6e-6
    rate_sh: float = 2.5e-3
    rate_opacity: float = 0.025
    rate_scale: float = 5e-3
    rate_quat: float = 1e-3
    dssim: float = 0.2
    depth_weight: float = 0.1
    depth_weight_end: float = 0.01
    background: tuple[float, float, float] = (0.0, 0.0, 0.0)

    def __post_init__(self):
        if self.densifier not in DENSIFIERS:
            raise ValueError(f"densifier is {self.densifier!r}, wanted one of {', '.join(DENSIFIERS)}.")


@struct.dataclass
class State:
    """Raw parameters, rows in use, Adam's moments, densification statistics, key and step."""

    params: dict[str, Float[Array, "p ..."]]
    alive: Bool[Array, "p"]
    opt: PyTree
    stats: cs.GradientStatistics
    key: Key[Array, ""]
    step: Int[Array, ""]


ADAM = optax.scale_by_adam(b1=0.9, b2=0.999, eps=1e-15)


def init_params(
    points: Float[Array, "n 3"], colors: Float[Array, "n 3"], spacing: Float[Array, "n"], cap: int, sh_degree: int
) -> tuple[dict[str, Array], Bool[Array, "p"]]:
    """Round Gaussians of opacity 0.1 on coloured points (colours in [0, 1]) and the rows in use.

    `spacing` is the scale: the root of the mean squared distance to the three nearest other points.
    """
    n = len(points)
    if points.shape != (n, 3) or colors.shape != (n, 3) or spacing.shape != (n,):
        raise ValueError(f"points, colors, spacing have shapes {points.shape}, {colors.shape}, {spacing.shape}.")
    if not 0 < n <= cap:
        raise ValueError(f"there are {n} points, wanted between 1 and cap = {cap}.")
    k = (sh_degree + 1) ** 2
    params = {
        "xyz": points,
        "log_scale": jnp.repeat(jnp.log(jnp.maximum(spacing, 1e-7))[:, None], 3, 1),
        "quat": jnp.tile(jnp.asarray([[1.0, 0, 0, 0]]), (n, 1)),
        "opacity_raw": jnp.full(n, jax.scipy.special.logit(0.1)),
        "sh": jnp.zeros((n, k, 3)).at[:, 0].set((colors - 0.5) / DC),
    }
    params = {k: jnp.pad(v.astype(jnp.float32), [(0, cap - n)] + [(0, 0)] * (v.ndim - 1)) for k, v in params.items()}
    return params, jnp.arange(cap) < n


def init(key: Key[Array, ""], config: Config, points, colors, spacing) -> State:
    """Fresh training state; see `init_params` for the points."""
    params, alive = init_params(points, colors, spacing, config.cap, config.sh_degree)
    return State(params, alive, ADAM.init(params), cs.empty_statistics(config.cap), key, jnp.zeros((), jnp.int32))


def loss(
    params: dict[str, Array],
    probe: Float[Array, "v p 3"] | None,
    alive: Bool[Array, "p"],
    batch: dict[str, PyTree],
    step: Int[Array, ""],
    config: Config,
    axis_name: str | None = None,
) -> tuple[Float[Array, ""], dict[str, Array]]:
    """Mean loss over the batch's views and its metrics.

    The batch holds `camera` (a Camera whose leaves lead with the views), `image` (v h w 3), and may hold `mask` (v h w)
    of valid pixels and `inv_depth` (v h w) of known 1/distance. With `axis_name` (inside shard_map) the rows of params
    are spread over that axis.
    """
    bg = jnp.asarray(config.background, params["xyz"].dtype)
    share = jnp.clip(step / config.horizon, 0, 1)
    depth_weight = jnp.exp((1 - share) * jnp.log(config.depth_weight) + share * jnp.log(config.depth_weight_end))

    def view(item, probe):
        degree = jnp.minimum(step // config.sh_every, config.sh_degree)
        out = render(
            params, alive, item["camera"], bg, cfg=config.render, sh_degree=degree, probe=probe, axis_name=axis_name
        )
        mask = item.get("mask")
        value = photometric(out["rgb"], item["image"], mask, config.dssim)
        valid = jnp.ones(item["image"].shape[:2], bool) if mask is None else mask
        if "inv_depth" in item:
            value = value + depth_weight * inverse_depth_l1(out["inv_depth"], item["inv_depth"], valid)
        error = jnp.where(valid[..., None], (jnp.clip(out["rgb"], 0, 1) - item["image"]) ** 2, 0)
        metrics = {
            "mse": error.sum() / (3 * jnp.maximum(valid.sum(), 1)),
            "overflow": out["overflow"],
            "pairs_per_tile": out["pairs_per_tile"],
        }
        return value, metrics | ({"span": out["span"]} if "span" in out else {})

    views = len(batch["image"])
    values: list[tuple[Array, dict[str, Array]]] = []
    for i in range(views):
        item = jax.tree.map(lambda a: a[i], batch)  # noqa: B023
        values.append(view(item, None if probe is None else probe[i]))
    value = sum((v for v, _ in values[1:]), values[0][0]) / views
    every = jax.tree.map(lambda *a: jnp.stack(a), *[m for _, m in values])
    metrics = {
        "mse": every["mse"].mean(),
        "overflow": every["overflow"].max(),
        "pairs_per_tile": every["pairs_per_tile"].mean(),
        "loss": value,
    }
    return value, metrics | ({"span": every["span"]} if "span" in every else {})


def learning_rates(step: Int[Array, ""], config: Config) -> dict[str, Array | float]:
    """Rate of each group; the position's falls log-linearly, colours above degree 0 get a twentieth."""
    share = jnp.clip(step / config.horizon, 0, 1)
    xyz = config.extent * jnp.exp((1 - share) * jnp.log(config.rate_xyz) + share * jnp.log(config.rate_xyz_end))
    k = (config.sh_degree + 1) ** 2
    sh = jnp.full((k, 1), config.rate_sh / 20).at[0].set(config.rate_sh)
    return {
        "xyz": xyz, "log_scale": config.rate_scale, "quat": config.rate_quat, "opacity_raw": config.rate_opacity, "sh": sh
    }  # fmt: skip


def _spread_gradient(params, alive, batch, step, config, mesh: Mesh, rows: str, views: str):
    """Gradient of the mean loss over all views, rows of Gaussians over the axis `rows`, views over the axis `views`."""
    by_rows, by_views, whole = PartitionSpec(rows), PartitionSpec(views), PartitionSpec()

    def local(params, alive, batch, step):
        value, metrics = loss(params, None, alive, batch, step, config, axis_name=rows)
        overflow = jax.lax.pmax(jax.lax.stop_gradient(metrics["overflow"]), mesh.axis_names)
        value, metrics = jax.lax.pmean((value, metrics), mesh.axis_names)
        return value, metrics | {"overflow": overflow}

    spread = jax.shard_map(
        local, mesh=mesh, in_specs=(by_rows, by_rows, by_views, whole), out_specs=whole, check_vma=False
    )
    return jax.grad(spread, has_aux=True)(params, alive, batch, step)


def update(
    state: State,
    batch: dict[str, PyTree],
    config: Config,
    *,
    frozen: PyTree = None,
    mesh: Mesh | None = None,
    rows: str = "fsdp",
    views: str = "data",
) -> tuple[State, dict]:
    """One Adam step on a batch of views, then densification when it is due. Nothing is frozen from outside.

    With `mesh`, the rows of Gaussians lie over its axis `rows` and the views over `views`, both evenly.
    """
    del frozen
    step = state.step + 1
    key, sub = jax.random.split(state.key)
    cloning = config.densifier == "clone_split"
    count = len(batch["image"])
    probe = jnp.zeros((count, config.cap, 3)) if cloning else None
    if mesh is not None:
        if cloning:
            raise ValueError("densifier is clone_split, on a mesh wanted mcmc or none.")
        if config.cap % mesh.shape[rows] or count % mesh.shape[views]:
            raise ValueError(
                f"{config.cap} rows and {count} views do not divide over {rows} = {mesh.shape[rows]} and "
                f"{views} = {mesh.shape[views]} devices."
            )
        by_params, metrics = _spread_gradient(state.params, state.alive, batch, step, config, mesh, rows, views)
    elif cloning:
        gradient = jax.grad(loss, argnums=(0, 1), has_aux=True)
        (by_params, by_probe), metrics = gradient(state.params, probe, state.alive, batch, step, config)
    else:
        by_params, metrics = jax.grad(loss, has_aux=True)(state.params, None, state.alive, batch, step, config)
    metrics["psnr"] = -10 * jnp.log10(jnp.maximum(metrics.pop("mse"), 1e-12))
    metrics["count"] = jnp.maximum(state.alive.sum(), 1)
    direction, opt = ADAM.update(by_params, state.opt)
    rates = learning_rates(step, config)
    params = jax.tree.map(lambda p, r, d: p - r * d, state.params, rates, direction)
    alive, stats = state.alive, state.stats
    if config.densifier == "mcmc":
        params, alive, opt = jax.lax.cond(
            due(step, config.mcmc),
            lambda p, a, o: _mcmc(sub, p, a, o, step, config),
            lambda p, a, o: (p, a, o),
            params, alive, opt,
        )  # fmt: skip
    if cloning:
        span = metrics.pop("span")
        for i in range(count):
            cam = jax.tree.map(lambda a: a[i], batch["camera"])  # noqa: B023
            stats = cs.add_view(stats, gradient_statistic(by_probe[i], state.params, cam), span[i])
        params, alive, opt, stats, lost = _clone_split(sub, params, alive, opt, stats, step, config)
        metrics["no_room"] = lost
    return State(params, alive, opt, stats, key, step), metrics


def _mcmc(key, params, alive, opt, step, config):
    copy_key, noise_key = jax.random.split(key)
    params, alive, opt = mcmc_densify(copy_key, params, alive, opt, config.mcmc)
    half = quat_to_matrix(params["quat"]) * jnp.exp(params["log_scale"])[:, None, :]
    cov = jnp.einsum("pik,pjk->pij", half, half)
    strength = config.mcmc.noise_lr * learning_rates(step, config)["xyz"]
    moved = exploration_noise(noise_key, params["xyz"], cov, jax.nn.sigmoid(params["opacity_raw"]), strength)
    return params | {"xyz": jnp.where(alive[:, None], moved, params["xyz"])}, alive, opt


def _clone_split(key, params, alive, opt, stats, step, config):
    cfg = config.clone_split
    event = (step > cfg.start) & (step < cfg.stop) & (step % cfg.every == 0)

    def densify(params, alive, opt, stats):
        params, alive, opt, lost = cs.clone_split(key, params, alive, opt, stats, step, cfg)
        return params, alive, opt, cs.empty_statistics(config.cap), lost

    def keep(params, alive, opt, stats):
        return params, alive, opt, stats, jnp.zeros((), jnp.int32)

    params, alive, opt, stats, lost = jax.lax.cond(event, densify, keep, params, alive, opt, stats)
    reset = (step < cfg.stop) & (step % cfg.reset_every == 0)
    params = jax.tree.map(lambda a, b: jnp.where(reset, a, b), cs.reset_opacity(params, cfg), params)
    return params, alive, opt, stats, lost
