"""Delta files: anybody can open them, the same change gives the same bytes, and nothing damaged is believed."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import factories as make
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from weightsync.bundle import Bundle
from weightsync.checkpoint import Checkpoint
from weightsync.codec import Dense, Mode, encode
from weightsync.delta.diff import write_full
from weightsync.delta.format import HEADER_BYTES, RECORD, SEGMENT, Header
from weightsync.delta.merge import Hop, write_merged
from weightsync.delta.reader import Delta
from weightsync.delta.step import Step
from weightsync.delta.writer import DeltaWriter
from weightsync.errors import BaseMismatch, FormatError, InputError, SchemaMismatch, Unsupported
from weightsync.parallel import Workers
from weightsync.schema import CHUNK_BYTES, Schema

ANYTHING = st.none() | st.booleans() | st.integers(-2, 2**54) | st.text(max_size=5) | st.just([1]) | st.just({})

# --- what is written


@pytest.mark.parametrize("of", ["delta", "full"])
def test_the_safetensors_library_opens_it(tmp_path: Path, of: str) -> None:
    """Three U8 tensors after a header of exactly 1,024 bytes with sorted keys; the parts lie where the tables say."""
    rng = np.random.default_rng(0)
    old = make.random_tensors(rng)
    made = make.between(tmp_path, old, make.mixed(rng, old))
    if of == "full":
        made = make.full(tmp_path / "b", tmp_path / "d")
    path = Bundle(tmp_path / "d").data_path(made.edge.data[0].sha256)
    data = path.read_bytes()
    assert int.from_bytes(data[:8], "little") == 1016
    header = json.loads(data[8:1024])
    assert data[8:1024].rstrip() == json.dumps(header, sort_keys=True, separators=(",", ":")).encode()
    assert header["__metadata__"] == {"format": "weightsync.delta/1", "requires": "", "shard": "0"}
    with safe_open(path, "numpy") as file:
        parts = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no mapping
    assert set(parts) == {"payload", "directory", "segments"}
    assert all(part.dtype == np.uint8 for part in parts.values())
    assert len(parts["payload"]) % 8 == 0
    records = parts["directory"].view(RECORD)
    assert records.itemsize == 88
    assert records["streams"]["coded"].sum() in range(len(parts["payload"]) - 7, len(parts["payload"]) + 1)
    assert len(parts["segments"].view(SEGMENT)) == records["segments"].sum()
    assert made.records == len(records)
    assert made.edge.data[0].bytes == len(data) == 1024 + sum(map(len, parts.values()))


@pytest.mark.parametrize("density", [*make.DENSITIES[1:], "mixed"])
def test_the_bytes_depend_on_the_change_alone(tmp_path: Path, density: Any) -> None:
    """Any number of threads, any run and any split of the tensors into files give the same data files and edge."""
    rng = np.random.default_rng(7)
    old = make.random_tensors(rng)
    new = make.mixed(rng, old) if density == "mixed" else make.step_tensors(rng, old, density)
    made = []
    for run, (threads, files) in enumerate([(1, 1), (2, 1), (5, 1), (1, 1), (2, 3)]):
        a, b = (make.write_checkpoint(tmp_path / f"{i}{run}", tensors, files) for i, tensors in enumerate((old, new)))
        with make.chunks_of(4096):
            one = make.delta(a, b, tmp_path / f"d{run}", threads=threads)
            made.append((one, make.full(b, tmp_path / f"f{run}", threads=threads)))
    for pair in made[1:]:
        assert [make.names(one) for one in pair] == [make.names(one) for one in made[0]]
    for pair in made[1:4]:
        assert [one.edge.sha256 for one in pair] == [one.edge.sha256 for one in made[0]]


@pytest.mark.parametrize("size", [CHUNK_BYTES, 4096, 64])
def test_records_lead_from_old_to_new_and_back(tmp_path: Path, size: int) -> None:
    """Old words and records give the new words, new ones and negated records the old; counts are those of the change."""
    rng = np.random.default_rng(size)
    old = make.random_tensors(rng)
    new = make.mixed(rng, old)
    with make.chunks_of(size):
        made = make.between(tmp_path, old, new)
        found, of = make.opened(tmp_path / "d", made), made.target.schema
        assert make.walked(found, of, old) == make.only_bytes(new)
        assert make.walked(found, of, new, reverse=True) == make.only_bytes(old)
    assert found.reversible is made.edge.reversible is True
    assert made.edge.changed == sum(part.k for _, part in make.decoded(found))
    assert [place for place, _ in make.decoded(found)] == sorted(place for place, _ in make.decoded(found))


def test_full_edges_come_back(tmp_path: Path) -> None:
    """From nothing to every type, bit for bit, whole or in chunks, and not reversible."""
    tensors = make.random_tensors(np.random.default_rng(3))
    path = make.write_checkpoint(tmp_path / "a", tensors)
    zeros = {name: (*row[:2], bytes(len(row[2]))) for name, row in tensors.items()}
    for size in (CHUNK_BYTES, 512):
        with make.chunks_of(size):
            made = make.full(path, tmp_path / f"f{size}")
            found = make.opened(tmp_path / f"f{size}", made)
            assert make.walked(found, made.target.schema, zeros) == make.only_bytes(tensors)
        assert not found.reversible
        assert made.edge.changed == made.target.schema.total_words


def test_nothing_changed_is_no_file(tmp_path: Path) -> None:
    """An edge between equal checkpoints has no data, and is read as no records."""
    tensors = make.random_tensors(np.random.default_rng(0))
    made = make.between(tmp_path, tensors, tensors)
    assert (made.edge.data, made.edge.changed, made.records) == ((), 0, 0)
    assert len(make.opened(tmp_path / "d", made)) == 0


def test_other_tensors_are_refused_and_leave_nothing(tmp_path: Path) -> None:
    """Another name, type or shape is a `SchemaMismatch`; a writer left by an error removes what it began."""
    old = make.random_tensors(np.random.default_rng(0), make.MANY)
    a = make.write_checkpoint(tmp_path / "a", old)
    b = make.write_checkpoint(tmp_path / "b", {**old, "t00": ("F16", *old["t00"][1:])})
    with pytest.raises(SchemaMismatch, match="t00"):
        make.delta(a, b, tmp_path / "d")
    with suppress(ZeroDivisionError), DeltaWriter(tmp_path / "e", shard_bytes=5000) as writer, Workers(1) as workers:
        write_full(Checkpoint.open(a), writer, workers)
        assert len(list((tmp_path / "e").iterdir())) > 1
        _ = 1 / 0
    assert list((tmp_path / "e").iterdir()) == []


def test_small_changes_share_a_record(tmp_path: Path) -> None:
    """Neighbours of one word size and family join until they hold 4,096 changes, and the group's counts pick the mode."""
    rng = np.random.default_rng(5)
    model = {f"{i:02d}": ("BF16", (20_000,)) for i in range(12)} | {"05x": ("F32", (10,))}
    old = make.random_tensors(rng, model)
    new = dict(old)
    for i in range(12):
        words = np.frombuffer(old[f"{i:02d}"][2], "<u2").copy()
        words[rng.permutation(20_000)[: 2048 if i < 4 else 1 + 999 * (i == 8)]] += 1
        new[f"{i:02d}"] = ("BF16", (20_000,), words.tobytes())
    new["05x"] = ("F32", (10,), bytes(b ^ 1 for b in old["05x"][2]))
    made = make.between(tmp_path, old, new)
    records = make.opened(tmp_path / "d", made).records
    assert [tuple(row) for row in records[["segments", "k", "mode", "width"]].tolist()] == [
        (2, 4096, Mode.GAP8, 2), (2, 4096, Mode.GAP8, 2), (2, 2, Mode.GAP16, 2), (1, 10, Mode.PLANES, 4), (6, 1005, Mode.GAP8, 2),
    ]  # fmt: skip


