"""Renews the README's table of systems from the catalogue: `python scripts/readme.py` (`--check` only says whether it is stale)."""

from __future__ import annotations

import sys
from pathlib import Path

from papyrax.methods.catalog import CATALOG, FIELDS

README = Path(__file__).resolve().parent.parent / "README.md"
BEGIN, END = "<!-- catalogue -->", "<!-- /catalogue -->"


def table() -> str:
    """One row a system, by field."""
    lines = ["| field | system | what it does | paper |", "|---|---|---|---|"]
    for field in FIELDS:
        for s in CATALOG:
            if s.field == field:
                lines.append(f"| {field} | `{s.name}` | {s.says} | [{s.title}]({s.link}) |")
    return "\n".join(lines)


def renewed(text: str) -> str:
    """The README's text with a fresh table."""
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n{table()}\n{END}{rest.split(END)[1]}"


def main(arguments: list[str]) -> int:
    """Writes, or checks; returns the exit code."""
    text = README.read_text()
    if "--check" in arguments:
        return 0 if renewed(text) == text else 1
    README.write_text(renewed(text))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
