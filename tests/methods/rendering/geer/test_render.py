import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from papyrax.methods.geometry.cameras import beap_camera, camera_rays, equidistant, make_camera
from papyrax.methods.geometry.rotations import look_at
from papyrax.methods.rendering.core.harmonics import sh_colour
from papyrax.methods.rendering.geer import learn
from papyrax.methods.rendering.geer.protocol import field_split, scores, scores_of_beap, to_beap, training_camera
from papyrax.methods.rendering.geer.ray import canonical, distance2
from papyrax.methods.rendering.geer.render import RenderConfig, gradient_statistic, render

pytestmark = [pytest.mark.proof("geer", "core"), pytest.mark.proof("geer", "proof")]
CFG = RenderConfig(tile=16, cap=64, pairs=2000, cutoff="opacity", ray_side="half", near=0.05)
draw = jax.jit(render, static_argnames="cfg")
BG = jnp.asarray([0.2, 0.4, 0.1])


def scene(p=40, seed=0, dtype=jnp.float32):
    rng = np.random.default_rng(seed)
    params = {
        "xyz": rng.normal(size=(p, 3)) * 1.2,
        "log_scale": np.log(0.25) + 0.5 * rng.normal(size=(p, 3)),
        "quat": rng.normal(size=(p, 4)),
        "opacity_raw": rng.normal(size=p),
        "sh": 0.3 * rng.normal(size=(p, 16, 3)),
    }
    return {k: jnp.asarray(v, dtype) for k, v in params.items()}, jnp.arange(p) < p - 2


def pose():
    return look_at(jnp.asarray([0.1, 0.2, -0.9]), jnp.asarray([0.2, 0, 0.3]), jnp.asarray([0.0, -1, 0]))


def cameras():
    R, t = pose()
    pin = make_camera("pinhole", (36, 30), jnp.asarray([20.0, 21, 17, 16]), R, t)
    return {
        "pinhole": pin,
        "beap": beap_camera((2.8, 2.2), 0.07, R, t),
        "fisheye 230": equidistant((40, 40), np.radians(230), R, t),
        "raymap": make_camera("raymap", (36, 30), camera_rays(pin), R, t),
    }


def brute(params, alive, cam, side="half", near=0.05):
    matrix, c, opacity = canonical(params, cam)
    rays = camera_rays(cam).reshape(-1, 3)
    rays = rays / jnp.linalg.norm(rays, axis=-1, keepdims=True)
    d2, along = distance2(matrix, c, rays)
    alpha = opacity[:, None] * jnp.exp(-0.5 * d2)
    shown = alive[:, None] & (along > near if side == "half" else (c[:, 2:] > near))
    alpha = jnp.where(shown & (alpha >= 1 / 255), jnp.minimum(alpha, 0.99), 0)
    offset = params["xyz"] + cam.R.T @ cam.t
    distance = jnp.linalg.norm(offset, axis=1)
    order = jnp.argsort(distance)
    alpha, colour = alpha[order].T, sh_colour(params["sh"], offset / distance[:, None])[order]
    after = jnp.cumprod(1 - alpha, 1)
    w = jnp.where(after > 1e-4, alpha * after / (1 - alpha), 0)
    light = jnp.where(after > 1e-4, after, 1).min(1)
    shape = (cam.wh[1], cam.wh[0])
    rgb = w @ colour + light[:, None] * BG
    return rgb.reshape(*shape, 3), (1 - light).reshape(shape), (w @ (1 / distance[order])).reshape(shape)


@pytest.mark.parametrize("name", ["pinhole", "beap", "fisheye 230", "raymap"])
def test_image_equals_the_brute_force_one_for_every_camera(name):
    params, alive = scene()
    cam = cameras()[name]
    out = draw(params, alive, cam, BG, cfg=CFG)
    rgb, alpha, inverse = jax.jit(brute)(params, alive, cam)
    assert out["overflow"] == 0 and 0.1 < alpha.mean() < 1
    # A pair at the floor of 1/255 may fall on either side of it: 4e-3 there, rounding elsewhere.
    for got, want in ((out["rgb"], rgb), (out["alpha"], alpha), (out["inv_depth"], inverse)):
        error = jnp.abs(got - want)
        assert float(jnp.quantile(error, 0.98)) < 2e-5 and float(error.max()) < 8e-3


def test_the_same_rays_give_the_same_picture_whatever_the_camera():
    params, alive = scene()
    pin, raymap = cameras()["pinhole"], cameras()["raymap"]
    a, b = (draw(params, alive, cam, BG, cfg=CFG)["rgb"] for cam in (pin, raymap))
    np.testing.assert_allclose(a, b, atol=3e-6)
    other = draw(params, alive, pin, BG, cfg=dataclasses.replace(CFG, path="angles", tile=8))["rgb"]
    np.testing.assert_allclose(a, other, atol=3e-6)


