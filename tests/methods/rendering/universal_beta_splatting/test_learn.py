import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from papyrax.methods.geometry.cameras import make_camera
from papyrax.methods.geometry.rotations import look_at
from papyrax.methods.rendering.core.mcmc import McmcConfig
from papyrax.methods.rendering.universal_beta_splatting import learn
from papyrax.methods.rendering.universal_beta_splatting.render import RenderConfig, render

pytestmark = [pytest.mark.proof("universal_beta_splatting", "core")]
CONFIG = learn.Config(
    dims=6, cap=60, init_query="wide", extent=3.0, horizon=60, rate_rgb=0.02, regularise_from=10,
    render=RenderConfig(tile=8, cap=48, pairs=2000), mcmc=McmcConfig(start=10, stop=50, every=20, noise_lr=1.0, grow=100),
)  # fmt: skip


def cameras(n=3, size=24):
    out = []
    for angle in np.linspace(0, 2, n):
        eye = jnp.asarray([3 * np.sin(angle), -0.4, -3 * np.cos(angle)], jnp.float32)
        R, t = look_at(eye, jnp.zeros(3), jnp.asarray([0.0, -1, 0]))
        out.append(
            make_camera("pinhole", (size, size), jnp.asarray([1.1 * size, 1.1 * size, size / 2, size / 2]), R, t)
        )
    return jax.tree.map(lambda *a: jnp.stack(a), *out)


def take(tree, index):
    return jax.tree.map(lambda a: a[index], tree)


def points(n=30):
    rng = np.random.default_rng(0)
    return (
        jnp.asarray(rng.uniform(-0.8, 0.8, (n, 3)), jnp.float32),
        jnp.asarray(rng.uniform(size=(n, 3)), jnp.float32),
        jnp.full(n, 0.4),
    )


@pytest.fixture(scope="module")
def trained():
    truth = learn.init(jax.random.key(9), dataclasses.replace(CONFIG, dims=3), *points())
    shown = jax.jit(lambda c: render(truth.params, truth.alive, c, None, jnp.zeros(3), cfg=CONFIG.render)["rgb"])
    cams = cameras()
    images = jnp.stack([shown(take(cams, i)) for i in range(3)])
    xyz, colors, spacing = points()
    state = learn.init(jax.random.key(0), CONFIG, xyz + 0.05, jnp.full_like(colors, 0.5), 0.7 * spacing)
    step = jax.jit(learn.update, static_argnums=2)
    history = []
    for i in range(60):
        one = slice(i % 3, i % 3 + 1)
        state, metrics = step(state, {"camera": take(cams, one), "image": images[one]}, CONFIG)
        history.append({k: float(v) for k, v in metrics.items()})
    return state, history, cams, images


def test_training_lowers_the_loss_and_grows_without_overflow(trained):
    state, history, *_ = trained
    assert history[-1]["loss"] < 0.4 * history[0]["loss"]
    assert all(np.isfinite(v) for m in history for v in m.values())
    assert max(m["overflow"] for m in history) == 0
    assert history[-1]["count"] > 30 and state.alive.shape == (60,) and state.step == 60


def test_initial_values_are_the_releases():
    xyz, colors, spacing = points()
    params, alive = learn.init_params(jax.random.key(0), xyz, colors, spacing, 7, 50)
    assert sum(v[0].size for v in params.values()) == 44 and alive.sum() == 30
    np.testing.assert_allclose(jax.nn.softplus(params["scale_raw"][:30]), [[0.4] * 3 + [1.0] * 4] * 30, atol=1e-4)
    assert (params["b"][:30, 1:4] == -3).all() and (params["b"][:, 0] == 0).all() and (params["b"][:, 4] == 0).all()
    assert (params["mean_q"][:30, 3] >= 0).all() and params["mean_q"][:30, :3].min() < -0.5
    six, _ = learn.init_params(jax.random.key(0), xyz, colors, spacing, 6, 50)
    assert sum(v[0].size for v in six.values()) == 35
    lobed, _ = learn.init_params(jax.random.key(0), xyz, colors, spacing, 3, 50, lobes=2)
    assert lobed["lobes"].shape == (50, 2, 6)


def test_frozen_b_does_not_move_and_rates_fall(trained):
    state, _, cams, images = trained
    config = dataclasses.replace(CONFIG, learn_b=False)
    batch = {"camera": take(cams, slice(1)), "image": images[:1]}
    rates = learn.learning_rates(jnp.asarray(0), config)
    assert rates["b"] == 0
    np.testing.assert_allclose(rates["xyz"], 3 * 1.6e-4, rtol=1e-5)
    np.testing.assert_allclose(learn.learning_rates(jnp.asarray(60), config)["xyz"], 3 * 1.6e-6, rtol=1e-4)
    value, metrics = jax.jit(learn.loss, static_argnums=4)(state.params, state.alive, batch, jnp.asarray(20), config)
    plain, _ = jax.jit(learn.loss, static_argnums=4)(state.params, state.alive, batch, jnp.asarray(5), config)
    opacity = jnp.where(state.alive, jax.nn.sigmoid(state.params["opacity_raw"]), 0).sum() / state.alive.sum()
    scale = jnp.where(state.alive[:, None], jax.nn.softplus(state.params["scale_raw"][:, :3]), 0).sum() / (
        3 * state.alive.sum()
    )
    np.testing.assert_allclose(value - plain, 0.01 * (opacity + scale), rtol=1e-3)
    assert metrics["psnr"] > 15


def test_several_views_average_and_bad_configs_are_told(trained):
    state, _, cams, images = trained
    f = jax.jit(learn.loss, static_argnums=4)
    args = (state.params, state.alive)
    both, _ = f(*args, {"camera": take(cams, slice(2)), "image": images[:2]}, jnp.asarray(1), CONFIG)
    one = [
        f(
            *args,
            {"camera": take(cams, slice(i, i + 1)), "image": images[i : i + 1]},
            jnp.asarray(1),
            CONFIG,
        )[0]
        for i in range(2)
    ]
    np.testing.assert_allclose(both, (one[0] + one[1]) / 2, rtol=1e-5)
    with pytest.raises(ValueError, match="dims is 4"):
        learn.Config(dims=4)
    with pytest.raises(ValueError, match="wanted between 1 and cap"):
        learn.init(jax.random.key(0), dataclasses.replace(CONFIG, cap=5), *points())
