"""Checkpoints of a fit: Orbax writes them in the background and atomically; a checksum list beside each one tells damage from health.

A checkpoint holds the State (typed keys included) and a small JSON record: the step, where the metrics file stood, and the state of the
batch iterator. Restoring takes the newest healthy one and says which damaged ones it passed over. Arrays come back on the shardings of the
template, so a run may go on with another number of devices.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import PyTree

from papyrax.train.errors import RunFolderError
from papyrax.train.files import write_atomic


def _digest(folder: Path) -> dict[str, str]:
    files = sorted(f for f in folder.rglob("*") if f.is_file())
    return {str(f.relative_to(folder)): hashlib.sha256(f.read_bytes()).hexdigest() for f in files}


class Checkpoints:
    """The last `keep` checkpoints of one fit in `folder`.

    `say` gets one sentence for each damaged checkpoint that a restore passes over.
    """

    def __init__(self, folder: Path, *, keep: int = 2, say: Callable[[str], None] = print):
        self.folder, self.keep, self.say = Path(folder).absolute(), keep, say
        self._unsummed: set[int] = set()
        self._leads = jax.process_index() == 0
        try:
            options = ocp.CheckpointManagerOptions(max_to_keep=keep, create=True, enable_async_checkpointing=True)
            self._manager = ocp.CheckpointManager(self.folder, options=options)
        except OSError as error:
            raise RunFolderError(f"{self.folder} can't be written: {error.strerror or error}") from error

    def save(self, step: int, state: PyTree, record: dict[str, Any]) -> None:
        """Starts writing a checkpoint and returns; the previous one is finished and summed first. One of the same step, left by a process that
        was killed and has been rewound since, is replaced. Raises RunFolderError."""
        self.wait()
        state = jax.tree.map(_stand_in, state)
        if jax.default_backend() == "cpu":
            state = jax.tree.map(jnp.copy, state)  # a host array may alias the buffer that the next step overwrites
        try:
            if step in self._manager.all_steps():
                self._manager.delete(step)
                self._sums(step).unlink(missing_ok=True)
            self._manager.save(
                step,
                args=ocp.args.Composite(state=ocp.args.StandardSave(state), record=ocp.args.JsonSave(record)),
                force=True,
            )
        except (OSError, ValueError) as error:
            raise RunFolderError(
                f"checkpoint {step} in {self.folder} can't be written: {_first_line(error)}"
            ) from error
        self._unsummed.add(step)

    def wait(self) -> None:
        """Finishes the write under way and lists its checksums. Raises RunFolderError when the background write failed."""
        try:
            self._manager.wait_until_finished()
        except Exception as error:
            raise RunFolderError(f"a checkpoint in {self.folder} can't be written: {_first_line(error)}") from error
        for step in sorted(self._unsummed):
            if self._leads and (self.folder / str(step)).is_dir():
                write_atomic(self._sums(step), json.dumps(_digest(self.folder / str(step))))
        self._unsummed.clear()
        if self._leads:
            for sums in self.folder.glob("*.sha256.json"):
                if not (self.folder / sums.name.split(".")[0]).is_dir():
                    sums.unlink(missing_ok=True)

    def steps(self) -> list[int]:
        """Steps with a finished checkpoint, oldest first."""
        return sorted(self._manager.all_steps())

    def restore(self, template: PyTree, step: int | None = None) -> tuple[int, PyTree, dict[str, Any]] | None:
        """(step, State, record) of the newest healthy checkpoint (or of `step`), on the template's shardings; None when there is none."""
        abstract = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=getattr(x, "sharding", None)),
            jax.tree.map(_stand_in, template),
        )
        for candidate in reversed(self.steps() if step is None else [step]):
            reason = self._damage(candidate)
            if reason is None:
                try:
                    found = self._manager.restore(
                        candidate,
                        args=ocp.args.Composite(
                            state=ocp.args.StandardRestore(abstract), record=ocp.args.JsonRestore()
                        ),
                    )
                    state = jax.tree.map(lambda x, got: got if x.size else x, template, found["state"])
                    return candidate, state, found["record"]
                except Exception as error:  # any other failure of a reader means the same here: try the one before
                    reason = _first_line(error)
                    if "not compatible with the stored shape" in reason:
                        detail = reason.split(" is not compatible")[0].removeprefix("Requested shape: ")
                        raise RunFolderError(
                            f"checkpoint {candidate} in {self.folder} is of another State: a leaf of shape {detail} is wanted and not there"
                        ) from error
            self.say(
                f"checkpoint {candidate} in {self.folder.name} is damaged ({reason}); going back to the one before"
            )
            if self._leads and step is None:
                self._retire(candidate)
        return None

    def close(self) -> None:
        """Finishes and releases the background writer."""
        self.wait()
        self._manager.close()

    def _sums(self, step: int) -> Path:
        return self.folder / f"{step}.sha256.json"

    def _damage(self, step: int) -> str | None:
        if not self._sums(step).is_file():
            return None  # killed between the finished write and its list: Orbax's own commit mark vouches for it
        try:
            listed = json.loads(self._sums(step).read_text())
        except ValueError:
            return "its checksum list is unreadable"
        present = _digest(self.folder / str(step))
        for name, digest in listed.items():
            if name not in present:
                return f"{name} is missing"
            if present[name] != digest:
                return f"{name} has changed since it was written"
        return None

    def _retire(self, step: int) -> None:
        target = self.folder.parent / f"damaged-{self.folder.name}-{step}"
        try:
            (self.folder / str(step)).rename(target)
            self._sums(step).unlink(missing_ok=True)
            self._manager.reload()
        except OSError:
            pass  # an unwritable folder will be told when the next checkpoint is due


def _stand_in(leaf: Any) -> Any:
    """One zero in place of an array without entries, which Orbax refuses to write."""
    if leaf.size:
        return leaf
    zero = np.zeros(1, leaf.dtype)
    sharding = getattr(leaf, "sharding", None)
    if isinstance(sharding, NamedSharding):
        return jax.device_put(zero, NamedSharding(sharding.mesh, PartitionSpec()))
    return jnp.asarray(zero)


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return (text.splitlines()[0] if text else type(error).__name__)[:300]
