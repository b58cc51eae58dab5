"""The command line as people and scripts meet it: every command's outcome, `--json`, exit statuses, interruptions."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import worlds
from worlds import Child, World, reset, tree, unlike

from integration.stores import small_disk
from weightsync.cli import commands, main
from weightsync.delta.target import locked


@pytest.fixture
def out(tiny: World) -> Path:
    """Give a place that is free."""
    shutil.rmtree(tiny.root / "out", ignore_errors=True)
    return tiny.root / "out"


@pytest.fixture(scope="module")
def volume(tiny: World) -> list[str]:
    """Give the options that name a store with v0, v1 and the sibling."""
    at = ["--store", str(tiny.root / "volume"), "--model", "tiny"]
    for source, version, more in (
        (tiny.folders[0], "v0", []),
        (tiny.folders[1], "v1", ["--parent", "v0", "--parent-source", str(tiny.folders[0])]),
        (tiny.sibling, "sibling", ["--parent", "v1", "--full-ratio", "9"]),
    ):
        assert main(["publish", str(source), *at, "--version", version, *more, "--quiet"]) == 0
    return at


class Run:
    """Runs commands in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *arguments: object, status: int = 0) -> str:
        """What a command prints; its errors must be one line, and none unless it fails."""
        self._capsys.readouterr()
        assert main([str(argument) for argument in arguments]) == status
        output, errors = self._capsys.readouterr()
        assert errors.count("\n") == (0 if status in (0, 1) else 1), errors
        self.errors = errors
        return output

    def json(self, *arguments: object, status: int = 0) -> dict[str, Any]:
        """The object that a command prints."""
        value = json.loads(self(*arguments, "--json", status=status))
        assert isinstance(value, dict)
        return value


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Give a way to run commands."""
    return Run(capsys)


# ---- every command's outcome


def test_diff(tiny: World, out: Path, run: Run) -> None:
    """`diff` says in one object, and in readable lines, what changed and what that costs."""
    found = run.json("diff", tiny.folders[0], tiny.folders[1], "-o", out, "--model", worlds.MODEL)
    edge = tiny.edges[0].edge()
    assert {"changed", "total", "full_bytes", "delta_bytes", "seconds"} <= found.keys()
    assert {name: type(found[name]) for name in ("changed", "total", "full_bytes", "delta_bytes")} == dict.fromkeys(
        ("changed", "total", "full_bytes", "delta_bytes"), int
    )
    assert isinstance(found["seconds"], float)
    assert (found["changed"], found["delta_bytes"], found["edge"]) == (edge.changed, edge.size, edge.sha256)
    model = worlds.model(1)
    assert found["full_bytes"] == sum(tensor.words.nbytes for tensor in model.tensors.values())
    assert found["total"] == sum(tensor.words.size for tensor in model.tensors.values())
    assert (found["kind"], found["reversible"], found["profile"]) == ("Delta", True, "LAN")
    assert found["target"]["weights"] == edge.target.weights
    shutil.rmtree(out)
    lines = run("diff", tiny.folders[0], tiny.folders[1], "-o", out).splitlines()
    assert re.fullmatch(rf"changed: {edge.changed:,} of {found['total']:,} values \(\d+(\.\d+)? %\)", lines[0])
    assert re.fullmatch(
        r"delta: +[\d.]+ KiB instead of [\d.]+ KiB, [\d.]+x smaller, .* bytes per changed value", lines[1]
    )
    assert str(out) in lines[2]


def test_diff_notes(tiny: World, out: Path, run: Run) -> None:
    """What was left aside, counted or done otherwise than asked is said."""
    model = worlds.model(1)
    words = model.tensors["h.scale"].words | 0x7FC00000
    old, new = model.save(tiny.root / "notes-old"), model.put("h.scale", words).save(tiny.root / "notes-new")
    (new / "train.log").write_text("x")
    text = run("diff", old, new, "-o", out, "--profile", "wan")
    assert "note:    profile wan" in text
    assert "note:    1 of the written values are infinite or NaN" in text
    assert "ignored: train.log" in text
    shutil.rmtree(out)
    (old / "model-00002-of-00002.safetensors").unlink()
    (old / "model.safetensors.index.json").unlink()
    found = run.json("diff", old, new, "-o", out, "--full")
    assert (found["kind"], found["base"]) == ("Full", None)
    assert "tensors differ" in found["notes"][0]


def test_diff_does_not_depend_on_threads(tiny: World, out: Path, run: Run) -> None:
    """The same edge comes out for any `--threads`, which the object repeats."""
    found = []
    for threads in (1, 2, 7):
        shutil.rmtree(out, ignore_errors=True)
        found.append(run.json("diff", tiny.folders[0], tiny.folders[1], "-o", out, "--threads", threads))
        assert found[-1]["threads"] == threads
    assert len({one["edge"] for one in found}) == 1


def test_apply(tiny: World, target: Path, run: Run) -> None:
    """`apply` walks deltas, back with `--reverse`, and says when there was nothing to do."""
    deltas = [edge.root for edge in tiny.edges]
    found = run.json("apply", target, *deltas, "--threads", 2)
    assert (found["hops"], found["walked"], found["recovered"], found["threads"]) == (3, 3, False, 2)
    assert found["weights"] == tiny.edges[2].edge().target.weights
    assert unlike(tree(target), tiny.trees[3]) == []
    assert "already held" in run("apply", target, *deltas)
    assert "every chunk proven" in run("apply", target, *deltas, "--reverse")
    assert unlike(tree(target), tiny.trees[0]) == []


def test_apply_output(tiny: World, target: Path, out: Path, run: Run) -> None:
    """`apply --output` leaves the target and makes a directory; a full copy and deltas after it make the target."""
    found = run.json("apply", target, tiny.edges[0].root, "-o", out)
    assert (found["output"], found["weights"]) == (str(out), tiny.edges[0].edge().target.weights)
    assert unlike(tree(out), tiny.trees[1]) == []
    assert unlike(tree(target), tiny.trees[0]) == []
    full = worlds.edge(tiny.folders[1], tiny.folders[1], tiny.root / "full", full=True)
    shutil.rmtree(out)
    assert str(out) in run("apply", out, full.root, tiny.edges[1].root)
    assert unlike(tree(out), tiny.trees[2]) == []
    shutil.rmtree(out)
    run("apply", out, full.root, tiny.edges[2].root, status=42)
    assert not out.exists()


def test_verify(tiny: World, target: Path, volume: list[str], run: Run) -> None:
    """`verify` proves a checkpoint against a delta or a version, or a delta itself; status 1 means different."""
    delta = tiny.edges[0].root
    assert run.json("verify", delta) == {"edge": tiny.edges[0].edge().sha256, "records": 9, "verified": True}
    assert run.json("verify", target, "--delta", delta)["matches"] == "base"
    assert "is the target" in run("verify", tiny.folders[1], "--delta", delta)
    assert run.json("verify", tiny.folders[1], *volume, "--version", "v1")["different_files"] == []
    (target / "config.json").write_text("{}")
    assert "small files differ: config.json" in run("verify", target, *volume, "--version", "v0", status=1)
    found = run.json("verify", tiny.folders[2], "--delta", delta, status=1)
    assert (found["matches"], found["chunks"], found["different_chunks"]) == (None, 10, 9)
    assert "a.embed" in found["tensors"]
    lines = run("verify", tiny.sibling, *volume, "--version", "v0", status=1).splitlines()
    assert "is not the version v0: 9 of 10 chunks differ" in lines[0]
    assert "  a.embed: 1 chunk" in lines
    run("verify", worlds.model(2, large=True).save(tiny.root / "large"), "--delta", delta, status=1)


def test_inspect(tiny: World, target: Path, run: Run) -> None:
    """`inspect` tells a checkpoint, a delta and a data file apart and says what they hold."""
    found = run.json("inspect", target)
    assert (found["kind"], found["tensors"], found["ignored"]) == ("checkpoint", 11, [])
    assert found["types"]["BF16"]["tensors"] == 4
    assert found["assets"] == sorted(worlds.ASSETS[0])
    assert "checkpoint: 11 tensors" in run("inspect", target)
    edge = tiny.edges[0].edge()
    found = run.json("inspect", tiny.edges[0].root)
    assert (found["edge"], found["changed"], found["bytes"]) == (edge.sha256, edge.changed, edge.size)
    assert sum(mode["changed"] for mode in found["modes"].values()) == edge.changed
    assert {"gap16", "gap8", "bitmap", "dense", "planes"} == found["modes"].keys()
    data = tiny.edges[0].data_path(edge.data[0].sha256)
    found = run.json("inspect", data)
    assert (found["kind"], found["bytes"], found["shard"]) == ("data file", edge.size, 0)
    assert "both ways" in run("inspect", tiny.edges[0].root)
    assert run.json("inspect", target / "model-00001-of-00002.safetensors")["tensors"] == 6


def test_merge(tiny: World, target: Path, out: Path, run: Run) -> None:
    """`merge` folds deltas into one with the effect of all."""
    deltas = [edge.root for edge in tiny.edges]
    found = run.json("merge", *deltas, "-o", out)
    assert (found["inputs"], found["kind"]) == (3, "Merge")
    assert found["delta_bytes"] < found["input_bytes"] == sum(edge.edge().size for edge in tiny.edges)
    run("apply", target, out)
    assert unlike(tree(target), tiny.trees[3]) == []
    shutil.rmtree(out)
    assert "3 deltas of" in run("merge", *deltas, "-o", out)


def test_publish_pull_graph(tiny: World, volume: list[str], out: Path, run: Run) -> None:
    """What is published can be listed, explained and pulled, again and again."""
    found = run.json("graph", *volume)
    assert found["versions"].keys() == {"v0", "v1", "sibling"}
    assert len(found["edges"]) >= 3
    assert "nothing -> " in run("graph", *volume)
    found = run.json("graph", *volume, "--from", "v0", "--to", "sibling")
    assert [hop["reverse"] for hop in found["hops"]] == [False, False]
    assert found["bytes"] == sum(hop["bytes"] for hop in found["hops"])
    assert "back Delta" in run("graph", *volume, "--from", "v1", "--to", "v0")
    found = run.json("pull", out, *volume, "--version", "v1")
    assert {
        "weights",
        "content",
        "hops",
        "why",
        "downloaded_bytes",
        "full_bytes",
        "left_out",
        "seconds",
    } <= found.keys()
    assert unlike(tree(out), tiny.trees[1]) == []
    text = run("pull", out, *volume, "--version", "sibling", "--threads", 2)
    assert "every chunk proven" in text
    assert re.search(r"fetched [\d.]+ KiB instead of [\d.]+ KiB", text)
    assert unlike(tree(out), tree(tiny.sibling)) == []
    again = ["publish", tiny.folders[1], *volume, "--version", "v1", "--parent", "v0"]
    found = run.json(*again, "--scratch", tiny.root / "scratch")
    assert (found["sent_bytes"], found["parent_from"]) == (0, "store")
    assert list((tiny.root / "scratch").iterdir()) == []
    assert "sent:    0 B" in run(*again)


# ---- exit statuses


def test_status_2(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    """Wrong usage: the usage line, one line that says what is wrong, nothing on stdout."""
    for words in (
        [],
        ["frobnicate"],
        ["diff", "a", "b"],
        ["apply", "a"],
        ["diff", "a", "b", "-o", "c", "--threads", "0"],
        ["diff", "a", "b", "-o", "c", "--threads", "²"],
        ["diff", "a", "b", "-o", "c", "--profile", "moon"],
        ["pull", "a", "--store", "s", "--model", "m"],
        ["publish", "a", "--store", "s", "--model", "m", "--version", "v", "--full-ratio", "nan"],
        ["publish", "a", "--store", "s", "--model", "m", "--version", "v", "--full-ratio", "-1"],
    ):
        with pytest.raises(SystemExit) as caught:
            main(words)
        assert caught.value.code == 2
        output, errors = capsys.readouterr()
        assert output == ""
        assert errors.startswith("usage: weightsync")
        assert "error: " in errors.splitlines()[-1]


def test_status_69(tiny: World, volume: list[str], out: Path, run: Run) -> None:
    """A store that does not give what it must: try later."""
    path = next((tiny.root / "volume/tiny/blobs").iterdir())
    blobs = {path: path.read_bytes() for path in path.parent.iterdir()}
    for path, data in blobs.items():
        path.write_bytes(data + b"!")
    assert run.json("pull", out, *volume, "--version", "v0", status=69)["error"]["reason"] == "StoreCorrupt"
    assert "does not have sha256" in run.errors
    for path, data in blobs.items():
        path.write_bytes(data)


def test_status_74(tiny: World, tmp_path: Path, run: Run) -> None:
    """Not enough room, with the numbers."""
    with small_disk(tmp_path / "disk", 1 << 20) as disk:
        (disk / "filler").write_bytes(bytes((1 << 20) - 40_000))
        error = run.json("apply", tiny.folders[0], tiny.edges[0].root, "-o", disk / "out", status=74)["error"]
    assert error["reason"] == "NoSpace"
    assert re.search(r"\d+ bytes, \d+ are available", error["message"])


def test_status_75(tiny: World, target: Path, run: Run) -> None:
    """Another process is changing the directory."""
    with locked(target):
        assert run.json("apply", target, tiny.edges[0].root, status=75)["error"]["reason"] == "TargetBusy"
    assert unlike(tree(target), tiny.trees[0]) == []


def test_status_130(tiny: World, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the middle of an apply: status 130, no traceback, and the same command goes on."""
    ready, begun = os.pipe()

    @contextmanager
    def waiting(*_: object, **__: object) -> Iterator[Any]:
        seen: list[int] = []

        def advance(count: int) -> None:
            seen.append(count)
            if len(seen) == 13:  # ten chunks digested, some records stored
                os.write(begun, b"x")
                signal.pause()

        yield advance

    monkeypatch.setattr(commands, "bar", waiting)
    arguments = ["apply", str(target), str(tiny.edges[0].root), "--threads", "1"]
    child = Child(lambda: main(arguments))
    os.read(ready, 1)
    os.kill(child.pid, signal.SIGINT)
    assert child.wait() == 0
    assert child.value == 130
    assert (target / ".weightsync" / "journal").exists()
    monkeypatch.undo()
    assert main(arguments) == 0
    assert unlike(tree(target), tiny.trees[1]) == []
    os.close(ready)
    os.close(begun)


def test_interrupted_apply(tiny: World, target: Path, run: Run) -> None:
    """After a kill every command says what to do, and doing either of the two works."""
    arguments = ["apply", str(target), str(tiny.edges[0].root), "--threads", "1"]
    for undo in (False, True):
        reset(target, tiny.trees[0])
        assert worlds.killed_at_line(lambda: main(arguments), ("delta/patch.py",), 150)
        run("apply", target, tiny.edges[1].root, status=42)
        assert "finish it with the same delta, or undo it with --reverse" in run.errors
        for other in (["inspect", target], ["diff", target, tiny.folders[1], "-o", tiny.root / "never"]):
            run(*other, status=42)
            assert "interrupted" in run.errors
        assert "an interrupted apply was picked up" in run(*arguments, *(["--reverse"] if undo else []))
        assert unlike(tree(target), tiny.trees[0 if undo else 1]) == []
