"""What every pod on a node shares: the connections, the rules, the clock. Holds, and does nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from devcluster.node.api import Api
from devcluster.node.backoff import BackoffRule
from devcluster.node.events import Recorder
from devcluster.node.images import Image
from devcluster.node.spawn import Isolation


@dataclass(frozen=True)
class Host:
    """One node's surroundings, handed to each of its pods."""

    name: str
    ip: str
    allocatable: Mapping[str, str]
    api: Api
    http: aiohttp.ClientSession  # for probes
    recorder: Recorder
    clock: Callable[[], float]
    rule: BackoffRule
    retry: float  # seconds before something that could not be had is tried again
    images: Mapping[str, Image]
    cluster_variables: Mapping[str, str]
    folder: Path  # of all pods
    isolation: Isolation
    switch_user: bool
