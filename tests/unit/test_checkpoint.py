"""Reading checkpoints: which files count, every element type, and where exactly a malformed file is wrong."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from factories import MODEL, file_bytes, header_of, random_tensors, write_checkpoint, write_file
from safetensors import safe_open

from weightsync import assets
from weightsync.checkpoint import Checkpoint
from weightsync.dtypes import BITS
from weightsync.errors import CheckpointError, SourceChanged
from weightsync.files import FOLDER, JOURNAL
from weightsync.layout import HEADER_LIMIT
from weightsync.schema import CHUNK_BYTES

ONE = {"a": ("U8", (3,), b"abc")}
TWO = {"b": ("BF16", (2,), b"wxyz")}
INDEX = "model.safetensors.index.json"


def values(checkpoint: Checkpoint) -> dict[str, tuple[str, list[int], bytes]]:
    """Name, type, shape and bytes of every tensor."""
    schema = checkpoint.schema
    return {
        schema.name(t): (
            schema.dtype(t),
            schema.shape(t),
            b"".join(checkpoint.chunk(t, c).tobytes() for c in range(np.diff(schema.chunk_starts)[t])),
        )
        for t in range(len(schema))
    }


def expected(*tensors: Mapping[str, Any]) -> dict[str, tuple[str, list[int], bytes]]:
    """The same of what was written."""
    return {name: (row[0], list(row[1]), row[2]) for part in tensors for name, row in part.items()}


def refusal(path: Path) -> str:
    """The message with which a checkpoint is refused."""
    with pytest.raises(CheckpointError) as e:
        Checkpoint.open(path)
    return str(e.value)


def folder(path: Path, files: Mapping[str, Any], index: Any = None, name: str = INDEX) -> Path:
    """A directory of safetensors files and, if given, an index with this weight map."""
    path.mkdir()
    for file, tensors in files.items():
        write_file(path / file, tensors)
    if index is not None:
        (path / name).write_text(index if isinstance(index, str) else json.dumps({"weight_map": index}))
    return path


# --- which files count


def test_the_index_decides(tmp_path: Path) -> None:
    """With an index the files that it names count, and no other."""
    files = {"one.safetensors": ONE, "two.safetensors": TWO, "three.safetensors": ONE}
    path = folder(tmp_path / "c", files, {"a": "one.safetensors", "b": "two.safetensors"})
    found = Checkpoint.open(path)
    assert values(found) == expected(ONE, TWO)
    assert [file.name for file in found.layout.files] == ["one.safetensors", "two.safetensors"]
    assert found.layout.index == INDEX


def test_an_index_of_another_name_counts_when_it_is_the_only_one(tmp_path: Path) -> None:
    """One index is an index under any name; of several only the usual name is one, and else none."""
    files = {"one.safetensors": ONE, "two.safetensors": TWO}
    path = folder(tmp_path / "c", files, {"a": "one.safetensors"}, "x.safetensors.index.json")
    assert values(Checkpoint.open(path)) == expected(ONE)
    (path / "y.safetensors.index.json").write_text(json.dumps({"weight_map": {"b": "two.safetensors"}}))
    assert values(Checkpoint.open(path)) == expected(ONE, TWO)
    (path / INDEX).write_text(json.dumps({"weight_map": {"b": "two.safetensors"}}))
    assert values(Checkpoint.open(path)) == expected(TWO)


def test_without_an_index_every_file_counts(tmp_path: Path) -> None:
    """One file or several, hidden ones left out."""
    path = folder(tmp_path / "c", {"one.safetensors": ONE, ".tmp.safetensors": TWO})
    assert values(Checkpoint.open(path)) == expected(ONE)
    write_file(path / "two.safetensors", TWO)
    assert values(Checkpoint.open(path)) == expected(ONE, TWO)
    assert Checkpoint.open(path).layout.index is None


def test_a_file_is_a_checkpoint(tmp_path: Path) -> None:
    """A single file has tensors but no assets, whatever lies beside it."""
    path = folder(tmp_path / "c", {"one.safetensors": ONE, "two.safetensors": TWO})
    (path / "config.json").write_text("{}")
    found = Checkpoint.open(path / "two.safetensors")
    assert values(found) == expected(TWO)
    assert found.contents == ({}, [])


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    """The message names the tensor, both files and both places."""
    message = refusal(folder(tmp_path / "c", {"one.safetensors": ONE, "two.safetensors": {**TWO, **ONE}}))
    at = len(file_bytes(header_of({**TWO, **ONE}))) + 4
    assert "'a' is in both one.safetensors (byte " in message
    assert f"two.safetensors (byte {at})" in message


def test_what_holds_no_weights_is_refused(tmp_path: Path) -> None:
    """An empty directory, a missing path, and a directory or a pipe in a file's place."""
    assert "holds no safetensors file" in refusal(tmp_path)
    assert "nowhere" in refusal(tmp_path / "nowhere")
    (tmp_path / "x.safetensors").mkdir()
    assert "x.safetensors" in refusal(tmp_path)
    (tmp_path / "x.safetensors").rmdir()
    os.mkfifo(tmp_path / "x.safetensors")
    assert "x.safetensors" in refusal(tmp_path)


