"""`python -m moe_analyze` runs the program."""

import os
import subprocess
import sys

from ._program import program

if __name__ == "__main__":
    command = [str(program()), *sys.argv[1:]]
    if os.name == "nt":
        sys.exit(subprocess.call(command))
    os.execv(command[0], command)
