"""DARP's benchmark at its smallest: every peer gives our losses, actions and rows."""

from __future__ import annotations

import dataclasses
import os

import numpy as np
import pytest

from papyrax.train.bench import Bench
from papyrax.train.peers import ROOT
from papyrax.train.recipes.control import darp

pytestmark = pytest.mark.proof("darp", "bench")
SMOKE = darp.PRESETS["smoke"]


@pytest.mark.skipif(
    not os.path.isdir(os.path.join(os.environ.get("PAPYRAX_DATA", ""), "darp")),
    reason="the demonstrations (data set darp) are not here",
)
@pytest.mark.skipif(
    not (ROOT / ".peers" / "torch" / "bin" / "python").exists(),
    reason="the peers' environment 'torch' is not built: run make peers",
)
def test_peers_agree_at_three_sizes():
    with Bench() as bench:
        tables = darp.bench(SMOKE, bench)
    assert len(tables) == 6
    for table in tables:
        assert len(table.rows) == 3 and table.headline and table.note
        assert all(np.isfinite(cell) and cell > 0 for row in table.rows for cell in row[:4])


def test_a_policy_that_the_peers_have_not_is_refused():
    changed = dataclasses.replace(SMOKE, darp=dataclasses.replace(SMOKE.darp, aggregator="set"))
    with Bench() as bench, pytest.raises(ValueError, match="aggregator"):
        darp.bench(changed, bench)
