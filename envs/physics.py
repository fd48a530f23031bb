"""Worlds by name: our own, and adaptors for Brax, MuJoCo Playground and gymnax.

    make("pendulums:4"), make("double_integrator"), make("cartpole_swingup")
    make("brax:inverted_pendulum", backend="spring")
    make("playground:CartpoleBalance")
    make("gymnax:CartPole-v1")

The packages' own wrappers are not used: their auto-reset overwrites the observation that a time limit must be
bootstrapped from, and goes back to cached first states. Here an environment is its bare `reset` and `step`;
`papyrax.envs.rollout` does the rest. Brax and Playground take raw uint32 keys, so typed keys are opened at that border
and nowhere else. What a step returns is cast to the types that reset gave: some packages return weakly typed or
differently typed numbers, which would compile everything a second time.

Gymnasium runs on the host: `papyrax.envs.gymnasium_host`.
"""

import contextlib
import difflib
import functools
import importlib
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Key, PyTree

from papyrax.envs import bodies, classic, draw, pendulums
from papyrax.envs.protocol import Step, World

OWN: dict[str, Callable[[], World]] = {
    "double_integrator": classic.double_integrator,
    "cartpole_swingup": classic.cartpole_swingup,
}
PACKAGES = ("brax", "playground", "gymnax")


def make(name: str, *, backend: str | None = None) -> World:
    """The world of that name; the same object each time, so that compiled functions are found again.

    Args:
        name: see the module docstring; `names()` lists all.
        backend: physics pipeline of Brax: "spring" (default), "generalized", "positional" or "mjx".

    Raises:
        ValueError: the name is unknown (the nearest ones are given), or `backend` is set for another package or
            unknown, or the world needs files that can't be fetched.
        ImportError: the package is not installed; the sentence says what to install.
    """
    package, _, rest = name.partition(":")
    if backend is not None and package != "brax":
        raise ValueError(f"backend is {backend!r} with world {name!r}, wanted None: only Brax worlds have backends.")
    if backend not in (None, "spring", "generalized", "positional", "mjx"):
        raise ValueError(f"backend is {backend!r}, wanted 'spring', 'generalized', 'positional' or 'mjx'.")
    if package == "pendulums" and rest.isdecimal() and int(rest) > 0:
        return pendulums.pendulums(int(rest))
    if name in OWN:
        return OWN[name]()
    if package in PACKAGES and name in _package_names(package):
        return _make_packaged(package, rest, backend or "spring")
    near = difflib.get_close_matches(name, names(), n=3, cutoff=0.4)
    wanted = " or ".join(map(repr, near)) or "one of papyrax.envs.physics.names()"
    raise ValueError(f"world {name!r} is unknown, wanted {wanted}.")


def names() -> list[str]:
    """All names that `make` takes here; packages that are not installed are left out, "pendulums:4" stands for any
    number.
    """
    found = ["pendulums:4", *OWN]
    for package in PACKAGES:
        try:
            found += _package_names(package)
        except ImportError:
            continue
    return found


