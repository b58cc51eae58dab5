"""How a byte range of a file is made of stored chunks: the answer to a Xet reconstruction query.

Pure: from a file's terms and its xorbs' chunks to the document that tells a client what to fetch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .xet import Chunk, Term


def reconstruction(
    terms: Sequence[Term], chunks: Mapping[str, Sequence[Chunk]], span: tuple[int, int] | None, base: str, version: int
) -> dict[str, Any] | None:
    """The document of protocol `version` (1 or 2) for bytes [span) of a file, None when it ends before them.

    `base` is the address, up to the xorb's hash, under which a xorb's bytes are served.
    """
    total = sum(term.length for term in terms)
    low, high = (0, total) if span is None else (span[0], min(span[1], total))
    if span is not None and low >= total:
        return None
    rows: list[dict[str, Any]] = []
    wanted: dict[str, set[tuple[int, int]]] = {}
    offset = at = 0
    for term in terms:
        end = at + term.length
        if end > low and at < high:
            have = chunks[term.xorb]
            first, start = term.first, at
            while start + have[first].length <= low:
                start += have[first].length
                first += 1
            last, stop = term.last, end
            while stop - have[last - 1].length >= high:
                last -= 1
                stop -= have[last].length
            if not rows:
                offset = max(low - start, 0)
            rows.append({"hash": term.xorb, "unpacked_length": stop - start, "range": {"start": first, "end": last}})
            wanted.setdefault(term.xorb, set()).add((first, last))
        at = end
    fetch = {
        xorb: [_fetch(base + xorb, chunks[xorb], *run, version) for run in _merge(runs)]
        for xorb, runs in wanted.items()
    }
    return {"offset_into_first_range": offset, "terms": rows, "xorbs" if version == 2 else "fetch_info": fetch}


def _merge(runs: set[tuple[int, int]]) -> list[tuple[int, int]]:
    """Overlapping or touching chunk ranges as one: a client wants each byte once."""
    merged: list[tuple[int, int]] = []
    for first, last in sorted(runs):
        if merged and first <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], last))
        else:
            merged.append((first, last))
    return merged


def _fetch(url: str, chunks: Sequence[Chunk], first: int, last: int, version: int) -> dict[str, Any]:
    run = {"start": first, "end": last}
    part = {"start": chunks[first].start, "end": chunks[last - 1].end - 1}
    if version == 2:
        return {"url": url, "ranges": [{"chunks": run, "bytes": part}]}
    return {"url": url, "range": run, "url_range": part}
