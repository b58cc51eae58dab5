"""Small worlds for tests of whole operations: checkpoints, chains of edges between them, and processes that die.

A model here has tensors of every word size and an edge changes them in every way the codec knows, in some hundred
kilobytes. Children are forked, not started, so that a test can afford hundreds of kills.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import pickle
import random
import shutil
import signal
import struct
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from weightsync.bundle import Bundle
from weightsync.checkpoint import Checkpoint
from weightsync.delta.make import make_delta, make_full
from weightsync.delta.step import Step
from weightsync.dtypes import word_bytes
from weightsync.parallel import Workers

Tree: TypeAlias = dict[str, bytes]
"""Every file below a directory by its path; a directory inside stands as its path with "/" and no bytes."""

MODEL = "tiny"

LARGE = (8 << 20) + 4096
"""Bytes of a tensor of two chunks."""

# name: dtype, shape, how an edge changes it
TENSORS: dict[str, tuple[str, tuple[int, ...], str]] = {
    "a.embed": ("BF16", (150, 128), "few"),
    "b.up": ("F16", (48, 64), "half"),
    "c.attn": ("BF16", (96, 128), "some"),
    "d.norm": ("BF16", (2048,), "all"),
    "e.moment": ("F32", (40, 50), "wide"),
    "f.ids": ("I64", (300,), "some"),
    "g.mask": ("BOOL", (1000,), "none"),
    "h.scale": ("F32", (), "all"),
    "i.empty": ("BF16", (0, 4), "none"),
    "j.fp8": ("F8_E4M3", (2048,), "half"),
    "k.fp4": ("F4", (10, 6), "some"),
}
SHARES = {"none": 0.0, "few": 0.001, "some": 0.04, "half": 0.4, "all": 1.0, "wide": 1.0}


@dataclass(frozen=True)
class Tensor:
    """A dtype string, a shape, and the values as words."""

    dtype: str
    shape: tuple[int, ...]
    words: npt.NDArray[Any]


@dataclass(frozen=True)
class Model:
    """A checkpoint in memory."""

    tensors: Mapping[str, Tensor]
    assets: Mapping[str, bytes] = field(default_factory=dict)
    files: int = 2

    def changed(self, seed: int, assets: Mapping[str, bytes] | None = None, *, only: str = "") -> Model:
        """The next step: every tensor (or those whose name begins with `only`) changed as its kind says."""
        rng = np.random.default_rng(seed)
        tensors = {
            name: _changed(tensor, TENSORS.get(name, ("", (), "few"))[2], rng) if name.startswith(only) else tensor
            for name, tensor in self.tensors.items()
        }
        return Model(tensors, self.assets if assets is None else assets, self.files)

    def put(self, name: str, words: npt.NDArray[Any]) -> Model:
        """The model with other values in one tensor."""
        return replace(self, tensors={**self.tensors, name: replace(self.tensors[name], words=words)})

    def save(self, folder: Path) -> Path:
        """Write it as transformers does: shards with an index, or one file without."""
        folder.mkdir(parents=True, exist_ok=True)
        names = sorted(self.tensors)
        shards = [names[i :: self.files] for i in range(self.files)]
        place = {}
        for i, shard in enumerate(shards, 1):
            file = f"model-{i:05d}-of-{self.files:05d}.safetensors" if self.files > 1 else "model.safetensors"
            (folder / file).write_bytes(safetensors_bytes({name: self.tensors[name] for name in shard}))
            place |= dict.fromkeys(shard, file)
        if self.files > 1:
            total = sum(tensor.words.nbytes for tensor in self.tensors.values())
            index = {"metadata": {"total_size": total}, "weight_map": place}
            (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
        for name, data in self.assets.items():
            (folder / name).write_bytes(data)
        return folder


def model(seed: int = 0, assets: Mapping[str, bytes] | None = None, *, large: bool = False, files: int = 2) -> Model:
    """A model with a tensor of every kind; with `large`, one of two chunks besides."""
    rng = np.random.default_rng(seed)
    shapes = {name: (dtype, shape) for name, (dtype, shape, _) in TENSORS.items()}
    if large:
        shapes["l.large"] = ("BF16", (LARGE // 2,))
    tensors = {}
    for name, (dtype, shape) in shapes.items():
        words = _words_of(dtype, shape)
        values = rng.integers(0, 1 << 8 * words.itemsize, len(words), dtype=np.uint64).astype(words.dtype)
        tensors[name] = Tensor(dtype, shape, values & 0x7F if dtype == "F8_E4M3" else values)
    return Model(tensors, assets or {}, files)


def _words_of(dtype: str, shape: tuple[int, ...]) -> npt.NDArray[Any]:
    bits = {"BF16": 16, "F16": 16, "F32": 32, "I64": 64, "F4": 4}.get(dtype, 8)
    width = word_bytes(dtype)
    return np.zeros(int(np.prod(shape, dtype=int)) * bits // 8 // width, f"<u{width}")


def _changed(tensor: Tensor, kind: str, rng: np.random.Generator) -> Tensor:
    words = tensor.words.copy()
    at = rng.choice(len(words), count := int(np.ceil(SHARES[kind] * len(words))), replace=False)
    high = 1 << 8 * words.itemsize if kind == "wide" else 4
    words[at] += rng.integers(1, high, count, dtype=np.uint64).astype(words.dtype)
    return replace(tensor, words=words)


def safetensors_bytes(tensors: Mapping[str, Tensor]) -> bytes:
    """A safetensors file, header padded as the library does it."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, tensor in tensors.items():
        end = at + tensor.words.nbytes
        header[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + b"".join(tensor.words.tobytes() for tensor in tensors.values())


# ---- chains


@dataclass(frozen=True)
class World:
    """Versions v0 … vn on disk, the edges between neighbours, and a sibling of v2 that also came from v1."""

    root: Path
    folders: list[Path]
    trees: list[Tree]
    edges: list[Bundle]
    sibling: Path

    def steps(self, start: int, goal: int) -> list[Step]:
        """The chain from one version to another, forward or backward."""
        if start < goal:
            return [Step.open(edge) for edge in self.edges[start:goal]]
        return [Step.open(edge, reverse=True) for edge in self.edges[goal:start][::-1]]


ASSETS: list[dict[str, bytes]] = [
    {"config.json": b'{"v": 0}\n', "tokenizer.json": b"{}" * 500, "only-v0.txt": b"zero", "merges.txt": b"a b\n"},
    {"config.json": b'{"v": 1}\n', "tokenizer.json": b"{}" * 500, "chat.jinja": b"{{ one }}"},
    {"config.json": b'{"v": 1}\n', "tokenizer.json": b"[]" * 400, "chat.jinja": b"{{ one }}", "merges.txt": b"a b\n"},
    {"config.json": b'{"v": 3}\n', "tokenizer.json": b"[]" * 400, "added-v3.json": b"3" * 5000},
]
"""Small files of v0 … v3: some change, some appear, some vanish, one vanishes and comes back."""


def world(root: Path, *, large: bool = False, steps: int = 3, files: int = 2) -> World:
    """Build a chain of `steps` edges and a sibling."""
    at = model(1, ASSETS[0], large=large, files=files)
    models = [at]
    for step in range(1, steps + 1):
        at = at.changed(step, ASSETS[step % len(ASSETS)])
        models.append(at)
    folders = [one.save(root / f"v{i}") for i, one in enumerate(models)]
    sibling = models[1].changed(99, {"config.json": b'{"v": "sibling"}\n'}).save(root / "sibling")
    edges = [edge(a, b, root / f"edge-{i}") for i, (a, b) in enumerate(itertools.pairwise(folders), 1)]
    return World(root, folders, [tree(folder) for folder in folders], edges, sibling)


def edge(old: Path, new: Path, folder: Path, *, full: bool = False) -> Bundle:
    """The delta between two checkpoints, or (`full`) all of the new one, in a new folder."""
    bundle = Bundle(folder)
    bundle.start()
    with Workers(1) as workers:
        if full:
            make_full(Checkpoint.open(new), bundle, workers, model=MODEL)
        else:
            make_delta(Checkpoint.open(old), Checkpoint.open(new), bundle, workers, model=MODEL)
    return bundle


# ---- directories


def sha256(data: bytes) -> str:
    """The digest in hex."""
    return hashlib.sha256(data).hexdigest()


def tree(folder: Path) -> Tree:
    """All that is below a directory, hidden things too."""
    found: Tree = {}
    for base, names, files in os.walk(folder):
        for name in names:
            found[f"{(Path(base) / name).relative_to(folder)}/"] = b""
        for name in files:
            found[str((Path(base) / name).relative_to(folder))] = (Path(base) / name).read_bytes()
    return found


def reset(folder: Path, content: Tree) -> Path:
    """Make a directory hold exactly this."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name, data in content.items():
        if name.endswith("/"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        else:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(data)
    return folder


def unlike(found: Tree, expected: Tree) -> list[str]:
    """What differs between two trees, in words; empty when they are equal."""
    lines = [f"{name} is left over" for name in found.keys() - expected.keys()]
    lines += [f"{name} is missing" for name in expected.keys() - found.keys()]
    lines += [f"{name} differs" for name in found.keys() & expected.keys() if found[name] != expected[name]]
    return sorted(lines)


def stamps(folder: Path) -> dict[str, tuple[int, int, int]]:
    """Inode, length and modification time of every file: equal when nothing was written."""
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path): (path.stat().st_ino, path.stat().st_size, path.stat().st_mtime_ns) for path in paths}


@contextmanager
def memory_folder() -> Iterator[Path]:
    """A folder in memory where there is one, so that forcing files to disk costs nothing; open to other users."""
    place = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    folder = Path(tempfile.mkdtemp(prefix="weightsync-test-", dir=place))
    folder.chmod(0o755)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


# ---- processes that die


class Child:
    """A forked process that runs `act` and ends. Its exceptions go to stderr as status 1."""

    def __init__(self, act: Callable[[], object], *, uid: int | None = None) -> None:
        started, self._started = os.pipe()
        self._result, result = os.pipe()
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            status = 1
            try:
                os.close(self._result)
                if uid is not None:
                    os.setgroups([])
                    os.setgid(uid)
                    os.setuid(uid)
                os.write(self._started, b"x")
                value = act()
                with os.fdopen(result, "wb") as pipe:
                    pickle.dump(value, pipe)
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        os.close(result)
        os.close(self._started)
        os.read(started, 1)
        os.close(started)

    def wait(self) -> int:
        """Its exit status, or minus the signal that ended it."""
        os.set_blocking(self._result, True)
        with os.fdopen(self._result, "rb") as pipe:
            self._data = pipe.read()
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    @property
    def value(self) -> Any:
        """What `act` returned, after `wait`."""
        return pickle.loads(self._data)


def outcome(act: Callable[[], object], *, uid: int | None = None) -> Any:
    """What `act` returns, or the exception that it raises, in a child of its own."""

    def caught() -> object:
        try:
            return act()
        except Exception as error:
            return type(error)(str(error))

    child = Child(caught, uid=uid)
    assert child.wait() == 0, "the child was killed"
    return child.value


def killed(act: Callable[[], object], delay: float, by: signal.Signals = signal.SIGKILL) -> bool:
    """Run `act` in a child and send it a signal after `delay` seconds; whether that kept it from finishing."""
    child = Child(act)
    time.sleep(delay)
    os.kill(child.pid, by)  # it is not waited for yet, so the number is still its own
    return child.wait() != 0


class Killer:
    """Kills children at random instants of their lives, and learns how long these last."""

    def __init__(self, act: Callable[[], object], seed: int, by: signal.Signals = signal.SIGKILL) -> None:
        self.random, self.by, self.struck = random.Random(seed), by, 0
        began = time.perf_counter()
        assert Child(act).wait() == 0
        self.longest = time.perf_counter() - began

    def strike(self, act: Callable[[], object]) -> bool:
        """Run `act` and kill it; whether the kill came before its end."""
        hit = killed(act, self.random.uniform(0, self.longest), self.by)
        self.longest = min(self.longest * 1.02, 0.2) if hit else self.longest * 0.9
        self.struck += hit
        return hit


def places(act: Callable[[], object], files: tuple[str, ...]) -> list[int]:
    """Where to kill `act`: of each line of these source files the first, a middle and the last time that it runs.

    Numbers count the lines as they are executed, in all threads.
    """

    def traced() -> list[tuple[str, int]]:
        seen = _trace(files, None)
        act()
        return seen

    child = Child(traced)
    assert child.wait() == 0
    times: dict[tuple[str, int], list[int]] = {}
    for number, line in enumerate(child.value):
        times.setdefault(line, []).append(number)
    return sorted({chosen for found in times.values() for chosen in (found[0], found[len(found) // 2], found[-1])})


def killed_at_line(act: Callable[[], object], files: tuple[str, ...], number: int) -> bool:
    """Run `act` in a child that kills itself before the given line of those it executes; whether it did."""

    def traced() -> None:
        _trace(files, number)
        act()

    status = Child(traced).wait()
    assert status in (0, -signal.SIGKILL)
    return status == -signal.SIGKILL


def _trace(files: tuple[str, ...], fatal: int | None) -> list[tuple[str, int]]:
    seen: list[tuple[str, int]] = []

    def line(frame: Any, event: str, _: Any) -> Any:
        if event == "line":
            if len(seen) == fatal:
                os.kill(os.getpid(), signal.SIGKILL)
            seen.append((frame.f_code.co_filename, frame.f_lineno))
        return line

    def call(frame: Any, _: str, __: Any) -> Any:
        return line if frame.f_code.co_filename.endswith(files) else None

    threading.settrace(call)
    sys.settrace(call)
    return seen
