"""The command line: verbs, one sentence for each mistake, exit codes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest

from papyrax.methods.catalog import CATALOG
from papyrax.scripts import cli
from papyrax.train import compile as aot


@pytest.fixture(autouse=True)
def one_device(monkeypatch):
    """Commands called in this process must not change how many devices the other tests of this process see."""
    monkeypatch.setattr(cli.platform, "split_cpu", lambda count: None)


def call(capsys, *words):
    code = cli.main(list(words))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def refused(capsys, *words):
    """The sentence of a refusal; there is nothing else on the screen."""
    code, out, err = call(capsys, *words)
    lines = err.strip().splitlines()
    assert code == 2 and not out and len(lines) == 1 and lines[0].startswith("papyrax: "), (code, out, err)
    return lines[0]


def test_list_shows_all_systems(capsys):
    code, out, _ = call(capsys, "list")
    assert code == 0 and all(s.name in out for s in CATALOG)
    code, out, _ = call(capsys, "list", "--json")
    rows = json.loads(out)
    assert len(rows) == 38 and set(rows[0]["proofs"]) == {"core", "proof", "run", "kernel", "scale", "bench"}
    unbuilt = next(r for r in rows if r["name"] == "personalized_deep_research")
    assert {p["state"] for p in unbuilt["proofs"].values()} == {"missing"}


def test_unknown_systems_name_the_nearest(capsys):
    assert "did you mean reppo" in refused(capsys, "run", "repo")
    assert "papyrax list" in refused(capsys, "bench", "zzzzzz")
    assert "wants a system" in refused(capsys, "run")


def test_unknown_commands(capsys):
    assert "no command 'rum'; wanted one of list, run" in refused(capsys, "rum", "reppo")


def test_planned_systems_say_so(capsys):
    assert "planned but not built yet" in refused(capsys, "run", "personalized_deep_research")


def test_wrong_presets_fields_and_values(capsys):
    assert "no preset 'huge'; it has smoke, cpu, study, paper" in refused(capsys, "run", "reppo", "--preset", "huge")
    assert "--config.seeds" in refused(capsys, "run", "reppo", "--config.seedz", "3")
    assert "seeds" in refused(capsys, "run", "reppo", "--config.seeds", "many")
    assert "clipped" in refused(capsys, "run", "reppo", "--config.agent.mode", "soft")
    assert "gamma must lie in [0, 1]" in refused(capsys, "run", "reppo", "--config.agent.gamma", "1.5")
    assert "--mesh has 'x=2'" in refused(capsys, "run", "reppo", "--preset", "smoke", "--mesh", "x=2")
    assert "--profile is 'now'" in refused(capsys, "run", "reppo", "--preset", "smoke", "--profile", "now")
    assert "wants --run-dir" in refused(capsys, "run", "reppo", "--preset", "smoke", "--distributed")
    assert "no argument '--jso'" in refused(capsys, "list", "--jso")


def test_unknown_worlds_are_one_sentence(capsys, tmp_path):
    said = refused(
        capsys, "run", "reppo", "--preset", "smoke", "--config.env", "pendulum:4", "--run-dir", str(tmp_path)
    )
    assert "pendulum" in said


def test_a_folder_that_is_none(capsys, tmp_path):
    (tmp_path / "file").write_text("")
    said = refused(capsys, "run", "reppo", "--preset", "smoke", "--run-dir", str(tmp_path / "file"))
    assert "can't be used as a run folder" in said.replace("\u2019", "'")
    assert "is not a folder" in refused(capsys, "report", str(tmp_path / "nowhere"))


def test_topologies(capsys):
    assert "v5e" in refused(capsys, "compile", "reppo", "--preset", "smoke", "--topology", "v9:2x2")


def test_a_missing_compiler_is_told(capsys, monkeypatch):
    def absent(topology):
        raise aot.NoCompiler("compiling for v5e:2x2 needs the wheel libtpu, which did not load (no module).")

    monkeypatch.setattr(aot, "topology_devices", absent)
    assert "libtpu" in refused(capsys, "compile", "reppo", "--preset", "smoke", "--topology", "v5e:2x2")


def test_a_missing_extra_says_what_to_install(capsys, monkeypatch):
    from papyrax.train import recipe

    def absent(name):
        raise ModuleNotFoundError("No module named 'gymnax'", name="gymnax")

    monkeypatch.setattr(recipe.importlib, "import_module", absent)
    assert "pip install 'papyrax[control]'" in refused(capsys, "run", "reppo")


def test_data_verbs(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("PAPYRAX_DATA", str(tmp_path))
    code, out, _ = call(capsys, "data", "darp")
    assert code == 0 and "darp" in out
    assert "wants one name of" in refused(capsys, "data", "get")
    assert "smollm2" in refused(capsys, "data", "get", "smollm3")
    said = refused(capsys, "run", "darp", "--preset", "cpu", "--run-dir", str(tmp_path / "run"))
    assert "darp" in said and not (tmp_path / "run").exists()


def test_help_shows_the_fields(capsys):
    code, out, _ = call(capsys, "run", "reppo", "--help")
    assert code == 0 and "--config.agent.kl-bound" in out and "--run-dir" in out
    assert call(capsys, "run", "--help")[0] == 0 and call(capsys)[0] == 0


@pytest.mark.parametrize("number, code", [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signals_save_and_say_how_to_go_on(tmp_path, number, code):
    words = ["run", "reppo", "--preset", "smoke", "--run-dir", str(tmp_path), "--config.env-steps", "100000000"]
    process = subprocess.Popen(
        [sys.executable, "-m", "papyrax.scripts.cli", *words],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        env=os.environ,
    )
    metrics = tmp_path / "metrics.jsonl"
    while process.poll() is None and not (metrics.is_file() and metrics.stat().st_size > 200):
        try:
            process.wait(0.2)
        except subprocess.TimeoutExpired:
            continue
    process.send_signal(number)
    _, err = process.communicate(timeout=120)
    assert process.returncode == code, err
    assert "go on with: papyrax run reppo" in err and str(tmp_path) in err
