"""The README: its table is fresh, its examples run, what they claim holds."""

from __future__ import annotations

import re

import numpy as np
import pytest

from papyrax.methods.catalog import CATALOG
from papyrax.scripts import readme

TEXT = readme.README.read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", TEXT, re.S)


def test_the_table_is_fresh():
    assert readme.renewed(TEXT) == TEXT, "the table is stale: run python scripts/readme.py"
    assert all(f"| `{s.name}` |" in TEXT for s in CATALOG)


@pytest.fixture(scope="module")
def names():
    spaces = []
    for source in EXAMPLES:
        space: dict = {}
        exec(compile(source, "README.md", "exec"), space)
        spaces.append(space)
    return spaces


def test_three_examples_run(names):
    assert len(names) == 3


def test_what_the_examples_say_holds(names):
    np.testing.assert_allclose(names[0]["targets"][:, 0], [2.6875, 2.75, 3.0])
    assert names[0]["gradient"].shape == (3, 51) and np.isfinite(names[0]["gradient"]).all()
    assert names[1]["returns"].shape == (8, 4)
    assert all(i not in row for i, row in enumerate(np.asarray(names[2]["ids"])))
