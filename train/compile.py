"""Ahead-of-time compilation of a step for a named TPU slice, on a machine that has none.

The TPU compiler (the wheel `libtpu`) compiles for a described topology: the real schedule, memory plan and collectives
of 256 chips come out of a laptop. `compile_target` also takes CPU meshes (virtual devices), where memory and
collectives are those of the CPU compiler.

    mesh = topology_mesh("v5e:16x16", {"fsdp": 256})
    result = compile_target(Target("step", step, (state_shapes, batch_shapes), donate=(0,)))
    fits(result, "v5e:16x16")
"""

import contextlib
import dataclasses
import math
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils, topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding
from rich.table import Table

from papyrax.train import hlo
from papyrax.train.errors import UserError
from papyrax.train.sharding import AXES

GIB = 2**30
HBM_GIB = {"v4": 32, "v5e": 16, "v5p": 95, "v6e": 32, "tpu7x": 192}
"""Memory of one chip. The chips of v4 and tpu7x hold two cores, each of them a device with half of it."""
_CORES = {"v4": 2, "tpu7x": 2}


class DoesNotFit(UserError):
    """The program needs more memory than a chip of the topology has."""


class BadTopology(UserError, ValueError):
    """The topology's name, or the mesh shape asked for on it, is not possible."""


class NoCompiler(UserError):
    """The compiler for the topology is not installed."""


@dataclasses.dataclass(frozen=True)
class Target:
    """A function to compile.

    Attributes:
        name: what tables and errors call it.
        fn: a function of `args`, jitted or not.
        args: one pytree of `jax.ShapeDtypeStruct` an argument, with NamedShardings where they matter.
        donate: numbers of the arguments whose memory the outputs may reuse.
    """

    name: str
    fn: Callable
    args: tuple
    donate: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on one device. `outputs` leaves out what lies in donated arguments; `peak` is the most held at once."""

    arguments: int
    outputs: int
    temporaries: int
    code: int
    peak: int


@dataclasses.dataclass(frozen=True)
class CompileResult:
    """What the compiler says about one target, for one device.

    Attributes:
        seconds: tracing, lowering and compiling.
        flops: XLA's count, with the matrix products inside loops multiplied by their trip counts (see `train/hlo.py`).
        bytes_accessed: XLA's count of bytes read and written by instructions; each loop body counts once.
        memory: see `Memory`.
        collective_bytes: bytes by kind of collective, loops multiplied.
        unknown_loops: number of loops whose trip count is not in the program (such as searches until convergence),
            counted once.
        devices: number of devices compiled for.
    """

    name: str
    seconds: float
    flops: float
    bytes_accessed: float
    memory: Memory
    collective_bytes: dict[str, int]
    unknown_loops: int
    devices: int


def _family(topology: str) -> str:
    """The chip family in a topology's name, or a BadTopology that lists the known ones."""
    match = re.fullmatch(r"(\w+):(\d+(?:x\d+){1,2})", topology)
    if match is None or match[1] not in HBM_GIB:
        known = ", ".join(HBM_GIB)
        raise BadTopology(f"topology must be FAMILY:AxB or FAMILY:AxBxC with a family of {known}, got {topology!r}.")
    return match[1]


@contextlib.contextmanager
def _quiet_stderr() -> Iterator[None]:
    """Sends file descriptor 2 to nowhere: libtpu greets from C++ before its own log level is read."""
    try:
        kept = os.dup(2)
    except OSError:
        yield
        return
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)


def _load_libtpu(topology: str) -> list[jax.Device]:
    """Devices of the topology. Without a TPU in the machine, tells libtpu not to look for one."""
    if jax.default_backend() != "tpu":
        for name, value in {
            "TPU_SKIP_MDS_QUERY": "1",
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
            "TPU_ACCELERATOR_TYPE": "v5litepod-1",
            "TPU_WORKER_HOSTNAMES": "localhost",
            "TPU_WORKER_ID": "0",
            "TPU_MIN_LOG_LEVEL": "3",
        }.items():
            os.environ.setdefault(name, value)
    # one chip is less than the usual host's share and needs its bounds said
    single = {"chips_per_host_bounds": [1, 1, 1]} if re.fullmatch(r"\w+:1x1(x1)?", topology) else {}
    with _quiet_stderr():
        return list(topologies.get_topology_desc(platform="tpu", topology_name=topology, **single).devices)