@pytest.mark.parametrize("last", [[(1000, 95), (1000, 200)], [(374, 75), (1000, 201)]])
def test_the_largest_records_are_read(tmp_path: Path, last: list[tuple[int, int]]) -> None:
    """A record that lacked one change and then took the fullest chunk of its mode is not too large for the reader."""
    rows = {f"{i:02d}": row for i, row in enumerate([last[1]] * 20 + last)}
    old = {name: ("U8", (n,), bytes(n)) for name, (n, _) in rows.items()}
    new = {name: ("U8", (n,), b"\1" * k + bytes(n - k)) for name, (n, k) in rows.items()}
    with make.chunks_of(1000):
        made = make.between(tmp_path, old, new)
        found = make.opened(tmp_path / "d", made)
        assert found.records["k"].tolist() == [4095 + last[1][1]]
        assert make.walked(found, made.target.schema, old) == make.only_bytes(new)


@pytest.mark.parametrize("threads", [1, 3])
def test_small_shards(tmp_path: Path, threads: int) -> None:
    """Every file keeps the limit, they count from zero, and together in their order give what one file gives."""
    rng = np.random.default_rng(2)
    old = make.random_tensors(rng, make.MANY)
    new = make.step_tensors(rng, old, 0.9, "wide")
    a, b = make.write_checkpoint(tmp_path / "a", old), make.write_checkpoint(tmp_path / "b", new)
    one = make.delta(a, b, tmp_path / "one", threads=threads)
    made = make.delta(a, b, tmp_path / "many", threads=threads, shard_bytes=25_000)
    assert max(file.bytes for file in made.edge.data) <= 25_000
    tight = make.delta(a, b, tmp_path / "tight", shard_bytes=one.edge.size - 1)
    assert max(file.bytes for file in tight.edge.data) < one.edge.size
    found = make.opened(tmp_path / "many", made)
    whole = make.decoded(make.opened(tmp_path / "one", one))
    assert all(make.same(x, y) for (_, x), (_, y) in zip(make.decoded(found), whole, strict=True))
    assert make.walked(found, made.target.schema, old) == make.only_bytes(new)
    paths = found.paths
    for wrong in (paths[::-1], paths[1:], [paths[0], *paths], [paths[0], *paths[2:]]):
        with pytest.raises(FormatError):
            Delta.open(wrong, made.target.schema)
    assert not list((tmp_path / "many" / "data").glob(".tmp-*"))


