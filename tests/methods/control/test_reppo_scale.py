import pytest

from tests.support.processes import finish, start


@pytest.mark.proof("reppo", "scale")
def test_one_device_equals_eight():
    output = finish(start("tests.methods.control.reppo_devices", devices=8))
    assert "equal on 1 and 8 devices" in output
