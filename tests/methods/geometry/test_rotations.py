import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.scipy.linalg import expm
from scipy.spatial.transform import Rotation

from papyrax.methods.geometry import rotations as rot


def test_quaternions_agree_with_scipy_and_invert():
    quat = jax.random.normal(jax.random.key(0), (50, 4))
    matrix = rot.quat_to_matrix(quat)
    want = Rotation.from_quat(np.asarray(quat)[:, [1, 2, 3, 0]]).as_matrix()
    np.testing.assert_allclose(matrix, want, atol=2e-6)
    back = rot.matrix_to_quat(matrix)
    unit = quat / jnp.linalg.norm(quat, axis=-1, keepdims=True)
    np.testing.assert_allclose(back, jnp.where(unit[:, :1] < 0, -unit, unit), atol=2e-6)
    half_turn = rot.quat_to_matrix(jnp.asarray([0.0, 0.0, 1.0, 0.0]))
    np.testing.assert_allclose(rot.quat_to_matrix(rot.matrix_to_quat(half_turn)), half_turn, atol=1e-6)


def test_zero_quaternion_is_the_identity_without_nan():
    value, grad = jax.value_and_grad(lambda q: rot.quat_to_matrix(q).sum())(jnp.zeros(4))
    assert value == 3 and np.isfinite(grad).all()


def test_exact_map_is_the_matrix_exponential_and_orders_approach_it():
    for scale in (0.0, 1e-3, 2.5):
        v = scale * jnp.asarray([[0.3, -0.5, 0.8]])
        np.testing.assert_allclose(rot.rodrigues(v)[0], expm(rot.skew(v)[0]), atol=3e-6)
    small = rot.skew(jnp.asarray([0.01, 0.02, -0.01]))
    exact = rot.so3_map(small, "exact")
    assert jnp.abs(rot.so3_map(small, "second_order") - exact).max() < 3e-6
    assert 1e-5 < jnp.abs(rot.so3_map(small, "first_order") - exact).max() < 1e-3
    assert np.isfinite(jax.grad(lambda v: rot.rodrigues(v).sum())(jnp.zeros(3))).all()
    with pytest.raises(ValueError, match="kind is 'third'"):
        rot.so3_map(small, "third")


def test_random_rotations_are_rotations_without_a_preferred_direction():
    matrix = rot.random_rotation(jax.random.key(1), (4000,))
    np.testing.assert_allclose(matrix @ matrix.mT, jnp.broadcast_to(jnp.eye(3), matrix.shape), atol=1e-5)
    np.testing.assert_allclose(jnp.linalg.det(matrix), 1, atol=1e-5)
    assert jnp.abs(matrix.mean(0)).max() < 0.05  # standard error of an entry is 0.58 / 63


def test_look_at_puts_the_target_on_the_axis_and_up_upwards():
    eye, target = jnp.asarray([1.0, 2.0, 3.0]), jnp.asarray([0.0, 0.5, 0.0])
    R, t = rot.look_at(eye, target, jnp.asarray([0.0, 0.0, 1.0]))
    np.testing.assert_allclose(R @ target + t, [0, 0, jnp.linalg.norm(eye - target)], atol=1e-5)
    assert (R @ (target + jnp.asarray([0, 0, 0.1])) + t)[1] < 0 and abs(jnp.linalg.det(R) - 1) < 1e-5
