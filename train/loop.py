"""The one training loop: steps any pair (init, update) on a mesh, and can be killed at any instant without losing more than time.

`fit` owns compilation with donated state and explicit shardings, prefetch, metrics fetched one call late so that the device never waits,
evaluation, checkpoints, exact resumption, preemption, the guard against NaN, and the choice of the best state. It is what `Run.fit` calls.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import PyTree

from papyrax.train import sharding as sharding_lib
from papyrax.train.batches import Source
from papyrax.train.checkpoint import Checkpoints
from papyrax.train.errors import Interrupted, NonFinite, RunFolderError, UserError

if TYPE_CHECKING:
    from papyrax.train.run import Run


@dataclasses.dataclass(frozen=True)
class Shard:
    """How a fit is placed on the mesh: rules for the State (and for `frozen`), one spec for the batch's leading axis."""

    state: sharding_lib.Rules = ()
    batch: PartitionSpec = sharding_lib.BATCH


@dataclasses.dataclass(frozen=True)
class Fit:
    """What a fit leaves: the chosen State, and histories whose leading axis is the logged (or evaluated) steps, under `step` and each metric."""

    state: Any
    metrics: dict[str, np.ndarray]
    evals: dict[str, np.ndarray]
    seconds: float
    """Wall time in the loop over all processes of the run, up to their last checkpoints, compilation left out."""
    compile_seconds: float
    resumed_from: int | None
    best_step: int


def _strong(tree: PyTree) -> PyTree:
    """Drops weak types, so that a step's output has the type of its input and nothing compiles twice."""
    return jax.tree.map(
        lambda x: x if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else jax.lax.convert_element_type(x, x.dtype), tree
    )


def make_step(update: Callable, config: Any, *, scan: int, skip_nonfinite: bool) -> Callable:
    """`(state, batch, frozen) -> (state, metrics)` around an update: `scan` updates a call, and bad steps undone if asked."""

    def once(state, batch, frozen):
        new, metrics = update(state, batch, config) if frozen is None else update(state, batch, config, frozen=frozen)
        if skip_nonfinite:
            good = jnp.all(jnp.stack([jnp.all(jnp.isfinite(m)) for m in jax.tree.leaves(metrics)]))
            kept = state
            moved = {name: getattr(new, name) for name in ("key", "step") if hasattr(new, name)}
            if moved:
                kept = dataclasses.replace(state, **moved)
            new = jax.tree.map(
                lambda a, b: jax.lax.select(good, a, b) if a.ndim == 0 else jnp.where(good, a, b), new, kept
            )
            metrics = {name: jnp.where(jnp.isfinite(m), m, 0) for name, m in metrics.items()}
            metrics["skipped"] = 1.0 - good.astype(jnp.float32)
        return _strong(new), metrics

    if not scan:
        return once

    def many(state, batch, frozen):
        return jax.lax.scan(lambda carry, one: once(carry, one, frozen), state, batch, length=scan)

    return many


class _Selection:
    """Remembers the best evaluation and how many have passed since."""

    def __init__(self, select: str, patience: int):
        self.metric, self.sign, self.patience = None, 1.0, patience
        if select != "last":
            if not select.startswith("best:"):
                raise UserError(f"select is {select!r}; wanted 'last', 'best:METRIC' or 'best:-METRIC'")
            name = select[len("best:") :]
            self.metric, self.sign = (name[1:], -1.0) if name.startswith("-") else (name, 1.0)
        self.best, self.best_step, self.since = None, 0, 0

    def see(self, step: int, values: dict[str, Any]) -> bool:
        """True when this evaluation is the best so far."""
        if self.metric is None:
            return False
        if self.metric not in values:
            raise UserError(
                f"select names the metric {self.metric!r}, but evaluate returned {', '.join(sorted(values))}"
            )
        value = self.sign * float(np.mean(values[self.metric]))
        if self.best is None or value > self.best:
            self.best, self.best_step, self.since = value, step, 0
            return True
        self.since += 1
        return False

    @property
    def over(self) -> bool:
        return self.patience > 0 and self.since >= self.patience

    def record(self) -> dict[str, Any]:
        return {"best": self.best, "best_step": self.best_step, "since": self.since}

    def restore(self, record: dict[str, Any]) -> None:
        self.best, self.best_step, self.since = record["best"], record["best_step"], record["since"]


