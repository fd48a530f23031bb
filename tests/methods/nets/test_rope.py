"""Rotary positions: each rule's formula in one place, layouts, sections, re-rotation."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from papyrax.methods.nets.rope import RopeConfig, frequencies, rotate, shift, tables
from tests.support.kernels import normal


def test_frequencies_of_every_rule():
    d, theta = 16, 10000.0
    inv = np.asarray([theta ** (-2 * j / d) for j in range(8)])
    get = lambda kind, length=None, **kw: frequencies(RopeConfig(d, theta, kind, **kw), length)  # noqa: E731
    np.testing.assert_allclose(get("default")[0], inv, rtol=1e-6)
    np.testing.assert_allclose(get("linear", factor=4.0)[0], inv / 4, rtol=1e-6)
    np.testing.assert_allclose(get("dynamic", 60, factor=2.0, original_length=64)[0], inv, rtol=1e-6)
    base = theta * (2.0 * 128 / 64 - 1.0) ** (d / (d - 2))
    want = [base ** (-2 * j / d) for j in range(8)]
    np.testing.assert_allclose(get("dynamic", 128, factor=2.0, original_length=64)[0], want, rtol=1e-6)
    got = get("llama3", factor=8.0, original_length=64)[0]
    for j, f in enumerate(inv):
        wavelength = 2 * math.pi / f
        if wavelength < 64 / 4:
            want = f
        elif wavelength > 64 / 1:
            want = f / 8
        else:
            s = (64 / wavelength - 1) / 3
            want = (1 - s) * f / 8 + s * f
        np.testing.assert_allclose(got[j], want, rtol=1e-6)
    freq, scale = get("yarn", factor=4.0, original_length=64)
    # Bounds for b turns: 16 ln(64 / (2 pi b)) / (2 ln 10000) = -0.99 (32 turns) and 2.02 (1 turn), so the ramp runs from 0 to 3.
    ramp = np.clip(np.arange(8) / 3, 0, 1)
    np.testing.assert_allclose(freq, inv / 4 * ramp + inv * (1 - ramp), rtol=1e-6)
    assert scale == pytest.approx(0.1 * math.log(4) + 1)
    lists = {"short": (1.0,) * 8, "long": (3.0,) * 8, "factor": 4.0, "original_length": 64}
    np.testing.assert_allclose(get("longrope", 64, **lists)[0], inv, rtol=1e-6)
    freq, scale = get("longrope", 65, **lists)
    np.testing.assert_allclose(freq, inv / 3, rtol=1e-6)
    assert scale == pytest.approx(math.sqrt(1 + math.log(4) / math.log(64)))


def test_rotation_depends_on_distance_only_and_keys_can_be_moved():
    freq, _ = frequencies(RopeConfig(8, 100.0))
    q, k = normal(0, (1, 2, 3, 8)), normal(1, (1, 2, 3, 8))
    for layout in ("half", "pair"):
        at = lambda x, p, layout=layout: rotate(x, *tables(jnp.asarray(p)[None, :, None], freq), layout)  # noqa: E731
        near = jnp.sum(at(q, [5, 6, 7]) * at(k, [2, 2, 2]), -1)
        far = jnp.sum(at(q, [105, 106, 107]) * at(k, [102, 102, 102]), -1)
        np.testing.assert_allclose(near, far, atol=2e-5)
        moved = shift(at(k, [2, 3, 4]), jnp.asarray([[3, -2, 10]]), freq, layout)
        np.testing.assert_allclose(moved, at(k, [5, 1, 14]), atol=1e-5)
    order = jnp.asarray([0, 2, 4, 6, 1, 3, 5, 7])
    cos, sin = tables(jnp.arange(3)[None, :, None], freq)
    np.testing.assert_allclose(
        rotate(q, cos, sin, "pair")[..., order], rotate(q[..., order], cos, sin, "half"), atol=1e-6
    )
    np.testing.assert_array_equal(rotate(q, cos[..., :2], sin[..., :2], "half")[..., 4:], q[..., 4:])


def test_sections_read_their_own_axis():
    freq = jnp.asarray([1.0, 0.5, 0.25])
    cos, sin = tables(jnp.asarray([[-2.0, 3.0]]), freq, (1, 2))
    np.testing.assert_allclose(cos[0], np.cos([-2.0, 1.5, 0.75]), rtol=1e-6)
    np.testing.assert_allclose(sin[0], np.sin([-2.0, 1.5, 0.75]), rtol=1e-6)
    with pytest.raises(ValueError, match="add up to 3 planes"):
        tables(jnp.zeros((1, 2)), freq, (1, 1))
    with pytest.raises(ValueError, match="needs original_length"):
        RopeConfig(8, kind="yarn")
    with pytest.raises(ValueError, match="must be one of"):
        RopeConfig(8, kind="ntk")