# --- merging


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(2, 4), st.sampled_from([CHUNK_BYTES, 4096, 256]))
def test_merges_are_the_direct_difference(seed: int, steps: int, size: int) -> None:
    """Folding consecutive steps, at once or in two goes, gives the very data files of comparing the ends."""
    rng = np.random.default_rng(seed)
    states = [make.random_tensors(rng)]
    for _ in range(steps):
        states.append(make.mixed(rng, states[-1], states))
    with tempfile.TemporaryDirectory(dir=make.SCRATCH) as temporary, make.chunks_of(size):
        root = Path(temporary)
        paths, chain = make.chain(root, states)
        direct = make.delta(paths[0], paths[-1], root / "direct")
        merged = make.merge(chain, root / "merged", threads=2, shard_bytes=2_000_000_000)
        assert make.names(merged) == make.names(direct)
        assert (merged.edge.changed, merged.edge.base, merged.edge.target, merged.records, merged.edge.reversible) == (
            direct.edge.changed, direct.edge.base, direct.edge.target, direct.records, True,
        )  # fmt: skip
        assert merged.edge.kind == "Merge"
        cut = int(rng.integers(1, steps))
        halves = [root / "left", root / "right"]
        for half, part in zip(halves, (chain[:cut], chain[cut:]), strict=True):
            make.merge(part, half)
        assert make.names(make.merge([Step.open(Bundle(half)) for half in halves], root / "again")) == make.names(
            direct
        )
        back = [Step.open(Bundle(root / f"d{i}"), reverse=True) for i in reversed(range(steps))]
        assert make.names(make.merge(back, root / "back")) == make.names(
            make.delta(paths[-1], paths[0], root / "reverse")
        )
        nothing = make.merge([*chain, *back], root / "nothing")
        assert (nothing.edge.data, nothing.edge.changed) == ((), 0)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([CHUNK_BYTES, 512]))
def test_siblings_merge_through_their_parent(seed: int, size: int) -> None:
    """Back along one edge and forth along another gives the data files of comparing the two siblings."""
    rng = np.random.default_rng(seed)
    base = make.random_tensors(rng)
    one = make.mixed(rng, base)
    two = make.mixed(rng, base, [one])
    with tempfile.TemporaryDirectory(dir=make.SCRATCH) as temporary, make.chunks_of(size):
        root = Path(temporary)
        a, b, c = (make.write_checkpoint(root / name, row) for name, row in (("a", base), ("b", one), ("c", two)))
        make.delta(a, b, root / "ab")
        make.delta(a, c, root / "ac")
        across = make.merge([Step.open(Bundle(root / "ab"), reverse=True), Step.open(Bundle(root / "ac"))], root / "bc")
        assert make.names(across) == make.names(make.delta(b, c, root / "direct"))
        assert make.walked(make.opened(root / "bc", across), across.target.schema, one) == make.only_bytes(two)


