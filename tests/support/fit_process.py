"""One process of a fit on virtual devices: `python -m tests.support.fit_process FOLDER STEPS MESH OUT` (joins others by the environment)."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
from jax.sharding import PartitionSpec

from papyrax.train import platform
from papyrax.train.loop import Shard
from papyrax.train.run import Run
from papyrax.train.sharding import make_mesh, to_host
from tests.support.learners import Config, batch, init, update


def main(folder: str, steps: str, mesh: str, out: str) -> None:
    """Fits on a mesh such as 2,2,2 with weights cut over fsdp and tensor; process 0 writes weights and losses."""
    if "PAPYRAX_COORDINATOR" in os.environ:
        platform.join_processes()
    import jax

    data, fsdp, tensor = map(int, mesh.split(","))
    shard = Shard(state=[("^w$", PartitionSpec("fsdp", "tensor")), ("^b$", PartitionSpec("tensor"))])
    config = Config()
    sizes = make_mesh(data=data, fsdp=fsdp, tensor=tensor)
    with Run(Path(folder), system="toy", preset="smoke", config=config, mesh=sizes, quiet=True) as run:
        fit = run.fit(
            update,
            init(run.key, config),
            batch,
            name="a/0",
            steps=int(steps),
            config=config,
            shard=shard,
            checkpoint_every=10,
        )
        assert fit.state.w.sharding.spec == PartitionSpec("fsdp", "tensor"), fit.state.w.sharding
        whole = jax.jit(lambda w: w, out_shardings=jax.sharding.NamedSharding(sizes, PartitionSpec()))(fit.state.w)
        if run.leads:
            np.savez(
                out,
                w=to_host(whole),
                loss=fit.metrics["loss"],
                resumed=np.asarray(fit.resumed_from or 0),
                devices=jax.device_count(),
            )


if __name__ == "__main__":
    main(*sys.argv[1:])
