import jax
import jax.numpy as jnp
import numpy as np
import pytest
from skimage.metrics import peak_signal_noise_ratio, structural_similarity

from papyrax.methods.metrics import image

psnr = jax.jit(image.psnr, static_argnames="data_range")
ssim = jax.jit(image.ssim, static_argnames=("data_range", "pad"))
ms_ssim = jax.jit(image.ms_ssim, static_argnames=("data_range", "pad", "weights"))


@pytest.fixture(scope="module")
def pair():
    keys = jax.random.split(jax.random.key(0), 2)
    x = jax.random.uniform(keys[0], (2, 40, 36, 3))
    return x, jnp.clip(x + 0.2 * jax.random.normal(keys[1], x.shape), 0, 1)


def test_psnr_and_valid_ssim_agree_with_scikit_image(pair):
    x, y = (np.asarray(a) for a in pair)
    for i in range(2):
        assert abs(psnr(*pair, data_range=1.0)[i] - peak_signal_noise_ratio(x[i], y[i], data_range=1.0)) < 1e-4
        want = structural_similarity(
            x[i], y[i], data_range=1.0, channel_axis=-1, gaussian_weights=True, sigma=1.5, use_sample_covariance=False
        )  # scikit-image crops 5 pixels a side before the mean, as "valid" does
        assert abs(ssim(*pair, data_range=1.0, pad="valid")[i] - want) < 1e-5


def test_range_scales_out_and_equal_images_are_perfect(pair):
    x, y = pair
    for f in (psnr, lambda *a, **k: ssim(*a, pad="same", **k)):
        np.testing.assert_allclose(f(255 * x, 255 * y, data_range=255), f(x, y, data_range=1), rtol=1e-4)
    assert jnp.isinf(psnr(x, x, data_range=1)).all()
    np.testing.assert_allclose(ssim(x, x, data_range=1, pad="same"), 1, atol=1e-6)
    big = jnp.tile(x, (1, 5, 5, 1))
    np.testing.assert_allclose(ms_ssim(big, big, data_range=1, pad="valid"), 1, atol=1e-5)


def test_masks_pool_only_inside(pair):
    x, y = pair
    mask = jnp.zeros((2, 40, 36), bool).at[:, 10:30, 5:25].set(True)
    spoiled = jnp.where(mask[..., None], y, 0.123)
    for f in (psnr, lambda *a, **k: ssim(*a, pad="same", **k)):
        np.testing.assert_allclose(f(x, spoiled, data_range=1, mask=mask), f(x, y, data_range=1, mask=mask), rtol=1e-6)
    inside = psnr(x[:, 10:30, 5:25], y[:, 10:30, 5:25], data_range=1)
    np.testing.assert_allclose(psnr(x, y, data_range=1, mask=mask), inside, rtol=1e-5)
    three = ms_ssim(x, y, data_range=1, pad="same", weights=(0.3, 0.3, 0.4), mask=jnp.ones_like(mask))
    np.testing.assert_allclose(three, ms_ssim(x, y, data_range=1, pad="same", weights=(0.3, 0.3, 0.4)), rtol=1e-6)


def test_ms_ssim_of_one_scale_is_ssim_and_noise_lowers_it(pair):
    x, y = pair
    one = ms_ssim(x, y, data_range=1, pad="valid", weights=(1.0,))
    np.testing.assert_allclose(one, ssim(x, y, data_range=1, pad="valid"), rtol=1e-5)
    assert (ms_ssim(x, y, data_range=1, pad="same", weights=(0.5, 0.5)) < 0.99).all()


def test_gradient_of_ssim_agrees_with_differences(pair):
    with jax.enable_x64():
        x, y = (a[:1, :14, :13, :1].astype(jnp.float64) for a in pair)

        def f(x):
            return ssim(x, y, data_range=1, pad="same")[0]

        direction = jax.random.normal(jax.random.key(4), x.shape, jnp.float64)
        h = 1e-6
        want = (f(x + h * direction) - f(x - h * direction)) / (2 * h)
        np.testing.assert_allclose((jax.jit(jax.grad(f))(x) * direction).sum(), want, rtol=1e-6)


def test_bad_input_is_told_plainly(pair):
    x, y = pair
    with pytest.raises(ValueError, match="pad is 'reflect'"):
        image.ssim(x, y, data_range=1, pad="reflect")
    with pytest.raises(ValueError, match="data_range is 0"):
        image.psnr(x, y, data_range=0)
    with pytest.raises(ValueError, match="want 176 pixels"):
        image.ms_ssim(x, y, data_range=1, pad="valid")
    with pytest.raises(ValueError, match="shapes"):
        image.psnr(x, y[:1], data_range=1)
