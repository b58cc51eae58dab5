"""Fixtures for tests on real checkpoints, built once and shared by all tests, workers and runs.

The checkpoints are read-only: a test that changes one works on its own copy.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
from pathlib import Path

import pytest

from realpair import build as realpair

REPOSITORY = Path(__file__).resolve().parent.parent
REAL_FIXTURES = {"real_chain", "real_sibling"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test that uses a real checkpoint, so that ``-m "not real"`` always leaves it out."""
    for item in items:
        if REAL_FIXTURES & set(getattr(item, "fixturenames", ())):
            item.add_marker("real")


@pytest.fixture(scope="session")
def real_chain() -> tuple[Path, ...]:
    """Give the base and four consecutive training steps, each changing 0.1 to 0.2 % of the values."""
    run = cached_run("rl_1e-6", steps=4)
    return tuple(run / f"step-{step:03d}" for step in range(5))


@pytest.fixture(scope="session")
def real_sibling() -> Path:
    """Give another first step from the base of ``real_chain``, changing about 1 % of the values."""
    return cached_run("rl_1e-5", steps=1) / "step-001"


def cached_run(run: str, steps: int) -> Path:
    """Build a run unless it is there. Its place depends on the builder, so a changed one builds anew."""
    cache = Path(os.environ.get("WEIGHTSYNC_TEST_CACHE", REPOSITORY / ".cache" / "realpair")).resolve()
    cache.mkdir(parents=True, exist_ok=True)
    sources = [realpair.HERE / "build.py", realpair.HERE / "tensors.json"]
    key = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:12]
    built = cache / f"{key}-{run}-{steps}"
    if built.is_dir():
        return built
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not built.is_dir():  # another process may have built it while this one waited
            partial = cache / f"{built.name}.partial"
            shutil.rmtree(partial, ignore_errors=True)
            folders = realpair.build(partial, run, steps)
            if run != "rl_1e-6":
                shutil.rmtree(folders[0])  # the same base as the chain's
            for file in partial.rglob("*.*"):
                if file.is_file():
                    file.chmod(0o444)
            partial.rename(built)
    return built
