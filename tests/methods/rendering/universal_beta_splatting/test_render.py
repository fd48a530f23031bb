import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from papyrax.methods.geometry.cameras import camera_center, make_camera, pixel_grid, project
from papyrax.methods.geometry.rotations import look_at, random_rotation
from papyrax.methods.rendering.universal_beta_splatting import kernel
from papyrax.methods.rendering.universal_beta_splatting.render import (
    RenderConfig,
    band,
    ewa_project,
    render,
    render_mode,
)
from papyrax.methods.rendering.universal_beta_splatting.spherical_beta import init_lobes, lobe_colour

pytestmark = [
    pytest.mark.proof("universal_beta_splatting", "core"),
    pytest.mark.proof("universal_beta_splatting", "proof"),
]
CFG = RenderConfig(tile=16, cap=64, pairs=2000)
draw = jax.jit(render, static_argnames="cfg")


def camera(w=40, h=33, f=36.0):
    R, t = look_at(jnp.asarray([0.4, -0.3, -3.0]), jnp.zeros(3), jnp.asarray([0.0, -1, 0]))
    return make_camera("pinhole", (w, h), jnp.asarray([f, 1.1 * f, w / 2 + 1.3, h / 2 - 0.7]), R, t)


def scene(d=6, p=48, seed=0, dtype=jnp.float32):
    rng = np.random.default_rng(seed)
    n, m = d - 3, d * (d - 1) // 2
    scale = np.concatenate([rng.uniform(0.1, 0.5, (p, 3)), rng.uniform(1.5, 3, (p, n))], 1)
    params = {
        "xyz": rng.uniform(-1, 1, (p, 3)),
        "mean_q": 0.3 * rng.uniform(-1, 1, (p, n)),
        "scale_raw": np.log(np.expm1(scale)),
        "l_tri": 0.1 * rng.normal(size=(p, m)),
        "rgb": rng.uniform(size=(p, 3)),
        "opacity_raw": rng.normal(size=p),
        "b": 0.3 * rng.normal(size=(p, 1 + n)),
    }
    return {k: jnp.asarray(v, dtype) for k, v in params.items()}, jnp.arange(p) < p - 3


def brute(params, alive, cam, time, bg):
    """Every pixel against every primitive, no tiles, all plain jnp: slice by dense linear algebra."""
    d = params["scale_raw"].shape[1]
    cov = kernel.covariance(kernel.scale_of(params["scale_raw"]), params["l_tri"])
    mean = jnp.concatenate([params["xyz"], params["mean_q"]], 1)
    query = kernel.view_query(params["xyz"], camera_center(cam), d, time)
    beta = kernel.beta_of(params["b"])
    m, s, o = kernel.slice_at(mean, cov, kernel.opacity_of(params["opacity_raw"]), beta[:, 1:], query)
    z = (m @ cam.R.T + cam.t)[:, 2]
    jac = jax.vmap(jax.jacfwd(lambda x: project(cam, x)[0]))(m)
    flat = jac @ s @ jac.mT + 0.3 * jnp.eye(2)
    uv, _ = project(cam, m)
    delta = uv[None] - pixel_grid(cam).reshape(-1, 1, 2)
    dist = jnp.einsum("qpi,pij,qpj->qp", delta, jnp.linalg.inv(flat), delta)
    alpha = jnp.where(
        (dist < 1) & alive & (z > 0.01), jnp.minimum(0.999, o * (1 - jnp.clip(dist, 0, 1 - 1e-6)) ** beta[:, 0]), 0
    )
    order = jnp.argsort(z)
    alpha, z, rgb = alpha[:, order], z[order], params["rgb"][order]
    after = jnp.cumprod(1 - alpha, 1)
    w = jnp.where(after > 1e-4, alpha * after / (1 - alpha), 0)
    light = jnp.where(after > 1e-4, after, 1).min(1)
    shape = (cam.wh[1], cam.wh[0])
    return (w @ rgb + light[:, None] * bg).reshape(*shape, 3), (1 - light).reshape(shape), (w @ z).reshape(shape)


