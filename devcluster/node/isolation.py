"""Find out what this process may do about namespaces, and enter those in which the agent works.

As root the agent gets a mount namespace of its own, so that the volumes it mounts are nobody else's
and vanish with it. An ordinary user may do the same inside a user namespace where the kernel allows
those. Else there is no isolation, and the README says what that means.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

from devcluster.node.inside import syscalls
from devcluster.node.spawn import Isolation


def enter(wanted: str) -> Isolation:
    """Enter namespaces, as far as wanted and possible. Call it first of all, before there are threads.

    `auto` takes what there is, `namespaces` insists, `user-namespace` insists on the way of ordinary users
    even as root, `none` goes without.
    """
    if wanted == "none":
        return Isolation.NONE
    try:
        if wanted != "user-namespace" and os.geteuid() == 0 and _works(syscalls.CLONE_NEWNS | syscalls.CLONE_NEWPID):
            _own_mounts()
        elif _works(syscalls.CLONE_NEWUSER | syscalls.CLONE_NEWNS | syscalls.CLONE_NEWPID):
            _own_user_namespace()
        else:
            raise PermissionError("this process may not make namespaces")
    except OSError:
        if wanted != "auto":
            raise
        return Isolation.NONE
    return Isolation.NAMESPACES


def may_switch_user() -> bool:
    """Whether there are other users to become: in a user namespace of one's own there are none."""
    return os.geteuid() == 0 and len(Path("/proc/self/uid_map").read_text().split()) == 3 and _all_users()


def _all_users() -> bool:
    return int(Path("/proc/self/uid_map").read_text().split()[2]) > 1


def _works(flags: int) -> bool:
    """Try in a child, since it cannot be undone."""
    child = os.fork()
    if child == 0:
        status = 1
        with suppress(OSError):
            syscalls.unshare(flags)
            status = 0
        os._exit(status)
    return os.waitpid(child, 0)[1] == 0


def _own_mounts() -> None:
    syscalls.unshare(syscalls.CLONE_NEWNS)
    # What the host mounts later shall be seen, what we mount shall not be.
    syscalls.mount("none", "/", None, syscalls.MS_REC | syscalls.MS_SLAVE)


def _own_user_namespace() -> None:
    """Go on as root of a user namespace, in a child that is the first process of a PID namespace.

    The child is needed because only the owner of a PID namespace may come back to it (see `spawn`), and
    the machine's is not ours.
    """
    uid, gid, tied = os.geteuid(), os.getegid(), _death_signal()
    syscalls.unshare(syscalls.CLONE_NEWUSER | syscalls.CLONE_NEWNS | syscalls.CLONE_NEWPID)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
    Path("/proc/self/gid_map").write_text(f"0 {gid} 1")
    if tied:
        syscalls.prctl(syscalls.PR_SET_PDEATHSIG, tied)  # the new credentials have cleared it
    child = os.fork()
    if child:
        _stand_by(child)
    syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)
    syscalls.mount("none", "/", None, syscalls.MS_REC | syscalls.MS_SLAVE)
    syscalls.mount("proc", "/proc", "proc", syscalls.MS_NOSUID | syscalls.MS_NODEV | syscalls.MS_NOEXEC)


def _stand_by(child: int) -> None:
    """Pass signals on to the agent and end as it does."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: os.kill(child, number))
    status = os.waitpid(child, 0)[1]
    code = os.waitstatus_to_exitcode(status)
    sys.exit(code if code >= 0 else 128 - code)


def _death_signal() -> int:
    """What PR_SET_PDEATHSIG was set to."""
    value = ctypes.c_int()
    ctypes.CDLL(None).prctl(2, ctypes.byref(value), 0, 0, 0)
    return value.value
