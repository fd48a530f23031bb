import dataclasses
import functools
import subprocess
import types

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from papyrax.envs import draw, physics, rollout

pytestmark = pytest.mark.proof("reppo", "core")
# Physics is compiled without optimisation: these tests run a few steps and spend their time in the compiler.
quick = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
needs_brax = pytest.mark.skipif(not any(n.startswith("brax:") for n in physics.names()), reason="brax is missing")
needs_playground = pytest.mark.skipif(
    not any(n.startswith("playground:") for n in physics.names()), reason="playground is missing"
)
needs_gymnax = pytest.mark.skipif(not any(n.startswith("gymnax:") for n in physics.names()), reason="gymnax is missing")


@pytest.fixture(scope="module")
def pendulum():
    from brax import envs

    return physics.make("brax:inverted_pendulum", backend="spring"), envs.get_environment(
        "inverted_pendulum", backend="spring"
    )


@needs_brax
def test_brax_rollout_by_hand(pendulum):
    """Observation, reward, done and truncation, through a termination and a time limit."""
    world, bare = pendulum
    world = dataclasses.replace(world, episode_length=8)
    envs = quick(lambda key: rollout.start(key, world, 2, stagger=False))(jax.random.key(0))
    push = jnp.array([0.0, 1.0])  # the second pole is pushed over before its time is up
    _, batch = quick(lambda envs: rollout.rollout(jax.random.key(1), lambda k, o: (push[:, None], None), envs, 9))(envs)
    step = quick(bare.step)
    for i in range(2):
        state = jax.tree.map(lambda x, i=i: x[i], envs.state)
        for t in range(8):
            np.testing.assert_array_equal(batch.obs[t, i], state.obs)
            state = step(state, push[i : i + 1])
            np.testing.assert_allclose(batch.next_obs[t, i], state.obs, atol=1e-6)
            over = t == 7 or bool(state.done)
            assert batch.reward[t, i] == state.reward and batch.done[t, i] == over
            assert batch.trunc[t, i] == (over and not state.done)
            if over:
                break
        assert bool(batch.trunc[t, i]) == (i == 0)
        assert np.abs(batch.obs[t + 1, i]).max() <= 0.01  # a fresh start
    assert t < 7


@needs_brax
def test_brax_states_keep_their_types_and_are_drawn(pendulum):
    world, _ = pendulum
    state = jax.eval_shape(world.reset, jax.random.key(0))
    after, out = jax.eval_shape(world.step, state, jnp.zeros(1))
    kinds = lambda tree: [(x.dtype, x.shape, x.weak_type) for x in jax.tree.leaves(tree)]  # noqa: E731
    assert kinds(state) == kinds(after) and out.reward.dtype == jnp.float32
    assert not any(x.weak_type for x in jax.tree.leaves(state))
    frame = world.draw(quick(world.reset)(jax.random.key(0)))
    assert frame.shape == (240, 320, 3) and frame.std() > 5
    assert physics.make("brax:inverted_pendulum") is world and world.act_dim == 1 and world.obs_dim == 4


@needs_playground
def test_playground_by_hand():
    from mujoco_playground import registry

    config = registry.get_default_config("CartpoleBalance")
    config.impl = "jax"
    env = registry.load("CartpoleBalance", config=config)
    # The physics is compiled once and shared: the adaptor runs around it operation by operation.
    shared = types.SimpleNamespace(
        reset=quick(env.reset), step=quick(env.step), observation_size=env.observation_size, action_size=1
    )
    world = physics.from_functional("playground:CartpoleBalance", shared, episode_length=1000)
    key = jax.random.key(5)
    state, raw = world.reset(key), shared.reset(jax.random.key_data(key))
    for t in range(4):
        action = jnp.array([1.5 - t])
        state, out = world.step(state, action)
        raw = shared.step(raw, jnp.clip(action, -1, 1))
        np.testing.assert_array_equal(out.next_obs, raw.obs)
        np.testing.assert_array_equal(world.observe(state), raw.obs)
        assert out.reward == raw.reward and not out.done and not out.trunc
    real = physics.make("playground:CartpoleBalance")
    assert (real.obs_dim, real.act_dim, real.episode_length, real.privileged) == (5, 1, 1000, None)
    frame = real.draw(state)
    assert frame.shape == (240, 320, 3) and frame.std() > 5
    broken = state.replace(obs=jnp.full(5, jnp.nan))
    assert np.isnan(real.observe(broken)).all()


