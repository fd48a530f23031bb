"""The sharding rules name every kernel of every family, and cut only axes that divide."""

import jax
import pytest
from jax.sharding import PartitionSpec

from papyrax.methods.nets.decoder.config import FAMILIES, nano
from papyrax.methods.nets.decoder.params import init
from papyrax.methods.nets.decoder.sharding import RULES
from papyrax.train.sharding import specs


@pytest.mark.parametrize("family", FAMILIES)
def test_every_kernel_has_a_place(family):
    params = jax.eval_shape(lambda: init(jax.random.key(0), nano(family)))
    placed = specs(params, RULES)
    for name, leaf in params["layers"].items():
        spec = placed["layers"][name]
        if leaf.ndim == 3:
            assert set(spec) == {None, "fsdp", "tensor"} and spec[0] is None, name
        elif name.endswith("_b"):
            assert spec == PartitionSpec(None, "tensor")
        else:
            assert spec == PartitionSpec(), name
    assert placed["embed"] == PartitionSpec("tensor", "fsdp") and placed["norm"] == PartitionSpec()
