"""Canonical JSON, manifests, edges, schemas and layouts: the same bytes for the same thing, and nothing hostile gets in."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from factories import MODEL, random_tensors, write_checkpoint
from hypothesis import example, given, settings
from hypothesis import strategies as st

from weightsync import canonical, digests, layout
from weightsync.assets import Asset
from weightsync.bundle import describe
from weightsync.checkpoint import Checkpoint
from weightsync.errors import FormatError, Unsupported
from weightsync.layout import File, Layout
from weightsync.manifest import Data, Edge, End, Manifest
from weightsync.parallel import Workers
from weightsync.schema import CHUNK_BYTES, FORMAT, Schema

ROUNDS = settings(max_examples=300, deadline=None)
TEXT = st.text(st.characters(codec="utf-8"), max_size=12)
INTEGERS = st.integers(-(2**53) + 1, 2**53 - 1)
TREES = st.recursive(
    st.none() | st.booleans() | INTEGERS | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=12,
)
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(["0" * 64, "Full"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
HEX = st.integers(0, 2**256 - 1).map("{:064x}".format)


# --- canonical JSON


@ROUNDS
@given(st.dictionaries(TEXT, TREES, max_size=5))
def test_canonical_json_comes_back(value: dict[str, Any]) -> None:
    """What is written is read, has no white space, sorted keys and unescaped text, and is written the same again."""
    data = canonical.dumps(value)
    assert canonical.loads(data, "x") == value
    assert canonical.dumps(canonical.loads(data, "x")) == data
    assert canonical.dumps(dict(reversed(value.items()))) == data
    assert json.loads(data) == value
    pairs = json.loads(data, object_pairs_hook=lambda found: found)
    assert [key.encode() for key, _ in pairs] == sorted(key.encode() for key in value)


def test_canonical_bytes() -> None:
    """The exact bytes of a document with everything in it."""
    value = {"é": '\u2028/"\\\n\x7f', "z": [1, -1, 0, 2**53 - 1, True, None], "a": {"𐀀": {}, "\uffff": [], "": ""}}
    expected = '{"a":{"":"","\uffff":[],"𐀀":{}},"z":[1,-1,0,9007199254740991,true,null],"é":"\u2028/\\"\\\\\\n\x7f"}'
    assert canonical.dumps(value) == expected.encode()


@pytest.mark.parametrize(
    "value",
    [1.0, float("nan"), float("inf"), 2**53, -(2**53), 10**5000, b"x", (1,), {1: 2}, {None: 1}, {True: 1}, {1, 2}, "\ud800",
     {"\udfff": 1}, object(), np.int64(1)],
    ids=lambda value: repr(value)[:20] if not isinstance(value, int) else hex(value)[:20],
)  # fmt: skip
def test_dumps_refuses(value: Any) -> None:
    """Floats, integers of 2**53 and more, keys that are not text, lone surrogates and all foreign types."""
    with pytest.raises(FormatError):
        canonical.dumps({"a": [value]})


@pytest.mark.parametrize(
    "data",
    [
        b"", b"{", b"[]", b"1", b'"a"', b"null", b"{}{}", b"{} x", b"\xef\xbb\xbf{}", b"\xff\xfe{\0}\0", b'{"a":"\xff"}',
        b'{"a":1.0}', b'{"a":1e3}', b'{"a":-0.0}', b'{"a":NaN}', b'{"a":Infinity}', b'{"a":-Infinity}', b"{'a':1}",
        b'{"a":9007199254740992}', b'{"a":-9007199254740992}', b'{"a":[{"b":99999999999999999999}]}', b'{"a":01}',
        b'{"a":1,"a":1}', b'{"b":{"a":1,"c":2,"\\u0061":3}}', b'{"a":"\\ud800"}', b'{"\\udc00":1}', b'{"a":"\\ud800\\ud800"}',
        b'{"a":"\x00"}', b'{"a":"\n"}', b'{"a":1,}', b'{"a":' + b"9" * 5000 + b"}", b'{"a":' * 100_000, b'{"a":' + b"[" * 100_000,
        b'{"a":\xed\xa0\x80}',
    ],
    ids=lambda data: repr(data)[:40],
)  # fmt: skip
def test_loads_refuses(data: bytes) -> None:
    """All that is not one object of the canonical subset, and what two parsers could read differently; says what it was."""
    with pytest.raises(FormatError, match="the thing"):
        canonical.loads(data, "the thing")


def test_depth_is_bounded() -> None:
    """As deep as allowed goes both ways, one deeper is refused both ways."""
    text = b'{"a":' * canonical.MAX_DEPTH + b"{}" + b"}" * canonical.MAX_DEPTH
    deepest = canonical.loads(text, "x")
    assert canonical.dumps(deepest) == text
    for refused in (lambda: canonical.loads(b'{"a":' + text + b"}", "x"), lambda: canonical.dumps({"a": deepest})):
        with pytest.raises(FormatError, match="nested deeper"):
            refused()


def test_loads_takes_what_is_not_canonical_but_clear() -> None:
    """Readers hash what they received, so white space, key order and escapes are the writer's affair."""
    assert canonical.loads(b' { "b" : "\\u00e9\\ud83d\\ude00" ,\n "a" : -0 } ', "x") == {"b": "é😀", "a": 0}