@flax.struct.dataclass
class PairState:
    obs: dict
    reward: jax.Array
    done: jax.Array


class Pair:
    """An environment with mappings as observations, as Playground's robots have them."""

    observation_size = types.MappingProxyType({"state": (2,), "privileged_state": (3,)})
    action_size = 1

    def _state(self, x):
        obs = {"state": jnp.stack([x, x]), "privileged_state": jnp.stack([x, x, 7.0 + x])}
        return PairState(obs, 1.0 * x, jnp.float32(x > 2))

    def reset(self, key):
        return self._state(jax.random.uniform(key))

    def step(self, state, action):
        return self._state(state.obs["state"][0] + action[0])


def test_critics_see_the_privileged_state():
    world = physics.from_functional("pair", Pair(), episode_length=3)
    assert (world.obs_dim, world.privileged_dim) == (2, 3)
    envs = rollout.start(jax.random.key(0), world, 2, stagger=False)
    after, step = rollout.advance(envs, jnp.array([[9.0], [0.5]]))  # 9 is clipped to 1
    np.testing.assert_allclose(step.next_obs[:, 0], envs.obs[:, 0] + jnp.array([1.0, 0.5]), rtol=1e-6)
    np.testing.assert_allclose(step.next_privileged[:, 2], 7 + step.next_obs[:, 0], rtol=1e-6)
    np.testing.assert_allclose(after.privileged[:, 2], 7 + after.obs[:, 0], rtol=1e-6)


def test_a_repeated_action_sums_rewards_and_stops_at_the_end():
    world = physics.from_functional("pair", Pair(), episode_length=5, repeat=3)
    assert world.episode_length == 2
    state = world.reset(jax.random.key(0))
    x = float(world.observe(state)[0])
    step = jax.jit(world.step)
    after, out = step(state, jnp.array([0.25]))
    np.testing.assert_allclose(out.reward, 3 * x + 1.5, rtol=1e-6)
    np.testing.assert_allclose(out.next_obs[0], x + 0.75, rtol=1e-6)
    assert not out.done
    _, out = step(after, jnp.array([1.0]))  # passes 2 at the second of three steps, at the latest
    passed = int(np.argmax(x + 0.75 + np.arange(1, 4) > 2)) + 1
    assert passed < 3 and out.done
    np.testing.assert_allclose(out.next_obs[0], x + 0.75 + passed, rtol=1e-6)
    np.testing.assert_allclose(out.reward, sum(x + 0.75 + i for i in range(1, passed + 1)), rtol=1e-6)


@needs_playground
def test_robots_that_can_not_be_fetched_are_told(monkeypatch, tmp_path):
    from mujoco_playground._src import mjx_env

    def offline(*_):
        raise subprocess.CalledProcessError(128, ["git", "clone"])

    monkeypatch.setattr(mjx_env, "EXTERNAL_DEPS_PATH", tmp_path / "deps")
    monkeypatch.setattr(mjx_env, "MENAGERIE_PATH", tmp_path / "deps" / "mujoco_menagerie")
    monkeypatch.setattr(mjx_env, "_clone_with_progress", offline)
    with pytest.raises(
        ValueError, match=r"needs the robots of mujoco_menagerie.*at commit \w+ to .*mujoco_menagerie\.$"
    ):
        physics.make("playground:Go1JoystickFlatTerrain")


