"""Training: initial primitives, loss, Adam with one learning rate a group, Markov-chain densification.

Loss = 0.8 L1 + 0.2 (1 - SSIM), and between two steps also 0.01 mean|o| + 0.01 mean|scale_xyz|. The release takes the
first three rows of the scales where the first three columns were meant; `scale_rows` reproduces that.
"""

import dataclasses

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int, Key, PyTree

from papyrax.methods.geometry.cameras import Camera
from papyrax.methods.rendering.core.harmonics import DC
from papyrax.methods.rendering.core.losses import photometric
from papyrax.methods.rendering.core.mcmc import McmcConfig, due, exploration_noise, mcmc_densify
from papyrax.methods.rendering.universal_beta_splatting import kernel
from papyrax.methods.rendering.universal_beta_splatting.render import RenderConfig, render
from papyrax.methods.rendering.universal_beta_splatting.spherical_beta import init_lobes

QUERIES = ("paper", "wide")


@dataclasses.dataclass(frozen=True)
class Config:
    """A model and its training.

    Attributes:
        dims: 3 (matte), 6 (with view direction) or 7 (with time).
        cap: rows of primitives, in use or not.
        learn_b: False freezes all b at their start: with dims 3 like 3DGS, with 6 or 7 like 6DGS or 7DGS.
        lobes: spherical Beta lobes for colour (Deformable Beta Splatting wants dims 3 and 2 lobes), 0 for plain colour.
        init_query: "paper", or "wide" (scales of direction 3, directions x 0.3), without which few primitives start visible.
        extent: 1.1 times the largest distance of a camera from the mean camera.
        horizon: step at which the position's rate has fallen from rate_xyz to rate_xyz_end (both times extent).
        regularise_from, regularise_to: steps between which opacity and scale are penalised.
        scale_rows: the release's slip in the scale penalty.
    """

    dims: int = 6
    cap: int = 300_000
    render: RenderConfig = dataclasses.field(default_factory=RenderConfig)
    mcmc: McmcConfig = dataclasses.field(default_factory=McmcConfig)
    learn_b: bool = True
    lobes: int = 0
    init_query: str = "paper"
    extent: float = 1.0
    horizon: int = 30_000
    rate_xyz: float = 1.6e-4
    rate_xyz_end: float = 1.6e-6
    rate_mean_q: float = 1e-3
    rate_rgb: float = 1e-3
    rate_opacity: float = 0.05
    rate_b: float = 1e-3
    rate_scale: float = 5e-3
    rate_l_tri: float = 1e-3
    rate_lobes: float = 2.5e-3
    dssim: float = 0.2
    opacity_weight: float = 0.01
    scale_weight: float = 0.01
    regularise_from: int = 500
    regularise_to: int = 25_000
    scale_rows: bool = False
    background: tuple[float, float, float] = (0.0, 0.0, 0.0)

    def __post_init__(self):
        if self.dims not in (3, 6, 7):
            raise ValueError(f"dims is {self.dims}, wanted 3, 6 or 7.")
        if self.init_query not in QUERIES:
            raise ValueError(f"init_query is {self.init_query!r}, wanted paper or wide.")
        if self.lobes and self.dims != 3:
            raise ValueError(f"lobes is {self.lobes} with dims {self.dims}, lobes go with dims 3.")


@struct.dataclass
class State:
    """Raw parameters, rows in use, Adam's moments, key and step."""

    params: dict[str, Float[Array, "p ..."]]
    alive: Bool[Array, "p"]
    opt: PyTree
    key: Key[Array, ""]
    step: Int[Array, ""]


ADAM = optax.scale_by_adam(b1=0.9, b2=0.999, eps=1e-15)


@dataclasses.dataclass(frozen=True)
class Split:
    """Which axes of a mesh share the batch's views, and which share the rows of primitives (and the tiles) of a view."""

    mesh: jax.sharding.Mesh
    views: tuple[str, ...] = ()
    rows: tuple[str, ...] = ()


