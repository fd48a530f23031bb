import warnings

import numpy as np
import pytest

from papyrax.envs.gymnasium_host import host_rollout

gymnasium = pytest.importorskip("gymnasium")
pytest.importorskip("mujoco")
pytestmark = pytest.mark.proof("darp", "core")


def lean(hist, valid, step):
    """Reaches past the bounds at times, uses the whole history."""
    return 3 * np.sin(hist.sum(axis=1)[:, :3] + valid[:, None])


def test_equals_a_single_environment_by_hand():
    found = host_rollout("Hopper-v4", lean, [3, 8], history=2, record=True, max_steps=60)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        env = gymnasium.make("Hopper-v4")
    for row, seed in enumerate((3, 8)):
        obs, _ = env.reset(seed=seed)
        past, total = [np.zeros(11, np.float32), obs.astype(np.float32)], 0.0
        for t in range(60):
            action = lean(np.stack(past)[None], np.array([min(t + 1, 2)]), t)[0]
            np.testing.assert_array_equal(found.obs[row, t], past[-1])
            action = np.clip(action.astype(np.float32), -1, 1)
            np.testing.assert_array_equal(found.actions[row, t], action)
            obs, reward, ended, cut, _ = env.step(action)
            past, total = [past[-1], obs.astype(np.float32)], total + reward
            if ended or cut:
                break
        assert found.returns[row] == pytest.approx(total, rel=1e-12) and found.lengths[row] == t + 1
        assert found.terminated[row] == ended
        assert np.isnan(found.obs[row, t + 1 :]).all() and np.isnan(found.actions[row, t + 1 :]).all()
    env.close()


def test_seeds_do_not_touch_each_other():
    calls = []

    def policy(hist, valid, step):
        calls.append((hist.shape, step))
        hist += 1  # a policy may write into what it was given
        return np.zeros((len(hist), 3))

    all_ = host_rollout("Hopper-v4", policy, range(3), max_steps=400, film_every=100)
    assert {shape for shape, _ in calls} == {(3, 1, 11)}
    assert [step for _, step in calls] == list(range(max(all_.lengths)))
    assert len(set(all_.lengths)) > 1 and all_.terminated.all() and all_.obs is None
    assert all_.frames.shape[1:] == (240, 320, 3) and all_.frames[0].std() > 2
    alone = host_rollout("Hopper-v4", lambda hist, valid, step: np.zeros((1, 3)), [2])
    assert alone.returns[0] == all_.returns[2] and alone.lengths[0] == all_.lengths[2]


def test_time_limit():
    found = host_rollout("Hopper-v4", lean, [0], max_steps=3)
    assert found.lengths[0] == 3 and not found.terminated[0]


def test_bad_input_is_told():
    with pytest.raises(ValueError, match="seeds is empty"):
        host_rollout("Hopper-v4", lean, [])
    with pytest.raises(ValueError, match="history is 0"):
        host_rollout("Hopper-v4", lean, [0], history=0)
    with pytest.raises(ValueError, match="does not know"):
        host_rollout("Hoper-v4", lean, [0])
    with pytest.raises(ValueError, match="wanted a box"):
        host_rollout("CartPole-v1", lean, [0])
    with pytest.raises(ValueError, match=r"shape \(1, 2\), wanted \(1, 3\)"):
        host_rollout("Hopper-v4", lambda hist, valid, step: np.zeros((1, 2)), [0])
    with pytest.raises(ValueError, match="not finite at step 0"):
        host_rollout("Hopper-v4", lambda hist, valid, step: np.full((1, 3), np.nan), [0])
