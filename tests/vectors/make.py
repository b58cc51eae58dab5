"""Write the test vector of docs/format.md again: `python tests/vectors/make.py DIR`.

Two small checkpoints whose delta uses every mode and word size. The committed copy is what counts: a newer zstd may
code the same streams in other bytes, which every reader must decode alike.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt

from weightsync.bundle import Bundle
from weightsync.checkpoint import Checkpoint
from weightsync.delta.make import make_delta, make_full
from weightsync.parallel import Workers

Step = tuple[str, str, npt.NDArray[np.uint8], npt.NDArray[np.uint8]]


def tensors() -> list[Step]:
    """(name, dtype, old bytes, new bytes) of each tensor."""
    rng = np.random.default_rng(20261201)
    rows: list[Step] = []
    for name, dtype, width, count, changed, wide in (
        ("bitmap.bf16", "BF16", 2, 600, 0.5, 0.0),
        ("bytes.f8", "F8_E4M3", 1, 700, 0.05, 0.2),
        ("dense.bf16", "BF16", 2, 5000, 0.95, 0.01),
        ("gap16.bf16", "BF16", 2, 70000, 0.0001, 0.3),
        ("gap8.bf16", "BF16", 2, 3000, 0.02, 0.3),
        ("gap8.f32", "F32", 4, 1000, 0.03, 0.9),
        ("gap8.i64", "I64", 4, 400, 0.03, 0.1),
        ("planes.f32", "F32", 4, 1500, 1.0, 1.0),
        ("planes.u8", "U8", 1, 5000, 1.0, 0.5),
        ("same.bf16", "BF16", 2, 100, 0.0, 0.0),
    ):
        old = rng.integers(0, 1 << (8 * width), count, np.uint64).astype(f"<u{width}")
        pick = np.flatnonzero(rng.random(count) < changed)
        size = np.where(rng.random(len(pick)) < wide, rng.integers(2, 1 << min(8 * width - 1, 20), len(pick)), 1)
        sign = rng.integers(0, 2, len(pick)) * 2 - 1
        new = old.copy()
        new[pick] += (size * sign).astype(f"<i{width}").view(f"<u{width}")
        rows.append((name, dtype, old.view(np.uint8), new.view(np.uint8)))
    rows.append(("empty.f16", "F16", np.empty(0, np.uint8), np.empty(0, np.uint8)))
    rows.append(("scalar.bf16", "BF16", np.array([0, 0], np.uint8), np.array([0, 128], np.uint8)))
    return rows


def write(path: Path, rows: list[Step], side: int) -> None:
    """One safetensors file with a hand-made header."""
    widths = {"BF16": 2, "F8_E4M3": 1, "F32": 4, "I64": 8, "U8": 1, "F16": 2}
    header, at = {}, 0
    for row in rows:
        data = row[side]
        shape = [] if row[0].startswith("scalar") else [len(data) // widths[row[1]]]
        header[row[0]] = {"dtype": row[1], "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    path.parent.mkdir(parents=True)
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(row[side].tobytes() for row in rows))
    (path.parent / "config.json").write_text(json.dumps({"step": side - 2}) + "\n")


def main(out: Path) -> None:
    """Write OUT/{old,new,delta,full}."""
    rows = tensors()
    write(out / "old" / "model.safetensors", rows, 2)
    write(out / "new" / "model.safetensors", rows, 3)
    old, new = Checkpoint.open(out / "old"), Checkpoint.open(out / "new")
    with Workers(1) as workers:
        for name in ("delta", "full"):
            bundle = Bundle(out / name)
            bundle.start()
            if name == "delta":
                make_delta(old, new, bundle, workers, model="vector")
            else:
                make_full(new, bundle, workers, model="vector")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
