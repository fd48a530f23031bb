"""Noise laws: tails by Hill's estimate, zero means, scipy's distributions, the moment, refusals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from papyrax.methods.optimization.clipped_sgd import noise as N

pytestmark = pytest.mark.proof("clipped_sgd", "core")

KEY = jax.random.key(0)
DRAWS = 200_000


@pytest.mark.proof("clipped_sgd", "proof")
@pytest.mark.parametrize(
    ("kind", "tail", "top"),
    [("pareto", 1.5, 400), ("pareto_one_sided", 2.001, 400), ("student_t", 2.001, 400), ("alpha_stable", 1.5, 2000)],
)
def test_hill_recovers_the_tail(kind, tail, top):
    # Standard error of Hill's estimate is tail/sqrt(top) < 0.1; four keys are averaged to halve it.
    x = jnp.stack([N.sample(k, N.Noise(kind, tail), (DRAWS,)) for k in jax.random.split(KEY, 4)])
    found = float(jnp.mean(jax.vmap(lambda v: N.hill(v, top))(x)))
    assert abs(found - tail) < 0.15


@pytest.mark.parametrize(
    ("draw", "law"),
    [
        (lambda: N.lomax(KEY, (20_000,), 1.7), stats.lomax(1.7)),
        (lambda: N.student_t(KEY, (20_000,), 2.5), stats.t(2.5)),
        (lambda: N.pareto(KEY, (20_000,), 2.2, "one_sided"), stats.lomax(2.2, loc=-1 / 1.2)),
    ],
)
def test_laws_agree_with_scipy(draw, law):
    # Kolmogorov-Smirnov at 20,000 draws: the 0.1 % critical value of the statistic is 1.95/sqrt(n) = 0.0138.
    assert stats.kstest(np.asarray(draw()), law.cdf).statistic < 0.0138


def test_alpha_stable_has_its_characteristic_function():
    x = N.alpha_stable(KEY, (DRAWS,), 1.5)
    for t in (0.5, 1.0, 2.0):
        assert float(jnp.mean(jnp.cos(t * x))) == pytest.approx(np.exp(-(t**1.5)), abs=4 / DRAWS**0.5)


def test_means_are_zero_and_one_sided_noise_is_skewed():
    x = N.pareto(KEY, (DRAWS,), 3.5, "one_sided")
    assert abs(float(jnp.mean(x))) < 0.01
    assert float(jnp.median(x)) < -0.1 and float(jnp.min(x)) >= -1 / 2.5 - 1e-6
    y = N.sample(KEY, N.Noise("pareto", 3.5, scale=2.0), (DRAWS,))
    assert abs(float(jnp.mean(y))) < 0.02


def test_radial_noise_has_one_length_and_a_uniform_direction():
    x = N.sample(KEY, N.Noise("pareto", 2.0, radial=True), (20_000, 3))
    length = np.linalg.norm(np.asarray(x), axis=-1)
    assert stats.kstest(length, stats.lomax(2.0).cdf).statistic < 0.0138
    np.testing.assert_allclose(np.mean(np.asarray(x) / length[:, None], 0), 0, atol=0.02)
    assert N.pareto(KEY, (5, 4), 2.0, "radial").shape == (5, 4)


def test_uniforms_never_vanish_and_resolve_below_float32_steps():
    u = N.open_uniform(KEY, (2_000_000,), jnp.float32)
    assert float(u.min()) > 0 and float(u.max()) <= 1
    # 2e6 draws from a grid of 2^-23 would show exact multiples only.
    assert np.any(np.asarray(u[u < 2.0**-18], np.float64) * 2.0**23 % 1 != 0)


def test_moment_scale_matches_closed_forms():
    # E|z|^2 = d for a Gaussian vector.
    assert float(N.moment_scale(KEY, N.Noise("gaussian"), 2.0, 4)) == pytest.approx(2.0, rel=0.02)
    # Lomax in one dimension: E s^p = Gamma(a - p) Gamma(1 + p) / Gamma(a).
    expected = stats.lomax(3.0).moment(1)
    assert float(N.moment_scale(KEY, N.Noise("pareto", 3.0), 1.0, 1)) == pytest.approx(expected, rel=0.03)
    assert float(N.moment_scale(KEY, N.Noise("none"), 2.0, 4)) == 0
    with pytest.raises(ValueError, match="below the tail index"):
        N.moment_scale(KEY, N.Noise("pareto", 1.5), 1.6, 3)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"kind": "cauchy"}, "must name a noise law"),
        ({"kind": "alpha_stable", "tail": 2.5}, "alpha-stable"),
        ({"tail": 0.9}, "above 1"),
        ({"scale": -1.0}, "scale must be at least 0"),
    ],
)
def test_bad_laws_are_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        N.Noise(**arguments)


def test_bad_hill_count_and_mode_are_refused():
    with pytest.raises(ValueError, match="k must lie"):
        N.hill(jnp.ones(5), 5)
    with pytest.raises(ValueError, match="mode must be"):
        N.pareto(KEY, (3,), 2.0, "both")
