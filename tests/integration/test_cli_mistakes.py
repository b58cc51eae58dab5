"""What users get wrong, or cannot help, on the command line: one line that says so, a documented status, no traceback."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias

import pytest
import worlds
from worlds import World, outcome, reset, stamps, tree, unlike

from bucketserver.client import BucketServer
from integration.stores import TOKEN
from weightsync import __version__
from weightsync.cli import main

ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}

COMMAND = [sys.executable, "-m", "weightsync.cli"]

Words: TypeAlias = list[object]


@pytest.fixture(scope="module")
def tiny() -> Iterator[World]:
    """Give four versions, a sibling and the deltas between them, and in `scenery` things that are something else."""
    with worlds.memory_folder() as folder:
        made = worlds.world(folder)
        reset(folder / "empty", {})
        reset(folder / "taken", {"mine.txt": b"mine"})
        reset(folder / "held", made.trees[0])
        (folder / "text").write_text("just text\n")
        (folder / "junk.safetensors").write_bytes(b"junk" * 10)
        worlds.edge(made.folders[0], made.folders[0], folder / "full", full=True)
        model = worlds.model(2)
        del model.tensors["h.scale"]  # type: ignore[attr-defined]
        model.save(folder / "other")
        at = ["--store", str(folder / "volume"), "--model", "tiny", "--version"]
        assert main(["publish", str(made.folders[0]), *at, "v0"]) == 0
        yield made


MISTAKES: dict[str, tuple[Callable[[Path], Words], int, str]] = {
    "diff: no such checkpoint": (lambda r: ["diff", r / "none", r / "v1", "-o", r / "new"], 42, "none"),
    "diff: empty directory": (lambda r: ["diff", r / "v0", r / "empty", "-o", r / "new"], 42, "no safetensors"),
    "diff: text file": (lambda r: ["diff", r / "text", r / "v1", "-o", r / "new"], 42, "text: byte 0: not a saf"),
    "diff: a delta as checkpoint": (lambda r: ["diff", r / "edge-1", r / "v1", "-o", r / "new"], 42, "edge-1"),
    "diff: other tensors": (lambda r: ["diff", r / "v0", r / "other", "-o", r / "new"], 42, "h.scale.*--full"),
    "diff: output not empty": (lambda r: ["diff", r / "v0", r / "v1", "-o", r / "taken"], 42, "exists already"),
    "diff: output is a file": (lambda r: ["diff", r / "v0", r / "v1", "-o", r / "text"], 42, "text"),
    "diff: output below a file": (lambda r: ["diff", r / "v0", r / "v1", "-o", r / "text" / "new"], 42, "text"),
    "diff: output's name too long": (lambda r: ["diff", r / "v0", r / "v1", "-o", r / ("x" * 300)], 42, "xxx"),
    "diff: bad lineage": (lambda r: ["diff", r / "v0", r / "v1", "-o", r / "new", "--model", "My Model"], 42, "My Mod"),
    "apply: no such target": (lambda r: ["apply", r / "none", r / "edge-1"], 42, "none"),
    "apply: a file as target": (lambda r: ["apply", r / "v0/config.json", r / "edge-1"], 42, "config.json"),
    "apply: target's name too long": (lambda r: ["apply", r / ("x" * 300), r / "edge-1"], 42, "xxx"),
    "apply: no such delta": (lambda r: ["apply", r / "held", r / "none"], 42, "none"),
    "apply: a checkpoint as delta": (lambda r: ["apply", r / "held", r / "v1"], 42, "0 edges"),
    "apply: a file as delta": (lambda r: ["apply", r / "held", r / "text"], 42, "text"),
    "apply: another base": (lambda r: ["apply", r / "held", r / "edge-2"], 42, "nothing was written"),
    "apply: deltas with a gap": (lambda r: ["apply", r / "held", r / "edge-1", r / "edge-3"], 42, "edge-3"),
    "apply: deltas out of order": (lambda r: ["apply", r / "held", r / "edge-2", r / "edge-1"], 42, "edge-1"),
    "apply: a full copy in place": (lambda r: ["apply", r / "held", r / "full"], 42, "exists already"),
    "apply: a full copy backwards": (lambda r: ["apply", r / "v0", r / "full", "--reverse", "-o", r / "new"], 42, "whole checkpoint"),
    "apply: output exists": (lambda r: ["apply", r / "v0", r / "edge-1", "-o", r / "taken"], 42, "exists"),
    "apply: output is the target": (lambda r: ["apply", r / "held", r / "edge-1", "-o", r / "held"], 42, "exists"),
    "apply: output's name too long": (lambda r: ["apply", r / "v0", r / "edge-1", "-o", r / ("x" * 300)], 42, "xxx"),
    "verify: nothing there": (lambda r: ["verify", r / "none"], 42, "none"),
    "verify: name too long": (lambda r: ["verify", r / ("x" * 300), "--delta", r / "edge-1"], 42, "xxx"),
    "verify: checkpoint alone": (lambda r: ["verify", r / "v0"], 42, "0 edges"),
    "verify: half a version": (lambda r: ["verify", r / "v0", "--store", r / "volume", "--model", "tiny"], 42, "--version"),
    "inspect: nothing there": (lambda r: ["inspect", r / "none"], 42, "none"),
    "inspect: text file": (lambda r: ["inspect", r / "text"], 42, "not a safetensors file"),
    "inspect: junk": (lambda r: ["inspect", r / "junk.safetensors"], 42, "junk.safetensors: byte 0"),
    "inspect: name too long": (lambda r: ["inspect", r / ("x" * 300)], 42, "xxx"),
    "inspect: unreadable file": (lambda r: ["inspect", "/proc/self/mem"], 42, "/proc/self/mem"),
    "merge: gap": (lambda r: ["merge", r / "edge-1", r / "edge-3", "-o", r / "new"], 42, "do not follow"),
    "merge: full copy": (lambda r: ["merge", r / "full", r / "edge-1", "-o", r / "new"], 42, "Full"),
    "merge: output exists": (lambda r: ["merge", r / "edge-1", r / "edge-2", "-o", r / "taken"], 42, "exists already"),
    "publish: no such checkpoint": (lambda r: ["publish", r / "none", *store(r), "v9"], 42, "none"),
    "publish: bad version": (lambda r: ["publish", r / "v1", *store(r), "Version 9"], 42, "Version 9"),
    "publish: no such parent": (lambda r: ["publish", r / "v1", *store(r), "v9", "--parent", "v8"], 42, "v8"),
    "publish: source without name": (lambda r: ["publish", r / "v1", *store(r), "v9", "--parent-source", r], 42, "--parent"),
    "publish: name taken": (lambda r: ["publish", r / "v1", *store(r), "v0"], 42, "already published"),
    "publish: store is a file": (lambda r: ["publish", r / "v1", *store(r, r / "text"), "v9"], 69, "text"),
    "publish: scratch is a file": (lambda r: ["publish", r / "v1", *store(r), "v9", "--scratch", r / "text"], 42, "text"),
    "pull: no such version": (lambda r: ["pull", r / "new", *store(r), "v9"], 42, "v9"),
    "pull: no such manifest": (lambda r: ["pull", r / "new", *store(r), "0" * 64], 42, "0000"),
    "pull: no such store": (lambda r: ["pull", r / "new", *store(r, r / "none"), "v0"], 42, "none"),
    "pull: onto a file": (lambda r: ["pull", r / "text", *store(r), "v0"], 42, "text"),
    "pull: onto something else": (lambda r: ["pull", r / "taken", *store(r), "v0"], 42, "no safetensors"),
    "pull: onto another model": (lambda r: ["pull", r / "other", *store(r), "v0"], 42, "h.scale"),
    "pull: name too long": (lambda r: ["pull", r / ("x" * 300), *store(r), "v0"], 42, "xxx"),
    "graph: from without to": (lambda r: ["graph", *store(r)[:-1], "--from", "v0"], 42, "--to"),
    "graph: no such version": (lambda r: ["graph", *store(r)[:-1], "--to", "v9"], 42, "v9"),
    "graph: bad lineage": (lambda r: ["graph", "--store", r / "volume", "--model", "../x"], 42, "cannot name a model"),
    **{
        f"graph: store {url!r}": (lambda r, url=url: ["graph", "--store", url, "--model", "m"], 42, "store|bucket|path")
        for url in ("", "s3://b/x", "https://huggingface.co/x", "hf://m", "hf://buckets/a", "hf://buckets/a b/c",
                    "hf://buckets/a/b/../c", "file://host/x", "file:x", "file://[", "ftp:x")
    },
}  # fmt: skip


def store(root: Path, at: Path | None = None) -> Words:
    """Options for a version of the published store, its name to follow."""
    return ["--store", at or root / "volume", "--model", "tiny", "--version"]


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes(tiny: World, capsys: pytest.CaptureFixture[str], name: str) -> None:
    """A mistake gives its status, one line that names what is wrong, and as JSON an object; nothing is changed."""
    words, status, match = MISTAKES[name]
    arguments = [str(word) for word in words(tiny.root)]
    before = {path: stamps(tiny.root / path) for path in ("v0", "v1", "held", "taken", "other", "empty", "volume")}
    capsys.readouterr()
    assert main(arguments) == status
    output, errors = capsys.readouterr()
    assert output == ""
    assert re.fullmatch(rf"weightsync: .*({match}).*\n", errors)
    assert main([*arguments, "--json"]) == status
    output, errors = capsys.readouterr()
    error = json.loads(output)["error"]
    assert error.keys() == {"message", "reason"}
    assert re.fullmatch("[A-Z][A-Za-z]+", error["reason"])
    assert errors == f"weightsync: {error['message']}\n"
    after = {path: stamps(tiny.root / path) for path in before}
    assert all(after[path].items() >= before[path].items() for path in before)
    left = (tiny.root / "new").exists()
    shutil.rmtree(tiny.root / "new", ignore_errors=True)
    assert not left, "an unfinished output directory is left, which keeps the corrected command from working"


# ---- what the user may not read or write


CLOSED: dict[str, Callable[[Path, Path], Words]] = {
    "diff old": lambda r, c: ["diff", c / "v0", r / "v1", "-o", r / "open/new"],
    "diff output": lambda r, c: ["diff", r / "v0", r / "v1", "-o", c / "new"],
    "apply target": lambda r, c: ["apply", c / "v0", r / "edge-1"],
    "apply delta": lambda r, c: ["apply", r / "v0", c / "edge-1", "-o", r / "open/new"],
    "apply output": lambda r, c: ["apply", r / "v0", r / "edge-1", "-o", c / "new"],
    "apply output beside": lambda r, c: ["apply", r / "v0", r / "edge-1", "-o", r / "locked/new"],
    "verify path": lambda r, c: ["verify", c / "v0", "--delta", r / "edge-1"],
    "verify delta": lambda r, c: ["verify", r / "v0", "--delta", c / "edge-1"],
    "inspect": lambda r, c: ["inspect", c / "v0"],
    "inspect file": lambda r, c: ["inspect", r / "secret"],
    "merge": lambda r, c: ["merge", c / "edge-1", r / "edge-2", "-o", r / "open/new"],
    "publish source": lambda r, c: ["publish", c / "v0", *store(r), "v9"],
    "publish parent source": lambda r, c: ["publish", r / "v1", *store(r), "v9", "--parent", "v0", "--parent-source", c / "v0"],
    "publish store": lambda r, c: ["publish", r / "v0", *store(r, c / "volume"), "v9"],
    "publish scratch": lambda r, c: ["publish", r / "v1", *store(r), "v9", "--scratch", r / "locked"],
    "pull": lambda r, c: ["pull", c / "new", *store(r), "v0"],
    "pull in place": lambda r, c: ["pull", r / "locked", *store(r), "v0"],
    "pull store": lambda r, c: ["pull", r / "open/new", *store(r, c / "volume"), "v0"],
    "graph": lambda r, c: ["graph", "--store", c / "volume", "--model", "tiny"],
}  # fmt: skip


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("name", CLOSED)
def test_permissions(tiny: World, name: str) -> None:
    """What this user may not read or write is said in one line with its path, by every command."""
    for folder, mode in (("closed", 0o700), ("locked", 0o755), ("open", 0o777)):
        reset(tiny.root / folder, {}).chmod(mode)
    (tiny.root / "secret").write_bytes(b"secret")
    (tiny.root / "secret").chmod(0o600)
    arguments = [str(word) for word in CLOSED[name](tiny.root, tiny.root / "closed")]

    def act() -> tuple[int, str]:
        with contextlib.redirect_stderr(io.StringIO()) as errors, contextlib.redirect_stdout(io.StringIO()):
            status = main(arguments)
        return status, errors.getvalue()

    result = outcome(act, uid=65534)
    assert not isinstance(result, BaseException), repr(result)
    assert result[0] in (42, 69)
    assert re.fullmatch(r"weightsync: .*(closed|locked|secret|volume).*\n", result[1])


@pytest.mark.parametrize("command", ["publish", "verify", "graph"])
def test_no_temporary_folder(tiny: World, command: str) -> None:
    """Where nothing can be written to the system's temporary folder that is said in one line."""
    words: Words = {
        "publish": ["publish", tiny.folders[1], *store(tiny.root), "v9"],
        "verify": ["verify", tiny.folders[0], *store(tiny.root), "v0"],
        "graph": ["graph", *store(tiny.root)[:-1], "--to", "v0"],
    }[command]
    done = call_without_temporary(*words)
    assert "Traceback" not in done.stderr
    assert done.stderr.count("\n") == 1
    assert done.returncode in (42, 74)


