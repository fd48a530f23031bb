"""Brax's own PPO on its environment `fast` (which costs next to nothing), one call so many whole training iterations.

Brax compiles inside `train`, so `train` runs in a thread of its own and is held between epochs: a call lets one epoch go
and waits for it. `jax.device_put_replicated`, which Brax needs, is put back where a newer JAX lacks it.
"""

import contextlib
import functools
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
from _serve import serve


def _replicated(tree, devices):
    return jax.tree.map(lambda x: jax.device_put(jnp.stack([x] * len(devices))), tree)


jax.device_put_replicated = _replicated

# Brax prints while it loads, and the answers are read from this output.
with contextlib.redirect_stdout(sys.stderr):
    from brax import envs
    from brax.training.agents.ppo import networks, train

_EPOCHS = 1000
_last = None


class _Ended(Exception):
    pass


class _Training:
    """A training whose epochs are run one at a time."""

    def __init__(self, size, inputs):
        number = {name: int(value) for name, value in inputs.items()}
        self.steps = int(size) * number["steps"] * number["iterations"]
        self._updates = number["epochs"] * number["minibatches"] * number["iterations"]
        self._sizes = {}
        self._go, self._done, self._stop = threading.Semaphore(0), threading.Semaphore(0), False
        self.result, self._error = None, None
        hidden = (number["hidden"],) * number["layers"]
        self._options = {
            "num_timesteps": _EPOCHS * self.steps,
            "num_evals": _EPOCHS + 1,
            "run_evals": False,
            "num_envs": int(size),
            "batch_size": int(size) // number["minibatches"],
            "num_minibatches": number["minibatches"],
            "num_updates_per_batch": number["epochs"],
            "unroll_length": number["steps"],
            "episode_length": number["episode"],
            "normalize_observations": True,
            "max_grad_norm": 0.5,
            "network_factory": functools.partial(
                networks.make_ppo_networks, policy_hidden_layer_sizes=hidden, value_hidden_layer_sizes=hidden
            ),
            "policy_params_fn": self._params,
            "progress_fn": self._progress,
        }
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def _work(self):
        try:
            train.train(environment=envs.get_environment("fast"), **self._options)
        except _Ended:
            pass
        except Exception as error:
            self._error = error
            self._done.release()

    def _params(self, step, make_policy, params):
        _, policy, value = params
        sizes = (sum(x.size for x in jax.tree.leaves(tree)) for tree in (policy, value))
        self._sizes = dict(zip(("policy_params", "value_params"), map(np.int64, sizes)))

    def _progress(self, step, metrics):
        if step == 0:
            return
        loss = float(np.asarray(metrics.get("training/total_loss", np.nan)).mean())
        self.result = {
            "env_steps": np.int64(self.steps),
            "updates": np.int64(self._updates),
            "finite": np.bool_(np.isfinite(loss)),
            **self._sizes,
        }
        self._done.release()
        self._go.acquire()
        if self._stop:
            raise _Ended

    def run(self):
        """One epoch; the first one has begun with the training itself."""
        if self.result is not None:
            self._go.release()
        self._done.acquire()
        if self._error is not None:
            raise self._error
        return self.result

    def end(self):
        self._stop = True
        self._go.release()
        self._thread.join()


def prepare(size, inputs):
    global _last
    if _last is not None:
        _last.end()
    _last = _Training(size, inputs)
    # The first epoch holds the compilation.
    _last.run()
    return _last.run


if __name__ == "__main__":
    serve(prepare, packages=("brax", "jax"))
