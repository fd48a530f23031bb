"""Small files on disk: whole or not at all."""

import os
import tempfile
from pathlib import Path

from papyrax.train.errors import RunFolderError


def write_atomic(path: Path, data: str | bytes) -> None:
    """Replaces a file in one step, so that a reader or a kill never meets half of it; makes its folder.

    Raises:
      RunFolderError: the file can't be written (a full disk, a read-only folder).
    """
    name = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "wb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)
        os.replace(name, path)
        name = None
    except OSError as error:
        raise RunFolderError(f"{path} can't be written: {error.strerror or error}.") from error
    finally:
        if name is not None:
            Path(name).unlink(missing_ok=True)
