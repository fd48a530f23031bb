"""Batched rollouts of device worlds: time limits, fresh random resets, true next observations, evaluation and films.

Many environments step together under `vmap`. Whenever an episode ends, by termination, by its time limit or by a number
that is not finite, that environment starts a *fresh* random episode (no cache of first states), while the batch keeps
the observation that the last step really led to. At the start, step counters are drawn uniformly in [0,
episode_length), so that time limits do not fall together (the reset trick of REPPO, Voelcker et al., ICLR 2026, arXiv
2507.11019).

A reset may break too: then the agent is shown zeros, and as the state stays broken the next step ends that episode.

Resets can cost as much as steps (MuJoCo), and few environments end at once. So a step makes only as many as are needed,
`chunk` at a time in a `while_loop`. Each environment owns its key: results do not depend on `chunk`.
"""

from collections.abc import Callable

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key, PyTree

from papyrax.envs.protocol import Step, World

Policy = Callable[[Key[Array, ""], PyTree], tuple[Array, PyTree]]


@flax.struct.dataclass
class Envs:
    """n environments in the middle of their episodes, a pytree that may lie inside a learner's state.

    Attributes:
        state: the world's states, leading axis n.
        key: one key an environment, for its future resets.
        time: steps since the episode began (or the staggered start value).
        obs, privileged: what agent and critic see now.
        episode_return: sum of rewards of the present episode; `last_return` is that of the last finished one, NaN
            before the first.
        world: the world, static.
        chunk: resets a pass, static.
    """

    state: PyTree
    key: Key[Array, "n"]
    time: Int[Array, "n"]
    obs: PyTree
    privileged: PyTree
    episode_return: Float[Array, "n"]
    last_return: Float[Array, "n"]
    world: World = flax.struct.field(pytree_node=False)
    chunk: int = flax.struct.field(pytree_node=False)


@flax.struct.dataclass
class Batch:
    """T steps of n environments, leading axes `t n`. Fields as in `Step`, with `obs` and `privileged` those that were
    acted on.
    """

    obs: PyTree
    action: Array
    extras: PyTree
    reward: Float[Array, "t n"]
    cost: Float[Array, "t n c"] | None
    done: Bool[Array, "t n"]
    trunc: Bool[Array, "t n"]
    next_obs: PyTree
    privileged: PyTree
    next_privileged: PyTree
    fault: Bool[Array, "t n"]


