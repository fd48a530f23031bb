import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import sph_harm_y

from papyrax.methods.geometry.cameras import camera_rays, pinhole_from_fov
from papyrax.methods.metrics.image import ssim
from papyrax.methods.rendering.core import harmonics, losses, maps

pytestmark = [pytest.mark.proof("universal_beta_splatting", "core"), pytest.mark.proof("geer", "core")]


def test_harmonics_equal_the_real_basis_of_scipy_in_3dgs_signs():
    d = np.random.default_rng(0).normal(size=(40, 3))
    d /= np.linalg.norm(d, axis=1, keepdims=True)
    theta, phi = np.arccos(d[:, 2]), np.arctan2(d[:, 1], d[:, 0])
    want = []
    for n in range(4):
        for m in range(-n, n + 1):
            y = sph_harm_y(n, abs(m), theta, phi)
            # 3DGS keeps the Condon-Shortley phase that the usual real basis cancels.
            want.append(y.real if m == 0 else np.sqrt(2) * (y.imag if m < 0 else y.real))
    np.testing.assert_allclose(harmonics.sh_basis(jnp.asarray(d)), np.stack(want, 1), atol=1e-5)


def test_colour_of_degree_zero_and_the_switch():
    sh = jnp.zeros((3, 16, 3)).at[:, 0].set((0.8 - 0.5) / harmonics.DC).at[:, 5].set(3.0)
    d = jnp.asarray([[0.6, 0.0, 0.8], [0.0, 0.6, 0.8], [-0.6, 0.64, 0.48]])
    np.testing.assert_allclose(harmonics.sh_colour(sh, d, 0), 0.8, atol=1e-6)
    assert (jnp.abs(harmonics.sh_colour(sh, d, jnp.asarray(2)) - 0.8).max(1) > 0.1).tolist() == [False, True, True]
    assert (harmonics.sh_colour(-9 * sh, d, 3) >= 0).all()
    with pytest.raises(ValueError, match="5 coefficients"):
        harmonics.sh_colour(jnp.zeros((1, 5, 3)), d[:1])


def test_photometric_is_the_stated_sum_and_masks():
    x, y = (jax.random.uniform(jax.random.key(i), (16, 17, 3)) for i in range(2))
    want = 0.8 * jnp.abs(x - y).mean() + 0.2 * (1 - ssim(x[None], y[None], data_range=1.0, pad="same")[0])
    np.testing.assert_allclose(losses.photometric(x, y), want, rtol=1e-6)
    mask = jnp.zeros((16, 17), bool).at[3:9].set(True)
    spoiled = jnp.where(mask[..., None], x, 7.0)
    np.testing.assert_allclose(losses.photometric(spoiled, y, mask), losses.photometric(x, y, mask), rtol=1e-6)
    assert losses.photometric(x, x) < 1e-6
    with pytest.raises(ValueError, match="its target"):
        losses.photometric(x, y[:3])


def test_normals_of_a_tilted_plane():
    normal = np.asarray([0.3, -0.2, -0.9])
    normal /= np.linalg.norm(normal)
    cam = pinhole_from_fov((20, 16), 0.9)
    rays = np.asarray(camera_rays(cam))
    depth = (normal @ [0, 0, 4.0]) / (rays @ normal)
    got = maps.normals_from_depth(jnp.asarray(depth), cam)
    inner = 2 * got[1:-1, 1:-1] - 1
    np.testing.assert_allclose(jnp.abs(inner @ normal), 1, atol=1e-4)
    assert (got[0] == 0.5).all() and (got[:, -1] == 0.5).all()
    assert maps.expected_depth(jnp.asarray([[0.0]]), jnp.asarray([[0.0]])) == 0
