import jax
import jax.numpy as jnp
import numpy as np
import pytest

from papyrax.methods.geometry.rotations import rodrigues
from papyrax.methods.rendering.universal_beta_splatting import kernel

pytestmark = [
    pytest.mark.proof("universal_beta_splatting", "core"),
    pytest.mark.proof("universal_beta_splatting", "proof"),
]


def raw(d, p=300, spread=0.7, seed=0):
    rng = np.random.default_rng(seed)
    scale = jnp.asarray(np.exp(0.5 * rng.normal(size=(p, d))))
    return scale, jnp.asarray(spread * rng.normal(size=(p, d * (d - 1) // 2)))


def slice_jit(mode):
    return jax.jit(lambda *a: kernel.slice_at(*a, mode=mode))


def test_activations_invert_and_beta_is_four_at_zero():
    with jax.enable_x64():
        x = jnp.linspace(-5.0, 5.0, 31)
        np.testing.assert_allclose(kernel.scale_inverse(kernel.scale_of(x)), x, atol=1e-6)
        np.testing.assert_allclose(kernel.opacity_inverse(kernel.opacity_of(x)), x, atol=1e-6)
        np.testing.assert_allclose(kernel.beta_inverse(kernel.beta_of(x)), x, atol=1e-6)
    assert kernel.beta_of(jnp.asarray(0.0)) == 4


def test_covariance_is_the_stated_factor_times_its_transpose():
    with jax.enable_x64():
        for d in (3, 6, 7):
            scale, tri = raw(d, 20)
            got = kernel.covariance(scale, tri)
            assert (jnp.linalg.eigvalsh(got) > 0).all()
            for i in range(3):
                a = np.zeros((3, 3))
                a[0, 1], a[0, 2], a[1, 2] = tri[i, :3]
                low = np.zeros((d, d))
                low[:3, :3] = (np.eye(3) + a - a.T) @ np.diag(scale[i, :3])
                entry = 3
                for row in range(3, d):
                    for column in range(row):
                        low[row, column] = tri[i, entry]
                        entry += 1
                    low[row, row] = scale[i, row]
                np.testing.assert_allclose(got[i], low @ low.T, atol=1e-12)
        scale, tri = raw(3, 20)
        turn = rodrigues(jnp.stack([-tri[:, 2], tri[:, 1], -tri[:, 0]], 1))
        exact = jnp.einsum("pij,pj,pkj->pik", turn, scale**2, turn)
        np.testing.assert_allclose(kernel.covariance(scale, tri, "exact"), exact, atol=1e-12)
        small = 0.01 * tri
        by = [
            jnp.abs(kernel.covariance(scale, small, r) - kernel.covariance(scale, small, "exact")).max()
            for r in ("first_order", "second_order")
        ]
        assert by[1] < 0.05 * by[0] and by[0] < 1e-2
        np.testing.assert_allclose(
            kernel.spatial_covariance(*raw(6, 20)), kernel.covariance(*raw(6, 20))[:, :3, :3], atol=1e-12
        )


@pytest.mark.parametrize("d", [6, 7])
def test_slice_at_b_zero_is_the_gaussian_conditional(d):
    with jax.enable_x64():
        n = d - 3
        cov = kernel.covariance(*raw(d))
        rng = np.random.default_rng(1)
        mean, query = (jnp.asarray(rng.normal(size=(300, m))) for m in (d, n))
        opacity = jnp.full(300, 0.8)
        beta = jnp.full((300, n), 4.0)
        gain = jnp.linalg.solve(cov[:, 3:, 3:], cov[:, 3:, :3]).mT
        want_mean = mean[:, :3] + jnp.einsum("pij,pj->pi", gain, query - mean[:, 3:])
        want_cov = cov[:, :3, :3] - gain @ cov[:, 3:, :3]
        for mode in kernel.SLICES:
            m, c, o = slice_jit(mode)(mean, cov, opacity, beta, query)
            np.testing.assert_allclose(m, want_mean, atol=1e-5)
            np.testing.assert_allclose(c, want_cov, atol=1e-5)
            assert (o <= opacity).all()
            y = jnp.linalg.solve(jnp.linalg.cholesky(cov[:, 3:, 3:]), (query - mean[:, 3:])[..., None])[..., 0]
            product = 0.8 * jnp.prod((1 - jnp.tanh(y * y)) ** 4, 1)
            np.testing.assert_allclose(o, product, atol=1e-9)
            _, _, at_mean = slice_jit(mode)(mean, cov, opacity, beta, mean[:, 3:])
            np.testing.assert_allclose(at_mean, 0.8, rtol=1e-9)


def test_opacity_is_one_whitened_product_per_dimension_not_one_distance():
    cov = kernel.covariance(*raw(6, 5))
    mean = jnp.zeros((5, 6))
    query = jnp.full((5, 3), 0.4)
    sharp = jnp.asarray([[40.0, 0.4, 0.4]] * 5)
    a = slice_jit("paper")(mean, cov, jnp.ones(5) * 0.9, sharp, query)[2]
    b = slice_jit("paper")(mean, cov, jnp.ones(5) * 0.9, sharp[:, ::-1], query)[2]
    assert (jnp.abs(a - b) > 1e-3).all()


def test_without_coupling_the_slice_moves_nothing():
    scale, tri = raw(6, 40)
    tri = tri.at[:, 3:].set(0)
    cov = kernel.covariance(scale, tri)
    mean, query = jnp.zeros((40, 6)), jnp.full((40, 3), 0.5)
    beta = 4 * jnp.exp(jnp.asarray(np.random.default_rng(3).normal(size=(40, 3)), jnp.float32))
    results = [slice_jit(mode)(mean, cov, jnp.full(40, 0.5), beta, query) for mode in kernel.SLICES]
    for m, c, _ in results:
        np.testing.assert_array_equal(m, mean[:, :3])
        np.testing.assert_array_equal(c, cov[:, :3, :3])
    np.testing.assert_allclose(results[0][2], results[1][2], rtol=1e-5)


def test_whitened_slices_stay_positive_where_mirrored_ones_do_not():
    cov = kernel.covariance(*raw(6, 2000, seed=5))
    rng = np.random.default_rng(6)
    beta = jnp.asarray(4 * rng.uniform(0, 1, (2000, 3)), jnp.float32)
    args = (jnp.zeros((2000, 6)), cov, jnp.full(2000, 0.5), beta, jnp.zeros((2000, 3)))
    least = {
        mode: np.linalg.eigvalsh(np.asarray(slice_jit(mode)(*args)[1], np.float64))[:, 0] for mode in kernel.SLICES
    }
    assert (least["whitened"] > -1e-5).all()
    assert 0.005 < (least["paper"] < -1e-4).mean() < 0.6
    paper, whitened = (slice_jit(mode)(*args[:3], jnp.full((2000, 3), 4.0), args[4]) for mode in kernel.SLICES)
    np.testing.assert_allclose(paper[1], whitened[1], atol=2e-4)


def test_opacity_gradients_are_finite_where_the_release_underflows():
    cov = kernel.covariance(jnp.full((1, 6), 0.05), jnp.zeros((1, 15)))

    def f(q):
        return kernel.slice_at(jnp.zeros((1, 6)), cov, jnp.asarray([0.5]), jnp.full((1, 3), 4.0), q)[2][0]

    value, grad = jax.value_and_grad(f)(jnp.asarray([[0.9, 0.9, 0.9]]))
    assert value < 1e-20 and np.isfinite(grad).all()


def test_the_query_carries_gradients_into_positions():
    xyz, center = jnp.asarray([[1.0, 2.0, 2.0], [0.0, 0.0, 0.0]]), jnp.zeros(3)
    np.testing.assert_allclose(kernel.view_query(xyz, center, 7, 0.3)[0], [1 / 3, 2 / 3, 2 / 3, 0.3], rtol=1e-6)
    jac = jax.jacobian(lambda x: kernel.view_query(x, center, 6)[0])(xyz)[:, 0]
    d = np.asarray([1, 2, 2]) / 3
    np.testing.assert_allclose(jac, (np.eye(3) - np.outer(d, d)) / 3, atol=1e-6)
    assert np.isfinite(jax.grad(lambda x: kernel.view_query(x, center, 6).sum())(xyz)).all()
    assert kernel.view_query(xyz, center, 3).shape == (2, 0)


def test_bad_input_is_told_plainly():
    with pytest.raises(ValueError, match="scale has 5 dimensions"):
        kernel.covariance(jnp.ones((2, 5)), jnp.ones((2, 10)))
    with pytest.raises(ValueError, match="l_tri has 3 entries, 6 dimensions want 15"):
        kernel.covariance(jnp.ones((2, 6)), jnp.ones((2, 3)))
    with pytest.raises(ValueError, match="mode is 'official'"):
        kernel.slice_at(
            jnp.zeros((1, 3)), jnp.zeros((1, 3, 3)), jnp.ones(1), jnp.ones((1, 0)), jnp.ones((1, 0)), "official"
        )
    with pytest.raises(ValueError, match="time is missing"):
        kernel.view_query(jnp.ones((1, 3)), jnp.zeros(3), 7)
