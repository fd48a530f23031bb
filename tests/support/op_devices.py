"""Runs the ops of value networks and the search inside shard_map on all devices of this process, against one device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from papyrax.jaxlib_ext.hl_gauss import hl_gauss_cross_entropy
from papyrax.jaxlib_ext.linear_norm import linear_norm_swish
from papyrax.jaxlib_ext.topk import topk

MESH = Mesh(np.array(jax.devices()), ("rows",))
RNG = np.random.default_rng(0)


def whole_numbers(*shape: int) -> jax.Array:
    return jnp.asarray(RNG.integers(-2, 3, shape), jnp.float32)


def search() -> None:
    """Rows of x sharded, ties across shards, k beyond a shard: the same scores and ids on every shard."""
    q, x = whole_numbers(6, 5), whole_numbers(20 * MESH.size, 5)
    valid, exclude = jnp.asarray(RNG.random(len(x)) < 0.9), jnp.arange(6, dtype=jnp.int32)[:, None] * 20
    for metric in ("l2", "ip"):
        find = functools.partial(topk, k=50, metric=metric, drop_equal=True)

        def part(q, x, valid, exclude, find=find):
            return find(q, x, valid=valid, exclude=exclude, axis_name="rows")

        specs = (P(), P("rows"), P("rows"), P())
        # the merged list is equal on all shards, which types cannot tell: it comes back stacked
        scores, ids = jax.jit(jax.shard_map(part, mesh=MESH, in_specs=specs, out_specs=P("rows")))(q, x, valid, exclude)
        wanted = jax.jit(lambda q, x, find=find: find(q, x, valid=valid, exclude=exclude))(q, x)
        for ours, one in zip((scores, ids), wanted):
            np.testing.assert_array_equal(ours, np.tile(one, (MESH.size, 1)))


def value_loss() -> None:
    """Batch sharded, weights on every shard: loss and gradients of a small value network."""
    x, value = jnp.asarray(RNG.normal(size=(4 * MESH.size, 5)), jnp.float32), jnp.linspace(-1.0, 1.0, 4 * MESH.size)
    w = jnp.asarray(RNG.normal(size=(5, 9)), jnp.float32)

    def loss(w, x, value):
        return jnp.sum(hl_gauss_cross_entropy(linear_norm_swish(x, w, scale=w[0]), value, -1.0, 1.0))

    def part(w, x, value):
        total, gradient = jax.value_and_grad(loss)(w, x, value)
        return jax.lax.psum(total, "rows"), gradient  # the gradient of what all shards hold is summed already

    sharded = jax.shard_map(part, mesh=MESH, in_specs=(P(), P("rows"), P("rows")), out_specs=P())
    for ours, one in zip(jax.jit(sharded)(w, x, value), jax.jit(jax.value_and_grad(loss))(w, x, value)):
        np.testing.assert_allclose(ours, one, rtol=2e-5, atol=2e-5)


if __name__ == "__main__":
    assert MESH.size == 8
    search()
    value_loss()
    print("equal on 8 devices")
