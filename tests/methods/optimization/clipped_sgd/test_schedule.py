"""Schedule and rates: printed values, monotonicity, the rate table, the expectation bound, refusals."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from papyrax.methods.optimization.clipped_sgd import schedule as S

pytestmark = pytest.mark.proof("clipped_sgd", "core")

KNOWN = {
    0: (1.221197e-01, 1.517587e-01, 0),
    1: (9.123024e-02, 1.755807e-01, 4.884787e-01),
    10: (3.435558e-02, 2.231562e-01, 2.691173e00),
    100: (4.815434e-03, 8.359891e-01, 6.512335e00),
    1000: (7.131492e-04, 3.598597e00, 1.192051e01),
}


def values(schedule, steps, dtype=None):
    def one(state, _):
        gamma, level, following = S.step(schedule, state)
        return following, (gamma, level, state.d)

    return jax.tree.map(np.asarray, jax.lax.scan(one, S.init(dtype), length=steps)[1])


@pytest.mark.proof("clipped_sgd", "proof")
def test_known_values_of_the_log1_preset():
    s = S.preset("log1", alpha=1.8, smoothness=2.0, radius=3.0, sigma=1.0, delta=0.1)
    assert S.optimal_beta(1.8) == pytest.approx(0.703704, abs=1e-6)
    assert S.noise_ratio(1.8, 2.0, 3.0, 1.0) == pytest.approx(0.605707, abs=1e-6)
    with jax.enable_x64():
        gamma, level, d = values(s, 1001)
    for k, (g, lam, dk) in KNOWN.items():
        assert gamma[k] == pytest.approx(g, rel=1e-6)
        assert level[k] == pytest.approx(lam, rel=1e-6)
        assert d[k] == pytest.approx(dk, rel=1e-6)


@pytest.mark.parametrize("name", S.PRESETS)
def test_weights_grow_and_no_step_is_longer_than_the_radius(name):
    s = S.preset(name, alpha=1.5, smoothness=1.0, radius=10.0, sigma=3.0)
    gamma, level, d = values(s, 2000)
    assert np.all(np.diff(d) > 0)
    assert np.all(gamma * level <= s.radius)
    assert np.all(gamma <= 1 / s.smoothness)


def test_compensated_sum_keeps_float32_at_the_float64_value():
    s = S.preset("no_log", alpha=2.0, smoothness=1.0, radius=1.0, sigma=0.1)
    _, _, d32 = values(s, 60_000, jnp.float32)
    with jax.enable_x64():
        _, _, d64 = values(s, 60_000, jnp.float64)
    # (k + 1)^2 passes int32 at k = 46341; each gamma is right to one rounding, the sum to two.
    assert d32[-1] == pytest.approx(d64[-1], rel=3e-7)


def test_without_noise_the_step_is_the_smooth_one():
    s = S.preset("log1", alpha=2.0, smoothness=4.0, radius=1.0, sigma=0.0)
    gamma, _, _ = values(s, 3)
    logs = [math.log(6 * (k + 1) ** 2 / s.delta) for k in range(3)]
    np.testing.assert_allclose(gamma, [1 / (4 * l) for l in logs], rtol=1e-6)


def test_rate_table_and_coefficient():
    ours = [S.rate(a)["last, high probability (this paper)"] for a in (2.0, 1.5, 1.0 + 1e-9)]
    assert ours == pytest.approx([1 / 3, 2 / 9, 0], abs=1e-8)
    assert S.rate(2.0)["average, high probability (Nguyen et al. 2023)"] == 0.5
    # D of the table at alpha = 2: max{R sigma, L^(1/5) R^(6/5) sigma^(4/5), L^(1/3) R^(4/3) sigma^(2/3)}
    L, R, s = 2.0, 3.0, 0.5
    expected = max(R * s, L**0.2 * R**1.2 * s**0.8, L ** (1 / 3) * R ** (4 / 3) * s ** (2 / 3))
    assert S.noise_coefficient(2.0, L, R, s) == pytest.approx(expected, rel=1e-12)


@pytest.mark.proof("clipped_sgd", "proof")
def test_expectation_bound_keeps_the_rate_up_to_logarithms():
    s = S.preset("theory", alpha=1.5, smoothness=1.0, radius=1.0, sigma=1.0)

    def expectation(k):
        hp = lambda steps, delta: S.last_iterate_bound(s, steps, delta)  # noqa: E731
        return S.hp_to_expectation(hp, lambda steps: S.almost_sure_bound(s, steps), k)

    for k in (1e3, 1e6, 1e9):
        # ln(6 (K+1)^2 K^3) is at most 5/2 of ln(6 (K+1)^2 / delta) squared, and the sure part L R^2/(2 K) is below the first term.
        assert S.last_iterate_bound(s, k) < expectation(k) < 8 * S.last_iterate_bound(s, k)
    slope = math.log(expectation(1e12) / expectation(1e9)) / math.log(1e3)
    assert -2 / 9 < slope < -2 / 9 + 0.12
    with pytest.raises(ValueError, match="at least 2"):
        expectation(1)


def test_average_schedule_follows_the_averaged_theory():
    s = S.average_schedule(S.preset("no_log", alpha=1.5, smoothness=1.0, radius=10.0, sigma=5.0))
    gamma, level, _ = values(s, 1000)
    assert gamma[999] / gamma[499] == pytest.approx(2 ** (-1 / 1.5), rel=1e-4)
    np.testing.assert_allclose(gamma * level, s.radius / s.clip_constant, rtol=1e-5)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"alpha": 1.0}, "alpha must lie in"),
        ({"delta": 1.5}, "delta must lie in"),
        ({"smoothness": 0.0}, "smoothness must be positive"),
        ({"sigma": -1.0}, "sigma must be finite"),
        ({"radius": float("inf")}, "radius must be positive and finite"),
    ],
)
def test_bad_constants_are_refused(change, words):
    with pytest.raises(ValueError, match=words):
        S.Schedule(**({"alpha": 2.0, "smoothness": 1.0, "radius": 1.0, "sigma": 1.0} | change))


def test_unknown_preset_is_refused():
    with pytest.raises(ValueError, match="preset must be one of"):
        S.preset("best", alpha=2.0, smoothness=1.0, radius=1.0, sigma=1.0)
