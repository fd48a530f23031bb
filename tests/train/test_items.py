"""Items: batching, order, resumption after a kill to the same numbers, refusal of duplicates, failing back ends,
recorded replies."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from papyrax.methods.text.messages import Reply, request_hash
from papyrax.train.errors import RunFolderError, UserError
from papyrax.train.items import BackendError, MissingReply, Recorded, Recording, run_items
from tests.support.dialogue import Guessing, middle, ranges

ROOT = str(Path(__file__).parents[2])
ITEMS = [{"id": f"item {i}", "secret": (i * 37) % 64} for i in range(20)]
BACKENDS = {"chat": middle, "search": ranges}


class Counting:
    """Wraps a back end and keeps the length of every list it was asked."""

    def __init__(self, backend):
        self.backend, self.sizes = backend, []

    def __call__(self, requests):
        self.sizes.append(len(requests))
        return self.backend(requests)


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_all_items_are_scored_in_order_and_requests_are_batched(tmp_path):
    chat, seen = Counting(middle), []
    rows = run_items(
        Guessing(),
        ITEMS,
        {"chat": chat, "search": ranges},
        tmp_path / "deep" / "items.jsonl",
        batch=8,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert [row["id"] for row in rows] == [item["id"] for item in ITEMS]
    assert all(row["score"]["found"] == 1 and row["error"] is None for row in rows)
    assert all(row["requests"] == row["score"]["guesses"][0] + 1 for row in rows)
    assert max(chat.sizes) == 8 and sum(chat.sizes) == sum(row["score"]["guesses"][0] for row in rows)
    assert sorted(lines(tmp_path / "deep" / "items.jsonl"), key=str) == sorted(rows, key=str)
    assert seen[-1] == (20, 20) and seen == sorted(seen)


def test_batch_size_does_not_change_the_rows(tmp_path):
    rows = [run_items(Guessing(), ITEMS, BACKENDS, tmp_path / f"{b}.jsonl", batch=b) for b in (1, 7, 50)]
    assert rows[0] == rows[1] == rows[2]
    assert len({row["transcript"] for row in rows[0]}) == len(ITEMS)


def test_no_items(tmp_path):
    assert run_items(Guessing(), [], BACKENDS, tmp_path / "i.jsonl") == []


def test_finished_items_are_not_driven_again_and_a_cut_line_is_dropped(tmp_path):
    whole = run_items(Guessing(), ITEMS, BACKENDS, tmp_path / "whole.jsonl")
    text = (tmp_path / "whole.jsonl").read_bytes()
    path, said = tmp_path / "part.jsonl", []
    path.write_bytes(b"".join(text.splitlines(keepends=True)[:9]) + text.splitlines()[9][:-4])
    search = Counting(ranges)
    rows = run_items(Guessing(), ITEMS, {"chat": middle, "search": search}, path, say=said.append)
    assert rows == whole and sum(search.sizes) == 11
    assert len(said) == 1 and "cut short" in said[0]
    assert len(lines(path)) == 20
    assert run_items(Guessing(), ITEMS, {}, path) == whole, "a finished file needs no back end"


def test_damage_before_the_last_line_is_refused(tmp_path):
    path = tmp_path / "i.jsonl"
    path.write_text('{"id": \n{"id": "a", "error": null}\n')
    with pytest.raises(ValueError, match="line 1 of"):
        run_items(Guessing(), ITEMS, BACKENDS, path)


def test_bad_items_are_refused(tmp_path):
    with pytest.raises(ValueError, match="more than once, the first of them 'a'"):
        run_items(Guessing(), [{"id": "a"}, {"id": "b"}, {"id": "a"}], BACKENDS, tmp_path / "i")
    with pytest.raises(ValueError, match=r"items\[0\] has no id"):
        run_items(Guessing(), [{"secret": 1}], BACKENDS, tmp_path / "i")
    with pytest.raises(ValueError, match="batch must be at least 1 and retries at least 0, got 0 and 0"):
        run_items(Guessing(), ITEMS, BACKENDS, tmp_path / "i", batch=0)
    assert not (tmp_path / "i").exists()


def poisoned(requests):
    if any("item 3:" in r.payload["messages"][0].text for r in requests):
        raise ConnectionError("no route.")
    return middle(requests)


def test_a_failing_request_costs_only_its_item(tmp_path):
    path = tmp_path / "i.jsonl"
    rows = run_items(Guessing(), ITEMS, {"chat": poisoned, "search": ranges}, path)
    bad = [row for row in rows if row["error"]]
    assert [row["id"] for row in bad] == ["item 3"] and bad[0]["score"] is None
    assert bad[0]["error"] == "The chat back end failed with ConnectionError: no route."
    assert run_items(Guessing(), ITEMS, BACKENDS, path) == rows, "an error is a result until it is asked for again"
    healed = run_items(Guessing(), ITEMS, BACKENDS, path, redo_errors=True)
    assert healed == run_items(Guessing(), ITEMS, BACKENDS, tmp_path / "clean.jsonl")
    assert len(lines(path)) == 20 and not list(tmp_path.glob(".*"))


def test_stop_keeps_the_finished_and_goes_on_later(tmp_path):
    path = tmp_path / "i.jsonl"
    with pytest.raises(BackendError, match="no route"):
        run_items(Guessing(), ITEMS, {"chat": poisoned, "search": ranges}, path, batch=2, on_error="stop")
    assert 0 < len(lines(path)) < 20
    rows = run_items(Guessing(), ITEMS, BACKENDS, path)
    assert rows == run_items(Guessing(), ITEMS, BACKENDS, tmp_path / "clean.jsonl")


def test_retries(tmp_path):
    failures = iter([True, True, False])

    def shaky(requests):
        if next(failures, False):
            raise TimeoutError
        return middle(requests)

    rows = run_items(Guessing(), ITEMS[:2], {"chat": shaky, "search": ranges}, tmp_path / "i", retries=2)
    assert all(row["error"] is None for row in rows)


def test_wrong_back_ends_stop_the_run(tmp_path):
    with pytest.raises(
        BackendError, match=r"asks for 'search', but there is no back end of that kind \(there is: chat\)"
    ):
        run_items(Guessing(), ITEMS, {"chat": middle}, tmp_path / "a")
    with pytest.raises(BackendError, match="gave 1 replies to 16 requests"):
        run_items(Guessing(), ITEMS, {"chat": middle, "search": lambda r: ranges(r[:1])}, tmp_path / "b")


def test_recorded_replies_replay_the_same_run(tmp_path):
    chat = Counting(middle)
    recording = Recording(chat, tmp_path / "chat.jsonl")
    rows = run_items(Guessing(), ITEMS, {"chat": recording, "search": ranges}, tmp_path / "a.jsonl")
    asked = sum(chat.sizes)
    again = Recording(chat, tmp_path / "chat.jsonl")
    assert run_items(Guessing(), ITEMS, {"chat": again, "search": ranges}, tmp_path / "b.jsonl") == rows
    assert sum(chat.sizes) == asked, "a recording asks nothing twice"
    recorded = Recorded(tmp_path / "chat.jsonl")
    assert run_items(Guessing(), ITEMS, {"chat": recorded, "search": ranges}, tmp_path / "c.jsonl") == rows


def test_a_miss_names_the_hash(tmp_path):
    Recording(middle, tmp_path / "chat.jsonl")
    request = Guessing().step(*_first())[1][0]
    with pytest.raises(MissingReply, match=f"chat.jsonl has no reply to the chat request {request_hash(request)}"):
        Recorded(tmp_path / "chat.jsonl")([request])
    with pytest.raises(UserError, match="no recorded replies"):
        Recorded(tmp_path / "nowhere")
    rows = run_items(
        Guessing(), ITEMS[:1], {"chat": Recorded(tmp_path / "chat.jsonl"), "search": ranges}, tmp_path / "i", retries=9
    )
    assert "has no reply" in rows[0]["error"]


def _first():
    state, requests = Guessing().reset(ITEMS[:1])
    return state, ranges(requests)


def test_a_reply_keeps_every_field_on_disk(tmp_path):
    request = Guessing().reset(ITEMS[:1])[1][0]
    reply = Reply("a", (1, 2), (-0.5, -1.0), ((("a", -0.5), ("b", -1.0)),), {"seconds": 1.0}, "none")
    Recording(lambda r: [reply], tmp_path / "r")([request])
    assert Recorded(tmp_path / "r")([request, request]) == [reply, reply]


def test_a_second_writer_and_a_folder_in_the_way_are_told(tmp_path):
    def nested(requests):
        run_items(Guessing(), ITEMS, BACKENDS, tmp_path / "i", on_error="stop")
        return []

    with pytest.raises(BackendError, match="Another process is writing"):
        run_items(Guessing(), ITEMS, {"chat": nested, "search": ranges}, tmp_path / "i", on_error="stop")
    (tmp_path / "d").mkdir()
    with pytest.raises(RunFolderError, match=r"Cannot write .*directory"):
        run_items(Guessing(), ITEMS, BACKENDS, tmp_path / "d")


KILLED = """
import sys, time
from papyrax.train.items import run_items
from tests.support.dialogue import Guessing, middle, ranges
from tests.train.test_items import ITEMS

def slow(requests):
    time.sleep(0.02)
    return middle(requests)

run_items(Guessing(), ITEMS, {"chat": slow, "search": ranges}, sys.argv[1], batch=3)
"""


def test_kill_at_any_instant_then_resume(tmp_path):
    path = tmp_path / "i.jsonl"
    child = subprocess.Popen([sys.executable, "-c", KILLED, str(path)], env={**os.environ, "PYTHONPATH": ROOT})
    limit = time.monotonic() + 60
    while not (path.exists() and path.read_bytes().count(b"\n") >= 4):
        assert child.poll() is None and time.monotonic() < limit
        time.sleep(0.005)
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert 4 <= path.read_bytes().count(b"\n") < 20
    rows = run_items(Guessing(), ITEMS, BACKENDS, path, say=lambda _: None)
    assert rows == run_items(Guessing(), ITEMS, BACKENDS, tmp_path / "clean.jsonl")
