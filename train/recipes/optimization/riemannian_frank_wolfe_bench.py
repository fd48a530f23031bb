"""Manifold maps and a Karcher mean timed beside NumPy, geoopt and pymanopt."""

import jax
import jax.numpy as jnp
import numpy as np

from papyrax.methods.geometry import ball
from papyrax.methods.geometry import manifolds as geometry
from papyrax.methods.optimization.riemannian_frank_wolfe import objectives, solver


def bench(config, bench) -> list:
    """Manifold maps on batches beside NumPy, geoopt and pymanopt; a 200-step Karcher mean beside pymanopt."""
    small = config.n < 50
    sizes, width = ((8, 16, 32), 4) if small else ((256, 1024, 4096), 64)
    tables = []

    def points(man, n):
        keys = jax.random.split(jax.random.key(0))
        if man.name == "sphere":
            return tuple(np.asarray(man.random(k, (int(n), width), jnp.float32)) for k in keys)
        # Near the middle: further out the peers' own float32 errors would be what is compared.
        inside = [0.3 * geometry.poincare(1.0).random(k, (int(n), width), jnp.float32) for k in keys]
        return tuple(np.asarray(ball.to_hyperboloid(x, 1.0) if man.name == "hyperboloid" else x) for x in inside)

    def maps(man):
        @jax.jit
        def go(x, y):
            u = man.log(x, y)
            return man.exp(x, u / 2), man.dist(x, y)

        return go

    def ours(man):
        def build(n):
            x, y = map(jnp.asarray, points(man, n))
            go = maps(man)
            return lambda: go(x, y)

        return build

    def numpy_sphere(n):
        x, y = points(geometry.sphere(), n)

        def go():
            cos = np.clip(np.einsum("nd,nd->n", x, y), -1, 1)
            theta = np.arccos(cos)
            u = y - cos[:, None] * x
            u *= (theta / np.maximum(np.linalg.norm(u, axis=1), 1e-12))[:, None] / 2
            r = np.linalg.norm(u, axis=1)[:, None]
            return np.cos(r) * x + np.sin(r) / np.maximum(r, 1e-12) * u, theta

        return go

    def close(a, b):
        b = [b["half"], b["dist"]] if isinstance(b, dict) else b
        for i, j in zip(a, b, strict=True):
            np.testing.assert_allclose(np.asarray(i), np.asarray(j), atol=1e-3)

    options = {"same": close, "unit": "points", "note": f"log, half of it by exp, and dist on [n, {width}] in float32"}
    tables.append(
        bench.compare("sphere maps", ours(geometry.sphere()), numpy_sphere, sizes, peer_name="NumPy", **options)
    )
    for name, man in (
        ("sphere", geometry.sphere()),
        ("poincare", geometry.poincare(1.0)),
        ("hyperboloid", geometry.hyperboloid()),
    ):
        remote = bench.process("geometry", f"geoopt_{name}")

        def inputs(n, man=man):
            return dict(zip("xy", points(man, n), strict=True))

        tables.append(bench.compare(f"{name} maps", ours(man), remote.on(inputs), sizes, peer_name="geoopt", **options))

    steps = 20 if small else 200

    def matrices(n):
        with jax.enable_x64():
            return {
                "points": np.asarray(geometry.spd().random(jax.random.key(1), (int(n), 4, 4), jnp.float64)),
                "steps": steps,
            }

    def ours_karcher(n):
        with jax.enable_x64():
            given = jnp.asarray(matrices(n)["points"])
            man = geometry.spd()

            @jax.jit
            def go(points):
                weights = jnp.full(points.shape[0], 1 / points.shape[0], points.dtype)
                f = objectives.karcher_mean(man, points, weights)
                return solver.gradient_descent_run(jnp.eye(4, dtype=points.dtype), f, man, 1.0, steps)[0]

            compiled = go.lower(given).compile()
        return lambda: compiled(given)

    def same_mean(a, b):
        np.testing.assert_allclose(np.asarray(a), b["mean"], atol=1e-5)

    remote = bench.process("geometry", "pymanopt_karcher")
    tables.append(
        bench.compare(
            "SPD Karcher mean",
            ours_karcher,
            remote.on(matrices),
            (5, 10, 20),
            peer_name="pymanopt",
            same=same_mean,
            unit="matrices",
            note=f"{steps} gradient steps, 4 x 4, float64; pymanopt's SteepestDescent",
        )
    )
    return tables
