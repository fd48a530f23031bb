import jax
import jax.numpy as jnp
import numpy as np
import pytest

from papyrax.jaxlib_ext.splat_raster import raster
from papyrax.jaxlib_ext.splat_raster import weights as W
from tests.support import kernels

BETA = {"weight": "beta2d", "alpha_min": 0.0, "alpha_max": 0.999}
RAY = {"weight": "gauss_ray", "alpha_min": 1 / 255, "alpha_max": 0.99}

pytestmark = [pytest.mark.proof("universal_beta_splatting", "kernel"), pytest.mark.proof("geer", "kernel")]


def case(weight, *, p=60, tiles=5, cap=70, px=64, seed=0, dtype=jnp.float32):
    """Random primitives in random lists: one list empty, one short, some longer than a chunk."""
    rng = np.random.default_rng(seed)
    side = int(px**0.5)
    o, z = rng.uniform(0.05, 0.95, (p, 1)), rng.uniform(1, 2, (p, 1))
    if W.PIXEL[weight] == 3:
        prims = np.concatenate([rng.normal(size=(p, 9)) * 2, rng.normal(size=(p, 3)) * 1.5, o, z], 1)
        pixels = rng.normal(size=(tiles, px, 3))
        pixels /= np.linalg.norm(pixels, axis=-1, keepdims=True)
    else:
        half = rng.normal(size=(p, 2, 2)) * 0.3
        conic = half @ half.swapaxes(1, 2) + 0.02 * np.eye(2)
        flat = [rng.uniform(0, side, (p, 2)), conic[:, 0, :1], conic[:, 0, 1:], conic[:, 1, 1:], o]
        prims = np.concatenate([*flat, *([np.exp(rng.normal(size=(p, 1)))] if weight == "beta2d" else []), z], 1)
        grid = np.stack(np.meshgrid(np.arange(side) + 0.5, np.arange(side) + 0.5), -1).reshape(1, -1, 2)
        pixels = np.broadcast_to(grid, (tiles, px, 2))
    counts = jnp.asarray(([0, 3, cap, cap // 2, 33] * tiles)[:tiles], jnp.int32)
    lists = jnp.asarray(rng.integers(0, p, (tiles, cap)), jnp.int32)
    return (
        *(jnp.asarray(a, dtype) for a in (prims, rng.uniform(size=(p, 3)))),
        lists,
        counts,
        jnp.asarray(pixels, dtype),
    )


def brute(weight, prims, colours, lists, counts, pixels, low, high, stop=1e-4, near=0.0):
    """Every pair at once, by a cumulative product: an independent compositor that JAX differentiates by itself."""

    def tile(entries, count, pixel):
        f = [prims[entries][:, i, None] for i in range(prims.shape[1])]
        raw, _ = W.opacity(weight, f, [pixel[None, :, i] for i in range(pixel.shape[1])], near)
        alpha = jnp.minimum(raw, high)
        alpha = jnp.where((alpha >= low) & (jnp.arange(len(entries)) < count)[:, None], alpha, 0)
        after = jnp.cumprod(1 - alpha, 0)
        before = jnp.concatenate([jnp.ones_like(after[:1]), after[:-1]])
        w = jnp.where(after > stop, alpha * before, 0)
        light = jnp.where(after > stop, after, 1).min(0)
        return jnp.einsum("kp,kc->pc", w, colours[entries]), light, jnp.einsum("kp,k->p", w, prims[entries][:, -1])

    return jax.vmap(tile)(lists, counts, pixels)


@pytest.mark.parametrize(
    ("weight", "low", "high"),
    [
        ("beta2d", 0.0, 0.999),
        ("gauss_ewa", 1 / 255, 0.99),
        ("gauss_ray_half", 1 / 255, 0.99),
        ("gauss_ray_erf", 0.0, 0.99),
    ],
)
def test_values_and_gradients_equal_plain_autodiff_of_a_brute_force_compositor(weight, low, high):
    with jax.enable_x64():
        args = case(weight, dtype=jnp.float64)
        weights = [
            jnp.asarray(np.random.default_rng(i).normal(size=s)) for i, s in enumerate([(5, 64, 3), (5, 64), (5, 64)])
        ]

        def scalar(f):
            def total(prims, colours):
                out = f(prims, colours)
                return sum((w * o).sum() for w, o in zip(weights, out)), out

            return jax.jit(jax.value_and_grad(total, (0, 1), has_aux=True))(*args[:2])

        (_, ours), grads = scalar(lambda p, c: raster(p, c, *args[2:], weight=weight, alpha_min=low, alpha_max=high))
        (_, want), want_grads = scalar(lambda p, c: brute(weight, p, c, *args[2:], low, high))
        for a, b in zip((*ours, *grads), (*want, *want_grads)):
            np.testing.assert_allclose(a, b, atol=1e-12 * max(1, float(jnp.abs(b).max())))
        assert (ours[1][0] == 1).all() and (ours[0][0] == 0).all()  # the empty list
        assert float(ours[1].min()) > 1e-4


def test_float32_stays_within_1e_5_of_float64():
    for weight in ("beta2d", "gauss_ray"):
        with jax.enable_x64():
            exact = jax.jit(lambda *a: brute(weight, *a, 0.0, 0.99))(*case(weight, dtype=jnp.float64))  # noqa: B023
        ours = jax.jit(lambda *a: raster(*a, weight=weight, alpha_max=0.99))(*case(weight))  # noqa: B023
        for a, b in zip(ours, exact):
            np.testing.assert_allclose(a, b, atol=2e-5)


def test_finite_differences_agree_at_twenty_scalars():
    with jax.enable_x64():
        for weight in ("beta2d", "gauss_ray"):
            args = case(weight, p=9, tiles=2, cap=9, dtype=jnp.float64, seed=3)
            args = (*args[:2], jnp.tile(jnp.arange(9)[None], (2, 1)), jnp.asarray([9, 5]), args[4])
            g = jnp.asarray(np.random.default_rng(1).normal(size=(2, 64, 3)))

            @jax.jit
            def f(prims, weight=weight, args=args, g=g):
                return (g * raster(prims, *args[1:], weight=weight, alpha_max=0.99)[0]).sum()

            grad = jax.jit(jax.grad(f))(args[0])
            rng = np.random.default_rng(5)
            for i, j in zip(rng.integers(0, 9, 10), rng.integers(0, W.FEATURES[weight] - 1, 10)):
                h = 1e-6
                want = (f(args[0].at[i, j].add(h)) - f(args[0].at[i, j].add(-h))) / (2 * h)
                np.testing.assert_allclose(grad[i, j], want, rtol=1e-3, atol=1e-6)


def test_probe_gets_the_sum_of_absolute_gradients_and_changes_nothing():
    for weight in ("gauss_ray", "beta2d"):
        prims, colours, lists, counts, pixels = case(weight, tiles=1, px=4, p=5, cap=5)
        lists, counts = jnp.arange(5)[None], jnp.asarray([5])
        n = W.probes(weight)
        place = slice(9, 12) if n == 3 else slice(0, 2)

        def f(prims, probe, pixels, weight=weight, colours=colours, lists=lists, counts=counts):
            return raster(prims, colours, lists, counts, pixels, weight=weight, alpha_max=0.99, probe=probe)[0].sum()

        got = jax.jit(jax.grad(f, 1))(prims, jnp.zeros((5, n)), pixels)
        one = jax.jit(jax.grad(lambda prims, pixels: f(prims, None, pixels)))
        want = sum(jnp.abs(one(prims, pixels[:, i : i + 1])[:, place]) for i in range(4))
        np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-6)


def cases():
    out = []
    for options, shapes in (
        (BETA, {"cap": 70}),
        (RAY, {"cap": 140, "tiles": 3}),
        ({**BETA, "weight": "gauss_ewa"}, {"px": 256, "tiles": 2}),
    ):
        out.append(kernels.Case(case(options["weight"], **shapes), options))
    return out


@pytest.mark.parametrize("number", range(3))
def test_kernels_equal_the_reference_in_interpret_mode(number):
    kernels.check_op(raster, [cases()[number]], grads=(0, 1), tolerances={"float32": 1e-4})


@pytest.mark.parametrize("options", [BETA, RAY])
def test_kernels_compile_for_a_tpu(options):
    args = case(options["weight"], px=256, cap=256, tiles=4)
    kernels.check_tpu_compile(raster, *args, grads=(0, 1), **options)


@pytest.mark.parametrize("options", [BETA, RAY])
def test_kernels_lower_for_cuda(options):
    args = case(options["weight"], px=256, cap=256, tiles=4)
    kernels.check_cuda_lowering(raster, *args, grads=(0, 1), **options)


def test_bad_input_is_told_plainly():
    prims, colours, lists, counts, pixels = case("beta2d")
    with pytest.raises(ValueError, match="weight is 'beta'"):
        raster(prims, colours, lists, counts, pixels, weight="beta")
    with pytest.raises(ValueError, match=r"wants \(p, 14\)"):
        raster(prims, colours, lists, counts, pixels, weight="gauss_ray")
    with pytest.raises(ValueError, match="counts has shape"):
        raster(prims, colours, lists, counts[:2], pixels, weight="beta2d")
    with pytest.raises(ValueError, match="alpha_max is 1"):
        raster(prims, colours, lists, counts, pixels, weight="beta2d", alpha_max=1.0)
