"""What diff, apply, undo and pull of one pair of checkpoints cost, beside memcpy and a two-stream compare.

    python benchmarks/pair.py OLD NEW [--threads 2] [--runs 5] [--json]

Every row is measured in one run, in a warm child process of its own, so that ratios are comparable and the peak of
anonymous memory belongs to that row alone. Weights lie in /dev/shm, as they do beside an engine. The table in
docs/benchmarks.md is this program's output.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from weightsync import digests
from weightsync.bundle import Bundle
from weightsync.checkpoint import Checkpoint
from weightsync.delta.apply import apply
from weightsync.delta.build import copy_and_apply
from weightsync.delta.make import make_delta
from weightsync.delta.patch import Walk, drive
from weightsync.delta.step import Step
from weightsync.parallel import Workers
from weightsync.publish import Parent, publish
from weightsync.pull import pull
from weightsync.remote import Remote
from weightsync.store import VolumeStore

BLOCK = 1 << 20


def anonymous() -> int:
    """This process's anonymous memory in bytes, now."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0


@contextmanager
def peak(out: list[int]) -> Iterator[None]:
    """Append the most anonymous memory that the block used beyond what was there before it."""
    before, done, most = anonymous(), threading.Event(), [0]

    def watch() -> None:
        while not done.wait(0.002):
            most[0] = max(most[0], anonymous() - before)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        out.append(most[0])


def row(work: Callable[[], Any], runs: int, reset: Callable[[], Any] | None, queue: Any) -> None:
    """In a child: one run to warm up, then `runs` timed ones."""
    seconds, memory = [], []
    for i in range(runs + 1):
        if reset:
            reset()
        if i == 0:
            with peak(memory):
                work()
            continue
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    queue.put((statistics.median(seconds), max(memory)))


def measure(work: Callable[[], Any], runs: int, reset: Callable[[], Any] | None = None) -> tuple[float, int]:
    """Median seconds and peak anonymous bytes of `work` in a process of its own."""
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=row, args=(work, runs, reset, queue))
    child.start()
    result: tuple[float, int] = queue.get()
    child.join()
    return result


def spans(checkpoint: Checkpoint) -> list[tuple[int, int, int]]:
    """(file, start, stop) pieces of all tensor bytes, 8 MiB each."""
    found = []
    for i, mapped in enumerate(checkpoint.maps):
        start = checkpoint.layout.files[i].data_start
        found += [(i, at, min(at + 8 * BLOCK, len(mapped))) for at in range(start, len(mapped), 8 * BLOCK)]
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    a = parser.parse_args()
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="weightsync-bench-") as folder:
        rows = run(a.old, a.new, Path(folder), a.threads, a.runs)
    if a.json:
        print(json.dumps(rows, indent=2))
        return
    print(f"| {a.threads} threads | seconds | x memcpy | x compare | peak anonymous MiB |\n|---|---|---|---|---|")
    for name, (seconds, memory) in rows["rows"].items():
        ratios = [seconds / rows["rows"][floor][0] for floor in ("memcpy", "compare")]
        print(f"| {name} | {seconds:.3f} | {ratios[0]:.2f} | {ratios[1]:.2f} | {memory / 2**20:.0f} |")
    print(f"\n{rows['delta_bytes']:,} bytes for {rows['changed']:,} of {rows['total']:,} values "
          f"({100 * rows['changed'] / rows['total']:.3f} %): {rows['delta_bytes'] / rows['changed']:.3f} bytes each")  # fmt: skip


