"""Small worlds whose every number can be checked by hand."""

import functools

import jax
import jax.numpy as jnp

from papyrax.envs.protocol import Step, World


def _step(state, reward, done):
    return Step(obs=state, reward=reward, cost=None, done=done, trunc=jnp.array(False), next_obs=state)


@functools.cache
def corridor(length: int = 4, limit: int = 20) -> World:
    """Discrete: left or right on cells 0 … length; reaching the last one pays 1 and terminates. Observation: one-hot."""

    def observe(x):
        return jax.nn.one_hot(x, length + 1)

    def step(x, action):
        x = jnp.clip(x + 2 * action - 1, 0, length)
        done = x == length
        return x, _step(observe(x), done.astype(jnp.float32), done)

    return World(
        name=f"corridor:{length}",
        reset=lambda key: jax.random.randint(key, (), 0, length),
        observe=observe,
        step=step,
        obs_dim=length + 1,
        act_dim=1,
        episode_length=limit,
        discrete=True,
        n_actions=2,
    )


@functools.cache
def hidden_goal(limit: int = 5) -> World:
    """Continuous, one step's memory: reward -(a - goal)², the goal shown to the critic alone; the agent sees (1, goal sign)."""

    def observe(goal):
        return jnp.stack([jnp.ones(()), jnp.sign(goal)])

    def privileged(goal):
        return goal[None]

    def step(goal, action):
        reward = -jnp.square(action[0] - goal)
        seen = observe(goal)
        return goal, _step(seen, reward, jnp.array(False)).replace(
            privileged=privileged(goal), next_privileged=privileged(goal)
        )

    return World(
        name="hidden_goal",
        reset=lambda key: jax.random.uniform(key, (), minval=-0.5, maxval=0.5),
        observe=observe,
        step=step,
        obs_dim=2,
        act_dim=1,
        episode_length=limit,
        privileged=privileged,
        privileged_dim=1,
    )
