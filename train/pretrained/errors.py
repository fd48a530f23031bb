"""What can be wrong with weights on disk, told in one sentence that names the file and the thing."""

from papyrax.train.errors import UserError

__all__ = ["WeightsError"]


class WeightsError(UserError):
    """The file is missing, damaged, incomplete, or of a kind that this code does not read."""
