"""Run with 8 virtual devices (`python -m tests.methods.control.reppo_devices`): REPPO on one device and on eight."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from papyrax.envs.pendulums import pendulums
from papyrax.methods.control.reppo import agent, learn, losses, networks
from papyrax.methods.control.reppo.config import ReppoConfig

CFG = ReppoConfig(
    num_envs=16,
    steps=8,
    minibatches=2,
    epochs=2,
    hidden_actor=8,
    hidden_critic=8,
    actor_layers=1,
    trunk_layers=1,
    bins=21,
    vmin=0.0,
    vmax=10.0,
    kl_samples=4,
    gamma=0.9,
    lr=3e-3,
    scale_returns=True,
)
DEVICES = 8
# The programs run for milliseconds and would compile for a minute.
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
MESH = Mesh(np.array(jax.devices()[:DEVICES]), ("d",))


def close(a, b, tolerance, what):
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(a), jax.tree.leaves(b)):
        if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            np.testing.assert_allclose(x, y, atol=tolerance, rtol=tolerance, err_msg=f"{what}{path}")


def same_samples():
    """One gradient step on the same rows and noise, whole on one device or an eighth on each: equal parameters."""
    config = dataclasses.replace(CFG, scale_returns=False)
    rng = np.random.default_rng(0)

    def draw(*shape):
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    n = 64
    rows = losses.Rows(
        obs=draw(n, 3),
        action=jnp.tanh(draw(n, 1)),
        target=draw(n),
        old=(draw(n, 1), jnp.exp(draw(n, 1))),
        next_embed=draw(n, 8),
        reward=draw(n),
        done=jnp.zeros(n),
        trunc=jnp.asarray(rng.random(n) < 0.2, jnp.float32),
    )
    noise = learn.draw_noise(jax.random.key(0), n, 1, config)
    params = {
        "actor": networks.actor_init(jax.random.key(1), config, 3, 1, discrete=False),
        "critic": networks.critic_init(jax.random.key(2), config, 3, 1, discrete=False),
    }
    opt = {name: learn.optimizer(config, name == "actor").init(params[name]) for name in params}

    def step(axis_name):
        return lambda p, o, r, e: learn.gradient_step(p, o, r, e, config, discrete=False, axis_name=axis_name)

    whole, spread = PartitionSpec(), PartitionSpec("d")
    split = jax.shard_map(
        step("d"),
        mesh=MESH,
        in_specs=(whole, whole, spread, PartitionSpec(None, "d")),
        out_specs=whole,
        check_vma=False,
    )
    close(
        jax.jit(split, compiler_options=QUICK)(params, opt, rows, noise),
        jax.jit(step(None), compiler_options=QUICK)(params, opt, rows, noise),
        1e-4,
        "step",
    )


def same_update():
    """Whole iterations: eight devices against eight parts mapped on one device, which share every number; learning falls."""
    state = jax.jit(lambda key: agent.init(key, CFG, pendulums(1)), compiler_options=QUICK)(jax.random.key(0))
    specs = agent.state_specs(state, "d")
    iterations = 12

    def run(state):
        return jax.lax.scan(lambda s, _: agent.update(s, None, CFG, axis_name="d"), state, None, iterations)

    spread = jax.jit(
        jax.shard_map(run, mesh=MESH, in_specs=(specs,), out_specs=(specs, PartitionSpec()), check_vma=False),
        compiler_options=QUICK,
    )
    after, metrics = spread(state)
    parts = jax.tree.map(
        lambda x, spec: x.reshape(DEVICES, -1, *x.shape[1:]) if spec else jnp.stack([x] * DEVICES), state, specs
    )
    mapped, mapped_metrics = jax.jit(jax.vmap(run, axis_name="d"), compiler_options=QUICK)(parts)
    # The first iterations agree to rounding; later ones amplify it, so the end is held more loosely.
    close(
        jax.tree.map(lambda x: x[:2], metrics), jax.tree.map(lambda x: x[0, :2], mapped_metrics), 1e-4, "first metrics"
    )
    for part in range(1, DEVICES):
        close(jax.tree.map(lambda x, i=part: x[i], mapped.params), jax.tree.map(lambda x: x[0], mapped.params), 0, "")
    close(after.obs, jax.tree.map(lambda x: x[0], mapped.obs), 1e-2, "statistics")
    assert int(after.obs.count) == iterations * CFG.num_envs * CFG.steps
    critic = np.asarray(metrics["critic_loss"])
    assert np.isfinite(critic).all() and critic[-3:].mean() < critic[:3].mean(), critic
    # Devices draw their own noise: no two environments have lived the same life.
    angles = np.asarray(after.envs.state.angle)[:, 0]
    assert len(np.unique(angles)) == CFG.num_envs


if __name__ == "__main__":
    assert len(jax.devices()) == DEVICES, jax.devices()
    same_samples()
    same_update()
    print("equal on 1 and 8 devices")
