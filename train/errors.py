"""Failures that are told to a person in one sentence, and the exit code that each one gives the command line."""

from __future__ import annotations


class UserError(Exception):
    """Something that the caller can put right: wrong value, missing data or extra, unusable folder. The message is one sentence."""

    exit_code = 2


class RunFolderError(UserError):
    """The run folder can't be used: read-only, full, locked by another process, or made by another configuration."""


class NonFinite(UserError):
    """A metric turned NaN or infinite; the message names the step, the metric and the last good checkpoint."""

    exit_code = 3


class Interrupted(Exception):
    """A signal stopped the run after its state was saved; `exit_code` is 128 + the signal's number."""

    def __init__(self, signum: int, where: str):
        super().__init__(where)
        self.signum = signum
        self.exit_code = 128 + signum