def topology_devices(topology: str) -> list[jax.Device]:
    """Devices of a TPU topology such as "v5e:16x16" or "v4:4x4x4"; "cpu" and "cpu:N" give the host's own (virtual)
    devices.

    Raises:
        BadTopology: the name is not one of a known family, or the compiler refuses its shape.
        NoCompiler: the wheel libtpu is not installed.
    """
    if topology == "cpu" or topology.startswith("cpu:"):
        devices = jax.devices("cpu")
        wanted = int(topology[4:]) if topology[4:].isdigit() else len(devices)
        if not 1 <= wanted <= len(devices):
            raise BadTopology(f"topology {topology!r} wants {wanted} CPU devices, this process has {len(devices)}.")
        return devices[:wanted]
    _family(topology)
    try:
        return _load_libtpu(topology)
    except Exception as error:
        text = str(error)
        if "INVALID_ARGUMENT" in text:
            reason = text.split("INVALID_ARGUMENT:")[-1].strip().splitlines()[0]
            raise BadTopology(f"topology {topology!r} is refused by the TPU compiler: {reason}.") from error
        reason = text.splitlines()[0] if text else repr(error)
        raise NoCompiler(f"compiling for {topology} needs the wheel libtpu, which did not load ({reason}).") from error


def topology_mesh(topology: str, shape: Mapping[str, int] | None = None) -> Mesh:
    """Mesh with the axes data, fsdp and tensor over all devices of a topology.

    Args:
        topology: see `topology_devices`.
        shape: size by axis; axes left out have size 1, one size may be -1 (whatever remains). None puts all devices on
            `data`.

    Raises: BadTopology when the sizes do not multiply to the number of devices, and what `topology_devices` raises.
    """
    devices = topology_devices(topology)
    sizes = dict.fromkeys(AXES, 1) | (dict(shape) if shape is not None else {"data": -1})
    if set(sizes) != set(AXES):
        raise BadTopology(f"shape must name axes of {', '.join(AXES)}, got {', '.join(sizes)}.")
    fixed = math.prod(size for size in sizes.values() if size != -1)
    sizes = {axis: len(devices) // max(fixed, 1) if size == -1 else size for axis, size in sizes.items()}
    if math.prod(sizes.values()) != len(devices) or min(sizes.values()) < 1:
        raise BadTopology(f"shape must multiply to the {len(devices)} devices of {topology}, got {sizes}.")
    dims = tuple(sizes[axis] for axis in AXES)
    try:
        # Lays the fast axes along the links of the torus. Where it knows no such layout for these sizes it refuses in one of three
        # ways, and the devices are taken in the order of their numbers: the same program, over longer ways.
        grid = mesh_utils.create_device_mesh(dims, devices, allow_split_physical_axes=True)
    except (NotImplementedError, ValueError, AssertionError):
        grid = np.array(devices).reshape(dims)
    return Mesh(grid, AXES)


def _place(args: Any, mesh: Mesh | None) -> Any:
    """Gives arguments without a sharding a full copy on every device of the mesh."""
    if mesh is None:
        return args
    whole = NamedSharding(mesh, PartitionSpec())

    def place(leaf):
        if getattr(leaf, "sharding", None) is not None:
            return leaf
        return jax.ShapeDtypeStruct(np.shape(leaf), jax.dtypes.canonicalize_dtype(leaf.dtype), sharding=whole)

    return jax.tree.map(place, args)


def _devices(args: Any) -> int:
    shardings = [
        leaf.sharding for leaf in jax.tree.leaves(args) if isinstance(getattr(leaf, "sharding", None), Sharding)
    ]
    return max((len(sharding.device_set) for sharding in shardings), default=1)


def compile_target(target: Target, *, mesh: Mesh | None = None) -> CompileResult:
    """Compiles one target for the devices in its arguments' shardings and reads the program that comes out.

    Args:
        target: what to compile.
        mesh: where arguments that carry no sharding go, replicated; without it they stay on the default device.

    Raises: DoesNotFit when the compiler runs out of the chip's memory, UserError when it reports no memory plan.
    """
    args = _place(target.args, mesh)
    start = time.perf_counter()
    try:
        compiled = jax.jit(target.fn, donate_argnums=target.donate).trace(*args).lower().compile()
    except jax.errors.JaxRuntimeError as error:
        raise _out_of_memory(target.name, error) or error from error
    seconds = time.perf_counter() - start
    stats, cost, counts = compiled.memory_analysis(), compiled.cost_analysis() or {}, hlo.count(compiled.as_text())
    if stats is None:
        raise UserError(f"{target.name}: this compiler reports no memory plan, so nothing can be said about its fit.")
    outputs = stats.output_size_in_bytes - stats.alias_size_in_bytes
    held = stats.argument_size_in_bytes + outputs + stats.temp_size_in_bytes + stats.generated_code_size_in_bytes
    memory = Memory(
        arguments=stats.argument_size_in_bytes,
        outputs=outputs,
        temporaries=stats.temp_size_in_bytes,
        code=stats.generated_code_size_in_bytes,
        peak=max(held, getattr(stats, "peak_memory_in_bytes", 0)),
    )
    return CompileResult(
        name=target.name,
        seconds=seconds,
        flops=float(cost.get("flops", 0.0)) + counts.product_flops - counts.product_flops_once,
        bytes_accessed=float(cost.get("bytes accessed", 0.0)),
        memory=memory,
        collective_bytes=counts.collective_bytes,
        unknown_loops=len(counts.unknown_loops),
        devices=_devices(args),
    )


def _out_of_memory(name: str, error: Exception) -> DoesNotFit | None:
    """The compiler's out-of-memory error as one sentence; None for any other error."""
    text = str(error)
    if "RESOURCE_EXHAUSTED" not in text:
        return None
    sizes = re.findall(r"([\d.]+[KMGT])\b", text)
    if len(sizes) < 2:
        return DoesNotFit(f"{name} does not fit: the compiler ran out of the chip's memory.")
    return DoesNotFit(
        f"{name} does not fit: the compiler needs {sizes[0]} bytes a device, and a device has {sizes[1]} to give."
    )


def fits(result: CompileResult, topology: str) -> CompileResult:
    """Returns the result, or raises DoesNotFit with both numbers when its peak passes the memory of a device of the
    topology.
    """
    family = _family(topology)
    limit = HBM_GIB[family] * GIB // _CORES.get(family, 1)
    if result.memory.peak > limit:
        raise DoesNotFit(
            f"{result.name} does not fit: it needs {result.memory.peak / GIB:.2f} GiB a device, "
            f"a device of {family} has {limit / GIB:g} GiB."
        )
    return result


def amount(number: float, unit: str = "") -> str:
    """A number with a decimal prefix: 1.23e9 -> "1.23 G"."""
    for factor, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= factor:
            return f"{number / factor:.3g} {prefix}{unit}"
    return f"{number:.3g} {unit}".rstrip()


def table(results: Sequence[CompileResult], title: str = "Compiled ahead of time, for one device") -> Table:
    """A rich table of results, one row a target."""
    out = Table(title=title, caption="FLOPs: products in loops multiplied. Read/write bytes: loop bodies once.")
    out.add_column("target")
    for column in ("devices", "compile s", "FLOPs", "read/write", "arguments", "outputs", "temporaries", "peak"):
        out.add_column(column, justify="right")
    out.add_column("collectives")
    for r in results:
        moved = ", ".join(f"{kind} {amount(size, 'B')}" for kind, size in sorted(r.collective_bytes.items())) or "none"
        if r.unknown_loops:
            moved += f" ({r.unknown_loops} loops of unknown length counted once)"
        sizes = (r.bytes_accessed, r.memory.arguments, r.memory.outputs, r.memory.temporaries, r.memory.peak)
        out.add_row(
            r.name, str(r.devices), f"{r.seconds:.1f}", amount(r.flops), *(amount(size, "B") for size in sizes), moved
        )
    return out


def execute(recipe: Any, config: Any, topology: str, shape: Mapping[str, int] | None = None) -> list[CompileResult]:
    """Compiles every target that a recipe names for the topology, and holds each to a device's memory.

    `shape` defaults to the recipe's `mesh_shape(config, devices)` where it has one, else to all devices on `data`.

    Raises: DoesNotFit, BadTopology, NoCompiler.
    """
    if shape is None and hasattr(recipe, "mesh_shape"):
        shape = recipe.mesh_shape(config, len(topology_devices(topology)))
    mesh = topology_mesh(topology, shape)
    return [fits(compile_target(target, mesh=mesh), topology) for target in recipe.compile_targets(config, mesh)]


def record(results: Sequence[CompileResult], preset: str) -> dict[str, Any]:
    """What results/SYSTEM.json keeps of a compile."""
    return {
        "preset": preset,
        "libtpu": _version("libtpu"),
        "jax": jax.__version__,
        "targets": [dataclasses.asdict(r) for r in results],
    }


def show(results: Sequence[CompileResult], topology: str) -> None:
    """Prints the table of results."""
    from rich.console import Console

    console = Console()
    (console if console.is_terminal else Console(width=200)).print(
        table(results, f"Compiled for {topology}, for one device")
    )


def _version(package: str) -> str | None:
    import importlib.metadata

    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