@needs_gymnax
def test_gymnax_by_hand():
    import gymnax

    world = physics.make("gymnax:CartPole-v1")
    assert world.discrete and world.n_actions == 2 and world.episode_length == 500 and world.obs_dim == 4
    env, params = gymnax.make("CartPole-v1")
    state = world.reset(jax.random.key(0))
    raw, step = state.state, jax.jit(world.step)
    raw_step = jax.jit(env.step_env)
    for t in range(30):
        state, out = step(state, jnp.int32(1))
        obs, raw, reward, done, _ = raw_step(jax.random.key(t), raw, 1, params)
        np.testing.assert_allclose(out.next_obs, obs, rtol=1e-6)
        assert out.reward == reward and out.done == done and not out.trunc
        if done:
            break
    assert done and t > 5
    late = state.replace(state=raw.replace(x=0.0, x_dot=0.0, theta=0.0, theta_dot=0.0, time=499))
    _, out = step(late, jnp.int32(1))
    assert out.trunc and out.done
    assert draw.film(world, jax.tree.map(lambda x: x[None], state)).shape == (1, 200, 400, 3)


@needs_gymnax
def test_gymnax_pictures_are_flat():
    import gymnax

    world = physics.make("gymnax:Breakout-MinAtar")
    env, params = gymnax.make("Breakout-MinAtar")
    state = quick(world.reset)(jax.random.key(0))
    assert world.picture == (10, 10, 4) and world.observe(state).shape == (world.obs_dim,) == (400,)
    _, out = quick(world.step)(state, jnp.int32(1))
    obs, *_ = quick(lambda key, state: env.step_env(key, state, 1, params))(jax.random.key(1), state.state)
    np.testing.assert_array_equal(out.next_obs.reshape(world.picture), obs)
    assert physics.make("gymnax:CartPole-v1").picture is None


@needs_gymnax
def test_gymnax_bounds_are_mapped():
    import gymnax

    world = physics.make("gymnax:Pendulum-v1")
    env, params = gymnax.make("Pendulum-v1")
    assert not world.discrete and world.act_dim == 1
    state = world.reset(jax.random.key(0))
    for action, torque in ((1.0, 2.0), (-0.25, -0.5), (-7.0, -2.0)):
        _, out = world.step(state, jnp.array([action]))
        obs, _, reward, _, _ = env.step_env(jax.random.key(1), state.state, jnp.array([torque]), params)
        np.testing.assert_allclose(out.next_obs, obs, rtol=1e-5)
        np.testing.assert_allclose(out.reward, reward, rtol=1e-5)


def test_names():
    assert physics.make("pendulums:3").act_dim == 3
    assert {physics.make(name).name for name in physics.OWN} == set(physics.OWN)
    assert {"pendulums:4", "cartpole_swingup"} <= set(physics.names())
    with pytest.raises(ValueError, match="'pendulum:4' is unknown, wanted 'pendulums:4'"):
        physics.make("pendulum:4")
    with pytest.raises(ValueError, match=r"'cartpol_swingup'.*'cartpole_swingup'"):
        physics.make("cartpol_swingup")
    with pytest.raises(ValueError, match="is unknown"):
        physics.make("pendulums:0")
    with pytest.raises(ValueError, match="only Brax worlds have backends"):
        physics.make("double_integrator", backend="spring")
    with pytest.raises(ValueError, match="backend is 'fast'"):
        physics.make("brax:ant", backend="fast")


def test_missing_package_is_told(monkeypatch):
    def absent(name):
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(physics.importlib, "import_module", absent)
    physics._package_names.cache_clear()
    with pytest.raises(ImportError, match=r"playground is not installed.*pip install 'papyrax\[control\]'"):
        physics.make("playground:CartpoleBalance")
    assert all(":" not in name or name.startswith("pendulums") for name in physics.names())
    monkeypatch.undo()
    physics._package_names.cache_clear()
