"""Benchmarks: alternating order, medians, growth, refusal of unequal results, peers in a process of their own,
stages."""

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from papyrax.train import bench as lib
from papyrax.train.bench import Bench, BenchTable, Stages, growth
from papyrax.train.errors import UserError
from papyrax.train.peers import PeerError, PeerProcess

PEER = Path(__file__).parents[1] / "support" / "peer_sort.py"


def inputs(size):
    return {"values": np.random.default_rng(0).normal(size=int(size)).astype(np.float32)}


def local_peer(**options):
    return PeerProcess("here", "sort", python=sys.executable, file=PEER, **options)


def test_calls_alternate_after_warming_up_both():
    order = []

    def side(name):
        return lambda size: lambda: order.append((name, size)) or np.float32(size)

    with Bench() as bench:
        table = bench.compare("t", side("a"), side("b"), [1, 2], repeats=3, warm=2, same=lambda x, y: x == y)
    assert order == [(name, size) for size in (1, 2) for name in "ab" * 6], (
        "two to warm up, three timed, one for memory"
    )
    assert [row[0] for row in table.rows] == [1, 2] and "medians of 3 alternating calls after 2" in table.note
    assert "grows" not in table.headline, "two sizes show no growth"


def test_ratio_and_growth_are_what_the_clock_says(monkeypatch):
    now = [0.0]
    clock = SimpleNamespace(perf_counter=lambda: now[0], process_time=lambda: 2 * now[0])
    monkeypatch.setattr(lib, "time", clock)

    def taking(factor, power):
        def prepare(size):
            # every third call is disturbed; the median does not see it
            lengths = iter([factor * size**power * (10 if i % 3 == 2 else 1) for i in range(99)])

            def call():
                now[0] += next(lengths)
                return 0

            return call

        return prepare

    with Bench() as bench:
        table = bench.compare(
            "t", taking(1, 1), taking(3, 2), [1, 2, 4], repeats=5, same=lambda x, y: None, peer_name="sloth"
        )
    assert [row[1:3] for row in table.rows] == [[1, 3], [2, 12], [4, 48]]
    assert [row[3:5] for row in table.rows] == [[3, 3], [6, 6], [12, 12]]
    assert table.headline == (
        "12.00 times as fast as sloth at size 4; time grows as size^1.00 (ours) and size^2.00 (sloth)"
    )
    assert growth([1, 2, 4], [3.0, 12.0, 48.0]) == pytest.approx(2)
    with pytest.raises(ValueError, match="at least three sizes, got 2"):
        growth([1, 2], [1, 2])


def test_unequal_results_stop_before_the_timing():
    calls = []

    def ours(size):
        return lambda: calls.append(1) or np.ones(2)

    def check(a, b):
        np.testing.assert_allclose(a, b)

    with Bench() as bench:
        with pytest.raises(UserError, match=r"pair: our result and that of peer differ at size 5 \(.*Not equal"):
            bench.compare("pair", ours, lambda size: lambda: np.zeros(2), [5], same=check)
        with pytest.raises(UserError, match=r"differ at size 5\.$"):
            bench.compare("pair", ours, ours, [5], same=lambda a, b: False)
    assert len(calls) == 3


@pytest.mark.parametrize("sizes", [[], [2, 2], [3, 1], [0, 1]])
def test_bad_sizes(sizes):
    with Bench() as bench, pytest.raises(ValueError, match="sizes must be positive and increase"):
        bench.compare("t", None, None, sizes, same=None)


def test_device_results_are_waited_for_and_memory_is_seen():
    x = jnp.ones((600, 600))
    call = jax.jit(lambda x: jax.lax.fori_loop(0, 20, lambda _, y: y @ x / 600, x))
    with Bench() as bench:
        taken = bench.measure(lambda: call(x), repeats=3)
        big = bench.measure(lambda: np.ones(30 * 2**20, np.uint8), repeats=2)
    assert taken.low <= taken.seconds <= taken.high
    # 20 products of 2 * 600^3 operations: no core does them within this time, so a shorter reading would be that of
    # the dispatch
    assert taken.seconds > 20 * 2 * 600**3 / 2e13
    if big.peak_mb is not None:
        assert 25 < big.peak_mb < 100


