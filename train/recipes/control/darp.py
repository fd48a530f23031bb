"""DARP (arXiv 2606.09758) on the paper's Hopper demonstrations, in closed loop beside cloning and the other baselines.

Training seeds decide the return more than anything else, so no number here is of one seed: means, spreads, and one selected policy a method,
chosen for every method by the same rule (return on rollout seeds 1000…, among seeds and checkpoints) and scored on seeds 0….
The paper's hyperparameters were themselves chosen by the return on the test episodes, which the report repeats.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from papyrax.methods.control.darp import bc, learner, replay, retrieval
from papyrax.methods.control.darp.config import BC_TASKS, TASKS, BCConfig
from papyrax.methods.control.darp.config import Config as DarpConfig
from papyrax.methods.control.darp.demos import Demos, Scalers, make_demos
from papyrax.train.compile import Target
from papyrax.train.data import demonstrations
from papyrax.train.recipes.control import darp_drift, darp_extra, darp_figures
from papyrax.train.recipes.control.darp_arena import (
    FILES,
    Arena,
    Policy,
    Trained,
    bc_policy,
    best,
    darp_policy,
    replayed,
)
from papyrax.train.recipes.control.darp_bench import bench
from papyrax.train.report import Number, Report, Table
from papyrax.train.run import Run

__all__ = [
    "DATA",
    "PRESETS",
    "Config",
    "bench",
    "check",
    "compile_targets",
    "held_out_smoothing",
    "mesh_shape",
    "run",
]

DATA: tuple[str, ...] = ("darp",)

ABLATIONS: dict[str, dict[str, Any]] = {
    "query": {"difference": "query"},
    "random": {"neighbours": "random"},
    "no_action": {"neighbour_action": False},
    "norm": {"difference": "norm"},
    "ordered": {"aggregator": "ordered"},
}
"""What each ablation changes in the policy."""

PAPER = {
    "hopper": (3545.6, 2313.7),
    "walker": (4894.0, 2658.4),
    "halfcheetah": (5515.4, 1063.2),
    "ant": (4383.3, 2376.2),
}
"""The paper's returns of DARP and of cloning, means of 100 trials."""


@dataclasses.dataclass(frozen=True)
class Config:
    """DARP, its baselines and ablations on one task."""

    seed: int = 0
    task: str = "hopper"
    rows: int = 0
    """Use the first so many expert rows; 0 uses all."""
    darp: DarpConfig = TASKS["hopper"]
    bc: BCConfig = BC_TASKS["hopper"]
    darp_seeds: int = 5
    bc_seeds: int = 5
    ablations: tuple[str, ...] = ("query", "random")
    ablation_seeds: int = 2
    mril: tuple[float, ...] = ()
    """Weights of the smoothness term; the one with the least loss on held-out rows is rolled out."""
    ensemble: int = 0
    """Members of the cloning ensemble; 0 for none."""
    selections: int = 6
    """Checkpoints of a training seed that are rolled out for selection."""
    selection_rollouts: int = 10
    rollouts: int = 30
    max_steps: int = 1000
    swingup: darp_extra.SwingUp | None = None
    push_t: darp_extra.PushT | None = None


PRESETS: dict[str, Config] = {
    "smoke": Config(
        rows=64,
        darp=dataclasses.replace(TASKS["hopper"], width=16, depth=2, k=12, lookback=3, epochs=4),
        bc=dataclasses.replace(BC_TASKS["hopper"], width=16, depth=2, epochs=4),
        darp_seeds=2,
        bc_seeds=2,
        ablations=("query",),
        ablation_seeds=1,
        selections=2,
        selection_rollouts=2,
        rollouts=2,
        max_steps=12,
    ),
    "cpu": Config(darp_seeds=1, bc_seeds=3, ablations=("query",), ablation_seeds=1, selections=4),
    "study": Config(
        mril=(0.1, 1.0, 10.0),
        ensemble=10,
        swingup=darp_extra.SwingUp(),
        push_t=darp_extra.PushT(),
    ),
    "paper": Config(
        task="ant",
        darp=TASKS["ant"],
        bc=dataclasses.replace(BC_TASKS["ant"], epochs=294),
        darp_seeds=10,
        bc_seeds=10,
        ablations=tuple(ABLATIONS),
        ablation_seeds=10,
        mril=(0.1, 1.0, 10.0),
        ensemble=10,
        selections=14,
        rollouts=100,
    ),
}


