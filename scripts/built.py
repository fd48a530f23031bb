"""Prints the names of the systems whose recipe has a given part: `python -m papyrax.scripts.built bench`."""

from __future__ import annotations

import sys

from papyrax.methods.catalog import CATALOG
from papyrax.train import recipe as recipes
from papyrax.train.errors import UserError
from papyrax.train.platform import settle


def main(part: str) -> None:
    """One name a line."""
    settle()
    for row in CATALOG:
        try:
            if hasattr(recipes.load(row), part):
                print(row.name)
        except UserError:
            continue


if __name__ == "__main__":
    main(sys.argv[1])
