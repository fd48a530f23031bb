"""DARP (arXiv 2606.09758) on the paper's Hopper demonstrations, in closed loop beside cloning and the other baselines.

Training seeds decide the return more than anything else: `study` and `paper` train five and more a method and report means, spreads and one
selected policy a method, chosen for every method by the same rule (return on rollout seeds 1000…, among seeds and checkpoints) and scored on
seeds 0…. `smoke` and `cpu` train DARP once and claim nothing by it. The paper's hyperparameters were themselves chosen by the return on the test
episodes, which the report repeats. A task comes with its settings: `study` is Hopper, `study-TASK` the others.
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
from papyrax.train.recipes.control import darp_drift, darp_extra, darp_figures, darp_report
from papyrax.train.recipes.control.darp_arena import (
    FILES,
    Arena,
    Policy,
    Trained,
    bc_policy,
    darp_policy,
    demonstrations_of,
    replayed,
)
from papyrax.train.recipes.control.darp_bench import bench
from papyrax.train.report import Report
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


@dataclasses.dataclass(frozen=True)
class Config:
    """DARP, its baselines and ablations on one task."""

    seed: int = 0
    task: str = "hopper"
    """hopper, walker, halfcheetah or ant; `darp` and `bc` are the settings of this task (presets study-TASK)."""
    rows: int = 0
    """Use the first so many expert rows; 0 uses all."""
    darp: DarpConfig = TASKS["hopper"]
    bc: BCConfig = BC_TASKS["hopper"]
    darp_seeds: int = 5
    bc_seeds: int = 5
    bc_long: bool = False
    """Also train clones for as many epochs as DARP, where the paper's clones have fewer."""
    ablations: tuple[str, ...] = ("query", "random")
    ablation_seeds: int = 2
    mril: tuple[float, ...] = ()
    """Weights of the smoothness term; the one with the least loss on held-out rows is rolled out."""
    ensemble: int = 0
    """Members of the cloning ensemble; 0 for none."""
    checkpoint_epochs: int = 20
    """Epochs between the checkpoints of every training, each rolled out for selection; the last epoch is one more."""
    selection_rollouts: int = 10
    rollouts: int = 30
    max_steps: int = 1000
    swingup: darp_extra.SwingUp = dataclasses.field(default_factory=lambda: darp_extra.SwingUp(seeds=0))
    push_t: darp_extra.PushT = dataclasses.field(default_factory=lambda: darp_extra.PushT(trajectories=0))


_STUDY = Config(bc_long=True, mril=(0.1, 1.0, 10.0), ensemble=10)

PRESETS: dict[str, Config] = {
    "smoke": Config(
        rows=64,
        darp=dataclasses.replace(TASKS["hopper"], width=16, depth=2, k=12, lookback=3, epochs=4),
        bc=dataclasses.replace(BC_TASKS["hopper"], width=16, depth=2, epochs=4),
        darp_seeds=2,
        bc_seeds=2,
        ablations=("query",),
        ablation_seeds=1,
        checkpoint_epochs=2,
        selection_rollouts=2,
        rollouts=2,
        max_steps=12,
    ),
    "cpu": Config(darp_seeds=1, bc_seeds=3, ablations=("query",), ablation_seeds=1, checkpoint_epochs=60),
    "study": dataclasses.replace(_STUDY, swingup=darp_extra.SwingUp(), push_t=darp_extra.PushT()),
    **{
        f"study-{task}": dataclasses.replace(_STUDY, task=task, darp=TASKS[task], bc=BC_TASKS[task])
        for task in ("walker", "halfcheetah", "ant")
    },
    "paper": dataclasses.replace(
        _STUDY,
        task="ant",
        darp=TASKS["ant"],
        bc=BC_TASKS["ant"],
        darp_seeds=10,
        bc_seeds=10,
        ablations=tuple(ABLATIONS),
        ablation_seeds=10,
        rollouts=100,
    ),
}