def check(config: Config) -> None:
    """Raises ValueError for an unknown task or ablation."""
    if config.task not in FILES:
        raise ValueError(f"task is {config.task!r}, wanted one of {', '.join(FILES)}")
    for name in config.ablations:
        if name not in ABLATIONS:
            raise ValueError(f"ablations holds {name!r}, wanted names of {', '.join(ABLATIONS)}")


_ensemble_act = jax.jit(bc.act_ensemble)


def _darp(
    run: Run, arena: Arena, name: str, demos: Demos, cfg: DarpConfig, seeds: int
) -> tuple[list[Trained], learner.Memory]:
    memory = learner.prepare(demos, cfg, jax.random.fold_in(run.key, 7))
    out = []
    for seed in range(seeds):
        state = learner.init(jax.random.fold_in(run.key, 100 + seed), demos, cfg)
        act_of = functools.partial(darp_policy, memory=memory, cfg=cfg)
        out.append(
            arena.train(
                f"{name}/{seed}", learner.update, state, cfg, memory, run.config.seed + seed, act_of, cfg.lookback
            )
        )
    return out, memory


def _bc(
    run: Run, arena: Arena, name: str, demos: Demos, cfg: BCConfig, seeds: int
) -> tuple[list[Trained], bc.BCMemory]:
    memory = bc.prepare(demos, cfg)
    out = []
    for seed in range(seeds):
        state = bc.init(jax.random.fold_in(run.key, 200 + seed), demos, cfg)
        act_of = functools.partial(bc_policy, scalers=memory.scalers)
        out.append(arena.train(f"{name}/{seed}", bc.update, state, cfg, memory, run.config.seed + seed, act_of, 1))
    return out, memory