@ROUNDS
@given(st.binary(max_size=60) | st.text(alphabet='{}[]":,0123456789.-eE\\u dabctruefalsn', max_size=60).map(str.encode))
def test_loads_raises_nothing_else(data: bytes) -> None:
    """Any bytes give an object or a `FormatError`."""
    with contextlib.suppress(FormatError):
        assert isinstance(canonical.loads(data, "x"), dict)


# --- manifests and edges

PATHS = st.sampled_from(["config.json", "a.txt", "tokenizer.model", "chat.jinja", "é.json"])
ASSETS = st.dictionaries(PATHS, st.tuples(st.integers(0, 64 << 20), HEX), max_size=4).map(
    lambda found: tuple(sorted(Asset(name, size, sha256) for name, (size, sha256) in found.items()))
)
MANIFESTS = st.builds(Manifest, model=TEXT, schema=HEX, digests=HEX, layout=HEX, assets=ASSETS, weights=HEX)
ENDS = st.builds(End, weights=HEX, manifest=HEX)
COUNTS = st.integers(0, 2**53 - 1)
FULL_EDGES = st.builds(Edge, st.just("Full"), st.none(), ENDS, st.just(()), COUNTS, st.just(False))
EDGES = FULL_EDGES | st.builds(
    Edge,
    kind=st.sampled_from(["Delta", "Merge"]),
    base=ENDS,
    target=ENDS,
    data=st.lists(st.builds(Data, sha256=HEX, bytes=COUNTS), max_size=3).map(tuple),
    changed=COUNTS,
    reversible=st.booleans(),
    profile=st.sampled_from(["LAN", "WAN"]),
    requires=st.lists(TEXT, max_size=2).map(tuple),
)

H = [f"{i:064x}" for i in range(9)]
MANIFEST = Manifest("m", H[0], H[1], H[2], (Asset("a.json", 2, H[3]), Asset("b.txt", 0, H[4])), H[5])
EDGE = Edge("Delta", End(H[0], H[1]), End(H[2], H[3]), (Data(H[4], 5000), Data(H[5], 7)), 12, True, "LAN", ("later",))


@ROUNDS
@given(MANIFESTS | EDGES)
def test_manifests_and_edges_come_back(document: Manifest | Edge) -> None:
    """`pack` and `unpack` are inverse; one with unknown keys is the same, but keeps the bytes and the name it came with."""
    data = document.pack()
    for text in (data, json.dumps({**json.loads(data), "later": [{"x": None}]}).encode()):
        found = type(document).unpack(text)
        assert (found, found.pack(), found.sha256) == (document, text, hashlib.sha256(text).hexdigest())
        assert isinstance(found, Manifest) or found.size == sum(file.bytes for file in found.data)


def test_unknown_features() -> None:
    """An edge with an unknown requirement is read, a manifest with one and either of another format are not."""
    assert Edge.unpack(replace(EDGE, requires=("later", "xet")).pack()).requires == ("later", "xet")
    with pytest.raises(Unsupported, match="later"):
        Manifest.unpack(replace(MANIFEST, requires=("later",)).pack())
    for document, unpack in ((MANIFEST, Manifest.unpack), (EDGE, Edge.unpack)):
        kind = "manifest" if document is MANIFEST else "edge"
        for text in (f"weightsync.{kind}/2", "weightsync.other/1", None):
            with pytest.raises(Unsupported if text and kind in text else FormatError):
                unpack(json.dumps({**json.loads(document.pack()), "format": text}).encode())


