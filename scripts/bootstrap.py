"""Builds an environment with nothing but the standard library: `bootstrap.py VENV [REQUIREMENTS]`, or `bootstrap.py --lock`.

uv does the work: the one on the path, else one from a private environment in `.uv/`. Run again, it brings the environment up to date.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "requirements.lock"


def find_uv() -> str:
    """Path of a uv that runs; installs one into .uv/ when there is none."""
    found = shutil.which("uv")
    if found:
        return found
    private = ROOT / ".uv" / "bin" / "uv"
    if not private.is_file():
        print("getting uv …", flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(ROOT / ".uv")], check=True)
        subprocess.run(
            [str(ROOT / ".uv" / "bin" / "python"), "-m", "pip", "install", "--quiet", "uv"],
            check=True,
            stderr=subprocess.DEVNULL,
        )
    return str(private)


def main(arguments: list[str]) -> int:
    """See the module; returns the exit code."""
    if sys.version_info < (3, 11):  # noqa: UP036 - this file runs on whatever python3 the machine has
        print(
            f"papyrax needs Python 3.11 or newer, this is {sys.version.split()[0]}; name one with make PYTHON=python3.12",
            file=sys.stderr,
        )
        return 2
    os.chdir(ROOT)
    uv = find_uv()
    try:
        if arguments == ["--lock"]:
            options = [
                "--universal",
                "--generate-hashes",
                "--no-header",
                "--python-version",
                "3.11",
                "--extra",
                "dev",
                "--upgrade",
                "--quiet",
            ]
            subprocess.run(
                [uv, "pip", "compile", *options, "pyproject.toml", "-o", str(LOCK)],
                check=True,
                stdout=subprocess.DEVNULL,
            )
            return 0
        venv = Path(arguments[0])
        python = venv / "bin" / "python"
        if len(arguments) == 1 and not python.is_file():
            subprocess.run([uv, "venv", "--quiet", "--python", sys.executable, str(venv)], check=True)
        if len(arguments) > 1:
            print(f"building {venv} from {arguments[1]} …", flush=True)
            # pip, not uv: it takes the local wheels of a machine's pip configuration, such as a CPU-only torch
            subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
            subprocess.run([str(python), "-m", "pip", "install", "--quiet", "-r", arguments[1]], check=True)
            return 0
        print(f"building {venv} from {LOCK.name} …", flush=True)
        subprocess.run([uv, "pip", "sync", "--quiet", "--python", str(python), str(LOCK)], check=True)
        subprocess.run(
            [uv, "pip", "install", "--quiet", "--python", str(python), "--no-deps", "--editable", "."], check=True
        )
        return 0
    except subprocess.CalledProcessError as error:
        print(
            f"building the environment failed: {' '.join(map(str, error.cmd[:4]))} … ended with {error.returncode}",
            file=sys.stderr,
        )
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
