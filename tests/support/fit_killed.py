"""A fit that the test kills: `python -m tests.support.fit_killed FOLDER STEPS`. Says each step, slowly."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from papyrax.train.run import Run
from tests.support.learners import Config, batch, init, update


def main(folder: str, steps: str) -> None:
    """Trains with a checkpoint every 10 steps, 5 ms apart, so that a kill may fall anywhere, into a write too."""

    def slow(step):
        time.sleep(0.005)
        print(step, flush=True)
        return batch(step)

    config = Config()
    with Run(Path(folder), system="toy", preset="smoke", config=config, quiet=True) as run:
        run.fit(update, init(run.key, config), slow, name="a/0", steps=int(steps), config=config, checkpoint_every=10)


if __name__ == "__main__":
    main(*sys.argv[1:])
