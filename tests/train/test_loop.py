"""The loop: one device = eight devices, stopped = uninterrupted, guards, selection, sources, and every refusal in one sentence."""

from __future__ import annotations

import json
import os
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from papyrax.train.batches import WithState
from papyrax.train.errors import Interrupted, NonFinite, RunFolderError, UserError
from papyrax.train.run import Run
from tests.support import learners
from tests.support.learners import Config, batch, init, update


def open_run(folder, config=Config()):
    return Run(folder, system="toy", preset="smoke", config=config, quiet=True)


def train(folder, steps=60, batches=batch, config=Config(), name="a/0", **options):
    with open_run(folder, config) as run:
        return run.fit(update, init(run.key, config), batches, name=name, steps=steps, config=config, **options)


def same(a, b):
    return all(
        np.array_equal(x, y) for x, y in zip(jax.tree.leaves(jax.device_get(a.state.w)), jax.tree.leaves(b.state.w))
    )


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return train(tmp_path_factory.mktemp("plain"))


def test_it_learns_and_logs(plain, tmp_path):
    losses = plain.metrics["loss"]
    assert plain.metrics["step"].tolist() == list(range(1, 61))
    assert losses[-10:].mean() < losses[:3].mean() / 3


def test_equals_a_hand_written_loop(plain):
    state = init(jax.random.key(0), Config())
    step = jax.jit(lambda s, b: update(s, b, Config()))
    for i in range(60):
        state, _ = step(state, batch(i))
    np.testing.assert_array_equal(plain.state.w, state.w)


@pytest.mark.parametrize("scan", [5, 20])
def test_scan_changes_nothing_but_the_calls(plain, tmp_path, scan):
    fit = train(tmp_path, scan=scan)
    # one fused program per call may round differently from one program per step
    np.testing.assert_allclose(fit.state.w, plain.state.w, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(fit.metrics["loss"], plain.metrics["loss"], rtol=1e-4, atol=1e-6)


class StopAt:
    """Batches that ask this process to stop when `step` is fetched: the loop has then used a few less."""

    def __init__(self, step, number=signal.SIGTERM):
        self.step, self.number = step, number

    def __call__(self, step):
        if step == self.step:
            os.kill(os.getpid(), self.number)
        return batch(step)


def test_a_best_checkpoint_of_an_abandoned_future_is_replaced(tmp_path, plain):
    """A killed process may have kept a best state beyond the checkpoint that the next one goes on from."""

    def stop(state):
        if int(state.step) == 30:
            raise KeyboardInterrupt
        return {"e": state.step}

    options = {"eval_every": 10, "select": "best:e", "checkpoint_every": 100}
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, evaluate=stop, **options)
    fit = train(tmp_path, evaluate=lambda s: {"e": s.step}, **options)
    assert fit.resumed_from is None and fit.best_step == 60 and same(fit, plain)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_the_run_goes_on_to_the_same_numbers(plain, tmp_path, number):
    with pytest.raises(Interrupted) as stopped:
        train(tmp_path, batches=StopAt(31, number))
    assert stopped.value.exit_code == 128 + number
    fit = train(tmp_path)
    assert fit.resumed_from is not None and 20 < fit.resumed_from < 40
    assert same(fit, plain)
    np.testing.assert_array_equal(fit.metrics["loss"], plain.metrics["loss"])


def test_a_finished_fit_is_read_back(plain, tmp_path):
    train(tmp_path)
    again = train(tmp_path, batches=lambda step: pytest.fail("a finished fit took a batch"))
    assert again.seconds > 0
    assert same(again, plain)
    np.testing.assert_array_equal(again.metrics["loss"], plain.metrics["loss"])


def test_grain_iterators_resume_where_they_were(tmp_path):
    whole = train(tmp_path / "whole", batches=learners.grain_dataset())

    class Cut:
        """The same dataset, whose iterator stops the process at its 31st batch."""

        def __iter__(self):
            self.inner, self.count = iter(learners.grain_dataset()), 0
            return self

        def __next__(self):
            self.count += 1
            if self.count == 31:
                os.kill(os.getpid(), signal.SIGTERM)
            return next(self.inner)

        def get_state(self):
            return self.inner.get_state()

        def set_state(self, state):
            self.inner.set_state(state)

    with pytest.raises(Interrupted):
        train(tmp_path / "cut", batches=Cut())
    assert same(train(tmp_path / "cut", batches=learners.grain_dataset()), whole)


def test_batches_may_read_the_state(tmp_path):
    seen = []

    def fn(step, state):
        seen.append(int(state.step))
        return batch(step)

    train(tmp_path, steps=5, batches=WithState(fn))
    assert seen == [0, 1, 2, 3, 4]


