"""Program of `test_darp_scale`: on virtual devices, one device against all for a training step and for retrieval."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from papyrax.methods.control.darp import learner, network, retrieval
from papyrax.methods.control.darp.config import Config
from papyrax.methods.control.darp.demos import Demos, fit_scalers, make_demos
from tests.support.params import drawn

CFG = Config(width=8, depth=1, k=12, lookback=3, decay=-0.5, ratio=0.5)


def main() -> None:
    rng = np.random.default_rng(0)
    obs = np.cumsum(rng.normal(size=(40, 4)), 0).astype(np.float32)
    demos = make_demos(obs, np.tanh(obs[:, :2]), np.array([0, 15, 22]))
    mesh = Mesh(np.array(jax.devices()), ("data",))
    everywhere = NamedSharding(mesh, PartitionSpec())
    print("devices", jax.device_count())

    scalers = fit_scalers(demos)
    hist, valid = jnp.asarray(rng.normal(size=(4, 5, 4)), jnp.float32), jnp.array([1, 3, 5, 5])
    search = functools.partial(retrieval.retrieve, **retrieval.search_of(CFG))
    rows = PartitionSpec("data")
    sharded = jax.shard_map(
        lambda d, h, v: search(d, scalers, h, v, axis_name="data"),
        mesh=mesh,
        in_specs=(Demos(rows, rows, PartitionSpec()), PartitionSpec(), PartitionSpec()),
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    one = jax.jit(lambda d, h, v: search(d, scalers, h, v))(demos, hist, valid)
    np.testing.assert_array_equal(jax.jit(sharded)(demos, hist, valid), one)
    print("retrieval same")

    memory = learner.prepare(demos, CFG)
    state = learner.fresh(jax.random.key(0), drawn(lambda: network.init(jax.random.key(0), 4, 2, CFG)), CFG)
    batch = jnp.arange(16)
    update = jax.jit(learner.update, static_argnums=2)
    alone, single = update(state, batch, CFG, frozen=memory)
    placed = jax.device_put(batch, NamedSharding(mesh, rows))
    spread, many = update(jax.device_put(state, everywhere), placed, CFG, frozen=jax.device_put(memory, everywhere))
    # grad_norm compares the gradients themselves, the weights only their signs and sizes after Adam
    for name in ("loss", "grad_norm"):
        np.testing.assert_allclose(many[name], single[name], rtol=1e-5)
    for a, b in zip(jax.tree.leaves(alone.params), jax.tree.leaves(spread.params)):
        np.testing.assert_allclose(a, b, atol=1e-5)
    print("update same")


if __name__ == "__main__":
    main()
