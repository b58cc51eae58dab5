"""The system calls that Python 3.11 has no function for, by ctypes. Nothing here decides anything."""

from __future__ import annotations

import ctypes
import os

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_REMOUNT, MS_NOATIME, MS_NODIRATIME = 32, 1024, 2048
MS_BIND, MS_REC, MS_PRIVATE, MS_SLAVE, MS_RELATIME = 4096, 16384, 1 << 18, 1 << 19, 1 << 21
MNT_DETACH = 2
CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWUSER, CLONE_NEWPID = 0x00020000, 0x04000000, 0x10000000, 0x20000000
PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS = 1, 38
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41, "ppc64le": 203, "s390x": 217, "riscv64": 41}

_libc = ctypes.CDLL(None, use_errno=True)


def _checked(result: int, what: str) -> None:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")


def mount(source: str, target: str, kind: str | None = None, flags: int = 0, options: str = "") -> None:
    """Mount."""
    result = _libc.mount(
        os.fsencode(source),
        os.fsencode(target),
        kind.encode() if kind else None,
        ctypes.c_ulong(flags),
        options.encode(),
    )
    _checked(result, f"mount {kind or 'bind'} {source} on {target}")


def unmount(target: str) -> None:
    """Take a mount away at once, and from its users when they are done."""
    _checked(_libc.umount2(os.fsencode(target), MNT_DETACH), f"umount {target}")


def unshare(flags: int) -> None:
    """Leave namespaces for new ones."""
    _checked(_libc.unshare(flags), "unshare")


def setns(fd: int, kind: int) -> None:
    """Enter a namespace."""
    _checked(_libc.setns(fd, kind), "setns")


def prctl(option: int, value: int) -> None:
    """Set an attribute of this process that takes one value."""
    _checked(_libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0), "prctl")


def sethostname(name: str) -> None:
    """Set the host name."""
    data = name.encode()
    _checked(_libc.sethostname(data, len(data)), "sethostname")


def pivot_root(new: str, old: str) -> None:
    """Make `new` the root and put the old one at `old`; the C library has no function for it."""
    number = _PIVOT_ROOT[os.uname().machine]
    _checked(_libc.syscall(ctypes.c_long(number), os.fsencode(new), os.fsencode(old)), "pivot_root")


def bind(source: str, target: str, *, read_only: bool = False, recursive: bool = False) -> None:
    """Show a file or folder at a second place."""
    mount(source, target, None, MS_BIND | (MS_REC if recursive else 0))
    if read_only:
        make_read_only(target)


def make_read_only(target: str) -> None:
    """Make one mount read-only, with the other flags kept: some may not be dropped in a user namespace."""
    names = {MS_NOSUID: 2, MS_NODEV: 4, MS_NOEXEC: 8, MS_NOATIME: 1024, MS_NODIRATIME: 2048, MS_RELATIME: 4096}
    have = os.statvfs(target).f_flag
    kept = sum(flag for flag, bit in names.items() if have & bit)
    mount("none", target, None, MS_REMOUNT | MS_BIND | MS_RDONLY | kept)
