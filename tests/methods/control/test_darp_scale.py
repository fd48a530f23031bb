"""One device equals eight: a training step with the batch spread, and retrieval with the expert rows spread."""

import pytest

from tests.support.processes import finish, start


@pytest.mark.proof("darp", "scale")
def test_eight_devices_equal_one():
    output = finish(start("tests.support.darp_devices", devices=8))
    for line in ("devices 8", "retrieval same", "update same"):
        assert line in output