def check(config: Config) -> None:
    """Raises ValueError for an unknown task or ablation, settings of another task, or counts below 1."""
    if config.task not in FILES:
        raise ValueError(f"task is {config.task!r}, wanted one of {', '.join(FILES)}")
    for name in config.ablations:
        if name not in ABLATIONS:
            raise ValueError(f"ablations holds {name!r}, wanted names of {', '.join(ABLATIONS)}")
    for name in ("darp_seeds", "bc_seeds", "checkpoint_epochs", "selection_rollouts", "rollouts", "max_steps"):
        if getattr(config, name) < 1:
            raise ValueError(f"{name} is {getattr(config, name)}, wanted at least 1")
    if config.ablations and config.ablation_seeds < 1:
        raise ValueError(f"ablation_seeds is {config.ablation_seeds}, wanted at least 1 with ablations")
    for part, table, marks in (
        ("darp", TASKS, ("decay", "ratio")),
        ("bc", BC_TASKS, ("learning_rate", "weight_decay")),
    ):
        # these two values together are a task's own (or shared by several tasks), so a task without its settings shows
        given = [getattr(getattr(config, part), mark) for mark in marks]
        owners = [task for task, row in table.items() if [getattr(row, mark) for mark in marks] == given]
        if owners and config.task not in owners:
            raise ValueError(
                f"task is {config.task!r} but {part} holds the {' and '.join(marks)} of {' and '.join(owners)}; "
                f"take the preset {'study' if config.task == 'hopper' else 'study-' + config.task} or set {part}'s fields"
            )
    if config.swingup.seeds and config.swingup.env != "cartpole_swingup":
        raise ValueError(
            f"swingup.env is {config.swingup.env!r}, wanted cartpole_swingup, whose start states can be moved"
        )


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
            arena.train(f"{name}/{seed}", learner, state, cfg, memory, run.config.seed + seed, act_of, cfg.lookback)
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
        out.append(arena.train(f"{name}/{seed}", bc, state, cfg, memory, run.config.seed + seed, act_of, 1))
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


def run(config: Config, run: Run) -> Report:
    """Trains and rolls out every method, then compares."""
    demos = demonstrations_of(run.data("darp"), config.task, config.rows)
    arena = Arena(run, config)
    ours, memory = _darp(run, arena, "darp", demos, config.darp, config.darp_seeds)
    clones, bc_memory = _bc(run, arena, "bc", demos, config.bc, config.bc_seeds)
    methods: dict[str, list[Trained]] = {"DARP": ours, "BC": clones}
    if config.bc_long and config.bc.epochs < config.darp.epochs:
        longer = dataclasses.replace(config.bc, epochs=config.darp.epochs)
        methods["BC, epochs of DARP"], _ = _bc(run, arena, "bc_long", demos, longer, config.bc_seeds)
    for name in config.ablations:
        changed = dataclasses.replace(config.darp, **ABLATIONS[name])
        methods[f"DARP, {name}"], _ = _darp(run, arena, f"ablation/{name}", demos, changed, config.ablation_seeds)
    weight = None
    if config.mril:
        weight = held_out_smoothing(run, demos, config.bc, config.mril)
        setting = dataclasses.replace(config.bc, smoothing=weight)
        methods["MRIL"], _ = _bc(run, arena, "mril", demos, setting, config.bc_seeds)

    back = config.darp.lookback
    fixed = {
        "retrieve and play": arena.score("replay", replayed(replay.retrieve_and_play, demos, config.darp), 1),
        "nearest sequence": arena.score("sequence", replayed(replay.nearest_sequence, demos, config.darp), back),
        "locally weighted regression": arena.score("lwr", replayed(replay.lwr, demos, config.darp), back),
    }
    if config.ensemble:
        fixed[f"BC ensemble of {config.ensemble}"] = arena.score("ensemble", _ensemble(run, demos, config), 1)

    weakest = min(clones, key=lambda t: t.last.mean())
    drifted = darp_drift.drift(run, arena, weakest, bc_memory.scalers, memory, config.darp, config)
    darp_figures.draw(run, methods, fixed, drifted, arena.env)
    darp_figures.film(run, arena, ours, memory, config)

    numbers = [*darp_report.numbers(config, methods, fixed), *darp_report.drift_numbers(drifted)]
    tables = [darp_report.returns_table(config, arena.env, methods, fixed), *darp_report.drift_tables(drifted)]
    if config.swingup.seeds:
        more, table = darp_extra.swingup(run, config.swingup)
        numbers += more
        tables.append(table)
    if config.push_t.trajectories:
        more, table = darp_extra.push_t(run, config.push_t)
        numbers += more
        tables.append(table)
    return darp_report.conclude(config, arena.env, methods, weight, numbers, tables)


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
    8,192 expert rows a device. The weights, fewer than 200,000 numbers, stay whole on every device: one all-reduce of their gradient a step costs
    less than gathering the parts of every layer would."""
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
