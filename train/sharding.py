"""Meshes and rules that place arrays on them: the same code for one CPU, eight virtual devices, several processes, and a pod.

The mesh always has the axes `data` (batch), `fsdp` (batch, and parameters cut along it) and `tensor` (parameters cut inside a layer, or a
sequence between blocks). A rule is a pair (regular expression on the leaf's path, PartitionSpec); the first match wins, no match means replicated.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from papyrax.train.errors import UserError

AXES = ("data", "fsdp", "tensor")
BATCH = PartitionSpec(("data", "fsdp"))
Rules = Sequence[tuple[str, PartitionSpec]]


def make_mesh(devices: Sequence[Any] | None = None, *, data: int = -1, fsdp: int = 1, tensor: int = 1) -> Mesh:
    """A mesh over `devices` (default: all); one size may be -1, which takes what is left.

    Raises UserError when the sizes do not multiply to the number of devices.
    """
    devices = list(jax.devices() if devices is None else devices)
    sizes = [data, fsdp, tensor]
    if sizes.count(-1) > 1:
        raise UserError(f"mesh sizes are data {data}, fsdp {fsdp}, tensor {tensor}; at most one of them may be -1")
    known = int(np.prod([s for s in sizes if s != -1]))
    sizes = [len(devices) // known if s == -1 else s for s in sizes]
    if int(np.prod(sizes)) != len(devices):
        raise UserError(
            f"mesh sizes data {data}, fsdp {fsdp}, tensor {tensor} do not divide the {len(devices)} devices that are here"
        )
    return Mesh(np.asarray(devices).reshape(sizes), AXES)


def path_name(path: tuple) -> str:
    """`params/layers/0/w` for a key path of jax.tree_util."""
    parts = []
    for entry in path:
        for attribute in ("key", "name", "idx"):
            if hasattr(entry, attribute):
                parts.append(str(getattr(entry, attribute)))
                break
    return "/".join(parts)


def specs(tree: Any, rules: Rules) -> Any:
    """The PartitionSpec of every leaf of `tree`, by the first rule whose pattern is found in the leaf's path."""

    def one(path, leaf):
        name = path_name(path)
        for pattern, spec in rules:
            if re.search(pattern, name):
                if len(spec) > np.ndim(leaf):
                    raise UserError(
                        f"sharding rule '{pattern}' has {len(spec)} axes but {name} has shape {np.shape(leaf)}"
                    )
                return spec
        return PartitionSpec()

    return jax.tree_util.tree_map_with_path(one, tree)


def shardings(tree: Any, rules: Rules, mesh: Mesh) -> Any:
    """NamedShardings for every leaf of `tree` (arrays or ShapeDtypeStructs).

    Raises UserError when a dimension is not divisible by the mesh axes that a rule cuts it along.
    """

    def one(path, leaf, spec):
        for size, axes in zip(np.shape(leaf), spec):
            parts = int(np.prod([mesh.shape[a] for a in ((axes,) if isinstance(axes, str) else axes or ())]))
            if size % parts:
                raise UserError(
                    f"{path_name(path)} has a dimension of {size}, which the {parts} devices along {axes} do not divide"
                )
        return NamedSharding(mesh, spec)

    return jax.tree_util.tree_map_with_path(
        one, tree, specs(tree, rules), is_leaf=lambda x: isinstance(x, PartitionSpec)
    )


def fsdp_rules(tree: Any, mesh: Mesh, *, axis: str = "fsdp", min_size: int = 2**14) -> list[tuple[str, PartitionSpec]]:
    """Rules that cut each large leaf along its longest divisible dimension over `axis`; small leaves stay replicated."""
    parts, rules = mesh.shape[axis], []

    def one(path, leaf):
        shape = np.shape(leaf)
        if int(np.prod(shape)) < min_size:
            return
        fitting = [i for i, size in enumerate(shape) if size % parts == 0]
        if fitting:
            longest = max(fitting, key=lambda i: shape[i])
            rules.append(
                (
                    f"^{re.escape(path_name(path))}$",
                    PartitionSpec(*[axis if i == longest else None for i in range(longest + 1)]),
                )
            )

    jax.tree_util.tree_map_with_path(one, tree)
    return rules


def batch_shardings(batch: Any, mesh: Mesh, spec: PartitionSpec = BATCH) -> Any:
    """Shardings of a batch whose leaves lead with the batch axis; scalars are replicated."""
    rules = [(".*", spec)]
    return jax.tree.map(
        lambda leaf: (
            NamedSharding(mesh, PartitionSpec()) if np.ndim(leaf) < len(spec) else shardings(leaf, rules, mesh)
        ),
        batch,
    )


def place_global(tree: Any, target: Any) -> Any:
    """Puts host arrays that every process holds whole onto `target` shardings; each process sends only its own pieces."""

    def one(leaf, sharding):
        if jax.process_count() == 1:
            return jax.device_put(leaf, sharding)
        if jax.dtypes.issubdtype(getattr(leaf, "dtype", np.dtype(type(leaf))), jax.dtypes.prng_key):
            data = np.asarray(jax.random.key_data(leaf))
            spec = NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec))
            return jax.random.wrap_key_data(
                jax.make_array_from_callback(data.shape, spec, lambda i: data[i]), impl=jax.random.key_impl(leaf)
            )
        array = np.asarray(leaf)
        return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])

    return jax.tree.map(one, tree, target)


def place_local(tree: Any, target: Any) -> Any:
    """Joins what each process loaded for itself (its part of the batch) to arrays on `target` shardings."""
    return jax.tree.map(
        lambda leaf, sharding: jax.make_array_from_process_local_data(sharding, np.asarray(leaf)), tree, target
    )


def to_host(tree: Any) -> Any:
    """NumPy copies of fully replicated or fully addressable arrays; typed keys become their key data."""

    def one(leaf):
        if isinstance(leaf, jax.Array):
            if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
                leaf = jax.random.key_data(leaf)
            if not leaf.is_fully_addressable:
                leaf = leaf.addressable_data(0)
        return np.asarray(leaf)

    return jax.tree.map(one, tree)
