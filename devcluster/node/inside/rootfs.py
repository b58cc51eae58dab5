"""Build a container's file system: the host's, a writable layer over it, its own /proc and /dev, the mounts.

Runs in the new process, in its own mount namespace. With overlayfs whatever the container writes lands
in memory and goes with it. Where overlayfs cannot be had (in a user namespace it may not cover `/`) a
tmpfs shows the host's folders one by one, and writes outside volumes need the host's permission.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from devcluster.node.inside import syscalls as sys
from devcluster.node.inside.spec import Launch, Mount

OLD = "/.devcluster-host"
DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
GPU_DEVICES = ("nvidia*", "dri", "kfd")


def enter(launch: Launch) -> None:
    """Make the new root and move into it."""
    assert launch.root is not None
    sys.mount("none", "/", None, sys.MS_REC | sys.MS_PRIVATE)
    base = Path(launch.root)
    sys.mount("tmpfs", str(base), "tmpfs", 0, "mode=755")
    os.chdir(base)  # overlay options take commas and colons apart, so the paths in them are relative
    for name in ("upper", "work", "root"):
        (base / name).mkdir()
    root = base / "root"
    overlaid = _overlay()
    if overlaid:
        _submounts(root, launch.hidden)
    else:
        sys.mount("tmpfs", str(root), "tmpfs", 0, "mode=755")
        _show(Path("/"), root, skip={"proc", "dev", "run"})
    _proc(root)
    _dev(root)
    _run(root)
    old = root / OLD.lstrip("/")
    old.mkdir(exist_ok=True)
    os.chdir(root)
    sys.pivot_root(".", OLD.lstrip("/"))
    os.chdir("/")
    own = {Path(path).stat().st_dev for path in ("/", "/dev", "/run")}
    if overlaid and launch.uid:
        _let_pass(launch, own)
    for mount in sorted(launch.mounts, key=lambda mount: len(Path(mount.target).parts)):
        _mount(mount, own)
    sys.unmount(OLD)
    Path(OLD).rmdir()
    if launch.read_only:
        sys.make_read_only("/")


def _overlay() -> bool:
    try:
        sys.mount("overlay", "root", "overlay", 0, "lowerdir=/,upperdir=upper,workdir=work")
    except OSError:
        return False
    return True


def _submounts(root: Path, hidden: str) -> None:
    """Show the host's other mounts, which an overlay does not carry along."""
    shown: list[Path] = [Path("/proc"), Path("/dev"), Path("/run"), Path(hidden or "/proc")]
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        point = Path(line.split()[4].replace("\\040", " "))
        if point == Path("/") or any(point == path or path in point.parents for path in shown):
            continue
        target = root / point.relative_to("/")
        if target.exists():
            # What is mounted below the one that has the agent's folder is looked at piece by piece.
            whole = point not in Path(hidden).parents
            sys.bind(str(point), str(target), recursive=whole)
            if whole:
                shown.append(point)


def _show(source: Path, target: Path, skip: set[str] | None = None) -> None:
    """Fill a folder with the entries of another: symlinks anew, everything else by bind mounts."""
    for entry in source.iterdir():
        if entry.name in (skip or ()):
            continue
        place = target / entry.name
        kind = entry.lstat().st_mode
        if stat.S_ISLNK(kind):
            place.symlink_to(entry.readlink())
            continue
        if stat.S_ISDIR(kind):
            place.mkdir()
        else:
            place.touch()
        sys.bind(str(entry), str(place), recursive=True)


def _proc(root: Path) -> None:
    point = root / "proc"
    point.mkdir(exist_ok=True)
    try:
        sys.mount("proc", str(point), "proc", sys.MS_NOSUID | sys.MS_NODEV | sys.MS_NOEXEC)
    except OSError:  # in a user namespace below a container whose own /proc is partly masked
        sys.bind("/proc", str(point), recursive=True)


def _dev(root: Path) -> None:
    """A small /dev of its own, so that /dev/shm and /dev/termination-log are the container's."""
    dev = root / "dev"
    dev.mkdir(exist_ok=True)
    sys.mount("tmpfs", str(dev), "tmpfs", sys.MS_NOSUID, "mode=755")
    host = Path("/dev")
    for device in [host / name for name in DEVICES] + [d for pattern in GPU_DEVICES for d in host.glob(pattern)]:
        if device.exists():
            place = dev / device.name
            place.mkdir() if device.is_dir() else place.touch()
            sys.bind(str(device), str(place), recursive=True)
    for name, target in (("fd", ""), ("stdin", "/0"), ("stdout", "/1"), ("stderr", "/2")):
        (dev / name).symlink_to(f"/proc/self/fd{target}")
    (dev / "shm").mkdir(mode=0o1777)
    (dev / "pts").mkdir()
    (dev / "ptmx").symlink_to("pts/ptmx")
    sys.mount("devpts", str(dev / "pts"), "devpts", 0, "newinstance,ptmxmode=0666,mode=620")


def _run(root: Path) -> None:
    """An empty /run: the host's sockets are not the container's, and tokens are mounted below it."""
    run = root / "run"
    run.mkdir(exist_ok=True)
    sys.mount("tmpfs", str(run), "tmpfs", sys.MS_NOSUID | sys.MS_NODEV, "mode=755")


def _mount(mount: Mount, own: set[int]) -> None:
    source = OLD + mount.source
    _point(Path(mount.target), own, folder=Path(source).is_dir())
    sys.bind(source, mount.target, read_only=mount.read_only)


def _point(target: Path, own: set[int], *, folder: bool) -> None:
    """Make the mount point. On a file system of the host's this must leave no trace there."""
    if target.exists():
        return
    there = next(parent for parent in target.parents if parent.exists())
    if there.stat().st_dev not in own:
        own.add(_cover(there))
    target.parent.mkdir(parents=True, exist_ok=True)
    target.mkdir() if folder else target.touch()


def _cover(folder: Path) -> int:
    """Put a tmpfs over a folder that shows the same entries and can take more."""
    fd = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    mode = folder.stat().st_mode & 0o7777
    sys.mount("tmpfs", str(folder), "tmpfs", 0, f"mode={mode:o}")
    _show(Path(f"/proc/self/fd/{fd}"), folder)
    os.close(fd)
    return folder.stat().st_dev


def _let_pass(launch: Launch, own: set[int]) -> None:
    """Let a container that is not root reach its program: images have no closed home folders on the way.

    Only the container's own layer changes. Every folder up to the program gets its x bit, those to
    which its symlinks lead included.
    """
    search = [Path(folder) for folder in launch.env.get("PATH", os.defpath).split(":")]
    program = Path(launch.argv[0])
    found = [program] if "/" in launch.argv[0] else [folder / program for folder in search]
    for _ in range(40):
        path = next((candidate for candidate in found if os.path.lexists(candidate)), None)
        if path is None:
            return
        for folder in path.absolute().parents:
            status = folder.stat()
            if not status.st_mode & stat.S_IXOTH and status.st_dev in own:
                folder.chmod((status.st_mode & 0o7777) | stat.S_IXOTH)
        if path.is_symlink():
            found = [path.parent / path.readlink()]
            continue
        interpreter = _interpreter(path)
        if interpreter is None:
            return
        found = [interpreter]


def _interpreter(program: Path) -> Path | None:
    """What runs a script, by its first line."""
    with program.open("rb") as file:
        if file.read(2) != b"#!":
            return None
        words = file.readline(1000).split()
    return Path(os.fsdecode(words[0])) if words else None
