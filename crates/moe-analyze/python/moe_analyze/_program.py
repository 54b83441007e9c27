"""The program `moe-analyze` of the wheel."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Union

StrPath = Union[str, "os.PathLike[str]"]


class Error(Exception):
    """A command of the program failed. The text is its message."""


def program() -> Path:
    """Path of the program: `MOE_ANALYZE` of the environment, else the program of this wheel, else `moe-analyze` in `PATH`.

    Raises FileNotFoundError if there is none.
    """
    if path := os.environ.get("MOE_ANALYZE"):
        return Path(path)
    name = "moe-analyze.exe" if os.name == "nt" else "moe-analyze"
    for directory in _script_directories():
        if (directory / name).is_file():
            return directory / name
    if found := shutil.which("moe-analyze"):
        return Path(found)
    raise FileNotFoundError("the program moe-analyze is not installed; run `pip install moe-analyze`, or set MOE_ANALYZE to its path")


def _script_directories() -> Iterator[Path]:
    yield Path(sysconfig.get_path("scripts"))
    yield Path(sysconfig.get_path("scripts", sysconfig.get_preferred_scheme("user")))
    # `pip install --target DIR` writes the program to DIR/bin.
    yield Path(__file__).resolve().parents[1] / ("Scripts" if os.name == "nt" else "bin")
    # A virtual environment that is not active, or an environment on top of another one.
    yield Path(sys.executable).parent


def run(*args: StrPath | int | float) -> subprocess.CompletedProcess[str]:
    """Runs the program and returns exit code and output: `run("hotness", "runs/first", "-o", "csv").stdout`.

    The exit code is 0, or 1 if a check of the command found a problem or a difference. Raises Error if the command failed.
    """
    command = [str(program()), *(os.fspath(arg) if isinstance(arg, os.PathLike) else str(arg) for arg in args)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, encoding="utf-8", errors="replace", check=False)
    if done.returncode not in (0, 1):
        message = done.stderr.strip() or f"{command[0]} ended with exit code {done.returncode}"
        raise Error(message.removeprefix("moe-analyze: "))
    return done
