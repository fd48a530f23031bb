"""Schedules at known values, conversions that return to where they came from, DDIM with a perfect model."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from papyrax.methods.diffusion.discrete import KINDS, add_noise, alpha_bar, convert, ddim_levels, ddim_step

N = 100


@pytest.fixture(scope="module")
def sample():
    rng = np.random.default_rng(0)
    x0, eps = jnp.asarray(rng.normal(size=(2, 5, 3, 4)).astype(np.float32))
    level = jnp.array([0, 10, 50, 80, 98])
    table = alpha_bar("linear", N)
    return x0, eps, level, table, add_noise(x0, eps, level, table)


def test_schedules():
    for kind in ("linear", "cosine", "scaled_linear"):
        a = np.asarray(alpha_bar(kind, 1000))
        assert np.all(np.diff(a) < 0) and a[0] > 0.999 and 0 < a[-1] < 5e-3
    beta = np.linspace(1e-4, 0.02, 1000)
    np.testing.assert_allclose(alpha_bar("linear", 1000), np.cumprod(1 - beta), rtol=1e-5)
    # closed form of the cosine schedule, away from the cut at its end
    f = np.cos((np.arange(1, 1001) / 1000 + 0.008) / 1.008 * np.pi / 2) ** 2
    np.testing.assert_allclose(
        alpha_bar("cosine", 1000)[:990], (f / np.cos(0.008 / 1.008 * np.pi / 2) ** 2)[:990], rtol=1e-5
    )


def test_unit_variance_is_kept(sample):
    _, _, level, table, _ = sample
    one = jnp.ones((5, 1))
    signal, noise = add_noise(one, 0 * one, level, table), add_noise(0 * one, one, level, table)
    np.testing.assert_allclose(signal**2 + noise**2, 1, rtol=1e-6)


def test_every_conversion_agrees_with_the_definitions(sample):
    x0, eps, level, table, x = sample
    one = jnp.ones((5, 1, 1))
    signal, noise = add_noise(one, 0 * one, level, table), add_noise(0 * one, one, level, table)
    truth = {"x0": x0, "eps": eps, "v": signal * eps - noise * x0, "velocity": x0 - eps}
    every = jax.jit(lambda t: [convert(x, t[s], level, s, d, table) for s, d in itertools.product(KINDS, KINDS)])
    for (s, d), got in zip(itertools.product(KINDS, KINDS), every(truth)):
        # the level next to clean divides by sqrt(1 - alpha_bar) = 0.03, the noisiest by sqrt(alpha_bar) = 0.006
        np.testing.assert_allclose(got, truth[d], atol=2e-4, err_msg=f"{s} to {d}")


def test_ddim_with_a_perfect_model_recovers_the_clean_sample(sample):
    """With eps exact at every level the walk stays on the line between x0 and its noise, whatever the step count."""
    x0, eps, _, table, _ = sample
    for steps, clip in ((1, None), (20, None), (20, 6.0)):
        start = int(ddim_levels(N, steps)[0, 0])
        x = add_noise(x0, eps, jnp.full(5, start), table)

        def step(x, pair, clip=clip):
            level, to = (jnp.full(5, v) for v in pair)
            perfect = convert(x, x0, level, "x0", "eps", table)
            return ddim_step(x, perfect, level, to, table, clip=clip), None

        got, _ = jax.lax.scan(step, x, ddim_levels(N, steps))
        np.testing.assert_allclose(got, x0, atol=2e-4)


def test_clip_bounds_the_result(sample):
    _, eps, _, table, _ = sample
    level = jnp.full(5, N - 1)
    assert float(jnp.abs(ddim_step(10 * eps, -eps, level, jnp.full(5, -1), table, clip=1.0)).max()) <= 1.0


def test_levels_and_errors():
    np.testing.assert_array_equal(ddim_levels(4, 2), [[3, 1], [1, -1]])
    with pytest.raises(ValueError, match="steps must lie in"):
        ddim_levels(4, 5)
    with pytest.raises(ValueError, match="kind must be"):
        alpha_bar("sigmoid", 4)
    x = jnp.zeros((1, 2))
    with pytest.raises(ValueError, match="src must be one of"):
        convert(x, x, jnp.zeros(1, int), "noise", "x0", alpha_bar("cosine", 4))