def test_large_merges_are_the_direct_difference(tmp_path: Path) -> None:
    """Tensors of several real chunks, sparse steps, several shards: the same files again."""
    rng = np.random.default_rng(11)
    model = {"a": ("BF16", (9 << 20,)), "b": ("F32", (5 << 20,)), "c": ("BF16", (4000,))}
    states = [make.random_tensors(rng, model)]
    for share in (0.001, 0.004, 0.0005):
        states.append(make.step_tensors(rng, states[-1], share, "ulp"))
    paths, chain = make.chain(tmp_path, states)
    direct = make.delta(paths[0], paths[-1], tmp_path / "direct", threads=2, shard_bytes=40_000)
    assert len(direct.edge.data) > 2
    assert make.names(make.merge(chain, tmp_path / "merged", threads=2, shard_bytes=40_000)) == make.names(direct)


def test_chains_must_meet(tmp_path: Path) -> None:
    """Edges that do not follow each other, none, a Full edge, and records that do not do what they claim are refused."""
    rng = np.random.default_rng(1)
    states = [make.random_tensors(rng)]
    for name in ("f16", "u8", "f32"):
        states.append(make.step_tensors(rng, states[-1], {name: 0.1}))
    paths, steps = make.chain(tmp_path, states)
    for wrong in ([steps[0], steps[2]], [steps[1], steps[0]], [steps[0], steps[0]]):
        with pytest.raises(BaseMismatch, match="do not follow"):
            make.merge(wrong, tmp_path / "m")
    with pytest.raises(InputError, match="no edge"):
        make.merge([], tmp_path / "m")
    whole = make.full(paths[0], tmp_path / "f")
    with pytest.raises(Unsupported, match="Full"):
        Step.open(Bundle(tmp_path / "f"))
    hops = [Hop(step.delta) for step in steps]
    undone = Hop(hops[1].delta, reverse=True)
    lies = [hops[:2], hops[1:], [hops[0], hops[2]], [*hops, undone], [], [Hop(make.opened(tmp_path / "f", whole))]]
    for lie, goal in (*((lie, steps[2].goal) for lie in lies), (hops, steps[1].goal)):
        with pytest.raises((FormatError, Unsupported)), DeltaWriter(tmp_path / "m") as writer, Workers(1) as workers:
            write_merged(lie, steps[0].start, goal, writer, workers)
    assert not list((tmp_path / "m").rglob("*.safetensors"))


# --- what is read


@pytest.fixture(scope="module", params=["delta", "full"])
def good(request: pytest.FixtureRequest) -> Iterator[make.Valid]:
    """A valid file with records of every mode that has a base, and one without."""
    with tempfile.TemporaryDirectory(dir=make.SCRATCH) as temporary:
        found = make.every_mode(Path(temporary), request.param)
        modes = {1, 2, 3, 4, 5} if request.param == "delta" else {6}
        assert set(found.parts()[2]["mode"].tolist()) == modes
        yield found


@pytest.mark.parametrize("table", ["directory", "segments"])
def test_every_field_is_checked(good: make.Valid, table: str) -> None:
    """Any number of a table set to 0, 1, its largest or a neighbour is refused, or says the same as before."""
    header, payload, records, segments = good.parts()
    assert good.outcome(good.bytes) is not None
    for get, put, most in make.fields(records if table == "directory" else segments):
        was = get()
        for value in {0, 1, most, max(was, 1) - 1, min(was, most - 8) + 1, min(was, most - 8) + 8} - {was}:
            put(value)
            found = good.outcome(header.pack() + payload + records.tobytes() + segments.tobytes())
            pairs = zip(good.changes if found is None else found, good.changes, strict=True)
            assert all(a == b and make.same(x, y) for (a, x), (b, y) in pairs)
        put(was)


@pytest.mark.parametrize(
    ("name", "value"),
    [("flags", 1), ("reserved", 1), ("k", 0), ("k", 1 << 40), ("mode", 0), ("width", 3), ("raw", 0), ("raw", 1 << 31)],
)
def test_impossible_numbers_are_noticed_at_once(good: make.Valid, name: str, value: int) -> None:
    """Opening a file is enough to refuse what no record can have."""
    header, payload, records, segments = good.parts()
    (records["streams"] if name == "raw" else records)[name][-1] = value
    good.path.write_bytes(header.pack() + payload + records.tobytes() + segments.tobytes())
    with pytest.raises(FormatError):
        good.open()