def test_known_value_of_one_primitive():
    params = {
        "xyz": jnp.asarray([[0.0, 0, 4]]), "mean_q": jnp.zeros((1, 0)), "scale_raw": kernel.scale_inverse(jnp.full((1, 3), 0.5)),
        "l_tri": jnp.zeros((1, 3)), "rgb": jnp.ones((1, 3)), "opacity_raw": kernel.opacity_inverse(jnp.asarray([0.8])), "b": jnp.zeros((1, 1)),
    }  # fmt: skip
    cam = make_camera("pinhole", (64, 64), jnp.asarray([100.0, 100, 32, 32]))
    mean, cov, _ = kernel.slice_params(params, jnp.zeros(3), None, rotation="first_order", mode="paper")
    flat = ewa_project(mean, cov, cam, near=0.01, far=1e10, blur=0.3)
    for name, want in (("c00", 12.5**2 + 0.3), ("c01", 0), ("c11", 12.5**2 + 0.3), ("radius", 13), ("depth", 4)):
        np.testing.assert_allclose(flat[name][0], want, rtol=1e-5, atol=1e-5)
    out = draw(params, jnp.ones(1, bool), cam, None, jnp.zeros(3), cfg=CFG)
    np.testing.assert_allclose(out["alpha"][31, 31], 0.78982, atol=1e-4)
    np.testing.assert_allclose(out["rgb"][31, 31], 0.78982, atol=1e-4)
    assert out["alpha"][31, 31 + 13] == 0  # the support ends at one standard deviation
    peaked = draw(params | {"b": jnp.full((1, 1), 6.0)}, jnp.ones(1, bool), cam, None, jnp.zeros(3), cfg=CFG)["alpha"]
    s = ((np.arange(64) + 0.5 - 32) ** 2 + 0.25) / 156.55
    assert peaked[31][np.asarray(s) >= 0.01].max() < 1e-3


@pytest.mark.parametrize("d", [3, 6, 7])
def test_image_equals_the_brute_force_one(d):
    params, alive = scene(d)
    cam, bg, time = camera(), jnp.asarray([0.1, 0.5, 0.9]), 0.4
    out = draw(params, alive, cam, time, bg, cfg=CFG)
    rgb, alpha, depth = jax.jit(brute)(params, alive, cam, time, bg)
    assert out["overflow"] == 0 and 0.05 < alpha.mean() < 0.99 and out["degenerate"] == 0
    np.testing.assert_allclose(out["rgb"], rgb, atol=2e-5)
    np.testing.assert_allclose(out["alpha"], alpha, atol=2e-5)
    np.testing.assert_allclose(out["depth"], depth, atol=1e-4)
    assert (out["alpha"] >= 0).all() and (out["alpha"] <= 1).all()


def test_gradients_equal_plain_autodiff_in_float64():
    with jax.enable_x64():
        params, alive = scene(7, 12, dtype=jnp.float64)
        cam = jax.tree.map(lambda a: a.astype(jnp.float64), camera(20, 17, 18.0))
        bg = jnp.asarray([0.1, 0.5, 0.9])
        g = jnp.asarray(np.random.default_rng(2).normal(size=(17, 20, 5)))

        def value(f):
            def scalar(params):
                rgb, alpha, depth = f(params)
                return (g * jnp.concatenate([rgb, alpha[..., None], depth[..., None]], -1)).sum()

            return jax.jit(jax.grad(scalar))(params)

        def ours(params):
            out = render(params, alive, cam, 0.4, bg, cfg=CFG)
            return out["rgb"], out["alpha"], out["depth"]

        a, b = value(ours), value(lambda p: brute(p, alive, cam, 0.4, bg))
        for name in params:
            np.testing.assert_allclose(a[name], b[name], atol=1e-9 * float(jnp.abs(b[name]).max()), err_msg=name)
            assert float(jnp.abs(b[name]).max()) > 0


def test_image_does_not_depend_on_tiles_order_or_capacity_that_suffices():
    params, alive = scene(6)
    cam, bg = camera(), jnp.zeros(3)
    want = draw(params, alive, cam, None, bg, cfg=CFG)["rgb"]
    for tile in (8, 32):
        got = draw(params, alive, cam, None, bg, cfg=dataclasses.replace(CFG, tile=tile))
        np.testing.assert_allclose(got["rgb"], want, atol=2e-6)
    mix = np.random.default_rng(0).permutation(len(alive))
    shuffled = draw({k: v[mix] for k, v in params.items()}, alive[mix], cam, None, bg, cfg=CFG)["rgb"]
    np.testing.assert_allclose(shuffled, want, atol=2e-6)
    assert draw(params, alive, cam, None, bg, cfg=dataclasses.replace(CFG, cap=4))["overflow"] > 0


