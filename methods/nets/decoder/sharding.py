"""Where a decoder's parameters lie on a mesh with axes ``fsdp`` and ``tensor``: pairs of a pattern on the leaf's path and a PartitionSpec.

Kernels that widen (q, k, v, gate, up) are cut along their outputs over ``tensor``, kernels that narrow (o, down) along their inputs, so a block
needs one sum over ``tensor`` after each of o and down; the other side is cut over ``fsdp`` and gathered when used. Tables are cut by words.
"""

from jax.sharding import PartitionSpec

__all__ = ["RULES"]

RULES: tuple[tuple[str, PartitionSpec], ...] = (
    (r"(^|/)(embed|head)$", PartitionSpec("tensor", "fsdp")),
    (r"layers/(q|k|v|gate|up)$", PartitionSpec(None, "fsdp", "tensor")),
    (r"layers/(o|down)$", PartitionSpec(None, "tensor", "fsdp")),
    (r"layers/(q|k|v)_b$", PartitionSpec(None, "tensor")),
    (r"norm$", PartitionSpec()),
)