def test_associations_change_the_pairs_but_hardly_the_picture():
    R, t = look_at(jnp.asarray([0.0, 0, -4.0]), jnp.zeros(3), jnp.asarray([0.0, -1, 0]))
    cam = beap_camera((1.4, 1.2), 0.03, R, t)
    params, alive = scene()
    params = params | {"log_scale": params["log_scale"] - 1}
    pairs, images = {}, {}
    for kind in ("pbf", "ut", "ewa"):
        cfg = dataclasses.replace(CFG, association=kind, tile=4)
        out = draw(params, alive, cam, BG, cfg=cfg)
        pairs[kind], images[kind] = float(out["pairs_per_tile"]), out["rgb"]
        assert out["overflow"] == 0
    assert pairs["pbf"] <= pairs["ut"] and pairs["pbf"] < pairs["ewa"]
    for kind in ("ut", "ewa"):
        assert float(jnp.quantile(jnp.abs(images[kind] - images["pbf"]), 0.95)) < 1e-3


def test_gradients_equal_plain_autodiff_in_float64():
    with jax.enable_x64():
        params, alive = scene(12, dtype=jnp.float64)
        cam = jax.tree.map(lambda a: a.astype(jnp.float64), equidistant((16, 16), np.radians(220), *pose()))
        g = jnp.asarray(np.random.default_rng(2).normal(size=(16, 16, 5)))

        def gradient(f):
            def scalar(params):
                rgb, alpha, inverse = f(params)
                return (g * jnp.concatenate([rgb, alpha[..., None], inverse[..., None]], -1)).sum()

            return jax.jit(jax.grad(scalar))(params)

        def ours(params):
            out = render(params, alive, cam, BG, cfg=CFG)
            return out["rgb"], out["alpha"], out["inv_depth"]

        a, b = gradient(ours), gradient(lambda p: brute(p, alive, cam))
        for name in params:
            np.testing.assert_allclose(a[name], b[name], atol=1e-8 * float(jnp.abs(b[name]).max()), err_msg=name)


def single(position, sigma=0.3, opacity=0.9):
    return {
        "xyz": jnp.asarray([position], jnp.float32), "log_scale": jnp.log(jnp.full((1, 3), sigma)),
        "quat": jnp.asarray([[1.0, 0, 0, 0]]), "opacity_raw": jax.scipy.special.logit(jnp.asarray([opacity])),
        "sh": jnp.zeros((1, 16, 3)).at[:, 0].set(1.0),
    }  # fmt: skip


def test_sides_mirror_ghosts_and_a_camera_inside():
    wide = equidistant((40, 40), np.radians(260))
    one = jnp.ones(1, bool)
    beside = single([1.2, 0.0, 0.05])
    release = dataclasses.replace(CFG, ray_side="release", near=0.2)
    assert draw(beside, one, wide, BG, cfg=release)["alpha"].max() == 0  # the release loses it
    half = draw(beside, one, wide, BG, cfg=CFG)["alpha"]
    assert half.max() > 0.8 and (half[:, :20] == 0).all()
    slanted = single([0.5, 0.0, 0.25])
    ghost = draw(slanted, one, wide, BG, cfg=dataclasses.replace(release, path="angles", association="pbf"))["alpha"]
    assert draw(slanted, one, wide, BG, cfg=CFG)["alpha"][:, :5].max() <= ghost[:, :5].max() + 1e-6
    inside = single([0.0, 0.0, 0.1], sigma=0.5)
    seen = draw(inside, one, wide, BG, cfg=dataclasses.replace(CFG, ray_side="erf"))["alpha"]
    # Forward along the axis: D = 0, and 0.2 sigma of the Gaussian lies behind the camera's side of its middle.
    forward = 0.9 * 0.5 * (1 + jax.scipy.special.erf(0.2 / np.sqrt(2)))
    np.testing.assert_allclose(seen[20, 20], forward, atol=3e-3)
    assert float(seen.min()) > 0.3


def test_exact_and_ewa_agree_on_axis_far_away_and_differ_aside():
    one = jnp.ones(1, bool)
    ewa = dataclasses.replace(CFG, weight="ewa", blur=0.0)
    near_axis = make_camera("pinhole", (33, 33), jnp.asarray([800.0, 800, 16.5, 16.5]))
    far = single([0.0, 0.0, 20.0], sigma=0.1)
    a, b = (draw(far, one, near_axis, BG, cfg=c)["alpha"] for c in (CFG, ewa))
    np.testing.assert_allclose(a, b, atol=1e-3)
    aside = make_camera("pinhole", (400, 40), jnp.asarray([40.0, 40, 20, 20]))
    angle = np.radians(75)
    wide = single([2 * np.sin(angle), 0.0, 2 * np.cos(angle)], sigma=0.15)
    a, b = (draw(wide, one, aside, BG, cfg=c)["alpha"] for c in (CFG, ewa))
    assert float(jnp.abs(a - b).max()) > 0.05