def start(key: Key[Array, ""], world: World, n: int, *, stagger: bool = True, chunk: int | None = None) -> Envs:
    """n fresh environments.

    Args:
        key: typed key.
        world: the world.
        n: number of environments.
        stagger: draw step counters uniformly in [0, episode_length); otherwise all are 0.
        chunk: most resets a pass of the reset loop; default n // 16, at least 1. It changes the speed, never the
            numbers.

    Raises:
        ValueError: n or chunk is not positive.
    """
    if n < 1:
        raise ValueError(f"n is {n}, wanted at least 1 environment.")
    chunk = max(1, n // 16) if chunk is None else chunk
    if not 1 <= chunk:
        raise ValueError(f"chunk is {chunk}, wanted at least 1.")
    key_time, key_envs = jax.random.split(key)
    keys, now = _split(jax.random.split(key_envs, n))
    state = jax.vmap(world.reset)(now)
    time = jax.random.randint(key_time, (n,), 0, world.episode_length) if stagger else jnp.zeros((n,), jnp.int32)
    zeros = jnp.zeros((n,), jnp.float32)
    return Envs(
        state=state,
        key=keys,
        time=time,
        **_shown(world, state, n),
        episode_return=zeros,
        last_return=jnp.full((n,), jnp.nan, jnp.float32),
        world=world,
        chunk=min(chunk, n),
    )


def advance(envs: Envs, action: Array) -> tuple[Envs, Step]:
    """One step of all environments, with time limit and auto-reset.

    Args:
        envs: n environments.
        action: `[n, act_dim]` in [-1, 1], or integers `[n]` in discrete worlds.

    Returns:
        the environments and the step; see `Step` for which observation is which. Where observation, reward or cost is
        not finite the episode ends as a termination with reward 0 and cost 0, `next_obs` is the observation acted on,
        and `fault` is set.
    """
    world = envs.world
    state, step = jax.vmap(world.step)(envs.state, action)
    fault = _not_finite((step.next_obs, step.next_privileged, step.reward, step.cost), envs.time.shape[0])
    time = envs.time + 1
    terminated = (step.done & ~step.trunc) | fault
    trunc = (step.trunc | (time >= world.episode_length)) & ~terminated
    done = terminated | trunc
    reward = jnp.where(fault, 0.0, step.reward)
    next_obs = _where(fault, envs.obs, step.next_obs)
    next_privileged = _where(fault, envs.privileged, step.next_privileged)
    total = envs.episode_return + reward

    after = Envs(
        state=state,
        key=envs.key,
        time=jnp.where(done, 0, time),
        obs=next_obs,
        privileged=next_privileged,
        episode_return=jnp.where(done, 0.0, total),
        last_return=jnp.where(done, total, envs.last_return),
        world=world,
        chunk=envs.chunk,
    )
    after = _reset(after, done)
    return after, Step(
        obs=after.obs,
        reward=reward,
        cost=None if step.cost is None else jnp.where(fault[:, None], 0.0, step.cost),
        done=done,
        trunc=trunc,
        next_obs=next_obs,
        privileged=after.privileged,
        next_privileged=next_privileged,
        fault=fault,
    )


def rollout(key: Key[Array, ""], policy: Policy, envs: Envs, t: int) -> tuple[Envs, Batch]:
    """t steps of every environment under one policy.

    Args:
        key: typed key; the policy gets a fresh one a step.
        policy: `policy(key, obs[n, …]) -> (action[n, …], extras)`; `extras` is any pytree to keep (log probabilities,
            …), or None.
        envs: from `start` or an earlier rollout.
        t: number of steps.

    Returns:
        the environments to go on from, and the batch with leading axes `t n`.
    """

    def one(envs: Envs, key):
        action, extras = policy(key, envs.obs)
        after, step = advance(envs, action)
        row = Batch(
            obs=envs.obs,
            action=action,
            extras=extras,
            reward=step.reward,
            cost=step.cost,
            done=step.done,
            trunc=step.trunc,
            next_obs=step.next_obs,
            privileged=envs.privileged,
            next_privileged=step.next_privileged,
            fault=step.fault,
        )
        return after, row

    return jax.lax.scan(one, envs, jax.random.split(key, t))


def evaluate(
    key: Key[Array, ""], world: World, policy: Callable[[PyTree], Array], n: int, steps: int | None = None
) -> Float[Array, "n"]:
    """Undiscounted returns of the first episode from n fresh starts.

    Args:
        key: typed key for the starts.
        world: the world.
        policy: deterministic, `policy(obs[n, …]) -> action[n, …]`.
        n: number of episodes.
        steps: most steps an episode; default the world's `episode_length`.

    Returns:
        one return an episode; an episode that breaks (a number that is not finite) keeps what it had collected.
    """
    state = jax.vmap(world.reset)(jax.random.split(key, n))
    obs = jax.vmap(world.observe)(state)

    def one(carry, _):
        state, obs, alive, total = carry
        state, step = jax.vmap(world.step)(state, policy(obs))
        alive = alive & ~_not_finite((step.next_obs, step.reward), n)
        total = total + jnp.where(alive, step.reward, 0.0)
        return (state, step.next_obs, alive & ~step.done, total), None

    carry = (state, obs, jnp.ones((n,), bool), jnp.zeros((n,), jnp.float32))
    (_, _, _, total), _ = jax.lax.scan(one, carry, None, world.episode_length if steps is None else steps)
    return total


def record(key: Key[Array, ""], world: World, policy: Callable[[PyTree], Array], steps: int | None = None) -> PyTree:
    """The world states of one episode from a fresh start, for films: leading axis `steps + 1`, the last state repeated
    after the end.

    `policy` is deterministic on a batch of one observation, as in `evaluate`; frames are `world.draw` of each state
    (see `papyrax.envs.draw.film`).
    """
    first = world.reset(key)

    def one(carry, _):
        state, alive = carry
        action = policy(jax.tree.map(lambda x: x[None], world.observe(state)))[0]
        after, step = world.step(state, action)
        after = jax.tree.map(lambda new, old: jnp.where(alive, new, old), after, state)
        return (after, alive & ~step.done), after

    _, states = jax.lax.scan(one, (first, jnp.array(True)), None, world.episode_length if steps is None else steps)
    return jax.tree.map(lambda a, b: jnp.concatenate([a[None], b]), first, states)


def _split(keys: Key[Array, "n"]) -> tuple[Key[Array, "n"], Key[Array, "n"]]:
    """Two independent keys for each key."""
    pairs = jax.vmap(jax.random.split)(keys)
    return pairs[:, 0], pairs[:, 1]


def _shown(world: World, state: PyTree, n: int) -> dict[str, PyTree]:
    """What n fresh states show to agent and critic; zeros where a reset gave a number that is not finite."""
    obs = jax.vmap(world.observe)(state)
    privileged = None if world.privileged is None else jax.vmap(world.privileged)(state)
    broken = _not_finite((obs, privileged), n)
    obs, privileged = (_where(broken, jax.tree.map(jnp.zeros_like, x), x) for x in (obs, privileged))
    return {"obs": obs, "privileged": privileged}


def _reset(envs: Envs, done: Bool[Array, "n"]) -> Envs:
    """Fresh episodes where `done`, `chunk` environments at a time."""
    world, n = envs.world, done.shape[0]

    def body(carry):
        waiting, state, key, obs, privileged = carry
        flag, rows = jax.lax.top_k(waiting.astype(jnp.int32), min(envs.chunk, n))
        rows = jnp.where(flag > 0, rows, n)  # row n lies past the end: reads are clamped, writes dropped
        later, now = _split(key[jnp.minimum(rows, n - 1)])
        fresh = jax.vmap(world.reset)(now)
        shown = _shown(world, fresh, rows.shape[0])

        def put(old, new):
            return jax.tree.map(lambda a, b: a.at[rows].set(b, mode="drop"), old, new)

        return (
            waiting.at[rows].set(False, mode="drop"),
            put(state, fresh),
            put(key, later),
            put(obs, shown["obs"]),
            None if world.privileged is None else put(privileged, shown["privileged"]),
        )

    carry = (done, envs.state, envs.key, envs.obs, envs.privileged)
    _, state, key, obs, privileged = jax.lax.while_loop(lambda carry: jnp.any(carry[0]), body, carry)
    return envs.replace(state=state, key=key, obs=obs, privileged=privileged)


def _where(mask: Bool[Array, "n"], a: PyTree, b: PyTree) -> PyTree:
    """`a` where the mask holds, else `b`, leaf by leaf along the leading axis."""
    return jax.tree.map(lambda x, y: jnp.where(mask.reshape(mask.shape + (1,) * (x.ndim - 1)), x, y), a, b)


def _not_finite(tree: PyTree, n: int) -> Bool[Array, "n"]:
    """Which rows of the leading axis hold a number that is not finite."""
    bad = jnp.zeros((n,), bool)
    for leaf in jax.tree.leaves(tree):
        if jnp.issubdtype(leaf.dtype, jnp.inexact):
            bad = bad | ~jnp.all(jnp.isfinite(leaf.reshape(n, -1)), axis=1)
    return bad
