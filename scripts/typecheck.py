"""Type check: pyright over a folder of links, since type checkers do not follow an editable install's mapping of folders to packages."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FLOORS = ("jaxlib_ext", "methods", "envs", "train", "scripts")


def main() -> int:
    """Makes the links, runs pyright by pyrightconfig.json, returns its exit code."""
    links = ROOT / ".venv" / "types" / "papyrax"
    links.mkdir(parents=True, exist_ok=True)
    for floor in FLOORS:
        link = links / floor
        if not link.is_symlink():
            link.symlink_to(ROOT / floor)
    return subprocess.run(
        [str(Path(sys.executable).parent / "pyright"), "--project", str(ROOT / "pyrightconfig.json"), *sys.argv[1:]]
    ).returncode


if __name__ == "__main__":
    sys.exit(main())