def fit(
    run: Run,
    update: Callable,
    state: PyTree,
    batches: Any = None,
    *,
    name: str,
    steps: int,
    config: Any,
    frozen: PyTree = None,
    evaluate: Callable[[Any], dict[str, Any]] | None = None,
    eval_every: int = 0,
    select: str = "last",
    patience: int = 0,
    checkpoint_every: int = 0,
    keep: int = 2,
    log_every: int = 1,
    scan: int = 0,
    shard: Shard = Shard(),
    nan: Literal["stop", "skip"] = "stop",
    show: str | None = None,
) -> Fit:
    """Runs `steps` updates, or what is left of them, and returns the chosen State with its history.

    Args:
      update: `(state, batch, config, *, frozen=None) -> (state, metrics)`, jit-able.
      state: from `init`; given up to the loop (its buffers are donated).
      batches: see `papyrax.train.batches.Source`.
      name: `arm/seed/stage`; unique within a run, except that a later call with more `steps` goes on with the same fit.
      frozen: weights that are neither trained nor checkpointed.
      evaluate: `state -> dict` of scalars (or arrays over seeds), called every `eval_every` steps and after the last.
      select: "last", "best:METRIC" (largest) or "best:-METRIC" (smallest) of the evaluations (means over seeds).
      patience: evaluations without a new best before the fit ends early; 0 never does.
      checkpoint_every: steps between checkpoints (0: about one a minute); one is always written at the end.
      log_every: steps between lines in metrics.jsonl.
      scan: updates in one call of the device, 0 for one plain call; divides `steps`, `eval_every` and `checkpoint_every`.
      nan: what a metric that is NaN or infinite does: stop, or undo that step and count it under `skipped`.
      show: the metric beside the progress bar.

    Raises:
      UserError: an argument does not fit. NonFinite: by the guard. Interrupted: after a signal, with everything saved.
      RunFolderError: the folder can't be written.
    """
    stride = max(scan, 1)
    for label, value in (("steps", steps), ("eval_every", eval_every), ("checkpoint_every", checkpoint_every)):
        if value % stride:
            raise UserError(f"{label} is {value}; it has to be a multiple of scan, which is {scan}")
    if steps <= run.fits_started.get(name, -1):
        raise UserError(
            f"two fits of this run are named {name!r}; every fit wants a name of its own, or more steps to go on to"
        )
    run.fits_started[name] = steps
    mesh = run.mesh
    selection = _Selection(select, patience)
    history = run.history(name)

    state_shardings = sharding_lib.shardings(state, shard.state, mesh)
    # The update donates its state, so the arrays must be the loop's own, not the caller's (a restarted arm may use the same State).
    state = jax.tree.map(jnp.copy, state) if jax.process_count() == 1 else state
    state = _strong(sharding_lib.place_global(state, state_shardings))
    if frozen is not None:
        frozen = sharding_lib.place_global(frozen, sharding_lib.shardings(frozen, shard.state, mesh))

    folder = run.dir / "checkpoints" / name.replace("/", "__")
    last = Checkpoints(folder / "last", keep=keep, say=run.say)
    best = Checkpoints(folder / "best", keep=1, say=run.say) if selection.metric else None
    step, resumed_from, spent = 0, None, 0.0
    position = None
    try:
        found = last.restore(state)
        if found is not None:
            step, state, record = found
            resumed_from = step
            position, spent = record["position"], record.get("seconds", 0.0)
            selection.restore(record["selection"])
            history.rewind(record["history"])
        else:
            history.rewind(None)
        if step >= steps or (found is not None and found[2]["over"]):
            return _finish(run, name, state, history, selection, best, step, spent, 0.0, resumed_from)
        if resumed_from is not None:
            run.say(f"{name}: going on from step {step} of {steps}")

        def place(batch, local):
            spec = PartitionSpec(None, *shard.batch) if scan else shard.batch
            target = sharding_lib.batch_shardings(batch, mesh, spec)
            if local and jax.process_count() > 1:
                return sharding_lib.place_local(batch, target)
            return sharding_lib.place_global(batch, target)

        source = Source(batches, start=step, place=place, scan=scan)
        source.seek(position)
    except BaseException:
        last.close()
        raise

    call = jax.jit(
        make_step(update, config, scan=scan, skip_nonfinite=nan == "skip"),
        donate_argnums=0,
        out_shardings=(state_shardings, NamedSharding(mesh, PartitionSpec())),
    )

    def save(over: bool = False):
        flush(0)
        last.save(
            step,
            state,
            {
                "position": source.position(),
                "history": history.mark(),
                "selection": selection.record(),
                "over": over,
                "seconds": spent + time.perf_counter() - started,
            },
        )

    pending: list[tuple[int, Any]] = []  # (step after the call, metrics on the device)

    def flush(leave: int):
        while len(pending) > leave:
            after, values = pending.pop(0)
            values = {k: np.asarray(v) for k, v in sharding_lib.to_host(values).items()}
            first = after - stride
            for i in range(stride):
                line = {k: v[i] if scan else v for k, v in values.items()}
                bad = [k for k, v in line.items() if not np.all(np.isfinite(v))]
                if bad:
                    good = last.steps()
                    where = f"the last good checkpoint is at step {good[-1]}" if good else "there is no checkpoint yet"
                    raise NonFinite(f"{name}: the metric {bad[0]!r} is not finite at step {first + i + 1}; {where}")
                if (first + i + 1) % log_every == 0 or first + i + 1 == steps:
                    history.add(first + i + 1, line)
            if show in values:
                bar.update(status=f"{show} {float(np.mean(values[show])):.4g}")

    compile_seconds, started, saved_at = 0.0, time.perf_counter(), time.perf_counter()
    compiled = None
    bar = run.bar(name, total=steps, done=step)
    try:
        with bar:
            while step < steps:
                try:
                    batch = source.take(stride, state)
                except StopIteration:
                    raise UserError(
                        f"{name}: the batches ended at step {step} of {steps}; give a repeating dataset or fewer steps"
                    ) from None
                if compiled is None:
                    begun = time.perf_counter()
                    bar.update(status="compiling")
                    compiled = call.lower(state, batch, frozen).compile()
                    compile_seconds = time.perf_counter() - begun
                    started += compile_seconds
                    bar.update(status="")
                with run.profiling(step):
                    state, metrics = compiled(state, batch, frozen)
                step += stride
                for leaf in jax.tree.leaves(metrics):
                    if leaf.is_fully_addressable:
                        leaf.copy_to_host_async()
                pending.append((step, metrics))
                flush(1)
                bar.advance(stride)
                due = (eval_every and step % eval_every == 0) or step >= steps
                if evaluate is not None and due:
                    flush(0)
                    bar.update(status="evaluating")
                    values = {k: np.asarray(v) for k, v in sharding_lib.to_host(evaluate(state)).items()}
                    bar.update(status="")
                    history.add(step, values, kind="eval")
                    if selection.see(step, values) and best is not None:
                        best.save(step, state, {"selection": selection.record()})
                    if selection.over:
                        save(over=True)
                        break
                signal = run.stop_signal(step)
                if checkpoint_every:
                    turn = step % checkpoint_every == 0
                else:
                    turn = jax.process_count() == 1 and time.perf_counter() - saved_at > 60
                if step >= steps or turn or signal:
                    save()
                    saved_at = time.perf_counter()
                if signal and step < steps:
                    last.wait()
                    raise Interrupted(signal, f"{name} stopped at step {step} of {steps}")
            flush(0)
        seconds = spent + time.perf_counter() - started
        return _finish(run, name, state, history, selection, best, step, seconds, compile_seconds, resumed_from)
    except OSError as error:
        raise RunFolderError(f"{run.dir} can't be written: {error.strerror or error}") from error
    finally:
        source.close()
        last.close()
        if best is not None:
            best.close()


def _finish(run, name, state, history, selection, best, step, seconds, compile_seconds, resumed_from) -> Fit:
    chosen = state
    if best is not None and selection.best is not None:
        best.wait()
        found = best.restore(state, step=selection.best_step)
        if found is None:
            raise RunFolderError(f"{name}: the best checkpoint (step {selection.best_step}) can't be read back")
        chosen = found[1]
    best_step = selection.best_step if selection.best is not None else step
    return Fit(
        chosen, history.columns("train"), history.columns("eval"), seconds, compile_seconds, resumed_from, best_step
    )
