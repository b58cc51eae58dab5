"""What the agent hands the new process: one value, as JSON through a memory file.

It holds secrets (the environment), so it never lies on disk and is no argument that `ps` shows. Named
tuples and not dataclasses: importing those would double the time a container takes to start.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple


class Mount(NamedTuple):
    """A file or folder of the host and where the container sees it."""

    source: str
    target: str
    read_only: bool = False


class Launch(NamedTuple):
    """A program and the surroundings it gets."""

    argv: tuple[str, ...]
    env: dict[str, str]
    cwd: str = "/"
    uid: int | None = None
    gid: int | None = None
    groups: tuple[int, ...] = ()
    no_new_privileges: bool = False
    hostname: str = ""
    root: str | None = None  # an empty folder to build the file system on; None keeps the host's
    read_only: bool = False
    mounts: tuple[Mount, ...] = ()
    hidden: str = ""  # the agent's folder: its mounts are no business of the container's
    join: int | None = None  # run inside the namespaces of this process instead

    def dump(self) -> bytes:
        """As JSON."""
        return json.dumps(self._asdict()).encode()


def load(data: bytes) -> Launch:
    """Read what `dump` wrote."""
    fields: dict[str, Any] = json.loads(data)
    for name in ("argv", "groups"):
        fields[name] = tuple(fields[name])
    fields["mounts"] = tuple(Mount(*mount) for mount in fields["mounts"])
    return Launch(**fields)
