"""The table that stands for images: an image's name and the program that runs in its place. Pure."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Image:
    """What an image would bring: a pod's `command` replaces the entrypoint, its `args` the arguments."""

    entrypoint: tuple[str, ...] = ()
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    working_dir: str = "/"
    user: int | None = None  # who the program is, if the pod does not say; None is the agent's own user


def find(images: Mapping[str, Image], name: str) -> Image | None:
    """Look an image up: by its full name, else without digest and tag, else by pattern, the longest first."""
    bare = name.partition("@")[0]
    head, colon, tail = bare.rpartition(":")
    untagged = head if colon and "/" not in tail else bare
    for candidate in (name, bare, untagged):
        if candidate in images:
            return images[candidate]
    patterns = sorted((p for p in images if "*" in p), key=len, reverse=True)
    return next((images[p] for p in patterns if fnmatch.fnmatchcase(name, p)), None)