def test_projection_agrees_with_autodiff_of_the_camera_and_clamps():
    cam = camera()
    rng = np.random.default_rng(1)
    mean = jnp.asarray(rng.uniform(-0.8, 0.8, (30, 3)), jnp.float32)
    half = jnp.asarray(0.2 * rng.normal(size=(30, 3, 3)), jnp.float32)
    cov = half @ half.mT
    six = [cov[:, i, j] for i in range(3) for j in range(i, 3)]
    flat = ewa_project([mean[:, i] for i in range(3)], six, cam, near=0.01, far=100.0, blur=0.3)
    jac = jax.vmap(jax.jacfwd(lambda x: project(cam, x)[0]))(mean)
    want = jac @ cov @ jac.mT + 0.3 * jnp.eye(2)
    for name, (i, j) in (("c00", (0, 0)), ("c01", (0, 1)), ("c11", (1, 1))):
        np.testing.assert_allclose(flat[name], want[:, i, j], rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(jnp.stack([flat["u"], flat["v"]], 1), project(cam, mean)[0], atol=1e-3)
    largest = jnp.linalg.eigvalsh(want)[:, 1]
    assert (flat["radius"] >= jnp.sqrt(largest) - 1e-4).all() and (flat["radius"] <= jnp.sqrt(largest) + 1.2).all()
    straight = make_camera("pinhole", (40, 40), jnp.asarray([40.0, 40, 20, 20]))
    far_left = [jnp.asarray([-50.0]), jnp.asarray([0.0]), jnp.asarray([1.0])]
    eye = [jnp.asarray([v]) for v in (1.0, 0, 0, 1.0, 0, 1.0)]
    side = ewa_project(far_left, eye, straight, near=0.01, far=100.0, blur=0.3)
    limit = 20 / 40 + 0.3 * 0.5
    np.testing.assert_allclose(side["c00"], 1600 * (1 + limit**2) + 0.3, rtol=1e-5)
    behind = ewa_project([*far_left[:2], jnp.asarray([-1.0])], eye, straight, near=0.01, far=100.0, blur=0.3)
    assert not behind["valid"][0]
    with pytest.raises(ValueError, match="wants a pinhole"):
        ewa_project(far_left, eye, make_camera("panorama", (4, 4), jnp.zeros(0)), near=0.01, far=1.0, blur=0.3)


def test_render_modes_and_layers():
    params, alive = scene(6)
    cam = camera()
    out = draw(params, alive, cam, None, jnp.zeros(3), cfg=CFG)
    channels = {m: render_mode(out, cam, m).shape[-1] for m in ("RGB", "D", "ED", "A", "RGB+D", "RGB+ED", "N")}
    assert channels == {"RGB": 3, "D": 1, "ED": 1, "A": 1, "RGB+D": 4, "RGB+ED": 4, "N": 3}
    expected = render_mode(out, cam, "ED")[..., 0]
    dense = out["alpha"] > 0.5
    assert (expected[dense] > 1.5).all() and (expected[dense] < 5).all()
    with pytest.raises(ValueError, match="mode is 'rgb'"):
        render_mode(out, cam, "rgb")
    values = params["b"][:, 0]
    low, high = band(values, alive, 0.0, 0.5), band(values, alive, 0.5, 1.0)
    assert ((low | high) == alive).all() and (low & high).sum() <= 1
    with pytest.raises(ValueError, match="the band is"):
        band(values, alive, 0.5, 0.5)


def test_antialiasing_dims_small_kernels_only():
    params, alive = scene(3, 5)
    tiny = params | {"scale_raw": kernel.scale_inverse(jnp.full((5, 3), 0.002))}
    on = dataclasses.replace(CFG, antialiased=True)
    bg = jnp.zeros(3)
    for p, low, high in ((tiny, 0.0, 0.2), (params, 0.9, 1.0)):
        ratio = (
            draw(p, alive, camera(), None, bg, cfg=on)["alpha"].sum()
            / draw(p, alive, camera(), None, bg, cfg=CFG)["alpha"].sum()
        )
        assert low <= ratio <= high


def test_spherical_beta_lobes():
    lobes = init_lobes(jax.random.key(0), 4)
    params = {
        "xyz": jnp.asarray([[0.0, 0, 2], [0, 0, -2], [0, 2, 0], [2, 0, 0]]),
        "rgb": jnp.zeros((4, 3)),
        "lobes": lobes,
    }
    assert lobes.shape == (4, 2, 6)
    lobe = jnp.asarray([1.0, 0.0, 0.0, 0.0, 0.0, 0.0])  # red, towards +z
    only = params | {"lobes": jnp.zeros((4, 1, 6)) + lobe}
    colour = lobe_colour(only, jnp.zeros(3))
    zero = np.log(2) / (10 * np.log(2))  # softplus of a raw 0
    np.testing.assert_allclose(colour[0], 0.5 + np.asarray([1.0, zero, zero]), atol=2e-3)
    np.testing.assert_allclose(colour[1:], 0.5, atol=1e-6)
    assert np.isfinite(jax.grad(lambda x: lobe_colour(only | {"xyz": x}, jnp.zeros(3)).sum())(only["xyz"])).all()


def test_rotating_everything_together_changes_nothing():
    params, _ = scene(3)
    cam = camera()
    turn = random_rotation(jax.random.key(5))
    scale = kernel.scale_of(params["scale_raw"])
    cov = kernel.covariance(scale, params["l_tri"])
    six = lambda c: [c[:, i, j] for i in range(3) for j in range(i, 3)]  # noqa: E731
    columns = lambda x: [x[:, i] for i in range(3)]  # noqa: E731
    a = ewa_project(columns(params["xyz"]), six(cov), cam, near=0.01, far=1e10, blur=0.3)
    turned = cam.replace(R=cam.R @ turn.T)
    b = ewa_project(columns(params["xyz"] @ turn.T), six(turn @ cov @ turn.T), turned, near=0.01, far=1e10, blur=0.3)
    for name in ("A", "B", "C"):
        np.testing.assert_allclose(a[name], b[name], rtol=1e-3, atol=1e-5)