def call_without_temporary(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a command where no temporary folder can be found."""
    code = "import sys, tempfile\ntempfile._candidate_tempdir_list = lambda: ['/proc/none']\n"
    code += "from weightsync.cli import main\nsys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def test_names_that_are_no_text(tiny: World) -> None:
    """File names of any bytes can be given and are printed without a traceback."""
    strange = Path(os.fsdecode(os.fsencode(tiny.root) + b"/str\xffange"))
    reset(strange, {**tiny.trees[0], os.fsdecode(b"notes\xfe.md"): b"x"})
    usual = {"PYTHONIOENCODING": "utf-8:strict"}  # as in en_US.UTF-8; in the C locale Python is more lenient
    listed = call("inspect", strange, **usual)
    assert (listed.returncode, listed.stderr) == (0, "")
    made = call("diff", strange, tiny.folders[1], "-o", strange / "delta", **usual)
    assert (made.returncode, made.stderr) == (0, "")
    wrong = call("inspect", strange / "none", **usual)
    assert wrong.returncode == 42
    assert wrong.stderr.startswith("weightsync: ")


def call(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a process of its own."""
    return subprocess.run(
        [*COMMAND, *map(str, arguments)],
        capture_output=True,
        text=True,
        errors="surrogateescape",
        check=False,
        env={**ENVIRONMENT, **environment},
        timeout=60,
    )


# ---- as a process


def test_script(tiny: World) -> None:
    """The installed script knows its version, and a mistake gives one line and status 42."""
    script = Path(sys.executable).with_name("weightsync")
    assert subprocess.check_output([script, "--version"], text=True) == f"weightsync {__version__}\n"
    wrong = call("inspect", tiny.root / "nothing")
    assert (wrong.returncode, wrong.stdout) == (42, "")
    assert re.fullmatch(r"weightsync: .*nothing.*\n", wrong.stderr)


def test_help_is_instant() -> None:
    """Help comes without the heavy imports, for every command, and names every exit status."""
    code = (
        "import sys\nfrom weightsync.cli import main\ntry: main(sys.argv[1:])\nfinally: print('numpy' in sys.modules)"
    )
    for command in ("", "diff", "apply", "verify", "inspect", "merge", "publish", "pull", "graph"):
        arguments = [sys.executable, "-c", code, *([command] if command else []), "--help"]
        done = subprocess.run(arguments, capture_output=True, text=True, check=False)
        assert done.returncode == 0
        assert done.stdout.endswith("False\n")
        assert all(status in done.stdout for status in ("42", "69", "74", "75", "130"))


def test_reader_that_goes_away(tiny: World) -> None:
    """When whoever reads the output closes it, as `head` does, there is no traceback."""
    command = [*COMMAND, "inspect", str(tiny.folders[0])]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.close()
    _, errors = process.communicate(timeout=60)
    assert errors == b""


def test_hub(tiny: World, tmp_path: Path) -> None:
    """A bucket is addressed by its URL; token and endpoint come from the environment; a wrong token is status 69."""
    out = tmp_path / "pulled"
    with BucketServer({TOKEN: "alice"}) as server:
        server.create("alice/weights", token=TOKEN)
        there = {"HF_TOKEN": TOKEN, "HF_ENDPOINT": server.endpoint, "HF_HOME": str(tmp_path)}
        at = ["--store", "hf://buckets/alice/weights/run", "--model", "tiny", "--version", "v0", "--json"]
        done = call("publish", tiny.folders[0], *at, **there)
        assert (done.returncode, done.stderr) == (0, "")
        assert json.loads(done.stdout)["version"] == "v0"
        done = call("pull", out, *at, **there)
        assert (done.returncode, done.stderr) == (0, "")
        assert unlike(tree(out), tiny.trees[0]) == []
        denied = call("pull", tiny.root / "never", *at, **{**there, "HF_TOKEN": "hf_wrong"})
    assert denied.returncode == 69
    assert json.loads(denied.stdout)["error"]["reason"] == "StoreDenied"


def test_a_file_is_not_compared_with_a_directory(
    tiny: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A version without small files would take them from whoever applies the delta: refused, also when published."""
    alone, out = tmp_path / "alone.safetensors", tmp_path / "out"
    shutil.copyfile(next(tiny.folders[1].glob("*.safetensors")), alone)
    assert main(["diff", str(tiny.folders[0]), str(alone), "-o", str(out)]) == 42
    assert "the other a directory" in capsys.readouterr().err
    assert not out.exists()
