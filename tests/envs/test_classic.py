import importlib.util
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from papyrax.envs import classic, draw, rollout

pytestmark = pytest.mark.proof("reppo", "core")


def test_double_integrator_by_hand():
    world = classic.double_integrator()
    state, out = world.step(classic.Point(jnp.float32(0.5), jnp.float32(-1.0)), jnp.array([3.0]))
    np.testing.assert_allclose(out.next_obs, [0.5 + 0.1 * -0.9, -0.9], rtol=1e-6)
    np.testing.assert_allclose(out.reward, -(0.25 + 0.1 + 0.1), rtol=1e-6)  # the action is clipped to 1
    assert world.draw(state).shape == (80, 400, 3)


def test_clipped_regulator_gives_the_known_return():
    gain = jnp.asarray(classic.lqr_gain(), jnp.float32)
    returns = rollout.evaluate(jax.random.key(0), classic.double_integrator(), lambda obs: -obs @ gain[:, None], 4000)
    assert abs(returns.mean() + 5.1) < 0.2  # spread 4.8, so 0.08 for the mean of 4,000
    worse = rollout.evaluate(jax.random.key(0), classic.double_integrator(), lambda obs: -obs[:, :1], 4000)
    assert worse.mean() < returns.mean() - 1


def test_cartpole_equals_mujoco():
    mujoco = pytest.importorskip("mujoco")
    # Found, not imported: only its model file is needed.
    spec = importlib.util.find_spec("mujoco_playground") or pytest.skip("playground is not installed")
    folder = Path(spec.origin).parent / "_src" / "dm_control_suite" / "xmls"
    model = mujoco.MjModel.from_xml_path(str(folder / "cartpole.xml"))
    data = mujoco.MjData(model)
    data.qpos[:], data.qvel[:] = [0.2, 2.0], [0.3, -4.0]
    inertia = classic.capsule_inertia(classic.POLE_MASS, classic.POLE_LENGTH, classic.POLE_RADIUS)
    np.testing.assert_allclose(inertia, model.body_inertia[2].max(), rtol=1e-6)

    state = classic.CartPole(*map(jnp.float32, (0.2, 2.0, 0.3, -4.0)))
    step = jax.jit(classic.cartpole_step)
    rng = np.random.default_rng(0)
    for _ in range(100):
        action = rng.uniform(-1, 1, 1)
        data.ctrl[:] = action
        mujoco.mj_step(model, data)
        state, out = step(state, jnp.asarray(action, jnp.float32))
    assert abs(data.qpos[0]) < 1.7  # away from the rail's end, where the two differ by design
    # float32 against float64 over 100 steps of a swinging pole.
    ours = [state.x, state.angle, state.x_speed, state.angle_speed]
    np.testing.assert_allclose(ours, [*data.qpos, *data.qvel], atol=2e-3)
    np.testing.assert_allclose(out.next_obs[1:3], [np.cos(data.qpos[1]), np.sin(data.qpos[1])], atol=2e-3)


def test_linear_quadratic_regulator():
    """Its mean return over random starts: clipped to [-1, 1] in the world itself, and without bounds by hand."""
    gain = classic.lqr_gain()
    world = classic.double_integrator()
    policy = lambda obs: jnp.clip(-obs @ jnp.asarray(gain, jnp.float32), -1, 1)[:, None]  # noqa: E731
    returns = jax.jit(lambda key: rollout.evaluate(key, world, policy, 8192))(jax.random.key(0))
    # Returns spread by about 6, so the mean of 8,192 by 0.07.
    assert float(returns.mean()) == pytest.approx(-5.1, abs=0.2)
    x, v = np.random.default_rng(0).uniform(-1, 1, (2, 20_000))
    total = 0.0
    for _ in range(100):
        u = -(gain[0] * x + gain[1] * v)
        total = total - (x**2 + 0.1 * v**2 + 0.1 * u**2)
        v = v + 0.1 * u
        x = x + 0.1 * v
    assert total.mean() == pytest.approx(-3.7, abs=0.1)


def test_swingup_reward():
    """Each factor of the DM Control reward at its margin: 1 -> (1 + 0.1)/2 for the Gaussians, 4/5 for the quadratic."""
    cases = [
        ((0.0, 0.0, 0.0, 0.0), 1.0),
        ((0.0, np.pi, 0.0, 0.0), 0.0),
        ((0.0, np.pi / 2, 0.0, 0.0), 0.5),
        ((-2.0, 0.0, 0.0, 0.0), 0.55),
        ((0.0, 0.0, 5.0, 0.0), 0.55),
        ((0.0, 0.0, 0.0, -1.0), 0.8),
        ((0.0, 0.0, 0.0, 0.5), 0.95),
        ((1.0, 0.0, -2.5, 0.0), (0.5 * (1 + 0.1**0.25)) ** 2),
    ]
    for arguments, want in cases:
        np.testing.assert_allclose(classic.swingup_reward(*map(jnp.float32, arguments)), want, atol=1e-6)


def test_rail_ends_and_starts():
    world = classic.cartpole_swingup()
    state = world.reset(jax.random.key(0))
    assert abs(state.angle - np.pi) < 0.1 and abs(state.x) < 0.1
    state = state.replace(x=jnp.float32(1.795), x_speed=jnp.float32(2.0))
    state, out = world.step(state, jnp.ones(1))
    assert float(state.x) == pytest.approx(1.8) and float(state.x_speed) == 0 and not out.done


def test_film():
    world = classic.cartpole_swingup()
    states = rollout.record(jax.random.key(0), world, lambda obs: jnp.ones((1, 1)), 6)
    frames = draw.film(world, states, every=3)
    assert frames.shape == (3, 200, 400, 3) and frames.dtype == np.uint8 and (frames[0] != frames[2]).any()
