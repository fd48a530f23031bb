import numpy as np
import pytest

from tests.support.processes import finish, start


@pytest.mark.proof("universal_beta_splatting", "scale")
@pytest.mark.proof("geer", "scale")
def test_eight_devices_draw_and_learn_as_one(tmp_path):
    out = tmp_path / "out.npz"
    finish(start("tests.support.splat_process", out, devices=8))
    with np.load(out) as found:
        assert int(found["devices"]) == 8
        names = {key.split(".")[0] + "." + key.split(".")[2] for key in found.files if "." in key}
        assert "ubs.value" in names and "geer.sh" in names
        for name in names:
            system, leaf = name.split(".")
            one, shared = found[f"{system}.one.{leaf}"], found[f"{system}.shared.{leaf}"]
            # The same sums in another order.
            np.testing.assert_allclose(shared, one, atol=2e-5 * max(np.abs(one).max(), 1e-6), err_msg=name)
        assert np.abs(found["ubs.one.xyz"]).max() > 1e-6 and np.abs(found["geer.one.quat"]).max() > 1e-6
