"""Every layout written small and read back; the six real files; what is wrong with a file is told."""

import os
import pickle
from pathlib import Path

import h5py
import numpy as np
import pytest

from papyrax.train.data.demonstrations import load, load_robomimic, save_pickle

REAL = Path(os.environ.get("PAPYRAX_DATA", "")) / "darp"
LENGTHS = [4, 3, 5]


@pytest.fixture
def pairs():
    rng = np.random.default_rng(0)
    return [(rng.normal(size=(n, 3)).astype(np.float32), rng.normal(size=(n, 2)).astype(np.float32)) for n in LENGTHS]


def check(got, pairs):
    np.testing.assert_array_equal(got.obs, np.concatenate([o for o, _ in pairs]))
    np.testing.assert_array_equal(got.act, np.concatenate([a for _, a in pairs]))
    np.testing.assert_array_equal(got.start, np.cumsum([0] + [len(o) for o, _ in pairs])[:-1])
    assert got.obs.dtype == got.act.dtype == np.float32 and got.start.dtype == np.int32


def test_pickle_round_trip(tmp_path, pairs):
    (tmp_path / "a.pkl").write_bytes(pickle.dumps([{"observations": o, "actions": a} for o, a in pairs], protocol=4))
    got = load(tmp_path / "a.pkl")
    check(got, pairs)
    save_pickle(tmp_path / "b.pkl", got)
    check(load(tmp_path / "b.pkl"), pairs)
    check(load(tmp_path / "b.pkl", limit=2), pairs[:2])


@pytest.mark.parametrize("ends", ["terminals", "timeouts", "open"])
def test_d4rl(tmp_path, pairs, ends):
    flags = {"terminals": np.zeros(sum(LENGTHS), bool), "timeouts": np.zeros(sum(LENGTHS), bool)}
    last = np.cumsum(LENGTHS) - 1
    flags["terminals" if ends == "open" else ends][last[: -1 if ends == "open" else None]] = True
    with h5py.File(tmp_path / "a.hdf5", "w") as file:
        file["observations"] = np.concatenate([o for o, _ in pairs])
        file["actions"] = np.concatenate([a for _, a in pairs])
        for name, value in flags.items():
            file[name] = value
    check(load(tmp_path / "a.hdf5"), pairs)


def test_robomimic_orders_by_number_and_joins_keys(tmp_path, pairs):
    pairs = (pairs * 4)[:11]
    with h5py.File(tmp_path / "a.hdf5", "w") as file:
        for i, (obs, act) in enumerate(pairs):
            file[f"data/demo_{i}/obs/eef_pos"] = obs[:, 1:].astype(np.float64)
            file[f"data/demo_{i}/obs/gripper"] = obs[:, 0]
            file[f"data/demo_{i}/actions"] = act
        file["mask/train"] = np.array([b"demo_0"])
    check(load(tmp_path / "a.hdf5", keys=["gripper", "eef_pos"]), pairs)
    with pytest.raises(ValueError, match="needs `keys`"):
        load(tmp_path / "a.hdf5")
    with pytest.raises(ValueError, match=r"demo_0 has no 'object', only \['eef_pos', 'gripper'\]"):
        load_robomimic(tmp_path / "a.hdf5", ["object"])


def test_minari_drops_the_last_state(tmp_path, pairs):
    with h5py.File(tmp_path / "main_data.hdf5", "w") as file:
        for i, (obs, act) in enumerate(pairs):
            file[f"episode_{i}/observations"] = np.concatenate([obs, 9 + obs[-1:]])
            file[f"episode_{i}/actions"] = act
            file[f"episode_{i}/terminations"] = np.zeros(len(act), bool)
    check(load(tmp_path / "main_data.hdf5"), pairs)
    with h5py.File(tmp_path / "bad.hdf5", "w") as file:
        file["episode_0/observations"], file["episode_0/actions"] = pairs[0]
    with pytest.raises(ValueError, match="one more is wanted"):
        load(tmp_path / "bad.hdf5")


def test_bad_files_are_told(tmp_path, pairs):
    def write(content):
        (tmp_path / "bad.pkl").write_bytes(pickle.dumps(content))
        return tmp_path / "bad.pkl"

    obs, act = pairs[0]
    for content, match in (
        ({"observations": obs}, "a list of dicts is wanted, got dict"),
        ([{"observations": obs}], "trajectory 0 has no 'actions'"),
        ([], "at least one trajectory"),
        ([{"observations": obs, "actions": act[:-1]}], "4 observations and 3 actions"),
        ([{"observations": obs * np.nan, "actions": act}], "not finite"),
        ([{"observations": obs, "actions": act}, {"observations": obs[:, :2], "actions": act}], "other widths"),
        ([{"observations": Path("x"), "actions": act}], "refused, because it asks for pathlib"),
    ):
        with pytest.raises(ValueError, match=match):
            load(write(content))
    (tmp_path / "not.hdf5").write_bytes(b"text")
    with pytest.raises(ValueError, match="not a readable HDF5 file"):
        load(tmp_path / "not.hdf5")


@pytest.mark.skipif(not REAL.is_dir(), reason="the folder darp is not in PAPYRAX_DATA")
@pytest.mark.proof("darp", "core")
@pytest.mark.parametrize(
    ("name", "trajectories", "rows", "o", "a"),
    [
        ("hopper-expert-v2_1", 1, 1000, 11, 3),
        ("walker2d-expert-v2_1", 1, 1000, 17, 6),
        ("halfcheetah-expert-v2_2", 2, 2000, 17, 6),
        ("ant-expert-v2-clean_2", 2, 2000, 27, 8),
        ("maze2d-umaze-v1_1", 1, 113, 6, 2),
        ("push_t_parsed", 206, 25650, 5, 2),
    ],
)
def test_the_papers_own_files(name, trajectories, rows, o, a):
    got = load(REAL / f"{name}.pkl")
    assert got.start.shape == (trajectories,) and got.obs.shape == (rows, o) and got.act.shape == (rows, a)
