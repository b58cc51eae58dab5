"""Logs: how pipes become lines, and what `kubectl logs` gets of them."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from devcluster.node.logs import MAX_LINE, LogWriter, Query, last_words, select
from devcluster.node.server import query_of

LINES = [b"1970-01-01T00:00:0%d.500000000Z stdout F line %d\n" % (n, n) for n in range(5)]
QUERIES = {
    "all": (Query(), b"line 0\nline 1\nline 2\nline 3\nline 4\n"),
    "the last two": (Query(tail=2), b"line 3\nline 4\n"),
    "none": (Query(tail=0), b""),
    "more than there is": (Query(tail=9), b"line 0\nline 1\nline 2\nline 3\nline 4\n"),
    "since": (Query(since=3.4), b"line 3\nline 4\n"),
    "since, then the last": (Query(since=1.0, tail=1), b"line 4\n"),
    "at most": (Query(limit_bytes=9), b"line 0\nli"),
    "with times": (Query(tail=1, timestamps=True), b"1970-01-01T00:00:04.500000000Z line 4\n"),
}


@pytest.mark.parametrize(("query", "text"), QUERIES.values(), ids=QUERIES.keys())
def test_select(query: Query, text: bytes) -> None:
    """What is asked for and no more; a line that is still being written is left out."""
    assert select([*LINES, b"1970-01-01T00:00:05.5"], query) == text


def test_query() -> None:
    """The options as they come from the API server."""
    found = query_of({"tailLines": "3", "sinceSeconds": "10", "follow": "true", "timestamps": "true"}, 100.0)
    assert found == Query(tail=3, since=90.0, timestamps=True, follow=True)
    assert query_of({"sinceTime": "1970-01-01T00:00:07Z", "previous": "true"}, 0) == Query(since=7.0, previous=True)


def written(path: Path, *chunks: bytes) -> list[bytes]:
    """Give the log of a program that writes these chunks."""

    async def main() -> None:
        writer = LogWriter(path, lambda: 1.5)
        pipe = writer.pipe("stderr")
        for chunk in chunks:
            os.write(pipe, chunk)
            await asyncio.sleep(0.01)
        os.close(pipe)
        await asyncio.wait_for(writer.closed.wait(), 5)

    asyncio.run(main())
    return path.read_bytes().splitlines(keepends=True)


def test_lines_are_put_together(tmp_path: Path) -> None:
    """Whatever the chunks; a last line without an end is a line."""
    head = b"1970-01-01T00:00:01.500000000Z stderr F "
    assert written(tmp_path / "log", b"one\ntw", b"o\n\nth", b"ree") == [
        head + b"one\n",
        head + b"two\n",
        head + b"\n",
        head + b"three\n",
    ]


def test_a_line_without_end_is_cut(tmp_path: Path) -> None:
    """So that memory does not grow with it."""
    lines = written(tmp_path / "log", b"x" * (MAX_LINE + 1), b"y\n")
    assert [len(line.split(b" ", 3)[3]) for line in lines] == [MAX_LINE + 2, 2]


def test_last_words(tmp_path: Path) -> None:
    """The end of a long log; nothing of one that is not there."""
    path = tmp_path / "log"
    path.write_bytes(b"".join(b"1970-01-01T00:00:00.000000000Z stdout F %05d\n" % n for n in range(10000)))
    words = last_words(path).splitlines()
    assert words[-1] == "09999"
    assert len(words) == 80
    assert last_words(tmp_path / "none") == ""