def held_out_smoothing(run: Run, demos: Demos, cfg: BCConfig, weights: tuple[float, ...]) -> float:
    """The smoothness weight with the least error on every tenth row, trained on the others (never on returns)."""

    def sweep():
        n = demos.obs.shape[0]
        held = np.arange(n) % 10 == 9
        train = make_demos(demos.obs[~held], demos.act[~held], [0])
        errors = []
        for weight in weights:
            setting = dataclasses.replace(cfg, smoothing=weight, epochs=max(1, cfg.epochs // 4))
            memory = bc.prepare(train, setting)
            state = bc.init(jax.random.fold_in(run.key, 300), train, setting)
            rows = np.stack(
                [
                    learner.batch_rows(0, i, int((~held).sum()), setting.batch)
                    for i in range(setting.epochs * learner.epoch_steps(int((~held).sum()), setting.batch))
                ]
            )
            state, _ = jax.jit(
                lambda s, r, m=memory, c=setting: jax.lax.scan(lambda s, b: bc.update(s, b, c, frozen=m), s, r)
            )(state, rows)
            out = bc.act(state.params, memory.scalers, demos.obs[held])
            errors.append(float(jnp.mean(jnp.square(memory.scalers.act(out) - memory.scalers.act(demos.act[held])))))
        return errors

    errors = run.once("mril/sweep", sweep)
    return weights[int(np.argmin(errors))]


def _row(name: str, arms: list[Trained]) -> list[Any]:
    last = np.asarray([t.last.mean() for t in arms])
    chosen = best(arms)
    return [
        name,
        len(arms),
        float(last.mean()),
        float(last.std()),
        float(last.max()),
        float(chosen.selected.mean()),
        float(1.96 * chosen.selected.std() / np.sqrt(len(chosen.selected))),
        chosen.epoch,
        float(np.mean([t.loss for t in arms])),
    ]


def _fixed(name: str, returns: np.ndarray) -> list[Any]:
    return [
        name,
        None,
        float(returns.mean()),
        None,
        None,
        float(returns.mean()),
        float(1.96 * returns.std() / np.sqrt(len(returns))),
        None,
        None,
    ]


def run(config: Config, run: Run) -> Report:
    """Trains and rolls out every method, then compares."""
    file, env = FILES[config.task]
    raw = demonstrations.load(run.data("darp") / file)
    demos = make_demos(*raw)
    if config.rows:
        demos = Demos(demos.obs[: config.rows], demos.act[: config.rows], demos.start[:1])
    arena = Arena(run, config)
    ours, memory = _darp(run, arena, "darp", demos, config.darp, config.darp_seeds)
    clones, bc_memory = _bc(run, arena, "bc", demos, config.bc, config.bc_seeds)
    methods: dict[str, list[Trained]] = {"DARP": ours, "BC": clones}
    for name in config.ablations:
        changed = dataclasses.replace(config.darp, **ABLATIONS[name])
        methods[f"DARP, {name}"], _ = _darp(run, arena, f"ablation/{name}", demos, changed, config.ablation_seeds)
    if config.mril:
        weight = held_out_smoothing(run, demos, config.bc, config.mril)
        setting = dataclasses.replace(config.bc, smoothing=weight)
        methods[f"MRIL, lambda {weight:g}"], _ = _bc(run, arena, "mril", demos, setting, config.bc_seeds)

    fixed = {
        "retrieve and play": arena.score("replay", replayed(replay.retrieve_and_play, demos, config.darp), 1),
        "nearest sequence": arena.score(
            "sequence", replayed(replay.nearest_sequence, demos, config.darp), config.darp.lookback
        ),
        "locally weighted regression": arena.score(
            "lwr", replayed(replay.lwr, demos, config.darp), config.darp.lookback
        ),
    }
    if config.ensemble:
        fixed[f"BC ensemble of {config.ensemble}"] = arena.score("ensemble", _ensemble(run, demos, config), 1)

    rows = [_row(name, arms) for name, arms in methods.items()] + [_fixed(name, r) for name, r in fixed.items()]
    columns = [
        "method",
        "seeds",
        "mean of seeds",
        "std of seeds",
        "best seed",
        "selected",
        "± 95 %",
        "selected epoch",
        "training loss",
    ]
    tables = [
        Table(
            f"Return on {env}, {config.rollouts} rollouts a policy",
            columns,
            rows,
            note=(
                f"Seeds are scored with their last weights. Selected: the seed and checkpoint with the best return on {config.selection_rollouts} "
                f"other rollouts, scored on rollout seeds 0 to {config.rollouts - 1}; the same rule for every method. The policy's hyperparameters are "
                "the paper's, which its authors chose by the return on the test episodes."
            ),
        )
    ]
    mean = {name: float(np.mean([t.last.mean() for t in arms])) for name, arms in methods.items()}
    selected = {name: float(best(arms).selected.mean()) for name, arms in methods.items()}
    full = config.task == "hopper" and not config.rows
    many = full and config.darp_seeds >= 5
    paper = PAPER[config.task]
    numbers = [
        Number(
            "return, mean of training seeds",
            mean["DARP"],
            mean["BC"],
            paper[0],
            spread=float(np.std([t.last.mean() for t in ours])) if len(ours) > 1 else None,
            target="> baseline",
            met=mean["DARP"] > mean["BC"],
        ),
        Number("return, selected policy", selected["DARP"], selected["BC"], paper[0], target=">= 3000" if full else ""),
        Number("return of the selected clone", selected["BC"], None, paper[1], target=">= 2000" if full else ""),
        Number("selected DARP above selected BC", selected["DARP"] - selected["BC"], target=">= 500" if full else ""),
    ]
    for name, returns in fixed.items():
        if not name.startswith("BC"):
            numbers.append(
                Number(
                    f"return of {name}",
                    float(returns.mean()),
                    selected["BC"],
                    target="< baseline",
                    met=float(returns.mean()) < selected["BC"],
                )
            )
    for name in config.ablations:
        value = mean[f"DARP, {name}"]
        must = name in ("query", "random")
        numbers.append(
            Number(
                f"ablation {name}: return, mean of seeds",
                value,
                mean["DARP"],
                target="< baseline" if must else "",
                met=value < mean["DARP"] if must else None,
                note="baseline: DARP",
            )
        )

    best_clone = best(clones)
    weakest = min(clones, key=lambda t: t.last.mean())
    drifted = darp_drift.drift(run, arena, weakest, bc_memory.scalers, memory, config.darp, config)
    if drifted["rows"]:
        hits = [bool(r[3]) and bool(r[4]) for r in drifted["rows"]]
        numbers.append(
            Number(
                "failing episodes of the clone where the state is out and the differences are in",
                float(np.mean(hits)),
                target=">= 0.5",
                note=f"{len(hits)} failing episodes of the weakest clone",
            )
        )
        tables.append(
            Table(
                "Where the clone first fails",
                ["rollout", "length", "first failing step", "state out", "differences in"],
                drifted["rows"],
            )
        )
    darp_figures.draw(run, methods, fixed, drifted, env)
    darp_figures.film(run, arena, ours, memory, config)
    notes = [
        f"Selected clone: epoch {best_clone.epoch}. Low training loss does not mean high return: see both columns."
    ]
    if config.swingup is not None:
        more, table = darp_extra.swingup(run, config.swingup)
        numbers += more
        tables.append(table)
    if config.push_t is not None:
        more, table = darp_extra.push_t(run, config.push_t)
        numbers += more
        tables.append(table)
    missed = [n.name for n in numbers if n.target and n.reached is False]
    ahead = mean["DARP"] > mean["BC"]
    verdict = (
        f"On {env} DARP returns {mean['DARP']:.0f} and BC {mean['BC']:.0f} (means over {config.darp_seeds} and {config.bc_seeds} training seeds); "
        f"selected by the same rule, {selected['DARP']:.0f} and {selected['BC']:.0f}."
    )
    if missed:
        verdict += f" Missed: {'; '.join(missed)}."
    if not many:
        verdict += " Five training seeds a method and the other baselines are in the study preset."
    return Report(
        claim="Acting on the differences to retrieved expert states keeps an imitation policy where it has data, so it drifts less than cloning.",
        shown=bool(ahead and selected["DARP"] > selected["BC"]),
        verdict=verdict,
        numbers=numbers,
        tables=tables,
        notes=notes,
    )


def _ensemble(run: Run, demos: Demos, config: Config) -> Policy:
    """Mean action of clones that differ in their seeds, trained together."""
    memory = bc.prepare(demos, config.bc)
    n, cfg = demos.obs.shape[0], config.bc
    keys = jax.random.split(jax.random.fold_in(run.key, 400), config.ensemble)
    states = jax.vmap(lambda k: bc.init(k, demos, cfg))(keys)
    per_epoch = learner.epoch_steps(n, cfg.batch)

    def rows(step):
        return np.stack([learner.batch_rows(1000 + i, step, n, cfg.batch) for i in range(config.ensemble)])

    def update(states, batch, cfg, *, frozen):
        return jax.vmap(lambda s, b: bc.update(s, b, cfg, frozen=frozen))(states, batch)

    fit = run.fit(
        update,
        states,
        rows,
        name="ensemble",
        steps=cfg.epochs * per_epoch,
        config=cfg,
        frozen=memory,
        scan=per_epoch,
        log_every=per_epoch,
    )
    return lambda hist, valid, step: np.asarray(_ensemble_act(fit.state.params, memory.scalers, hist[:, -1]))


def mesh_shape(config: Config, devices: int) -> dict[str, int]:
    """Rows of a batch, and expert rows in retrieval, over all devices."""
    return {"data": devices}


def compile_targets(config: Config, mesh: jax.sharding.Mesh) -> list[Target]:
    """A training step of the preset's policy with its batch and its neighbour cache over the devices, and retrieval with the expert rows sharded;
    8,192 expert rows a device."""
    devices = mesh.shape["data"]
    per_device, o, a = 8192, 27, 8
    n = devices * per_device
    cfg = dataclasses.replace(config.darp, batch=devices * max(1, config.darp.batch // devices))
    whole, spread = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("data"))

    def shape(*size, dtype=jnp.float32, sharding=whole):
        return jax.ShapeDtypeStruct(size, dtype, sharding=sharding)

    demos = Demos(shape(n, o), shape(n, a), shape(1, dtype=jnp.int32))
    scalers = Scalers(shape(o), shape(o), shape(a), shape(a))
    memory = learner.Memory(demos, scalers, shape(n, cfg.kept(n), dtype=jnp.int32, sharding=spread))
    state = jax.eval_shape(lambda k, d: learner.init(k, d, cfg), jax.random.key(0), demos)
    state = jax.tree.map(lambda x: shape(*x.shape, dtype=x.dtype), state)
    batch = shape(cfg.batch, dtype=jnp.int32, sharding=spread)
    rows = PartitionSpec("data")
    search = jax.shard_map(
        lambda d, s, h, v: retrieval.retrieve(d, s, h, v, axis_name="data", **retrieval.search_of(cfg)),
        mesh=mesh,
        in_specs=(Demos(rows, rows, PartitionSpec()), PartitionSpec(), PartitionSpec(), PartitionSpec()),
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    stored = Demos(shape(n, o, sharding=spread), shape(n, a, sharding=spread), shape(1, dtype=jnp.int32))
    hist, valid = shape(64, cfg.lookback, o), shape(64, dtype=jnp.int32)
    return [
        Target(
            f"training step ({n:,} expert rows, batch {cfg.batch})",
            lambda s, b, m: learner.update(s, b, cfg, frozen=m),
            (state, batch, memory),
            donate=(0,),
        ),
        Target(
            f"retrieval ({n:,} expert rows over {devices} devices, 64 queries)", search, (stored, scalers, hist, valid)
        ),
    ]