def run(old_path: Path, new_path: Path, folder: Path, threads: int, runs: int) -> dict[str, Any]:
    """All rows over copies in `folder`."""
    shutil.copytree(old_path, folder / "old")
    shutil.copytree(new_path, folder / "new")
    shutil.copytree(old_path, folder / "target")
    old, new = Checkpoint.open(folder / "old"), Checkpoint.open(folder / "new")
    target = Checkpoint.open(folder / "target", writable=True)
    store = Remote(VolumeStore(folder / "store"), "bench")
    bundle = Bundle(folder / "delta")
    bundle.start()
    with Workers(threads) as workers:
        made = make_delta(old, new, bundle, workers, model="bench")
        publish(folder / "old", store, "old", folder / "scratch", workers)
        publish(folder / "new", store, "new", folder / "scratch", workers, parent=Parent("old", folder / "old"))
    pieces = spans(old)

    def threaded(work: Callable[[tuple[int, int, int]], object]) -> Callable[[], None]:
        def go() -> None:
            with Workers(threads) as workers:
                workers.run(work, pieces)

        return go

    def copy(piece: tuple[int, int, int]) -> None:
        i, start, stop = piece
        np.copyto(np.frombuffer(target.maps[i], np.uint8)[start:stop], np.frombuffer(old.maps[i], np.uint8)[start:stop])

    def compare(piece: tuple[int, int, int]) -> int:
        i, start, stop = piece
        one, two = (np.frombuffer(side.maps[i], np.uint16, (stop - start) // 2, start) for side in (old, new))
        mask = np.empty(1 << 18, bool)
        return sum(
            int(
                np.count_nonzero(
                    np.not_equal(one[at : at + len(mask)], two[at : at + len(mask)], out=mask[: len(one) - at])
                )
            )
            for at in range(0, len(one), len(mask))
        )

    def diff() -> None:
        shutil.rmtree(folder / "out", ignore_errors=True)
        out = Bundle(folder / "out")
        out.start()
        with Workers(threads) as workers:
            make_delta(old, new, out, workers, model="bench")

    step, back = Step.open(bundle), Step.open(bundle, reverse=True)

    def plain() -> None:
        with Workers(threads) as workers:
            for one in (step, back):
                drive(Walk(target, one.delta, one.reverse, one.start, one.goal), 1, workers)

    def journaled() -> None:
        with Workers(threads) as workers:
            apply(folder / "target", [step], workers)

    def undo() -> None:
        with Workers(threads) as workers:
            apply(folder / "target", [back], workers)

    def hash_all() -> None:
        with Workers(threads) as workers:
            digests.of_checkpoint(target, workers)

    def fresh() -> None:
        shutil.rmtree(folder / "pulled", ignore_errors=True)
        with Workers(threads) as workers:
            pull(store, "new", folder / "pulled", workers)

    def again() -> None:
        with Workers(threads) as workers:
            pull(store, "old", folder / "moved", workers)

    def forward() -> None:
        with Workers(threads) as workers:
            pull(store, "new", folder / "moved", workers)

    def copied() -> None:
        shutil.rmtree(folder / "copied", ignore_errors=True)
        with Workers(threads) as workers:
            copy_and_apply(folder / "old", folder / "copied", [step], workers)

    rows: dict[str, tuple[float, int]] = {
        "memcpy": measure(threaded(copy), runs),
        "compare": measure(threaded(compare), runs),
        "digests of one checkpoint": measure(hash_all, runs),
        "diff, digests of both": measure(diff, runs),
    }
    seconds, memory = measure(plain, runs)
    rows["patch, proven after"] = (seconds / 2, memory)
    rows["apply, proven before and after, journaled"] = measure(journaled, runs, undo)
    rows["undo, likewise"] = measure(undo, runs, journaled)
    rows["apply into a copy"] = measure(copied, runs)
    rows["pull, fresh, full copy and delta"] = measure(fresh, runs)
    again()
    rows["pull, one delta forward"] = measure(forward, runs, again)
    shutil.copytree(folder / "old", folder / "check", dirs_exist_ok=True)
    sizes = {"changed": made.edge.changed, "delta_bytes": made.edge.size, "total": made.target.schema.total_words}
    return {"cpus": len(os.sched_getaffinity(0)), "rows": rows, "threads": threads, **sizes}


if __name__ == "__main__":
    main()