def from_functional(
    name: str,
    env: Any,
    *,
    episode_length: int,
    repeat: int = 1,
    draw: Callable[[PyTree], np.ndarray] | None = None,
) -> World:
    """A world from an environment with the interface that Brax and Playground share.

    Args:
        name: name of the world.
        env: has `reset(raw key) -> state`, `step(state, action) -> state`, `action_size` and `observation_size`; states
            have `obs`, `reward` and `done`. Where observations are mappings, the agent sees "state" and the critic
            "privileged_state", if present.
        episode_length: time limit in steps of `env`.
        repeat: steps of `env` that one action lasts; their rewards are summed, and none is made after the episode's end.
        draw: picture of a state.
    """
    size = env.observation_size
    asymmetric = not isinstance(size, int | tuple)
    secret = asymmetric and "privileged_state" in size

    def observe(state):
        return state.obs["state"] if asymmetric else state.obs

    def privileged(state):
        return state.obs["privileged_state"]

    def reset(key: Key[Array, ""]):
        return _cast(env.reset(jax.random.key_data(key)))

    def step(state, action):
        action = jnp.clip(action, -1.0, 1.0)
        after = _cast(env.step(state, action), state)
        reward = after.reward
        if repeat > 1:

            def again(carry, _):
                now, reward = carry
                new = _cast(env.step(now, action), now)
                going = now.done <= 0.5
                now = jax.tree.map(lambda a, b: jnp.where(going, a, b), new, now)
                return (now, reward + jnp.where(going, new.reward, 0.0)), None

            (after, reward), _ = jax.lax.scan(again, (after, reward), None, repeat - 1)
        obs, extra = observe(after), privileged(after) if secret else None
        done = after.done > 0.5
        return after, Step(
            obs=obs,
            reward=reward,
            cost=None,
            done=done,
            trunc=jnp.zeros_like(done),
            next_obs=obs,
            privileged=extra,
            next_privileged=extra,
        )

    return World(
        name=name,
        reset=reset,
        observe=observe,
        step=step,
        obs_dim=_count(size["state"] if asymmetric else size),
        act_dim=env.action_size,
        episode_length=-(-episode_length // repeat),
        privileged=privileged if secret else None,
        privileged_dim=_count(size["privileged_state"]) if secret else 0,
        draw=draw,
    )


@flax.struct.dataclass
class GymnaxState:
    """State of a gymnax environment: its own state, what it showed (flat), and the key of its further randomness."""

    state: PyTree
    obs: Array
    key: Key[Array, ""]


def _unscale(space: Any) -> Callable[[Array], Array]:
    """The map from [-1, 1] to the bounds of a gymnax box."""
    shape = tuple(space.shape)
    low = jnp.broadcast_to(jnp.asarray(space.low, jnp.float32), shape)
    high = jnp.broadcast_to(jnp.asarray(space.high, jnp.float32), shape)
    return lambda action: low + 0.5 * (jnp.clip(action, -1.0, 1.0).reshape(shape) + 1.0) * (high - low)


def from_gymnax(name: str, env: Any, params: Any) -> World:
    """A world from a gymnax environment: discrete, or continuous with its bounds mapped to [-1, 1].

    Observations are laid out flat; where they have three axes (MinAtar), `picture` is their shape.
    """
    space = env.action_space(params)
    discrete = hasattr(space, "n")
    shape = env.observation_space(params).shape
    native = (lambda action: action) if discrete else _unscale(space)

    def flat(obs) -> Array:
        return jnp.asarray(obs, jnp.float32).reshape(-1)

    def reset(key: Key[Array, ""]) -> GymnaxState:
        now, later = jax.random.split(key)
        obs, state = env.reset_env(now, params)
        return _cast(GymnaxState(state=state, obs=flat(obs), key=later))

    def step(state: GymnaxState, action: Array) -> tuple[GymnaxState, Step]:
        now, later = jax.random.split(state.key)
        obs, after, reward, terminated, _ = env.step_env(now, state.state, native(action), params)
        after = _cast(GymnaxState(state=after, obs=flat(obs), key=later), state)
        terminated = jnp.asarray(terminated, bool)
        trunc = jnp.asarray(env.is_truncated(after.state, params), bool) & ~terminated
        return after, Step(
            obs=after.obs,
            reward=jnp.asarray(reward, jnp.float32).reshape(()),
            cost=None,
            done=terminated | trunc,
            trunc=trunc,
            next_obs=after.obs,
        )

    return World(
        name=name,
        reset=reset,
        observe=lambda state: state.obs,
        step=step,
        obs_dim=_count(shape),
        act_dim=1 if discrete else _count(tuple(space.shape)),
        episode_length=int(params.max_steps_in_episode),
        discrete=discrete,
        n_actions=int(space.n) if discrete else 0,
        draw=_draw_gymnax_cartpole if name == "gymnax:CartPole-v1" else None,
        picture=tuple(shape) if len(shape) == 3 else None,
    )


@functools.cache
def _make_packaged(package: str, env_name: str, backend: str) -> World:
    name = f"{package}:{env_name}"
    if package == "brax":
        env = _import("brax.envs").get_environment(env_name, backend=backend)
        shapes = bodies.shapes_of(env.sys.mj_model) if getattr(env, "sys", None) is not None else None
        name = name if backend == "spring" else f"{name}@{backend}"
        return from_functional(name, env, episode_length=1000, draw=shapes and functools.partial(_draw_brax, shapes))
    if package == "playground":
        registry = _import("mujoco_playground").registry
        spec = _import("mujoco").MjSpec
        if not hasattr(spec, "find_body"):
            spec.find_body = spec.body  # Playground's reacher calls it by the name that older MuJoCo had
        config = registry.get_default_config(env_name)
        config.impl = "jax"
        source = _import("mujoco_playground._src.mjx_env")
        try:
            with contextlib.redirect_stdout(sys.stderr):  # it tells of its download
                env = registry.load(env_name, config=config)
        except (subprocess.CalledProcessError, OSError) as error:
            raise ValueError(
                f"world {name!r} needs the robots of mujoco_menagerie, which can't be fetched ({error}); put a clone of "
                f"github.com/deepmind/mujoco_menagerie at commit {source.MENAGERIE_COMMIT_SHA} to {source.MENAGERIE_PATH}."
            ) from error
        picture = functools.partial(_draw_mjx, bodies.shapes_of(env.mj_model))
        length, repeat = int(config.episode_length), int(config.action_repeat)
        return from_functional(name, env, episode_length=length, repeat=repeat, draw=picture)
    env, params = _import("gymnax").make(env_name)
    return from_gymnax(name, env, params)


@functools.cache
def _package_names(package: str) -> list[str]:
    """The names of a package's environments, with the package in front."""
    if package == "brax":
        # Brax has no public list of its environments; "fast" is a stub for speed tests.
        found = sorted(_import("brax.envs")._envs.keys() - {"fast"})
    elif package == "playground":
        found = _import("mujoco_playground").registry.ALL_ENVS
    else:
        found = _import("gymnax").registered_envs
    return [f"{package}:{name}" for name in found]


def _import(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.split(".")[0].replace("mujoco_playground", "playground")
        raise ImportError(
            f"package {package} is not installed or does not load ({error}); install it with: "
            "pip install 'papyrax[control]'"
        ) from error


def _cast(tree: PyTree, like: PyTree | None = None) -> PyTree:
    """Numbers with the types of `like` (their own by default) and without weak types."""

    def cast(x, y):
        if jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key):
            return x
        return jax.lax.convert_element_type(x, jnp.result_type(y))

    return jax.tree.map(cast, tree, tree if like is None else like)


def _count(shape: int | tuple[int, ...]) -> int:
    return shape if isinstance(shape, int) else int(np.prod(shape))


def _draw_brax(shapes: bodies.Shapes, state) -> np.ndarray:
    """Brax keeps one frame a moving link; the world's own frame is put before them."""
    frames = state.pipeline_state.x
    position = np.concatenate([np.zeros((1, 3)), np.asarray(frames.pos)])
    rotation = np.concatenate([np.eye(3)[None], bodies.quaternion_matrix(np.asarray(frames.rot))])
    return bodies.draw_bodies(position, rotation, shapes)


def _draw_mjx(shapes: bodies.Shapes, state) -> np.ndarray:
    return bodies.draw_bodies(np.asarray(state.data.xpos), np.asarray(state.data.xmat).reshape(-1, 3, 3), shapes)


def _draw_gymnax_cartpole(state: GymnaxState) -> np.ndarray:
    return draw.cartpole(float(state.state.x), float(state.state.theta))