@pytest.mark.parametrize(
    "index",
    [
        {"a": "one.safetensors", "b": "gone.safetensors"},
        {"a": "../c/one.safetensors"},
        {"a": "/etc/one.safetensors"},
        {"a": "sub/one.safetensors"},
        {"a": ".hidden.safetensors"},
        {"a": "one.bin"},
        {"a": "a\nb.safetensors"},
        {"a": ""},
        {"a": 5},
        {"a": None},
        {"a": ["one.safetensors"]},
        ["one.safetensors"],
        [["a", "one.safetensors"]],
        {},
        {"a": "two.safetensors"},
        {"x": "one.safetensors"},
        5,
        "no JSON",
        "[]",
        "{}",
        '{"weight_map": ' + "[" * 100_000,
        '{"weight_map": {"a": ' + "9" * 5000 + "}}",
    ],
    ids=lambda index: str(index)[:40],
)
def test_a_bad_index_is_refused(tmp_path: Path, index: Any) -> None:
    """It must name plain files beside it that are there and hold the tensors it says; the index is in the message."""
    path = folder(tmp_path / "c", {"one.safetensors": ONE, "two.safetensors": TWO, ".hidden.safetensors": ONE}, index)
    assert str(path / INDEX) in refusal(path)


# --- what tensors can be


@pytest.mark.parametrize("shards", [1, 2, 4])
def test_every_element_type_is_read(tmp_path: Path, shards: int) -> None:
    """Unaligned tensors, scalars, empty ones, sub-byte and unknown types come back byte for byte, as words of their width."""
    tensors = random_tensors(np.random.default_rng(shards))
    found = Checkpoint.open(write_checkpoint(tmp_path / "c", tensors, shards, {"format": "pt"}))
    assert values(found) == expected(tensors)
    schema = found.schema
    assert [schema.name(t) for t in range(len(schema))] == sorted(tensors, key=str.encode)
    assert any(offset % 4 for offset in found.offsets)
    for t in range(len(schema)):
        dtype, data = schema.dtype(t), tensors[schema.name(t)][2]
        width = {16: 2, 32: 4, 64: 4}.get(BITS.get(dtype, 8), 1)
        assert schema.words[t] == width
        if data:
            assert np.array_equal(found.words(t, 0), np.frombuffer(data, f"<u{width}"))
    assert schema.total_bytes == sum(len(row[2]) for row in tensors.values())
    elements = {row[0]: int(np.prod(row[1])) for row in tensors.values()}
    twice, bytewise = elements["F64"] + elements["I64"], elements["F4"] + elements["F6_E2M3"]
    assert schema.total_words == sum(int(np.prod(row[1])) for row in tensors.values()) + twice - bytewise + 9 + 6


