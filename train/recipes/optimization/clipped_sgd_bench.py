"""Clipped SGD timed beside a vectorised NumPy loop, optax's injected hyperparameters, and torch."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from papyrax.methods.optimization.clipped_sgd import schedule as theory
from papyrax.methods.optimization.clipped_sgd.transform import ClipState, clipped_sgd_theory


def bench(config, bench) -> list:
    """Clipped SGD on given noise, all runs at once: beside a vectorised NumPy loop and optax's injected
    hyperparameters."""
    steps, dim = (20, 8) if config.runs < 100 else (500, config.dim)
    sizes = (2, 4, 8) if config.runs < 100 else (25, 100, 400)
    schedule = theory.preset("log1", alpha=2.0, smoothness=1.0, radius=10.0, sigma=1.0, delta=0.05)
    tx = clipped_sgd_theory(schedule, average=False)

    def inputs(runs):
        rng = np.random.default_rng(0)
        return {
            "noise": rng.standard_t(2.1, (steps, int(runs), dim)).astype(np.float32),
            "x0": np.ones(dim, np.float32),
        }

    def levels():
        def one(state, _):
            gamma, level, state = theory.step(schedule, state)
            return state, (gamma, level)

        return jax.lax.scan(one, theory.init(), length=steps)[1]

    def ours(runs):
        given = {k: jnp.asarray(v) for k, v in inputs(runs).items()}

        @jax.jit
        def go(x0, noise):
            x = jnp.broadcast_to(x0, noise.shape[1:])

            # The schedule is common to all runs; counters are each run's own.
            axes = (ClipState(None, 0, 0), None)
            step = jax.vmap(lambda g, s: tx.update(g, s), (0, axes), (0, axes))

            def body(carry, e):
                x, state = carry
                updates, state = step(x + e, state)
                return (x + updates, state), None

            return jax.lax.scan(body, (x, jax.vmap(tx.init, 0, axes)(x)), noise)[0][0]

        return lambda: go(given["x0"], given["noise"])

    def numpy_peer(runs):
        given = inputs(runs)
        gammas, lams = (np.asarray(v) for v in jax.jit(levels)())

        def go():
            x = np.broadcast_to(given["x0"], given["noise"].shape[1:]).copy()
            for e, gamma, lam in zip(given["noise"], gammas, lams):
                g = x + e
                norm = np.sqrt(np.einsum("rd,rd->r", g, g))
                x -= (gamma * np.minimum(1, lam / np.maximum(norm, 1e-30)))[:, None] * g
            return x

        return go

    def optax_peer(runs):
        given = {k: jnp.asarray(v) for k, v in inputs(runs).items()}
        peer = optax.inject_hyperparams(
            lambda level, rate: optax.chain(optax.clip_by_global_norm(level), optax.sgd(rate))
        )(level=1.0, rate=1.0)

        @jax.jit
        def go(x0, noise):
            x = jnp.broadcast_to(x0, noise.shape[1:])

            def body(carry, inputs):
                (x, state), (e, gamma, lam) = carry, inputs

                def one(g, s):
                    s = s._replace(hyperparams=s.hyperparams | {"level": lam, "rate": gamma})
                    return peer.update(g, s)

                updates, state = jax.vmap(one)(x + e, state)
                return (x + updates, state), None

            return jax.lax.scan(body, (x, jax.vmap(peer.init)(x)), (noise, *levels()))[0][0]

        return lambda: go(given["x0"], given["noise"])

    def same(a, b):
        np.testing.assert_allclose(a, b["x"] if isinstance(b, dict) else b, atol=2e-4)

    options = {"same": same, "unit": "runs", "note": f"{steps} steps in dimension {dim}, noise given"}
    tables = [
        bench.compare("clipped SGD", ours, numpy_peer, sizes, peer_name="NumPy", **options),
        bench.compare("clipped SGD through optax", ours, optax_peer, sizes, peer_name="optax", **options),
    ]
    remote = bench.process("torch", "clipped_sgd_torch")

    def remote_inputs(runs):
        gammas, lams = jax.jit(levels)()
        return inputs(runs) | {"gammas": np.asarray(gammas), "levels": np.asarray(lams)}

    return [
        *tables,
        bench.compare("clipped SGD in torch", ours, remote.on(remote_inputs), sizes, peer_name="torch", **options),
    ]
