"""Replace the files of a folder all at once, the way the kubelet does for ConfigMaps and tokens.

A timestamped folder holds the files, `..data` is a symlink to it that a rename swaps, and each file's
own name is a symlink through `..data`. A reader therefore sees either all old or all new files, and
one that holds a file open keeps it.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from devcluster.node.payloads import File

DATA = "..data"


def write(folder: Path, files: Mapping[str, File], user: int | None = None, group: int | None = None) -> bool:
    """Make the folder hold exactly these files; False if it already did."""
    current = folder / DATA
    if current.is_dir() and _read(current) == dict(files):
        return False
    fresh = Path(tempfile.mkdtemp(prefix="..", dir=folder))
    fresh.chmod(0o755)
    for path, file in files.items():
        target = fresh / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(file.data)
        target.chmod(file.mode)
        if user is not None or group is not None:
            os.chown(target, -1 if user is None else user, -1 if group is None else group)
    old = current.readlink() if current.is_symlink() else None
    swap = folder / "..data_tmp"
    swap.unlink(missing_ok=True)
    swap.symlink_to(fresh.name)
    swap.rename(current)
    _link(folder, {Path(path).parts[0] for path in files})
    if old:
        shutil.rmtree(folder / old, ignore_errors=True)
    return True


def _link(folder: Path, names: set[str]) -> None:
    """Give each first-level name its symlink, and take away those of files that are gone."""
    for entry in folder.iterdir():
        if not entry.name.startswith("..") and entry.name not in names:
            entry.unlink()
    for name in names:
        link = folder / name
        if not link.is_symlink():
            link.symlink_to(Path(DATA) / name)


def _read(folder: Path) -> dict[str, File]:
    folder = folder.resolve()
    return {
        str(path.relative_to(folder)): File(path.read_bytes(), path.stat().st_mode & 0o7777)
        for path in folder.rglob("*")
        if path.is_file()
    }