def test_training_lowers_the_loss_with_either_densifier():
    R, t = look_at(jnp.asarray([0.0, 0, -3.0]), jnp.zeros(3), jnp.asarray([0.0, -1, 0]))
    cam = beap_camera((1.0, 0.8), 0.04, R, t)
    rng = np.random.default_rng(0)
    points = jnp.asarray(rng.uniform(-0.8, 0.8, (30, 3)), jnp.float32)
    colors = jnp.asarray(rng.uniform(size=(30, 3)), jnp.float32)
    truth, alive = learn.init_params(points, colors, jnp.full(30, 0.25), 30, 0)
    truth["opacity_raw"] = truth["opacity_raw"] + 4
    image = draw(truth, alive, cam, jnp.zeros(3), cfg=CFG)["rgb"]
    batch = {
        "camera": jax.tree.map(lambda a: a[None], cam),
        "image": image[None],
        "mask": jnp.ones((1, *image.shape[:2]), bool),
    }
    for densifier in ("mcmc", "clone_split"):
        config = learn.Config(
            cap=40, sh_degree=1, sh_every=20, render=CFG, densifier=densifier, extent=3.0, horizon=40, rate_sh=0.02,
            mcmc=learn.McmcConfig(start=5, stop=35, every=15, noise_lr=1.0, grow=100),
            clone_split=learn.cs.CloneSplitConfig(extent=3.0, start=5, stop=35, every=15, threshold=1e-9, reset_every=1000),
        )  # fmt: skip
        state = learn.init(jax.random.key(0), config, points + 0.03, jnp.full_like(colors, 0.5), jnp.full(30, 0.2))
        step = jax.jit(learn.update, static_argnums=2)
        losses = []
        for _ in range(40):
            state, metrics = step(state, batch, config)
            losses.append(float(metrics["loss"]))
        assert losses[-1] < 0.6 * losses[0] and np.isfinite(losses).all(), densifier
        assert state.alive.sum() > 30 and metrics["overflow"] == 0
        assert all(np.ndim(v) == 0 for v in metrics.values())


def test_statistic_and_field_split():
    params, _ = scene(6)
    cam = cameras()["beap"]
    matrix, c, _ = canonical(params, cam)
    v = jnp.ones((6, 3))
    want = [0.3 * (float(c[i] @ c[i]) + 1) * float(jnp.linalg.norm(matrix[i].T @ v[i])) for i in range(6)]
    np.testing.assert_allclose(gradient_statistic(v, params, cam), want, rtol=1e-5)
    wide = equidistant((64, 64), np.pi)
    central, outer = field_split(wide)
    half = float(jnp.arctan2(jnp.linalg.norm(camera_rays(wide)[..., :2], axis=-1), camera_rays(wide)[..., 2]).max())
    np.testing.assert_allclose(
        central.sum() / central.size, np.pi * (half / np.pi * 64 * 0.5 / 1) ** 2 / 64**2, rtol=0.03
    )
    assert (central ^ outer).all()
    with pytest.raises(ValueError, match="association is 'obb'"):
        RenderConfig(association="obb")


def test_beap_round_trips_and_scores_by_field():
    fish = make_camera(
        "fisheye", (72, 60), jnp.asarray([26.0, 26, 35.5, 29.5, 0.02, -0.003, 0, 0]), *pose(), center=0.0
    )
    beap = training_camera(fish, 2.0, 0.03)
    assert beap.wh == (104, 104)  # both half fields are capped at 90 degrees
    x, y = jnp.meshgrid(jnp.linspace(0, 5, 72), jnp.linspace(0, 4, 60))
    smooth = jnp.stack([0.5 + 0.4 * jnp.sin(x), 0.5 + 0.4 * jnp.cos(y), 0.5 + 0 * x], -1)

    @jax.jit
    def all_scores(noise):
        there, mask = to_beap(smooth, fish, beap)
        spoiled = jnp.where(field_split(fish)[0][..., None], smooth, smooth + noise)
        return mask.mean(), scores_of_beap(there, smooth, beap, fish), scores(spoiled, smooth, fish)

    covered, own, spoiled = all_scores(0.1)
    assert 0.3 < covered < 1 and own["psnr"] > 100  # the render is the truth's own BEAP image
    assert jnp.isinf(spoiled["psnr_central"])
    np.testing.assert_allclose(spoiled["psnr_peripheral"], 20, atol=0.3)
    assert spoiled["psnr_peripheral"] < spoiled["psnr"] and spoiled["ssim"] < 1
    with pytest.raises(ValueError, match="the camera is beap"):
        training_camera(beap, 1.0, 0.1)
