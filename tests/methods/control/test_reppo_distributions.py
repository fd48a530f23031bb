import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from papyrax.methods.control.reppo import distributions as dist

pytestmark = pytest.mark.proof("reppo", "proof")

RNG = np.random.default_rng(0)
MEAN, STD = (
    jnp.asarray(RNG.uniform(-1, 1, (6, 3)), jnp.float32),
    jnp.asarray(RNG.uniform(0.3, 0.6, (6, 3)), jnp.float32),
)
MEAN2, STD2 = (
    jnp.asarray(RNG.uniform(-1, 1, (6, 3)), jnp.float32),
    jnp.asarray(RNG.uniform(0.3, 0.6, (6, 3)), jnp.float32),
)


def naive_logp(mean, std, action):
    """Change of variables in double precision: normal density over the slope of tanh."""
    action = np.asarray(action, np.float64)
    u = np.arctanh(action)
    return np.sum(stats.norm.logpdf(u, np.asarray(mean), np.asarray(std)) - np.log1p(-(action**2)), axis=-1)


def test_log_prob_is_the_change_of_variables():
    action = jnp.asarray(RNG.uniform(-0.99, 0.99, (6, 3)), jnp.float32)
    np.testing.assert_allclose(dist.tanh_logp(MEAN, STD, action), naive_logp(MEAN, STD, action), rtol=1e-4, atol=1e-4)


def test_density_integrates_to_one():
    a = np.tanh(np.linspace(-8, 8, 4001))
    p = np.exp(naive_logp(MEAN[:1, :1], STD[:1, :1], a[:, None]))
    ours = jnp.exp(dist.tanh_logp(MEAN[0, :1], STD[0, :1], jnp.asarray(a[1000:3001, None], jnp.float32)))
    np.testing.assert_allclose(np.trapezoid(p, a), 1, atol=1e-4)
    np.testing.assert_allclose(ours, p[1000:3001], rtol=2e-3)


def test_sample_and_its_density_agree_with_scoring_the_action():
    noise = jax.random.normal(jax.random.key(0), (6, 3))
    action, logp = dist.tanh_sample(noise, MEAN, STD)
    np.testing.assert_allclose(logp, dist.tanh_logp(MEAN, STD, action), rtol=1e-3, atol=1e-3)


def test_density_of_a_far_sample_stays_finite():
    action, logp = dist.tanh_sample(jnp.full((1, 1), 3.0), jnp.full((1, 1), 40.0), jnp.ones((1, 1)))
    assert action == 1.0 and np.isfinite(logp).all()
    assert np.isfinite(dist.tanh_logp(jnp.zeros(1), jnp.ones(1), dist.clip_action(jnp.ones(1))))


@pytest.mark.parametrize("jit", [False, True])
def test_kl_of_equal_policies_is_exactly_zero(jit):
    noise = jax.random.normal(jax.random.key(1), (16, 6, 3))
    kl = jax.jit(dist.kl_estimate) if jit else dist.kl_estimate
    # The second policy is so wide that most samples are clipped.
    for mean, std in ((MEAN, STD), (8 * MEAN, 9 * STD)):
        np.testing.assert_array_equal(kl(noise, mean, std, mean, std), np.zeros(6))


def test_kl_estimate_is_the_mean_log_ratio_of_clipped_samples():
    noise = jax.random.normal(jax.random.key(2), (16, 6, 3))
    for scale in (1, 6):
        samples = np.clip(np.tanh(np.asarray(scale * MEAN + STD * noise, np.float64)), -(1 - 1e-4), 1 - 1e-4)
        want = naive_logp(scale * MEAN, STD, samples) - naive_logp(MEAN2, STD2, samples)
        got = dist.kl_estimate(noise, scale * MEAN, STD, MEAN2, STD2)
        np.testing.assert_allclose(got, want.mean(0), rtol=1e-3, atol=1e-3)


def test_kl_estimate_converges_to_the_closed_form():
    noise = jax.random.normal(jax.random.key(3), (100_000, 6, 3))
    got = jax.jit(dist.kl_estimate)(noise, MEAN, STD, MEAN2, STD2)
    np.testing.assert_allclose(got, dist.gaussian_kl(MEAN, STD, MEAN2, STD2), rtol=0.02)


def test_kl_gradient_reaches_only_the_new_policy_in_the_way_of_its_log_density():
    noise = jax.random.normal(jax.random.key(4), (8, 6, 3))
    samples = MEAN + STD * noise

    def log_density(mean, std):
        return -dist.gaussian_logp(samples, mean, std).mean(0).sum()

    got = jax.grad(lambda m, s: dist.kl_estimate(noise, MEAN, STD, m, s).sum(), argnums=(0, 1))(MEAN2, STD2)
    for a, b in zip(got, jax.grad(log_density, argnums=(0, 1))(MEAN2, STD2)):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3)


def test_pathwise_gradient_varies_far_less_than_the_score_gradient():
    """Q = -a², a ~ N(1, 0.5²): both average -2 for the mean, with variances 1 and 21.75."""
    noise = jax.random.normal(jax.random.key(5), (400_000,))
    sample = 1 + 0.5 * noise
    path = jax.vmap(jax.grad(lambda m, e: -jnp.square(m + 0.5 * e)), (None, 0))(1.0, noise)
    slope = jax.vmap(jax.grad(lambda m, a: dist.gaussian_logp(a[None], m[None], jnp.array([0.5]))), (None, 0))(
        jnp.array(1.0), sample
    )
    score = -jnp.square(sample) * slope
    np.testing.assert_allclose([path.mean(), score.mean()], [-2, -2], atol=0.03)
    np.testing.assert_allclose([path.var(), score.var()], [1.0, 21.75], rtol=0.03)


def test_categorical_entropy_and_kl_equal_scipy():
    p, q = jax.nn.log_softmax(MEAN), jax.nn.log_softmax(MEAN2)
    np.testing.assert_allclose(dist.categorical_entropy(p), stats.entropy(np.exp(p), axis=-1), rtol=1e-4)
    np.testing.assert_allclose(dist.categorical_kl(p, q), stats.entropy(np.exp(p), np.exp(q), axis=-1), rtol=1e-3)
    np.testing.assert_array_equal(dist.categorical_kl(p, p), np.zeros(6))
