"""Become a program that the kernel kills when its parent dies: `python launch.py PARENT PROGRAM ARGUMENT...`.

A script of its own, since what must happen between fork and exec is not safe in a process with threads.
Imports as little as it can; nothing of the package.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Tie this process to its parent, then execute the program in its place."""
    parent, program = int(sys.argv[1]), sys.argv[2]
    if ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0):
        sys.exit("launch: prctl failed")
    # A parent that died before the line above sends no signal; by now we would have another one.
    if os.getppid() != parent:
        sys.exit("launch: the parent is gone")
    os.execv(program, sys.argv[2:])


if __name__ == "__main__":
    main()
