"""Which devices JAX may look for, and how processes of one run find each other."""

from __future__ import annotations

import contextlib
import glob
import hashlib
import os
import platform
from pathlib import Path

from papyrax.train.errors import UserError


def settle() -> None:
    """On a machine without an accelerator, tells JAX so: installed TPU and CUDA plugins would search for one and complain at length.

    Does nothing when JAX_PLATFORMS is set already.
    """
    if "JAX_PLATFORMS" not in os.environ and not any(
        glob.glob(p) for p in ("/dev/nvidia[0-9]*", "/dev/accel*", "/dev/vfio/[0-9]*", "/dev/kfd")
    ):
        os.environ["JAX_PLATFORMS"] = "cpu"


def cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def split_cpu(count: int) -> None:
    """Lets JAX see the CPU as `count` devices, each with a thread of its own, so that independent work runs side by side.

    Does nothing off the CPU, when XLA_FLAGS says a number already, or once JAX has looked for its devices.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if count > 1 and os.environ.get("JAX_PLATFORMS") == "cpu" and "host_platform_device_count" not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count={count}".strip()


def keep_compiled(root: Path, limit: int = 2 * 2**30) -> None:
    """Keeps compiled programs below `root`, in a folder for this kind of processor, so that equal programs of one run, and those of a run that
    goes on, compile once. Beyond `limit` bytes the oldest go.

    Does nothing when JAX's own settings name a place already, or when the folder can't be written.
    """
    import jax

    if jax.config.jax_compilation_cache_dir:
        return
    known = Path("/proc/cpuinfo")
    flags = (
        next((line for line in known.read_text().splitlines() if line.startswith("flags")), "")
        if known.is_file()
        else ""
    )
    kind = hashlib.sha256(f"{platform.machine()} {flags}".encode()).hexdigest()[:12]
    folder = root / "compiled" / kind
    try:
        folder.mkdir(parents=True, exist_ok=True)
        files = sorted((f.stat().st_mtime, f.stat().st_size, f) for f in folder.iterdir())
    except OSError:
        return
    held = sum(size for _, size, _ in files)
    for _, size, file in files:
        if held <= limit:
            break
        with contextlib.suppress(OSError):
            file.unlink()
        held -= size
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


def join_processes() -> None:
    """Joins the processes of one run: by PAPYRAX_COORDINATOR, PAPYRAX_PROCESSES and PAPYRAX_PROCESS where they are set (two processes on one
    machine, launchers of one's own), else by what JAX finds in a TPU pod, Slurm, Kubernetes or Open MPI.

    Raises UserError when they can't be joined.
    """
    import jax

    address = os.environ.get("PAPYRAX_COORDINATOR")
    try:
        if jax.config.jax_platforms == "cpu":
            jax.config.update("jax_cpu_collectives_implementation", "gloo")
        if address is None:
            jax.distributed.initialize()
        else:
            count, index = int(os.environ["PAPYRAX_PROCESSES"]), int(os.environ["PAPYRAX_PROCESS"])
            jax.distributed.initialize(address, count, index)
    except (RuntimeError, ValueError, KeyError) as error:
        raise UserError(f"the processes of this run can't be joined: {str(error).splitlines()[0]}") from error
