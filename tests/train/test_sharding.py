"""Rules that place arrays: first match, divisibility, automatic cuts, refusals."""

from __future__ import annotations

from typing import ClassVar

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, PartitionSpec

from papyrax.train.errors import UserError
from papyrax.train.sharding import batch_shardings, fsdp_rules, make_mesh, path_name, specs


class FakeMesh:
    """Axis sizes alone, for rules that never touch a device."""

    shape: ClassVar = {"data": 2, "fsdp": 4, "tensor": 2}


TREE = {"layers": {"w": np.zeros((8, 12)), "b": np.zeros(12)}, "head": np.zeros((12, 3))}


def test_the_first_rule_that_is_found_wins():
    rules = [
        ("layers/w$", PartitionSpec("fsdp", "tensor")),
        ("w", PartitionSpec("data")),
        ("head", PartitionSpec(None, "tensor")),
    ]
    found = specs(TREE, rules)
    assert found["layers"]["w"] == PartitionSpec("fsdp", "tensor")
    assert found["layers"]["b"] == PartitionSpec() and found["head"] == PartitionSpec(None, "tensor")
    with pytest.raises(UserError, match=r"has 2 axes but layers/b has shape \(12,\)"):
        specs(TREE, [("layers", PartitionSpec("fsdp", "tensor"))])


def test_paths_of_dataclasses_and_lists():
    names = []
    jax.tree_util.tree_map_with_path(lambda p, x: names.append(path_name(p)), {"a": [1, (2,)]})
    assert names == ["a/0", "a/1/0"]


def test_automatic_cuts_take_the_longest_divisible_side():
    rules = fsdp_rules(TREE, FakeMesh, min_size=30)  # type: ignore[arg-type]
    assert specs(TREE, rules) == {
        "layers": {"w": PartitionSpec(None, "fsdp"), "b": PartitionSpec()},
        "head": PartitionSpec("fsdp"),
    }


def test_what_does_not_divide_is_told():
    mesh = AbstractMesh((2, 4, 2), ("data", "fsdp", "tensor"))
    from papyrax.train.sharding import shardings

    with pytest.raises(UserError, match="head has a dimension of 3, which the 2 devices along tensor do not divide"):
        shardings(TREE, [("head", PartitionSpec(None, "tensor"))], mesh)
    with pytest.raises(UserError, match="dimension of 6"):
        batch_shardings({"x": np.zeros((6, 2)), "scale": np.zeros(())}, mesh)


def test_mesh_sizes():
    assert dict(make_mesh().shape) == {"data": len(jax.devices()), "fsdp": 1, "tensor": 1}
    with pytest.raises(UserError, match="at most one of them may be -1"):
        make_mesh(data=-1, fsdp=-1)
    with pytest.raises(UserError, match="do not divide"):
        make_mesh(data=1, fsdp=len(jax.devices()) + 1)