def test_damaged_checkpoints_are_passed_over(tmp_path, capsys, plain):
    with pytest.raises(Interrupted):
        train(tmp_path, batches=StopAt(45), checkpoint_every=10)
    folder = tmp_path / "checkpoints" / "a__0" / "last"
    newest = max(int(p.name) for p in folder.iterdir() if p.name.isdigit())
    victim = max((p for p in (folder / str(newest)).rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    victim.write_bytes(victim.read_bytes()[: victim.stat().st_size // 2])
    said = []
    with open_run(tmp_path) as run:
        run.say = said.append
        fit = run.fit(update, init(run.key, Config()), batch, name="a/0", steps=60, config=Config())
    assert fit.resumed_from is not None and fit.resumed_from < newest
    assert any("damaged" in s and str(newest) in s for s in said)
    assert same(fit, plain)
    np.testing.assert_array_equal(fit.metrics["loss"], plain.metrics["loss"])


def test_flipped_bytes_are_damage_too(tmp_path, plain):
    with pytest.raises(Interrupted):
        train(tmp_path, batches=StopAt(45), checkpoint_every=10)
    folder = tmp_path / "checkpoints" / "a__0" / "last"
    newest = max(int(p.name) for p in folder.iterdir() if p.name.isdigit())
    victim = max((p for p in (folder / str(newest)).rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 0xFF
    victim.write_bytes(bytes(data))
    fit = train(tmp_path)
    assert fit.resumed_from < newest and same(fit, plain)


def bad_update(state, data, config, *, frozen=None):
    new, metrics = update(state, data, config)
    bad = state.step == 7
    return new.replace(w=jnp.where(bad, jnp.nan, new.w)), {"loss": jnp.where(bad, jnp.nan, metrics["loss"])}


def test_nan_stops_with_step_metric_and_checkpoint(tmp_path):
    with (
        open_run(tmp_path) as run,
        pytest.raises(NonFinite, match=r"'loss' is not finite at step 8; the last good checkpoint is at step 5"),
    ):
        run.fit(bad_update, init(run.key, Config()), batch, name="a", steps=20, config=Config(), checkpoint_every=5)


def test_nan_is_skipped_on_request(tmp_path):
    with open_run(tmp_path) as run:
        fit = run.fit(bad_update, init(run.key, Config()), batch, name="a", steps=20, config=Config(), nan="skip")
    assert fit.metrics["skipped"].sum() == 1 and fit.metrics["skipped"][7] == 1
    assert np.isfinite(fit.state.w).all() and int(fit.state.step) == 20


def error(state):
    return {"error": jnp.abs(state.w - 0.3).mean()}


def test_best_is_selected_and_patience_ends(tmp_path):
    values = iter([3.0, 1.0, 2.0, 2.5, 0.0])
    with open_run(tmp_path) as run:
        fit = run.fit(
            update,
            init(run.key, Config()),
            batch,
            name="a",
            steps=50,
            config=Config(),
            evaluate=lambda s: {"e": next(values), "mark": s.step},
            eval_every=10,
            select="best:-e",
            patience=2,
        )
    assert fit.best_step == 20 and int(fit.state.step) == 20
    assert fit.evals["e"].tolist() == [3.0, 1.0, 2.0, 2.5]
    again = train(tmp_path, name="a", steps=50, evaluate=error, eval_every=10, select="best:-e", patience=2)
    assert again.best_step == 20 and int(again.state.step) == 20


def test_seeds_are_vmapped(tmp_path, plain):
    keys = jnp.stack([jax.random.key(0), jax.random.key(1), jax.random.key(2)])
    states = jax.vmap(lambda k: init(k, Config()))(keys)
    many = jax.vmap(lambda s, b: update(s, b, Config()), in_axes=(0, None))
    with open_run(tmp_path) as run:
        fit = run.fit(lambda s, b, config: many(s, b), states, batch, name="a", steps=60, config=Config())
    assert fit.metrics["loss"].shape == (60, 3)
    # batched products may sum in another order
    np.testing.assert_allclose(fit.metrics["loss"][:, 0], plain.metrics["loss"], rtol=1e-4, atol=1e-6)


def test_frozen_weights_are_used_and_not_kept(tmp_path):
    frozen = {"shift": jnp.ones(4)}
    fit = train(tmp_path / "frozen", frozen=frozen, steps=200)
    bare = train(tmp_path / "bare", steps=200)
    np.testing.assert_allclose(fit.state.b - bare.state.b, 1.0, atol=0.1)
    assert "shift" not in "".join(p.read_text(errors="ignore") for p in (tmp_path / "frozen").rglob("_METADATA"))


def test_lines_and_events_are_written(tmp_path):
    train(tmp_path, steps=10, log_every=5)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [5, 10] and {"fit", "kind", "loss", "time"} <= set(lines[0])
    assert list(tmp_path.glob("events.*"))


def test_a_half_written_line_is_dropped(tmp_path, plain):
    with pytest.raises(Interrupted):
        train(tmp_path, batches=StopAt(31))
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"fit": "a/0", "kind": "tra')
    np.testing.assert_array_equal(train(tmp_path).metrics["loss"], plain.metrics["loss"])


@pytest.mark.parametrize(
    "options, words",
    [
        ({"steps": 7, "scan": 2}, "multiple of scan"),
        ({"select": "most"}, "best:METRIC"),
        ({"batches": [1, 2]}, "get_state"),
        ({"batches": iter([]), "steps": 3}, "get_state"),
    ],
)
def test_arguments_that_do_not_fit(tmp_path, options, words):
    with pytest.raises(UserError, match=words):
        train(tmp_path, **options)


def test_unknown_metric_and_repeated_name(tmp_path):
    with pytest.raises(UserError, match="evaluate returned error"):
        train(tmp_path / "a", steps=10, evaluate=error, eval_every=5, select="best:gain")
    with open_run(tmp_path / "b") as run:
        run.fit(update, init(run.key, Config()), batch, name="x", steps=2, config=Config())
        with pytest.raises(UserError, match="named 'x'"):
            run.fit(update, init(run.key, Config()), batch, name="x", steps=2, config=Config())
        more = run.fit(update, init(run.key, Config()), batch, name="x", steps=4, config=Config())
    assert more.resumed_from == 2 and more.metrics["step"].tolist() == [1, 2, 3, 4]


def test_data_that_ends_early(tmp_path):
    def short(step):
        if step >= 4:
            raise StopIteration
        return batch(step)

    with pytest.raises(UserError, match="ended at step 4 of 60"):
        train(tmp_path, batches=short)


def test_a_full_disk_is_one_sentence(tmp_path, monkeypatch):
    from papyrax.train.history import History

    def full(self, *_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(History, "add", full)
    with pytest.raises(RunFolderError, match="No space left on device"):
        train(tmp_path)
