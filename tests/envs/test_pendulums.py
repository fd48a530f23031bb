import jax
import jax.numpy as jnp
import numpy as np
import pytest

from papyrax.envs import pendulums, rollout

pytestmark = pytest.mark.proof("reppo", "core")


def test_dynamics_by_hand():
    rng = np.random.default_rng(0)
    th, w = rng.uniform(-3, 3, 4), rng.uniform(-8, 8, 4)
    world = pendulums.pendulums(4)
    state = pendulums.State(angle=jnp.array(th), speed=jnp.array(w))
    step = jax.jit(world.step)
    for _ in range(20):
        action = rng.uniform(-1.5, 1.5, 4)
        w = np.clip(w + 0.05 * (15 * np.sin(th) + 3 * 2 * np.clip(action, -1, 1)), -8, 8)
        th = th + 0.05 * w
        state, out = step(state, jnp.array(action))
        np.testing.assert_allclose(out.reward, np.mean((1 + np.cos(th)) / 2), rtol=1e-4)
        np.testing.assert_allclose(out.next_obs, np.concatenate([np.cos(th), np.sin(th), w]), atol=1e-3)
        assert not out.done and not out.trunc
    assert world.obs_dim == 12 and world.act_dim == 4 and world.episode_length == 200


def test_starts():
    state = jax.vmap(pendulums.pendulums(1).reset)(jax.random.split(jax.random.key(0), 4000))
    for values, bound in ((state.angle, np.pi), (state.speed, 1.0)):
        assert np.abs(values).max() <= bound
        # Standard deviation of the mean of 4,000 uniforms on (-1, 1) is 0.009.
        assert abs(values.mean()) < 0.05 * bound and abs(np.std(values) / bound - 3**-0.5) < 0.02


def test_random_torque_and_optimum():
    world = pendulums.pendulums(4)

    def random(obs):
        # A hash of the observation stands for chance: evaluation takes deterministic policies.
        return 2 * jnp.mod(1e4 * obs[:, :4], 1.0) - 1

    returns = jax.jit(lambda key: rollout.evaluate(key, world, random, 512))(jax.random.key(0))
    assert abs(returns.mean() - 62.7) < 1.5
    best = jax.jit(pendulums.optimal_return)()
    assert abs(best - 186.6) < 0.2
    assert abs(jax.jit(lambda: pendulums.optimal_return(steps=1, angles=61, speeds=41))() - 0.5) < 0.02


def test_picture_and_bad_k():
    world = pendulums.pendulums(2)
    frame = world.draw(world.reset(jax.random.key(0)))
    assert frame.dtype == np.uint8 and frame.shape == (160, 320, 3) and frame.std() > 5
    with pytest.raises(ValueError, match="k is 0"):
        pendulums.pendulums(0)