@pytest.mark.parametrize("dtype", sorted(BITS))
def test_known_types_have_their_length(tmp_path: Path, dtype: str) -> None:
    """Sixteen elements take sixteen times the bits, one byte less or more is refused, with the tensor's place."""
    good = BITS[dtype] * 2
    path = tmp_path / "x.safetensors"
    found = Checkpoint.open(write_file(path, {"t": (dtype, (4, 4), bytes(good))}))
    assert found.schema.nbytes.tolist() == [good]
    for length in (good - 1, good + 1, 0):
        tensors = {"s": ("U8", (1,), b"s"), "t": (dtype, (4, 4), bytes(length))}
        message = refusal(write_file(path, tensors))
        assert f"{path}: byte {len(file_bytes(header_of(tensors))) + 1}: tensor 't'" in message


def test_tensors_are_cut_into_chunks(tmp_path: Path) -> None:
    """Chunks count from a tensor's first byte; the last is short, and an empty tensor has none."""
    data = np.random.default_rng(0).bytes(2 * CHUNK_BYTES + 6)
    tensors = {"a": ("U8", (1,), b"a"), "big": ("BF16", (CHUNK_BYTES + 3,), data), "c": ("F32", (0,), b"")}
    found = Checkpoint.open(write_checkpoint(tmp_path / "c", tensors))
    assert found.schema.chunk_starts.tolist() == [0, 1, 4, 4]
    assert values(found) == expected(tensors)
    assert len(found.words(1, 2)) == 3
    assert [found.schema.locate(i) for i in range(4)] == [(0, 0), (1, 0), (1, 1), (1, 2)]


def test_agrees_with_the_safetensors_library(tmp_path: Path) -> None:
    """What the library reads from a hand-written file is what is read here."""
    tensors = {
        name: row for name, row in random_tensors(np.random.default_rng(1)).items() if row[0] in ("F32", "U8", "I64")
    }
    path = write_checkpoint(tmp_path / "c", tensors) / "model.safetensors"
    with safe_open(path, "numpy") as file:
        theirs = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no mapping
    found = values(Checkpoint.open(path))
    assert {name: (list(t.shape), t.tobytes()) for name, t in theirs.items()} == {
        n: row[1:] for n, row in found.items()
    }


def test_writable_stores_reach_the_file(tmp_path: Path) -> None:
    """Stores into words change the file when asked for, and are impossible when not."""
    path = write_checkpoint(tmp_path / "c", TWO)
    with pytest.raises(ValueError, match="read-only"):
        Checkpoint.open(path).words(0, 0)[:] = 0
    found = Checkpoint.open(path, writable=True)
    found.words(0, 0)[1] = 0x4141
    found.flush()
    assert (path / "model.safetensors").read_bytes().endswith(b"wxAA")


# --- malformed files

HEADER = header_of({**ONE, **TWO})
ROW = {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]}


def text(document: Any) -> bytes:
    return json.dumps(document).encode()


