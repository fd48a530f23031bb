"""One static HTML page over all runs and committed results: every system's numbers beside baseline and paper, with
the runs' figures."""

import html
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from urllib.parse import quote

from papyrax.train.files import write_atomic
from papyrax.train.report import Number, Report, cell, duration, number_cells, read

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 76rem; padding: 0 1rem; color: #1b1b1b;
background: #fff } h1 { font-size: 1.6rem } h2 { font-size: 1.2rem; margin-top: 2.2rem; border-bottom: 1px solid #ddd
  } h3 { font-size: 1rem }
table { border-collapse: collapse; width: 100%; font-size: .87rem; margin: .6rem 0 }
th, td { text-align: left; padding: .25rem .6rem; border-bottom: 1px solid #eee; vertical-align: top }
th { background: #f6f6f6 } td.yes { color: #00694a; font-weight: 600 } td.no { color: #b03a00; font-weight: 600 }
.pictures { display: flex; flex-wrap: wrap; gap: .8rem } figure { margin: 0; width: 15rem } figure img { width: 100%;
border: 1px solid #eee } figcaption { font-size: .8rem; color: #555 } .facts { color: #666; font-size: .82rem }
"""
_COLUMNS = ("number", "ours", "baseline", "paper", "target", "met", "note")


def page(folders: Iterable[Path | str], results_dir: Path | str, out: Path | str) -> Path:
    """Writes the page.

    Args:
      folders: run folders; those without a report yet are listed as unfinished.
      results_dir: the folder of committed `SYSTEM.json` files (may be absent).
      out: the HTML file; links to runs and pictures are relative to it.

    Returns:
      The path of the page.
    """
    out = Path(out)
    parts = ["<h1>papyrax results</h1>"]
    committed = _committed(Path(results_dir))
    runs, unfinished = [], []
    for folder in sorted(map(Path, folders), key=str):
        try:
            report, meta = read(folder)
            runs.append((folder, report, meta))
        except (FileNotFoundError, ValueError) as error:
            unfinished.append((folder, str(error)))
    parts.append("<h2>Systems</h2>")
    parts.append(_systems(committed, runs) if committed or runs else "<p>No run and no committed result yet.</p>")
    for system, data in committed.items():
        parts += _bench(system, data.get("bench"))
    if runs:
        parts.append("<h2>Runs</h2>")
    for folder, report, meta in runs:
        parts += _run(folder, report, meta, out.parent)
    if unfinished:
        parts.append("<h2>Runs without a report</h2><ul>")
        parts += [
            f"<li>{_link(folder, out.parent, folder.name)}: {html.escape(why)}</li>" for folder, why in unfinished
        ]
        parts.append("</ul>")
    body = "\n".join(parts)
    write_atomic(
        out,
        f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>papyrax results</title><style>{_STYLE}</style>\n<body>\n{body}\n</body></html>\n",
    )
    return out


def _committed(folder: Path) -> dict[str, dict[str, Any]]:
    found = {}
    for path in sorted(folder.glob("*.json")):
        try:
            found[path.stem] = json.loads(path.read_text(encoding="utf-8"))
        except json.JSONDecodeError as error:
            raise ValueError(f"{path} is not JSON ({error}).") from error
    return found


def _systems(committed: dict[str, dict[str, Any]], runs: list[tuple[Path, Report, dict[str, Any]]]) -> str:
    rows = []
    for system, data in committed.items():
        for preset, entry in sorted(data.get("runs", {}).items()):
            rows += [[system, preset, *number_cells(Number(**_known(n)))] for n in entry["numbers"]]
    have = {(row[0], row[1]) for row in rows}
    for folder, report, meta in runs:
        system, preset = str(meta.get("system", folder.parent.name)), str(meta.get("preset", ""))
        if (system, preset) not in have:
            rows += [[system, f"{preset} (not committed)", *number_cells(n)] for n in report.numbers]
    return _table(("system", "preset", *_COLUMNS), sorted(rows, key=lambda row: row[:2]))


def _known(number: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in number.items() if k in Number.__dataclass_fields__}


def _bench(system: str, bench: dict[str, Any] | None) -> list[str]:
    parts = []
    for table in (bench or {}).get("tables", []):
        parts.append(f"<h3>{html.escape(system)}: {html.escape(table['name'])}</h3>")
        parts.append(f"<p>{html.escape(table['headline'])}</p>" if table.get("headline") else "")
        parts.append(_table(table["columns"], [[cell(v) for v in row] for row in table["rows"]]))
        parts.append(f'<p class="facts">{html.escape(table["note"])}</p>' if table.get("note") else "")
    return ["<h2>Benchmarks of " + html.escape(system) + "</h2>", *parts] if parts else []


def _run(folder: Path, report: Report, meta: dict[str, Any], base: Path) -> list[str]:
    system, preset = str(meta.get("system", folder.parent.name)), str(meta.get("preset", ""))
    shown = {True: "shown", False: "not shown", None: "not tested"}[report.shown]
    parts = [f"<h3>{_link(folder / 'report.md', base, f'{system} ({preset}) {folder.name}')}: {shown}</h3>"]
    parts.append(f"<p>{html.escape(report.claim)}<br><b>{html.escape(report.verdict)}</b></p>")
    parts.append(_table(_COLUMNS, [number_cells(n) for n in report.numbers]))
    if report.figures:
        parts.append('<div class="pictures">')
        for figure in report.figures:
            href, title = _href(folder / figure.path, base), html.escape(figure.title)
            picture = f'<a href="{href}"><img loading="lazy" src="{href}" alt="{title}"></a>'
            parts.append(f"<figure>{picture}<figcaption>{title}</figcaption></figure>")
        parts.append("</div>")
    parts.append(
        f'<p class="facts">seed {html.escape(str(meta.get("seed")))}, wall time {duration(meta.get("wall_s"))}</p>'
    )
    return parts


def _table(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = "".join(f"<th>{html.escape(str(c))}</th>" for c in columns)
    body = "".join(
        "<tr>"
        + "".join(f'<td class="{c}">{c}</td>' if c in ("yes", "no") else f"<td>{html.escape(str(c))}</td>" for c in row)
        + "</tr>"
        for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _href(path: Path, base: Path) -> str:
    return quote(Path(os.path.relpath(path, base)).as_posix())


def _link(path: Path, base: Path, text: str) -> str:
    return f'<a href="{_href(path, base)}">{html.escape(text)}</a>'