def test_any_other_length_is_refused(good: make.Valid) -> None:
    """A file cut anywhere or longer by a byte, an empty one and a missing one."""
    data = good.bytes
    assert len(data) > 2000
    cuts = {7, 8, 1023, 1024, 1025, *range(0, len(data), 17), *range(len(data) - 100, len(data))}
    assert not any(good.outcome(other) for other in (*(data[:cut] for cut in cuts), data + b"\0", data + data))
    with pytest.raises(FormatError, match="nowhere"):
        Delta.open([good.path.with_name("nowhere")], good.schema)


@settings(max_examples=500, deadline=None)
@given(st.data())
def test_damaged_bytes_are_refused_or_harmless(good: make.Valid, data: st.DataObject) -> None:
    """Bytes changed anywhere give an error of the format, or changes that stay within the tensors."""
    valid = good.bytes
    damaged, start = bytearray(valid), data.draw(st.sampled_from([0, HEADER_BYTES, len(valid) // 2, len(valid) - 900]))
    for at in data.draw(st.lists(st.integers(start, len(valid) - 1), min_size=1, max_size=3)):
        damaged[at] = data.draw(st.integers(0, 255))
    for (tensor, chunk), part in good.outcome(bytes(damaged)) or ():
        assert chunk == 0
        assert part.n * part.diff.itemsize == good.schema.nbytes[tensor]


@settings(max_examples=600, deadline=None)
@given(st.data())
def test_hostile_headers_are_refused(good: make.Valid, data: st.DataObject) -> None:
    """Only the very form that is written is taken, whatever JSON the header holds: of right types, with right spans."""
    header = json.loads(good.bytes[8:HEADER_BYTES])
    inner = data.draw(st.sampled_from([header, *header.values(), header["payload"]["data_offsets"]]))
    inner[data.draw(st.sampled_from([*inner, "x"] if isinstance(inner, dict) else [0, 1]))] = data.draw(ANYTHING)
    text = json.dumps(header, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode(errors="replace")
    with suppress(FormatError, Unsupported):
        found = Header.unpack(good.bytes[:8] + text.ljust(1016), "x")
        assert min(found.shard, found.payload, found.directory, found.segments) >= 0


def test_unknown_features_are_unsupported(good: make.Valid) -> None:
    """A later format, a requirement and the reserved mode are told apart from damage."""
    data = good.bytes
    header, payload, records, segments = good.parts()
    records["mode"][0] = Mode.CLASSES
    later = header.pack() + payload + records.tobytes() + segments.tobytes()
    required = data.replace(b'"requires":""', b'"requires":"x"').replace(b" ", b"", 1)
    for other in (later, data.replace(b"delta/1", b"delta/2"), required):
        good.path.write_bytes(other)
        with pytest.raises(Unsupported):
            good.open()


@pytest.mark.parametrize(
    ("segments", "message"),
    [
        ([(0, chunk) for chunk in range(65)], None), ([(0, chunk) for chunk in range(66)], "larger than any"),
        ([(0, 0), (0, 0)], "ascending"), ([(0, 1), (0, 0)], "ascending"), ([(1, 0), (0, 0)], "ascending"),
        ([(0, 100)], "beyond its tensor"), ([(2, 0)], "names tensor 2"), ([], "no segments"),
    ],
)  # fmt: skip
def test_impossible_segments_are_refused(tmp_path: Path, segments: list[tuple[int, int]], message: str | None) -> None:
    """Segments ascend, exist, and are no more than grouping puts into one record, which bounds a reader's memory."""
    n = 64 * max(len(segments), 1)
    with make.chunks_of(64), DeltaWriter(tmp_path) as writer:
        writer.add(encode(Mode.PLANES, 1, [Dense(np.ones(n, np.uint8), n)]), segments)
        path = tmp_path / f"{writer.finish()[0].sha256}.safetensors"
        with pytest.raises(FormatError, match=message) if message else nullcontext():
            Delta.open([path], Schema.build([("a", "U8", [6400], 6400), ("b", "U8", [64], 64)])).decode(0)


def test_other_tensors_do_not_fit(good: make.Valid) -> None:
    """A file read with the schema of other tensors is refused."""
    of = good.schema
    good.path.write_bytes(good.bytes)
    rows = [(of.name(t), of.dtype(t), of.shape(t), int(of.nbytes[t])) for t in range(len(of))]
    grown = [(name, dtype, [shape[0] * 2], size * 2) for name, dtype, shape, size in rows]
    for wrong in (rows[:-1], rows[1:], grown, []):
        with pytest.raises(FormatError):
            good.open(Schema.build(wrong))