MALFORMED = {
    "no bytes": (b"", 0),
    "half a length": (b"\x01\0\0", 0),
    "truncated header": (file_bytes(HEADER)[:-1], 0),
    "header longer than the file": ((1 << 40).to_bytes(8, "little") + b"{}", 0),
    "header of nothing": (file_bytes(b""), 8),
    "truncated data": (file_bytes(HEADER, b"abcwxy"), 8 + len(HEADER) + 6),
    "no data": (file_bytes(HEADER), 8 + len(HEADER)),
    "trailing bytes": (file_bytes(HEADER, b"abcwxyz+"), 8 + len(HEADER) + 7),
    "bytes without tensors": (file_bytes(b"{}", b"+"), 10),
    "not UTF-8": (file_bytes(b'{"\xff": 1}'), 10),
    "not JSON": (file_bytes(b'{"a": nope}'), 14),
    "not JSON after other letters": (file_bytes('{"äöü": nope}'.encode()), 19),
    "two values": (file_bytes(b"{} {}"), 11),
    "a list": (file_bytes(b"[]"), 8),
    "nested too deep": (file_bytes(b'{"a":' + b"[" * 200_000), 8),
    "number too long": (file_bytes(b'{"a":' + b"9" * 5000 + b"}"), 8),
    "duplicate keys": (file_bytes(b'{"a":%s,"a":%s}' % (text(ROW), text(ROW)), b"abc"), 8),
    "duplicate keys in a tensor": (file_bytes(b'{"a":{"dtype":"U8","dtype":"U8","shape":[0],"data_offsets":[0,0]}}'), 8),
    "metadata not text": (file_bytes(b'{"__metadata__":{"a":1}}'), 8),
    "metadata no object": (file_bytes(b'{"__metadata__":"a"}'), 8),
    "hole": (file_bytes(h := text({"a": ROW, "b": {**ROW, "data_offsets": [5, 8]}}), bytes(8)), 8 + len(h) + 5),
    "hole at the start": (file_bytes(h := text({"a": {**ROW, "data_offsets": [2, 5]}}), bytes(5)), 8 + len(h) + 2),
    "overlap": (file_bytes(h := text({"a": ROW, "b": {**ROW, "data_offsets": [2, 5]}}), bytes(5)), 8 + len(h) + 2),
    "the same bytes twice": (file_bytes(h := text({"a": ROW, "b": ROW}), bytes(3)), 8 + len(h)),
    "too short for its shape": (file_bytes(h := text({"a": {**ROW, "shape": [4]}}), bytes(3)), 8 + len(h)),
    "half a byte": (file_bytes(h := text({"a": {**ROW, "dtype": "F4", "shape": [5]}}), bytes(3)), 8 + len(h)),
    "endless shape": (file_bytes(h := text({"a": {**ROW, "shape": [2**53 - 1] * 30}}), bytes(3)), 8 + len(h)),
    "surrogate": (file_bytes(b'{"\\ud800":%s}' % text(ROW), b"abc"), 8),
}  # fmt: skip

ENTRIES: list[Any] = [
    None, 5, "text", [], {},
    *({key: value for key, value in ROW.items() if key != gone} for gone in ROW),
    *({**ROW, "dtype": value} for value in (None, 8, ["U8"], "Ü8")),
    *({**ROW, "shape": value} for value in (None, 3, "", {}, "abc", [-3], [3.0], [True, 3], ["3"], [[3]], [2**53], [10**400])),
    *({**ROW, "data_offsets": value} for value in (None, 3, [], [0], [0, 3, 3], [3, 0], [-1, 2], [0.0, 3.0], ["0", "3"], "03", [0, 2**53])),
]  # fmt: skip


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_files_are_refused_where_they_are_wrong(tmp_path: Path, case: str) -> None:
    """The message holds the file and the offset, in bytes from the file's start, of what is wrong."""
    data, at = MALFORMED[case]
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)
    for place in (path, tmp_path):
        assert f"{path}: byte {at}: " in refusal(place)


@pytest.mark.parametrize("entry", ENTRIES, ids=repr)
def test_malformed_entries_are_refused(tmp_path: Path, entry: Any) -> None:
    """An entry without type, shape or offsets of the right kind names the file, byte 8 and the tensor."""
    path = tmp_path / "model.safetensors"
    path.write_bytes(file_bytes(text({"a": entry}), b"abc"))
    message = refusal(path)
    assert f"{path}: byte 8: " in message
    assert "'a'" in message


def test_a_header_beyond_the_limit_is_not_read(tmp_path: Path) -> None:
    """A header longer than the safetensors library takes is refused, even if the file could hold it."""
    path = tmp_path / "model.safetensors"
    path.write_bytes((HEADER_LIMIT + 1).to_bytes(8, "little"))
    os.truncate(path, 2 * HEADER_LIMIT)
    assert f"{path}: byte 0: " in refusal(path)


