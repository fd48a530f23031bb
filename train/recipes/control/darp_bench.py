"""DARP's speed: training beside plain torch, acting beside torch and scikit-learn, retrieval alone beside scikit-learn
and NumPy over numbers of expert rows.

Rows and histories come from the task's demonstrations. A peer gets the same arrays and the same weights, and has to give
the same losses, actions or sets of rows before anything is timed.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from papyrax.methods.control.darp import learner, replay, retrieval
from papyrax.methods.control.darp.config import Config as DarpConfig
from papyrax.methods.control.darp.demos import Demos, fit_scalers, positions
from papyrax.train.bench import Bench, BenchTable
from papyrax.train.data.catalogue import need
from papyrax.train.recipes.control.darp_arena import darp_policy, demonstrations_of, replayed

_NOISE = 0.05
"""Standard deviation, in standardised units, by which histories and further rows are moved off the expert's rows."""


def bench(config: Any, bench: Bench) -> list[BenchTable]:
    """Six tables: training, acting (two peers), retrieve-and-play, retrieval (two peers).

    Raises:
      ValueError: a policy other than the mean of neighbours with a point for an action, which the peers have not.
      MissingData: the demonstrations are not there.
    """
    cfg = config.darp
    plain = DarpConfig()
    for name in ("aggregator", "head", "difference", "neighbour_action", "neighbours", "metric", "normalise"):
        if getattr(cfg, name) != getattr(plain, name):
            raise ValueError(
                f"darp.{name} is {getattr(cfg, name)!r}, but the peers have {getattr(plain, name)!r} alone."
            )
    if cfg.weights or cfg.rotation:
        raise ValueError("darp.weights and darp.rotation must be empty, the peers have neither.")
    demos = demonstrations_of(need("darp"), config.task, config.rows)
    small = demos.obs.shape[0] < 500
    torch = bench.process("torch", "darp_torch")
    kept = cfg.kept(demos.obs.shape[0])
    neighbours = sorted({max(1, kept // 4), max(1, kept // 2), kept})
    episodes, steps = ((1, 2, 4), 4) if small else ((1, 10, 30), 50)
    rows = (16, 32, 64) if small else (1000, 8000, 64000)
    scene = _Scene(demos, cfg, steps)
    return [
        _training(bench, torch, demos, cfg, neighbours),
        *_acting(bench, torch, scene, episodes),
        _playing(bench, scene, episodes),
        *_retrieval(bench, demos, cfg, rows, episodes[-1]),
    ]


def _training(bench: Bench, torch: Any, demos: Demos, cfg: DarpConfig, sizes: list[int]) -> BenchTable:
    """An epoch of training from the same weights, over numbers of neighbours."""
    n = demos.obs.shape[0]
    steps = learner.epoch_steps(n, cfg.batch)
    batches = np.stack([learner.batch_rows(0, step, n, cfg.batch) for step in range(steps)])

    @functools.cache
    def begin(size: int) -> tuple[DarpConfig, learner.Memory, learner.State]:
        now = dataclasses.replace(cfg, k=math.ceil(size / cfg.ratio))
        return now, learner.prepare(demos, now), learner.init(jax.random.key(0), demos, now)

    def ours(size: int) -> Callable[[], Any]:
        now, memory, state = begin(size)
        given = jnp.asarray(batches)

        def epoch(state, memory):
            return jax.lax.scan(lambda s, rows: learner.update(s, rows, now, frozen=memory), state, given)

        compiled = jax.jit(epoch, donate_argnums=0).lower(state, memory).compile()
        held = [learner.init(jax.random.key(0), demos, now)]  # the peer reads the other one

        def call():
            held[0], metrics = compiled(held[0], memory)
            return metrics["loss"]

        return call

    def inputs(size: int) -> dict[str, Any]:
        now, memory, state = begin(size)
        return {
            **_weights(state.params),
            "z": memory.scalers.obs(demos.obs),
            "u": memory.scalers.act(demos.act),
            "cache": memory.cache,
            "batches": batches,
            "learning_rate": now.learning_rate,
            "weight_decay": now.weight_decay,
            "clip_norm": now.clip_norm,
        }

    table = bench.compare(
        "DARP, training",
        ours,
        torch.on(inputs),
        sizes,
        repeats=5,
        same=lambda a, b: np.testing.assert_allclose(a, b["loss"], rtol=2e-3, atol=1e-4),
        peer_name="torch",
        unit="neighbours",
        note=(
            f"{steps} steps a call, an epoch of {n} expert rows in batches of {cfg.batch}, {cfg.depth} layers of "
            f"{cfg.width}, states of {demos.obs.shape[1]}, eager torch with its fused AdamW; every loss of the first "
            "epoch equal to 0.2 %"
        ),
    )
    return _rates(table, [steps] * len(sizes), "steps/s")


class _Scene:
    """A policy trained for one epoch, and histories of episodes that move beside the expert's rows."""

    def __init__(self, demos: Demos, cfg: DarpConfig, steps: int):
        self.demos, self.cfg, self.steps = demos, cfg, steps
        self.memory = learner.prepare(demos, cfg)
        n = demos.obs.shape[0]
        state = learner.init(jax.random.key(0), demos, cfg)
        update = jax.jit(lambda s, rows, m: learner.update(s, rows, cfg, frozen=m))
        for step in range(learner.epoch_steps(n, cfg.batch)):
            state, _ = update(state, learner.batch_rows(0, step, n, cfg.batch), self.memory)
        self.params = state.params
        scalers = self.memory.scalers
        self.z, self.u = np.asarray(scalers.obs(demos.obs)), np.asarray(scalers.act(demos.act))
        self.place = np.asarray(positions(demos.start, n))

    def histories(self, episodes: int) -> tuple[np.ndarray, np.ndarray]:
        """(states [steps, episodes, lookback, o], how many of them are real), as `host_rollout` would hand them over."""
        rng, obs = np.random.default_rng(0), np.asarray(self.demos.obs)
        back, n = self.cfg.lookback, len(obs)
        begin = rng.integers(0, max(1, n - self.steps), episodes)
        path = obs[(begin[:, None] + np.arange(self.steps)) % n]
        path = path + _NOISE * np.asarray(self.memory.scalers.obs_std) * rng.standard_normal(path.shape)
        padded = np.pad(path, ((0, 0), (back - 1, 0), (0, 0))).astype(np.float32)
        hist = np.stack([padded[:, t : t + back] for t in range(self.steps)])
        valid = np.minimum(np.arange(self.steps) + 1, back)
        return hist, np.repeat(valid[:, None], episodes, axis=1).astype(np.int32)

    def rolled(
        self, act: Callable[[np.ndarray, np.ndarray, int], np.ndarray], episodes: int
    ) -> Callable[[], np.ndarray]:
        """A policy called once a step, histories in and actions out on the host."""
        hist, valid = self.histories(episodes)
        return lambda: np.stack([act(h, v, t) for t, (h, v) in enumerate(zip(hist, valid))])


def _acting(bench: Bench, torch: Any, scene: _Scene, sizes: tuple[int, ...]) -> list[BenchTable]:
    """Retrieval, re-ranking and network, one call a step for all running episodes."""
    cfg, demos, scalers = scene.cfg, scene.demos, scene.memory.scalers
    n = demos.obs.shape[0]
    k, keep = cfg.candidates(n), cfg.kept(n)
    weights = _weights(scene.params)
    named = {name: np.asarray(getattr(scalers, name)) for name in ("obs_mean", "obs_std", "act_mean", "act_std")}

    def ours(size: int) -> Callable[[], Any]:
        return scene.rolled(darp_policy(scene.params, scene.memory, cfg), size)

    def inputs(size: int) -> dict[str, Any]:
        hist, valid = scene.histories(size)
        arrays = {"z": scene.z, "u": scene.u, "place": scene.place, "hist": hist, "valid": valid}
        scaling = {"mean": named["obs_mean"], "std": named["obs_std"], "k": k, "keep": keep, "decay": cfg.decay}
        return {**weights, **arrays, **scaling, "act_mean": named["act_mean"], "act_std": named["act_std"]}

    def learn(size: int) -> Callable[[], Any]:
        search = _searcher(scene.z, k, size)
        act = _numpy_policy(search, scene.z, scene.u, scene.place, named, weights, k, keep, cfg)
        return scene.rolled(act, size)

    def same(a, b):
        np.testing.assert_allclose(a, b["action"] if isinstance(b, dict) else b, atol=1e-4)

    note = (
        f"{scene.steps} steps a call, {n} expert rows, {k} candidates scored along {cfg.lookback} steps, {keep} kept, "
        f"{cfg.depth} layers of {cfg.width}; histories are expert rows moved by {_NOISE} standard deviations; actions "
        "equal to 1e-4"
    )
    peers: list[tuple[str, str, Any, str]] = [
        ("DARP, acting", "torch", torch.on(inputs), ""),
        ("DARP, acting (search by scikit-learn)", "scikit-learn", learn, "; re-ranking and network in NumPy"),
    ]
    tables = []
    for name, peer_name, peer, more in peers:
        table = bench.compare(
            name, ours, peer, sizes, same=same, peer_name=peer_name, unit="episodes", note=note + more
        )
        tables.append(_rates(table, [size * scene.steps for size in sizes], "actions/s"))
    return tables


def _playing(bench: Bench, scene: _Scene, sizes: tuple[int, ...]) -> BenchTable:
    """Retrieve-and-play beside the regressor that does the same."""
    from sklearn.neighbors import KNeighborsRegressor

    scalers = scene.memory.scalers
    mean, std = np.asarray(scalers.obs_mean), np.asarray(scalers.obs_std)

    def ours(size: int) -> Callable[[], Any]:
        return scene.rolled(replayed(replay.retrieve_and_play, scene.demos, scene.cfg), size)

    def peer(size: int) -> Callable[[], Any]:
        found = KNeighborsRegressor(n_neighbors=1).fit(scene.z, np.asarray(scene.demos.act))
        return scene.rolled(lambda hist, valid, step: found.predict((hist[:, -1] - mean) / std), size)

    table = bench.compare(
        "Retrieve and play",
        ours,
        peer,
        sizes,
        same=lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4),
        peer_name="KNeighborsRegressor",
        unit="episodes",
        note=f"{scene.steps} steps a call, {len(scene.z)} expert rows, actions equal to 1e-4",
    )
    return _rates(table, [size * scene.steps for size in sizes], "actions/s")


def _retrieval(bench: Bench, demos: Demos, cfg: DarpConfig, sizes: tuple[int, ...], queries: int) -> list[BenchTable]:
    """The k nearest expert rows of some queries, over numbers of rows."""
    scalers = fit_scalers(demos)
    real = np.asarray(scalers.obs(demos.obs))
    k = min(cfg.k, sizes[0] - 1)
    rng = np.random.default_rng(1)
    extended = real[np.arange(sizes[-1]) % len(real)]
    # copies of a row are moved apart; the first round is the expert's own
    moved = 0.3 * rng.standard_normal(extended.shape) * (np.arange(sizes[-1]) >= len(real))[:, None]
    extended = (extended + moved).astype(np.float32)
    asked = real[rng.integers(0, len(real), queries)]
    asked = (asked + _NOISE * rng.standard_normal(asked.shape)).astype(np.float32)

    find = jax.jit(lambda q, x: retrieval.candidate_set(_space(q), _space(x), k, retrieval.Metric()))

    def ours(size: int) -> Callable[[], Any]:
        rows = jnp.asarray(extended[:size])
        return lambda: np.asarray(find(asked, rows))

    def learn(size: int) -> Callable[[], Any]:
        search = _searcher(extended[:size], k, queries)
        return lambda: search(asked)

    def brute(size: int) -> Callable[[], Any]:
        rows = extended[:size]
        squares = np.sum(rows * rows, axis=1)

        def call():
            far = squares - 2 * (asked @ rows.T)
            return np.argpartition(far, k - 1, axis=1)[:, :k]

        return call

    def same(a, b):
        np.testing.assert_array_equal(np.sort(a, axis=1), np.sort(b, axis=1))

    note = (
        f"{k} nearest rows of {queries} queries, {real.shape[1]} features, equal sets; beyond the {len(real)} expert rows "
        "further ones are these with noise of 0.3 standard deviations"
    )
    return [
        bench.compare(name, ours, peer, sizes, same=same, peer_name=peer_name, unit="rows", note=note)
        for name, peer_name, peer in (
            ("Retrieval beside scikit-learn", "scikit-learn", learn),
            ("Retrieval beside NumPy", "NumPy", brute),
        )
    ]


def _space(x: Any) -> retrieval.Space:
    return retrieval.Space(x, x[:, :0])


def _searcher(rows: np.ndarray, k: int, queries: int) -> Callable[[np.ndarray], np.ndarray]:
    """scikit-learn's search for the k nearest rows other than the query itself, by the quicker of its two methods."""
    from sklearn.neighbors import NearestNeighbors

    probe = rows[:queries] + np.float32(1e-3)
    took = {}
    for algorithm in ("kd_tree", "brute"):
        fitted = NearestNeighbors(n_neighbors=min(k + 1, len(rows)), algorithm=algorithm).fit(rows)
        fitted.kneighbors(probe)
        begun = time.perf_counter()
        for _ in range(3):
            fitted.kneighbors(probe)
        took[time.perf_counter() - begun] = fitted
    fitted = took[min(took)]

    def search(query):
        far, near = fitted.kneighbors(query)
        # a row at distance 0 comes first and is left out
        return np.where(far[:, :1] < 1e-6, near[:, 1:], near[:, :-1])[:, :k]

    return search


def _numpy_policy(
    search: Callable[[np.ndarray], np.ndarray],
    z: np.ndarray,
    u: np.ndarray,
    place: np.ndarray,
    scaling: dict[str, np.ndarray],
    weights: dict[str, Any],
    k: int,
    keep: int,
    cfg: DarpConfig,
) -> Callable[[np.ndarray, np.ndarray, int], np.ndarray]:
    """The policy as NumPy users write it, whole batches at a time."""
    back = np.arange(cfg.lookback)
    decay = ((back + 1) ** cfg.decay).astype(np.float32)
    layers = int(weights["layers"])
    w = {name: np.asarray(value) for name, value in weights.items()}

    def act(hist, valid, step):
        past = ((hist - scaling["obs_mean"]) / scaling["obs_std"])[:, ::-1]
        rows = search(past[:, 0])
        terms = np.minimum(place[rows] + 1, valid[:, None])
        gap = z[np.maximum(rows[..., None] - back, 0)] - past[:, None]
        score = np.where(back < terms[..., None], decay * np.sqrt(np.einsum("bklo,bklo->bkl", gap, gap)), 0).sum(-1)
        if keep < k:
            rows = np.take_along_axis(rows, np.argpartition(score, keep - 1, axis=1)[:, :keep], axis=1)
        near = z[rows]
        h = np.concatenate([near, u[rows], (near - past[:, :1]) * np.float32(math.sqrt(0.5))], axis=-1)
        h = h.reshape(-1, h.shape[-1])
        for i in range(layers - 1):
            h = h @ w[f"w{i}"] + w[f"b{i}"]
            h -= h.mean(1, keepdims=True)
            h *= 1 / np.sqrt(np.einsum("rw,rw->r", h, h) / h.shape[1] + 1e-5)[:, None]
            h *= w[f"scale{i}"]
            h += w[f"bias{i}"]
            np.maximum(h, 0, out=h)
        out = (h @ w[f"w{layers - 1}"] + w[f"b{layers - 1}"]).reshape(*rows.shape, -1).mean(1)
        return out * scaling["act_std"] + scaling["act_mean"]

    return act


def _weights(params: Any) -> dict[str, Any]:
    """The per-neighbour network as arrays with names."""
    named = {f"{name}{i}": np.asarray(value) for i, layer in enumerate(params["f"]) for name, value in layer.items()}
    return named | {"layers": len(params["f"])}


def _rates(table: BenchTable, work: list[int], unit: str) -> BenchTable:
    """The table with both rates beside its seconds."""
    ours, peer = (column.removesuffix("(s)") + f"({unit})" for column in table.columns[1:3])
    rows = [[*row, n / row[1], n / row[2]] for row, n in zip(table.rows, work)]
    return dataclasses.replace(table, columns=(*table.columns, ours, peer), rows=rows)