def init_params(
    key: Key[Array, ""],
    points: Float[Array, "n 3"],
    colors: Float[Array, "n 3"],
    spacing: Float[Array, "n"],
    dims: int,
    cap: int,
    *,
    init_query: str = "paper",
    lobes: int = 0,
) -> tuple[dict[str, Array], Bool[Array, "p"]]:
    """Primitives on coloured points (colours in [0, 1]) and the rows in use.

    `spacing` is the spatial scale: the root of the mean squared distance to the three nearest other points.
    """
    n = len(points)
    if points.shape != (n, 3) or colors.shape != (n, 3) or spacing.shape != (n,):
        raise ValueError(f"points, colors, spacing have shapes {points.shape}, {colors.shape}, {spacing.shape}.")
    if not 0 < n <= cap:
        raise ValueError(f"there are {n} points, wanted between 1 and cap = {cap}.")
    q, m = dims - 3, dims * (dims - 1) // 2
    keys = jax.random.split(key, 5)
    direction = jax.random.uniform(keys[0], (n, min(q, 3)), minval=-1, maxval=1)
    time = jax.random.uniform(keys[1], (n, max(q - 3, 0)))
    query_scale = 1 + 1e-5 * jax.random.normal(keys[2], (n, q))
    if init_query == "wide":
        # Times stay as they are: at scale 1 a kernel is seen at all of them, and already knows its own.
        direction, query_scale = 0.3 * direction, query_scale.at[:, :3].multiply(3.0)
    scale = jnp.concatenate([jnp.repeat(jnp.maximum(spacing, 1e-7)[:, None], 3, 1), query_scale], 1)
    b = jnp.zeros((n, 1 + q))
    if dims == 7:
        b = b.at[:, 1:4].set(-3.0)
    params = {
        "xyz": points,
        "mean_q": jnp.concatenate([direction, time], 1),
        "scale_raw": kernel.scale_inverse(scale),
        "l_tri": 1e-5 * jax.random.normal(keys[3], (n, m)),
        "rgb": (colors - 0.5) / DC if lobes else colors,
        "opacity_raw": jnp.zeros(n),
        "b": b,
    }
    if lobes:
        params["lobes"] = init_lobes(keys[4], n, lobes)
    params = {k: jnp.pad(v.astype(jnp.float32), [(0, cap - n)] + [(0, 0)] * (v.ndim - 1)) for k, v in params.items()}
    return params, jnp.arange(cap) < n


def init(key: Key[Array, ""], config: Config, points, colors, spacing) -> State:
    """Fresh training state; see `init_params` for the points."""
    key, sub = jax.random.split(key)
    params, alive = init_params(
        sub, points, colors, spacing, config.dims, config.cap, init_query=config.init_query, lobes=config.lobes
    )
    return State(params, alive, ADAM.init(params), key, jnp.zeros((), jnp.int32))


def views_loss(
    params: dict[str, Array],
    alive: Bool[Array, "p"],
    batch: dict[str, PyTree],
    config: Config,
    axis_name: str | tuple[str, ...] | None = None,
) -> tuple[Float[Array, ""], dict[str, Array]]:
    """Mean photometric loss of the batch's views, without regularisers, and what the renders say.

    The batch holds `camera` (a Camera whose leaves lead with the views), `image` (v h w 3) and, for dims 7, `time` (v).
    """
    bg = jnp.asarray(config.background, params["xyz"].dtype)

    def view(camera: Camera, image, time):
        out = render(params, alive, camera, time, bg, cfg=config.render, axis_name=axis_name)
        return photometric(out["rgb"], image, None, config.dssim), {
            "mse": jnp.mean((jnp.clip(out["rgb"], 0, 1) - image) ** 2),
            "overflow": out["overflow"],
            "pairs_per_tile": out["pairs_per_tile"],
            "degenerate": out["degenerate"],
        }

    times = batch.get("time", jnp.zeros(len(batch["image"])))
    if len(batch["image"]) == 1:
        return view(*jax.tree.map(lambda a: a[0], (batch["camera"], batch["image"], times)))
    value, metrics = jax.lax.map(lambda x: view(*x), (batch["camera"], batch["image"], times))
    return value.mean(), jax.tree.map(lambda a: a.mean() if a.dtype.kind == "f" else a.max(), metrics)


def loss(
    params: dict[str, Array],
    alive: Bool[Array, "p"],
    batch: dict[str, PyTree],
    step: Int[Array, ""],
    config: Config,
    split: Split | None = None,
) -> tuple[Float[Array, ""], dict[str, Array]]:
    """Mean loss over the batch's views (see `views_loss`) with the regularisers, and its metrics.

    With `split`, views and primitives are shared over devices: same value and gradients.
    """
    if split is None:
        value, metrics = views_loss(params, alive, batch, config)
    else:
        axes, rows, views = (*split.views, *split.rows), PartitionSpec(split.rows), PartitionSpec(split.views)

        def local(params, alive, batch):
            value, metrics = views_loss(params, alive, batch, config, split.rows or None)
            return jax.lax.pmean(value, axes), jax.tree.map(
                lambda a: (jax.lax.pmean if a.dtype.kind == "f" else jax.lax.pmax)(a, axes), metrics
            )

        specs = {"in_specs": (rows, rows, views), "out_specs": PartitionSpec(), "check_vma": False}
        value, metrics = jax.shard_map(local, mesh=split.mesh, **specs)(params, alive, batch)
    metrics["psnr"] = -10 * jnp.log10(metrics.pop("mse"))
    count = jnp.maximum(alive.sum(), 1)
    opacity = jnp.where(alive, kernel.opacity_of(params["opacity_raw"]), 0).sum() / count
    scales = kernel.scale_of(params["scale_raw"])
    if config.scale_rows:
        scale = scales[:3].mean()
    else:
        scale = jnp.where(alive[:, None], scales[:, :3], 0).sum() / (3 * count)
    on = (step > config.regularise_from) & (step < config.regularise_to)
    value = value + on * (config.opacity_weight * opacity + config.scale_weight * scale)
    return value, metrics | {"loss": value, "opacity": opacity, "count": count}


