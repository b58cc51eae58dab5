"""The committed test vector: what was written once must be read for ever."""

from __future__ import annotations

import shutil
from pathlib import Path

from weightsync.bundle import Bundle
from weightsync.checkpoint import Checkpoint
from weightsync.codec import Mode
from weightsync.delta.apply import apply
from weightsync.delta.build import create
from weightsync.delta.make import make_delta
from weightsync.delta.step import Step
from weightsync.parallel import Workers

VECTOR = Path(__file__).parents[1] / "vectors" / "v1"


def _same(one: Path, two: Path) -> bool:
    return all((one / name).read_bytes() == (two / name).read_bytes() for name in ("model.safetensors", "config.json"))


def test_the_vector_uses_every_mode_and_word_size() -> None:
    """Nothing of the format is left out of the vector."""
    delta = Step.open(Bundle(VECTOR / "delta")).delta
    assert set(delta.records["mode"].tolist()) == {Mode.GAP16, Mode.GAP8, Mode.BITMAP, Mode.DENSE, Mode.PLANES}
    assert set(delta.records["width"].tolist()) == {1, 2, 4}


def test_the_vector_leads_both_ways(tmp_path: Path) -> None:
    """The stored delta makes the new checkpoint of the old one, and the old one of the new one."""
    target = tmp_path / "target"
    shutil.copytree(VECTOR / "old", target)
    with Workers(1) as workers:
        apply(target, [Step.open(Bundle(VECTOR / "delta"))], workers)
        assert _same(target, VECTOR / "new")
        apply(target, [Step.open(Bundle(VECTOR / "delta"), reverse=True)], workers)
        assert _same(target, VECTOR / "old")


def test_the_full_vector_makes_the_checkpoint_from_nothing(tmp_path: Path) -> None:
    """The stored Full edge and layout give the new file bit for bit."""
    with Workers(1) as workers:
        create(tmp_path / "made", [Bundle(VECTOR / "full")], workers)
    assert _same(tmp_path / "made", VECTOR / "new")


def test_identities_and_records_are_still_made_alike(tmp_path: Path) -> None:
    """Today's writer gives the same digests, grouping and decoded lengths; zstd may differ in the coded bytes."""
    bundle = Bundle(tmp_path / "delta")
    bundle.start()
    with Workers(2) as workers:
        made = make_delta(
            Checkpoint.open(VECTOR / "old"), Checkpoint.open(VECTOR / "new"), bundle, workers, model="vector"
        )
    then, now = Step.open(Bundle(VECTOR / "delta")), Step.open(bundle)
    assert (made.edge.base, made.edge.target) == (then.edge.base, then.edge.target)
    assert (then.delta.segments == now.delta.segments).all()
    for name in ("n", "k", "mode", "width", "first", "segments"):
        assert (then.delta.records[name] == now.delta.records[name]).all()
    assert (then.delta.records["streams"]["raw"] == now.delta.records["streams"]["raw"]).all()
