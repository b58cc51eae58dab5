"""Become the container's program: namespaces, file system, user, exec.

Called by the agent as `python -c` in a process that is already the first of a new PID namespace (or,
for an exec, in the agent's). Errors before the program starts go through a pipe that closes when it
does, so the agent can tell "could not start" from "ended".
"""

from __future__ import annotations

import os
import select
import signal
import sys
from contextlib import suppress

from devcluster.node.inside import rootfs, syscalls
from devcluster.node.inside.spec import Launch, load


def run(spec_fd: int, error_fd: int) -> None:
    """Read what to do, and do it; returns only through exec or exit."""
    os.set_inheritable(error_fd, False)
    _die_with_parent(error_fd)
    try:
        with os.fdopen(spec_fd, "rb") as file:
            launch = load(file.read())
        os.umask(0o022)
        if launch.join is not None:
            _join(launch, error_fd)
        elif launch.root is not None:
            syscalls.unshare(syscalls.CLONE_NEWNS | syscalls.CLONE_NEWUTS)
            syscalls.sethostname(launch.hostname)
            rootfs.enter(launch)
        _become(launch, error_fd)
    except BaseException as error:
        os.write(error_fd, f"{error}".encode()[:4000])
        os._exit(127)


def _die_with_parent(pipe: int) -> None:
    """End with the agent, however it ends. Its end of the pipe tells whether that has happened already."""
    syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)
    poll = select.poll()
    poll.register(pipe, select.POLLERR)
    if poll.poll(0):
        os._exit(127)


def _join(launch: Launch, error_fd: int) -> None:
    """Enter a running container, then go on in a child, since a PID namespace begins with one."""
    kinds = (("pid", syscalls.CLONE_NEWPID), ("uts", syscalls.CLONE_NEWUTS), ("mnt", syscalls.CLONE_NEWNS))
    fds = [(os.open(f"/proc/{launch.join}/ns/{name}", os.O_RDONLY), kind) for name, kind in kinds]
    for fd, kind in fds:
        syscalls.setns(fd, kind)
        os.close(fd)
    child = os.fork()
    if child:
        os.close(error_fd)
        _, status = os.waitpid(child, 0)
        code = os.waitstatus_to_exitcode(status)
        os._exit(code if code >= 0 else 128 - code)
    syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)


def _become(launch: Launch, error_fd: int) -> None:
    if launch.uid is not None or launch.gid is not None:
        os.setgroups(launch.groups)
        os.setgid(launch.gid or 0)
        os.setuid(launch.uid or 0)
        _die_with_parent(error_fd)  # a change of user clears it
    if launch.no_new_privileges:
        syscalls.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1)
    with suppress(OSError):
        os.setsid()
    os.chdir(launch.cwd)
    os.execvpe(launch.argv[0], launch.argv, launch.env)


if __name__ == "__main__":
    run(int(sys.argv[1]), int(sys.argv[2]))