def test_the_content_digest_is_what_is_documented() -> None:
    """Of version contents: content = sha256(weights + canonical JSON of the assets), weights as 32 bytes."""
    listing = f'[{{"bytes":2,"path":"a.json","sha256":"{H[3]}"}},{{"bytes":0,"path":"b.txt","sha256":"{H[4]}"}}]'
    assert MANIFEST.content == hashlib.sha256(bytes.fromhex(H[5]) + listing.encode()).hexdigest()
    assert json.loads(MANIFEST.pack())["content"] == MANIFEST.content
    assert MANIFEST.blobs == H[:5]
    for other in (replace(MANIFEST, weights=H[6]), replace(MANIFEST, assets=MANIFEST.assets[:1])):
        lie = {**json.loads(other.pack()), "content": MANIFEST.content}
        with pytest.raises(FormatError, match="content"):
            Manifest.unpack(json.dumps(lie).encode())


@st.composite
def replaced(draw: st.DrawFn, document: Any) -> Any:
    """The document with a value somewhere in it replaced or removed."""
    if isinstance(document, dict | list) and document and draw(st.integers(0, 3)):
        copy = document.copy()
        key = draw(st.sampled_from(sorted(copy) if isinstance(copy, dict) else list(range(len(copy)))))
        if draw(st.integers(0, 5)):
            copy[key] = draw(replaced(copy[key]))
        else:
            del copy[key]
        return copy
    if isinstance(document, int) and not isinstance(document, bool) and draw(st.booleans()):
        return document + draw(st.sampled_from([-1, 1, 2**31, 2**32, 2**53 - 1, 2**63, 2**64, -(2**63)]))
    return draw(ANYTHING)


