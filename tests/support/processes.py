"""Starting Python processes with virtual devices, alone or joined on loopback."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def start(module: str, *arguments: object, devices: int = 1, **environment: str) -> subprocess.Popen:
    """Starts `python -m module` with that many virtual CPU devices."""
    env = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices} --xla_backend_optimization_level=0",
        **environment,
    }
    command = [sys.executable, "-m", module, *map(str, arguments)]
    return subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(process: subprocess.Popen, timeout: float = 600) -> str:
    """Its output; fails when it ended badly."""
    output, _ = process.communicate(timeout=timeout)
    assert process.returncode == 0, f"exit code {process.returncode}:\n{output[-3000:]}"
    return output


def free_address() -> str:
    """A loopback address whose port is free now."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{s.getsockname()[1]}"


def joined(module: str, *arguments: object, processes: int, devices: int) -> list[str]:
    """Runs `processes` joined processes with `devices` devices each; their outputs."""
    address = free_address()
    started = [
        start(
            module,
            *arguments,
            devices=devices,
            PAPYRAX_COORDINATOR=address,
            PAPYRAX_PROCESSES=str(processes),
            PAPYRAX_PROCESS=str(i),
        )
        for i in range(processes)
    ]
    return [finish(p) for p in started]