def render_views(
    params: dict[str, Array],
    alive: Bool[Array, "p"],
    batch: dict[str, PyTree],
    config: Config,
    split: Split | None = None,
) -> tuple[Float[Array, "v h w 3"], Int[Array, "v"]]:
    """Colours of the batch's views and the pairs of tile and primitive that did not fit, shared as in `loss`."""

    def local(params, alive, batch):
        def view(x):
            camera, time = x
            bg = jnp.asarray(config.background, params["xyz"].dtype)
            axes = split.rows if split is not None and split.rows else None
            out = render(params, alive, camera, time, bg, cfg=config.render, axis_name=axes)
            return out["rgb"], out["overflow"]

        return jax.lax.map(view, (batch["camera"], batch["time"]))

    if split is None:
        return local(params, alive, batch)
    rows, views = PartitionSpec(split.rows), PartitionSpec(split.views)
    specs = {"in_specs": (rows, rows, views), "out_specs": views, "check_vma": False}
    return jax.shard_map(local, mesh=split.mesh, **specs)(params, alive, batch)


def learning_rates(step: Int[Array, ""], config: Config) -> dict[str, Array | float]:
    """Rate of each group; the position's falls log-linearly."""
    share = jnp.clip(step / config.horizon, 0, 1)
    xyz = config.extent * jnp.exp((1 - share) * jnp.log(config.rate_xyz) + share * jnp.log(config.rate_xyz_end))
    return {
        "xyz": xyz, "mean_q": config.rate_mean_q, "scale_raw": config.rate_scale, "l_tri": config.rate_l_tri,
        "rgb": config.rate_rgb, "opacity_raw": config.rate_opacity, "b": config.rate_b if config.learn_b else 0.0,
        "lobes": config.rate_lobes,
    }  # fmt: skip


def densify(
    key: Key[Array, ""],
    params: dict[str, Array],
    alive: Bool[Array, "p"],
    opt_state: PyTree,
    step: Int[Array, ""],
    config: Config,
) -> tuple[dict[str, Array], Bool[Array, "p"], PyTree]:
    """One event: relocate, grow, then noise on positions (which the release adds at these events only)."""
    copy_key, noise_key = jax.random.split(key)
    params, alive, opt_state = mcmc_densify(copy_key, params, alive, opt_state, config.mcmc)
    scale = kernel.scale_of(params["scale_raw"])
    cov = kernel.spatial_covariance(scale, params["l_tri"], config.render.rotation)
    strength = config.mcmc.noise_lr * learning_rates(step, config)["xyz"]
    moved = exploration_noise(noise_key, params["xyz"], cov, kernel.opacity_of(params["opacity_raw"]), strength)
    return params | {"xyz": jnp.where(alive[:, None], moved, params["xyz"])}, alive, opt_state


def update(
    state: State, batch: dict[str, PyTree], config: Config, *, frozen: PyTree = None, split: Split | None = None
) -> tuple[State, dict]:
    """One Adam step on a batch of views, then densification when it is due. Nothing is frozen from outside."""
    del frozen
    step = state.step + 1
    key, sub = jax.random.split(state.key)
    grads, metrics = jax.grad(loss, has_aux=True)(state.params, state.alive, batch, step, config, split)
    direction, opt = ADAM.update(grads, state.opt)
    rates = learning_rates(step, config)
    rates = {name: rates[name] for name in state.params}  # lobes may be absent
    params = jax.tree.map(lambda p, r, d: p - r * d, state.params, rates, direction)
    params, alive, opt = jax.lax.cond(
        due(step, config.mcmc),
        lambda p, a, o: densify(sub, p, a, o, step, config),
        lambda p, a, o: (p, a, o),
        params, state.alive, opt,
    )  # fmt: skip
    return State(params, alive, opt, key, step), metrics
