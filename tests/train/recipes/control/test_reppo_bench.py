"""Parts of REPPO's benchmark at their smallest."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from papyrax.train.recipes.control import reppo, reppo_bench
from tests.support.worlds import corridor

pytestmark = pytest.mark.proof("reppo", "bench")
AGENT = dataclasses.replace(
    reppo.PRESETS["smoke"].agent, num_envs=8, steps=4, hidden_actor=8, hidden_critic=8, aux_weight=0.0
)
PPO = dataclasses.replace(reppo.PRESETS["smoke"].ppo, num_envs=8, steps=4, hidden=8)


def test_speed_takes_discrete_worlds():
    split = reppo_bench.speed(corridor(), AGENT, jax.random.key(0), repeats=1)
    assert set(split) == {"steps_per_s", "rollout_share", "rollout_steps_per_s"}
    assert all(np.isfinite(value) and value > 0 for value in split.values())


def test_a_return_that_is_not_reached_is_told():
    table = reppo_bench._reach(AGENT, PPO, 4, seeds=1)
    assert table.rows == [["REPPO", 0, None, None], ["PPO", 0, None, None]]
    assert table.headline.endswith("REPPO not at all, PPO not at all")


def test_work_is_equal_when_every_count_is():
    counts = {"env_steps": 64, "updates": 4, "policy_params": 9, "value_params": 8, "finite": True}
    assert reppo_bench._equal_work(counts, counts)
    for name in counts:
        assert not reppo_bench._equal_work(counts, counts | {name: 0})
