"""Expert demonstrations from the files that papers publish, as flat arrays of rows with the start of each trajectory.

Layouts read:

* DARP pickle: a list of dicts with `observations` (T, o) and `actions` (T, a);
* D4RL HDF5: flat `observations`, `actions`, `terminals`, `timeouts`; a trajectory ends where either flag is set;
* robomimic and MimicGen HDF5: `data/demo_<i>/obs/<key>` and `data/demo_<i>/actions`;
* Minari HDF5: `episode_<i>/observations` with one row more than `actions` (the state after the last action, dropped).

`save_pickle` writes the first layout from any of them.
"""

import pickle
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from papyrax.train.pretrained import unpickle


class Trajectories(NamedTuple):
    """N rows of all trajectories in file order, and the first row of each of the J trajectories."""

    obs: Float[np.ndarray, "n o"]
    act: Float[np.ndarray, "n a"]
    start: Int[np.ndarray, " j"]

    def split(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """(observations, actions) of every trajectory."""
        return list(zip(np.split(self.obs, self.start[1:]), np.split(self.act, self.start[1:])))


def load(path: str | Path, *, keys: Sequence[str] | None = None, limit: int | None = None) -> Trajectories:
    """Reads a file of any of the four layouts, told apart by what lies in it.

    Args:
      path: a `.pkl` or HDF5 file.
      keys: robomimic only: which observation arrays to join, in this order.
      limit: read this many trajectories at most.

    Raises:
      ValueError: an unknown layout, missing keys, lengths that differ, or an empty file.
    """
    path = Path(path)
    if path.suffix in (".pkl", ".pickle"):
        return load_pickle(path, limit=limit)
    with _open(path) as file:
        if "data" in file and any(name.startswith("demo_") for name in file["data"]):
            kind = "robomimic"
        elif any(name.startswith("episode_") for name in file):
            kind = "minari"
        elif "observations" in file and "actions" in file:
            kind = "d4rl"
        else:
            raise ValueError(f"{path.name}: none of the known layouts, it holds {sorted(file)[:8]}.")
    if kind == "robomimic":
        if keys is None:
            raise ValueError(f"{path.name}: a robomimic file needs `keys`, the observation arrays to join.")
        return load_robomimic(path, keys, limit=limit)
    return (load_minari if kind == "minari" else load_d4rl)(path, limit=limit)


def load_pickle(path: str | Path, *, limit: int | None = None) -> Trajectories:
    """DARP's pickle, by the reader that runs no code."""
    path = Path(path)
    content = unpickle.load(path)
    if not isinstance(content, list) or not all(isinstance(t, dict) for t in content):
        raise ValueError(f"{path.name}: a list of dicts is wanted, got {type(content).__name__}.")
    for i, item in enumerate(content):
        for key in ("observations", "actions"):
            if key not in item:
                raise ValueError(f"{path.name}: trajectory {i} has no {key!r}, only {sorted(item)}.")
    return join([(t["observations"], t["actions"]) for t in content[:limit]], path.name)


def load_d4rl(path: str | Path, *, limit: int | None = None) -> Trajectories:
    """D4RL's flat arrays; rows after the last end form a trajectory of their own."""
    path = Path(path)
    with _open(path) as file:
        obs, act = file["observations"][()], file["actions"][()]
        if "terminals" not in file:
            raise ValueError(f"{path.name}: no 'terminals' array, so trajectories cannot be told apart.")
        end = np.asarray(file["terminals"][()]).reshape(-1) != 0
        if "timeouts" in file:
            end |= np.asarray(file["timeouts"][()]).reshape(-1) != 0
    if not len(obs) == len(act) == len(end):
        raise ValueError(f"{path.name}: {len(obs)} observations, {len(act)} actions and {len(end)} end flags differ.")
    cuts = np.flatnonzero(end[:-1]) + 1
    pairs = list(zip(np.split(obs, cuts), np.split(act, cuts)))
    return join(pairs[:limit], path.name)


def load_robomimic(path: str | Path, keys: Sequence[str], *, limit: int | None = None) -> Trajectories:
    """robomimic's groups, by number; the arrays named by `keys` are flattened per row and joined in that order."""
    path = Path(path)
    pairs = []
    with _open(path) as file:
        demos = _numbered(file["data"], "demo_")[:limit]
        for name in demos:
            demo = file["data"][name]
            missing = [key for key in keys if key not in demo["obs"]]
            if missing:
                raise ValueError(f"{path.name}: {name} has no {missing[0]!r}, only {sorted(demo['obs'])}.")
            parts = [np.asarray(demo["obs"][key][()]) for key in keys]
            pairs.append((np.concatenate([p.reshape(len(p), -1) for p in parts], 1), demo["actions"][()]))
    return join(pairs, path.name)


def load_minari(path: str | Path, *, limit: int | None = None) -> Trajectories:
    """Minari's episode groups with plain (box) observations; a dict of them is joined by name."""
    path = Path(path)
    pairs = []
    with _open(path) as file:
        for name in _numbered(file, "episode_")[:limit]:
            obs, act = _flatten(file[name]["observations"]), file[name]["actions"][()]
            if len(obs) != len(act) + 1:
                raise ValueError(
                    f"{path.name}: {name} has {len(obs)} observations for {len(act)} actions, one more is wanted."
                )
            pairs.append((obs[:-1], act))
    return join(pairs, path.name)


def join(pairs: Sequence[tuple[np.ndarray, np.ndarray]], name: str = "demonstrations") -> Trajectories:
    """Flat float32 rows of (observations, actions) pairs.

    Raises:
      ValueError: no rows, an empty trajectory, lengths or widths that differ, numbers that are not finite.
    """
    if not pairs:
        raise ValueError(f"{name}: at least one trajectory is wanted, got none.")
    pairs = [(_rows(obs), _rows(act)) for obs, act in pairs]
    for i, (obs, act) in enumerate(pairs):
        if not len(obs) == len(act) > 0:
            raise ValueError(f"{name}: trajectory {i} has {len(obs)} observations and {len(act)} actions.")
        if obs.shape[1] != pairs[0][0].shape[1] or act.shape[1] != pairs[0][1].shape[1]:
            raise ValueError(
                f"{name}: trajectory {i} has other widths ({obs.shape[1]}, {act.shape[1]}) than the first."
            )
    lengths = [len(obs) for obs, _ in pairs]
    obs, act = (np.concatenate(part) for part in zip(*pairs))
    if not (np.isfinite(obs).all() and np.isfinite(act).all()):
        raise ValueError(f"{name}: observations or actions hold numbers that are not finite.")
    return Trajectories(obs, act, np.cumsum([0, *lengths[:-1]]).astype(np.int32))


def _rows(values) -> np.ndarray:
    return np.asarray(values, np.float32).reshape(len(values), -1)


def save_pickle(path: str | Path, trajectories: Trajectories) -> None:
    """Writes DARP's list of dicts."""
    content = [{"observations": obs, "actions": act} for obs, act in trajectories.split()]
    Path(path).write_bytes(pickle.dumps(content, protocol=4))


def _open(path: Path) -> Any:
    """An open HDF5 file; whether a member is a group or an array shows only at run time."""
    import h5py  # of the control extra; the pickle layout does without

    try:
        return h5py.File(path, "r")
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ValueError(f"{path.name}: not a readable HDF5 file ({error}).") from None


def _numbered(group, prefix: str) -> list[str]:
    """Members by their number, which is not their alphabetical order (demo_10 follows demo_9)."""
    found = [(int(m[1]), name) for name in group if (m := re.fullmatch(re.escape(prefix) + r"(\d+)", name))]
    return [name for _, name in sorted(found)]


def _flatten(node) -> np.ndarray:
    if hasattr(node, "keys"):
        return np.concatenate([_flatten(node[key]) for key in sorted(node)], axis=1)
    values = np.asarray(node[()])
    return values.reshape(len(values), -1)