# --- the small files, and changes under the reader


def test_assets_are_an_allow_list(tmp_path: Path) -> None:
    """Configuration and tokenizer files travel; weights and index are layout; all the rest is listed as ignored."""
    good = {
        name: name.encode() for name in ("config.json", "tokenizer.model", "chat.jinja", "merges.txt", "a.tiktoken")
    }
    path = write_checkpoint(tmp_path / "c", {**ONE, **TWO}, shards=2, assets=good)
    for name in ("model.py", "optimizer.pt", ".hidden.json", "README.md", "CONFIG.JSON", "new\nline.json"):
        (path / name).write_bytes(b"x")
    (path / "runs.json").mkdir()
    (path / "dangling.json").symlink_to("nowhere")
    (path / ".weightsync").mkdir()
    (path / "big.json").touch()
    os.truncate(path / "big.json", assets.SIZE_LIMIT + 1)
    contents, ignored = Checkpoint.open(path).contents
    assert contents == good
    assert ignored == [
        ".hidden.json", "CONFIG.JSON", "README.md", "big.json (larger than 64 MiB)", "dangling.json", "model.py",
        "new\nline.json", "optimizer.pt", "runs.json/",
    ]  # fmt: skip


def test_assets_are_described(tmp_path: Path) -> None:
    """Name, length and sha256, in order of the names; an asset of the largest size is still one."""
    path = write_checkpoint(tmp_path / "c", ONE, assets={"b.json": b"{}", "a.txt": b""})
    (path / "limit.json").touch()
    os.truncate(path / "limit.json", assets.SIZE_LIMIT)
    found = assets.describe(Checkpoint.open(path).contents[0])
    assert [(a.path, a.bytes) for a in found] == [("a.txt", 0), ("b.json", 2), ("limit.json", assets.SIZE_LIMIT)]
    assert found[0].sha256 == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"


@pytest.mark.parametrize("change", ["touch", "write", "grow", "replace", "remove"])
def test_changes_under_the_reader_are_noticed(tmp_path: Path, change: str) -> None:
    """A file that is rewritten, resized, replaced or gone since it was opened raises `SourceChanged` with its name."""
    path = write_checkpoint(tmp_path / "c", {**ONE, **TWO}, shards=2)
    found = Checkpoint.open(path)
    found.check_unchanged()
    victim = found.paths[1]
    stamp = victim.stat()
    if change == "touch":
        os.utime(victim, ns=(stamp.st_atime_ns, stamp.st_mtime_ns + 1))
    elif change == "write":
        victim.write_bytes(victim.read_bytes()[:-1] + b"!")
        os.utime(victim, ns=(stamp.st_atime_ns, stamp.st_mtime_ns + 1))
    elif change == "grow":
        os.truncate(victim, stamp.st_size + 1)
        os.utime(victim, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    elif change == "replace":
        other = write_file(tmp_path / "other", TWO)
        os.utime(other, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
        other.replace(victim)
    else:
        victim.unlink()
    with pytest.raises(SourceChanged, match=victim.name):
        found.check_unchanged()


def test_a_mixture_is_not_read(tmp_path: Path) -> None:
    """A directory with the journal of an interrupted apply may hold parts of two versions."""
    path = write_checkpoint(tmp_path / "c", ONE)
    (path / FOLDER).mkdir()
    assert len(Checkpoint.open(path).schema) == 1
    (path / FOLDER / JOURNAL).touch()
    assert "interrupted" in refusal(path)
    assert len(Checkpoint.open(path, writable=True).schema) == 1


def test_the_model_covers_every_kind() -> None:
    """The tensors used above hold every word size, sub-byte, 8-byte, unknown, scalar and empty ones."""
    assert {BITS.get(dtype) for dtype, _ in MODEL.values()} == {4, 6, 8, 16, 32, 64, None}