def test_cores_are_kept_to_and_given_back():
    before = os.sched_getaffinity(0)
    with Bench(cores=1) as bench:
        assert len(os.sched_getaffinity(0)) == 1
        peer = bench.process("here", "sort", python=sys.executable, file=PEER)
        remote = peer.on(inputs)
        remote.prepare(8)
        remote.run()
        assert remote.result()["threads"] == 1
    assert os.sched_getaffinity(0) == before
    assert peer._process is None, "peers end with the benchmark"
    with pytest.raises(ValueError, match="cores must lie in"):
        Bench(cores=10**6)


def test_a_peer_in_another_process():
    def ours(size):
        values = jnp.asarray(inputs(size)["values"])
        call = jax.jit(jnp.sort)
        return lambda: call(values)

    with Bench() as bench:
        peer = bench.process("here", "sort", python=sys.executable, file=PEER)
        table = bench.compare(
            "sort",
            ours,
            peer.on(inputs),
            [100, 1000, 10000],
            repeats=3,
            same=lambda a, b: np.testing.assert_array_equal(a, b["sorted"]),
            peer_name="numpy",
        )
    assert len(table.rows) == 3 and all(row[1] > 0 and row[2] > 0 for row in table.rows)
    assert f"numpy {np.__version__}" in table.note


def test_a_peers_failures_are_told():
    with local_peer(timeout=20) as peer:
        with pytest.raises(PeerError, match=r"could not prepare: ValueError: no such size\.$"):
            peer.on(inputs=lambda size: {}).prepare(-1)
        peer.on(inputs).prepare(4)
        assert peer.ask("run")["seconds"] > 0, "an error does not end the peer"
        with pytest.raises(PeerError, match=r"ended while it was asked to prepare: out of memory\.$"):
            peer.on(inputs=lambda size: {}).prepare(-2)
        peer.on(inputs).prepare(4)
        peer.timeout = 0.3
        with pytest.raises(PeerError, match=r"took longer than 0.3 s to prepare"):
            peer.on(inputs=lambda size: {}).prepare(-3)


def test_an_environment_that_is_not_built():
    with pytest.raises(PeerError, match=r"environment 'no-such' of the peer 'x' is not built: run make peers\.$"):
        PeerProcess("no-such", "x")
    with pytest.raises(PeerError, match="no peer 'no-such-script'"):
        PeerProcess("e", "no-such-script", python=sys.executable)


def test_stages():
    stages = Stages()
    for _ in range(3):
        with stages("search") as done:
            hits = done(jnp.ones(3) + 1)
    assert hits.tolist() == [2, 2, 2]
    stages.seconds.clear()
    for t in range(1, 102):
        stages.record("search", t)
        stages.record("read", 1.0)
    table = stages.table("query", skip=1)
    search = table.rows[0]
    assert search[:4] == ["search", 100, pytest.approx(51.5), pytest.approx(96.05)]
    assert "search takes 98 %" in table.headline
    with pytest.raises(ValueError, match="no stage has more than skip = 200"):
        stages.table("query", skip=200)


def test_execute_record_show(capsys):
    table = BenchTable("speed", ["size", "ratio"], [[1, 2.0]], "how", "twice as fast")
    recipe = SimpleNamespace(bench=lambda config, bench: [table] if bench.cores and config == "c" else [])
    tables = lib.execute(recipe, "c")
    kept = lib.record(tables, "cpu")
    assert kept["preset"] == "cpu" and kept["tables"][0]["headline"] == "twice as fast" and kept["machine"]["cores"]
    lib.show(tables)
    assert "twice as fast" in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"rows\[0\] of 't' has 1 cells, wanted 2"):
        BenchTable("t", ["a", "b"], [[1]])