SCHEMA = Schema.build([("a", "F32", [2, 3], 24), ("b", "X9", [], 5), ("é", "BF16", [CHUNK_BYTES], 2 * CHUNK_BYTES)])
LAYOUT = Layout((File("a.safetensors", b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'),), layout.INDEX)
READERS: dict[str, tuple[bytes, Callable[[bytes], Any]]] = {
    "manifest": (MANIFEST.pack(), Manifest.unpack),
    "edge": (EDGE.pack(), Edge.unpack),
    "schema": (SCHEMA.blob, Schema.parse),
    "layout": (LAYOUT.blob, Layout.parse),
}


def harmless(kind: str, data: bytes) -> None:
    """Read hostile bytes; whatever is accepted must be usable without further surprises."""
    try:
        found = READERS[kind][1](data)
        if isinstance(found, Layout):
            assert all("/" not in file.name and file.name[0] != "." for file in found.files)
            found.check_tensors(SCHEMA)
    except (FormatError, Unsupported):
        return
    if isinstance(found, Schema):
        assert found.blob == data
        assert found.chunks >= 0
    elif isinstance(found, Manifest | Edge):
        assert READERS[kind][1](found.pack()) == found


@pytest.mark.parametrize("kind", READERS)
@settings(max_examples=600, deadline=None)
@given(st.data())
def test_mutated_documents_are_refused_or_harmless(kind: str, data: st.DataObject) -> None:
    """A valid document with one value changed, removed or of another type."""
    document = data.draw(replaced(json.loads(READERS[kind][0])))
    harmless(kind, json.dumps(document, sort_keys=True, separators=(",", ":")).encode())


@pytest.mark.parametrize("kind", READERS)
@ROUNDS
@given(st.data())
def test_mutated_bytes_are_refused_or_harmless(kind: str, data: st.DataObject) -> None:
    """A valid document with bytes changed, cut out or put in."""
    good = READERS[kind][0]
    start = data.draw(st.integers(0, len(good)))
    stop = data.draw(st.integers(start, min(start + 4, len(good))))
    harmless(kind, good[:start] + data.draw(st.binary(max_size=4)) + good[stop:])


@pytest.mark.parametrize("kind", READERS)
@ROUNDS
@given(st.dictionaries(st.sampled_from(["format", "files", "names", "assets", "data", "x"]), ANYTHING) | ANYTHING)
def test_arbitrary_documents_are_refused(kind: str, document: Any) -> None:
    """Any JSON at all."""
    harmless(kind, json.dumps(document).encode())


@pytest.mark.parametrize("kind", READERS)
@pytest.mark.parametrize("inner", ["[", '{"x":'])
def test_endless_nesting_is_refused(kind: str, inner: str) -> None:
    """A document that would exhaust the stack."""
    with pytest.raises(FormatError):
        READERS[kind][1](b'{"x":' + inner.encode() * 200_000)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("path", "../a.json"), ("path", "a/b.json"), ("path", ".a.json"), ("path", "a.py"), ("path", "model.safetensors"),
        ("path", layout.INDEX), ("path", "a\x1b[2J.json"), ("path", "a\x7f.json"), ("path", "a\x9b31m.json"), ("path", ""), ("path", "x" * 251 + ".json"),
        ("path", 5), ("path", ["a.json"]), ("bytes", -1), ("bytes", True), ("bytes", "2"), ("bytes", (64 << 20) + 1), ("bytes", None),
        ("sha256", 5), ("sha256", None), ("sha256", ["0" * 64]), ("sha256", "0" * 63), ("sha256", "A" * 64), ("sha256", "0" * 64 + "\n"),
    ],
)  # fmt: skip
def test_hostile_assets_are_refused(key: str, value: Any) -> None:
    """An asset must be a plain name of an allowed kind with a length and a digest, whatever the content digest says."""
    document = json.loads(MANIFEST.pack())
    document["assets"] = [{**document["assets"][0], key: value}]
    listing = json.dumps(document["assets"], sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    document["content"] = hashlib.sha256(bytes.fromhex(document["weights"]) + listing).hexdigest()
    with pytest.raises(FormatError):
        Manifest.unpack(json.dumps(document).encode())


def test_contradictions_are_refused() -> None:
    """Assets out of order or twice; an edge whose base, kind and way back do not go together; a count that is none."""
    one, two = MANIFEST.assets
    wrong: list[Manifest | Edge] = [replace(MANIFEST, assets=(two, one)), replace(MANIFEST, assets=(one, one))]
    wrong += [replace(EDGE, base=None), replace(EDGE, kind="Full"), replace(EDGE, kind="Full", base=None)]
    for document in [*wrong, replace(EDGE, changed=True), replace(EDGE, changed=-1)]:
        with pytest.raises(FormatError, match=r"not in order|do not go together|a count"):
            type(document).unpack(document.pack())


# --- schema, layout and the weights digest


@ROUNDS
@given(st.permutations(sorted(MODEL)), st.integers(0, 2**32 - 1))
@example(sorted(MODEL), 0)
def test_schemas_come_back(names: list[str], seed: int) -> None:
    """The order in which tensors are given does not matter, and the blob is read back to the same columns."""
    tensors = random_tensors(np.random.default_rng(seed))
    schema = Schema.build([(name, tensors[name][0], tensors[name][1], len(tensors[name][2])) for name in names])
    again = Schema.parse(schema.blob)
    assert again == schema
    assert hash(again) == hash(schema)
    rows = [(again.name(t), again.dtype(t), tuple(again.shape(t)), int(again.nbytes[t])) for t in range(len(again))]
    assert rows == [(n, tensors[n][0], tuple(tensors[n][1]), len(tensors[n][2])) for n in sorted(names, key=str.encode)]
    assert again.differences(schema) == []


@pytest.mark.parametrize(
    "change",
    [
        {"names": ["b", "a"]}, {"names": ["a", "a"]}, {"names": ["a"]}, {"types": [0, 2]}, {"types": [0, -1]}, {"dtypes": ["F32", "F32"]},
        {"dtypes": ["F32", "U8", "X"]}, {"dtypes": ["U8", "F32"]}, {"bytes": [8, -1]}, {"bytes": [9, 1]}, {"bytes": [8, 2**53]},
        {"shapes": [[2], [-1]]}, {"shapes": [[2], [1] * 65]}, {"shapes": [[2], [2**53]]}, {"shapes": [[2**53 - 1] * 60, [1]]}, {"x": 1},
        {"format": "weightsync.schema/2"}, {"names": ["a", 5]}, {"bytes": [8, True]}, {"bytes": [8, 1.0]},
    ],
    ids=lambda change: str(change)[:40],
)  # fmt: skip
def test_schema_blobs_have_one_form(change: dict[str, Any]) -> None:
    """Anything but the canonical blob of possible tensors is refused."""
    good = {"bytes": [8, 1], "dtypes": ["F32", "U8"], "format": FORMAT, "names": ["a", "b"], "shapes": [[2], [1]], "types": [0, 1]}  # fmt: skip
    assert len(Schema.parse(canonical.dumps(good))) == 2
    with pytest.raises(FormatError):
        Schema.parse(json.dumps({**good, **change}, sort_keys=True, separators=(",", ":")).encode())
    with pytest.raises(FormatError):
        Schema.parse(json.dumps(good).encode())


def test_the_weights_digest_is_what_is_documented(tmp_path: Path) -> None:
    """sha256(sha256(schema) + sha256(digests)), digests being big-endian xxh3-128 of each 8 MiB, whatever the files are."""
    model = {**MODEL, "large": ("BF16", (CHUNK_BYTES // 2 + 7,))}
    tensors = random_tensors(np.random.default_rng(1), model)
    rows = sorted(tensors.items(), key=lambda row: row[0].encode())
    types = sorted({dtype for dtype, _, _ in tensors.values()})
    schema = {
        "bytes": [len(data) for _, (_, _, data) in rows],
        "dtypes": types,
        "format": "weightsync.schema/1",
        "names": [name for name, _ in rows],
        "shapes": [list(shape) for _, (_, shape, _) in rows],
        "types": [types.index(dtype) for _, (dtype, _, _) in rows],
    }
    blob = json.dumps(schema, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    pieces = [data[at : at + (8 << 20)] for _, (_, _, data) in rows for at in range(0, len(data), 8 << 20)]
    listing = b"".join(xxhash.xxh3_128_intdigest(piece).to_bytes(16, "big") for piece in pieces)
    weights = hashlib.sha256(hashlib.sha256(blob).digest() + hashlib.sha256(listing).digest()).hexdigest()
    for shards in (1, 3):
        found = Checkpoint.open(
            write_checkpoint(tmp_path / str(shards), tensors, shards, assets={"config.json": b"{}"})
        )
        with Workers(shards) as workers:
            version, blobs = describe(found, digests.of_checkpoint(found, workers), "m")
        assert version.manifest.weights == weights
        assert (version.manifest.schema, version.manifest.digests) == tuple(
            hashlib.sha256(b).hexdigest() for b in (blob, listing)
        )
        assert all(hashlib.sha256(data).hexdigest() == name for name, data in blobs.items())
        assert set(version.manifest.blobs) == set(blobs)
        parsed = Layout.parse(found.layout.blob)
        assert parsed == found.layout
        parsed.check_tensors(found.schema)
        for file in parsed.files:
            assert (found.root / file.name).read_bytes().startswith(file.prefix)
    with pytest.raises(FormatError, match="digests blob"):
        digests.parse(listing[:-1], found.schema)


@pytest.mark.parametrize(
    "name",
    ["../a.safetensors", "/a.safetensors", "d/a.safetensors", ".a.safetensors", "", ".", "..", "a", "a.safetensors/", "a\0.safetensors",
     "a\n.safetensors", "a\x1b.safetensors", "a\x7f.safetensors", "a\x9b.safetensors", "é" * 128 + ".safetensors", "a.safetensors.index.json", 5, None],
    ids=ascii,
)  # fmt: skip
def test_hostile_layout_names_are_refused(name: Any) -> None:
    """A file of a layout and its index are plain names of their kind."""
    document = json.loads(LAYOUT.blob)
    document["files"][0]["name"] = name
    with pytest.raises(FormatError):
        Layout.parse(json.dumps(document).encode())
    if name not in (None, "a.safetensors.index.json"):
        index = str(name).replace(".safetensors", layout.INDEX)
        with pytest.raises(FormatError):
            Layout.parse(json.dumps({**json.loads(LAYOUT.blob), "index": index}).encode())


def test_layouts_hold_the_tensors_of_their_schema() -> None:
    """A file twice, a missing tensor, a header that is none: `FormatError`."""
    one = LAYOUT.files[0]
    schema = Schema.build([("a", "U8", [1], 1)])
    LAYOUT.check_tensors(schema)
    with pytest.raises(FormatError, match="occurs twice"):
        Layout.parse(Layout((one, one), None).blob)
    for files in (
        (),
        (one, replace(one, name="b.safetensors")),
        (replace(one, header=b"{"),),
        (replace(one, header=b"{}"),),
    ):
        with pytest.raises(FormatError):
            Layout.parse(Layout(files, None).blob).check_tensors(schema)
