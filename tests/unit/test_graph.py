"""The graph against brute force on small random graphs, and what it says to people, word for word."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weightsync.errors import NoPath
from weightsync.graph import MAX_HOPS, Hop, Link, cheapest, since_full
from weightsync.manifest import Data, Edge, End

NODES = "abcde"
WORDS = ("ranks", "rope")


@st.composite
def graphs(draw: st.DrawFn) -> list[Link]:
    """Up to ten links; few nodes and few sizes, so that parallels, cycles and ties are common."""
    count = draw(st.integers(0, 10))
    names = draw(st.permutations([f"{number:02d}" for number in range(count)]))
    links = []
    for name in names:
        base = draw(st.sampled_from([None, *NODES]))
        links.append(
            Link(
                base=base,
                target=draw(st.sampled_from(NODES)),
                bytes=draw(st.integers(-1, 4)),
                name=name,
                kind="Full" if base is None else draw(st.sampled_from([None, "Delta", "Merge"])),
                reversible=False if base is None else draw(st.sampled_from([None, True, True, False])),
                requires=tuple(draw(st.lists(st.sampled_from(WORDS), max_size=1))),
            )
        )
    return links


@st.composite
def questions(draw: st.DrawFn) -> tuple[list[Link], str | None, str, dict[str, object]]:
    links = draw(graphs())
    names = [link.name for link in links]
    options: dict[str, object] = {
        "features": frozenset(draw(st.sets(st.sampled_from(WORDS)))),
        "excluded": dict.fromkeys(draw(st.sets(st.sampled_from(names), max_size=2)) if names else (), "corrupt"),
        "max_hops": draw(st.sampled_from([1, 2, 3, 4, 64])),
        "full": draw(st.booleans()),
    }
    return links, draw(st.sampled_from([None, *NODES])), draw(st.sampled_from(NODES)), options


def every_path(links, held, needed, *, features, excluded, max_hops, full) -> Iterator[tuple[Hop, ...]]:
    """All paths that pass no node twice, found by trying everything."""

    def extend(way: tuple[Hop, ...], node: str | None, passed: frozenset[str | None]) -> Iterator[tuple[Hop, ...]]:
        if node == needed:
            yield way
        elif len(way) < max_hops:
            for link in links:
                if link.bytes < 0 or link.name in excluded or not set(link.requires) <= features:
                    continue
                if link.base == node and link.target not in passed:
                    yield from extend((*way, Hop(link, False)), link.target, passed | {link.target})
                back = link.reversible in (True, None) and link.base is not None
                if back and link.target == node and link.base not in passed:
                    yield from extend((*way, Hop(link, True)), link.base, passed | {link.base})

    if held is not None:
        yield from extend((), held, frozenset([held]))
    if full and held != needed:
        yield from extend((), None, frozenset([None]))


def rank(way: tuple[Hop, ...]) -> tuple[int, int, list[tuple[str, bool]]]:
    return sum(hop.link.bytes for hop in way), len(way), [(hop.link.name, hop.reverse) for hop in way]


def answer(links, held, needed, options) -> object:
    try:
        return cheapest(links, held, needed, **options)
    except NoPath as error:
        return str(error)


@settings(max_examples=800, deadline=None)
@given(questions())
def test_the_path_is_the_one_that_trying_everything_finds(question) -> None:
    links, held, needed, options = question
    expected = min(every_path(links, held, needed, **options), key=rank, default=None)
    if expected is None:
        with pytest.raises(NoPath):
            cheapest(links, held, needed, **options)
    else:
        path = cheapest(iter(links), held, needed, **options)
        assert path.hops == expected
        assert path.bytes == rank(expected)[0]


@settings(max_examples=400, deadline=None)
@given(questions())
def test_the_explanation_agrees_with_trying_everything(question) -> None:
    links, held, needed, options = question
    told = answer(links, held, needed, options)
    if held == needed:
        assert told.why == "nothing to fetch: what is needed is held"
        return
    unbounded = options | {"max_hops": len(links)}
    sound = [link for link in links if link.bytes >= 0 and link.base != link.target]
    barred = {"features": frozenset(WORDS), "excluded": {}}
    without_bars = [Link(link.base, link.target, link.bytes, link.name) for link in sound]
    if isinstance(told, str):
        lengths = [len(way) for way in every_path(links, held, needed, **unbounded)]
        reachable = any(True for _ in every_path(without_bars, held, needed, **unbounded | barred))
        ends = {link.target for link in sound} | {link.base for link in sound}
        assert ("the shortest way has " in told) == bool(lengths)
        assert f"the shortest way has {min(lengths, default=0)} edge" in told or not lengths
        assert ("every way uses edges that were left out" in told) == (reachable and not lengths)
        assert ("no edge leads there at all" in told) == (needed not in ends)
    else:
        other = None if told.hops[0].start is not None else held
        start = {"full": True} if other is None else {"full": False}
        ways = every_path(links, other, needed, **options | start)
        size = min((rank(way)[0] for way in ways if way[0].start == other), default=None)
        if held is None:
            assert "would be" not in told.why
            assert "no way" not in told.why
        elif size is None:
            assert " within " in told.why
        else:
            assert f" would be {size} byte" in told.why
        at_best = min(rank(way)[0] for way in every_path(without_bars, held, needed, **options | barred))
        assert ("(with them " in told.why) == (at_best < told.bytes)
        assert f"(with them {at_best} byte" in told.why or at_best == told.bytes
    for reason, count in {
        "corrupt": sum(link.name in options["excluded"] for link in sound),
        **{
            f"requiring {word}": sum(
                link.requires == (word,) and word not in options["features"] and link.name not in options["excluded"]
                for link in sound
            )
            for word in WORDS
        },
    }.items():
        text = told if isinstance(told, str) else told.why
        assert (f"{count} {reason}" if count else reason) in text or not count
        assert reason not in text or count


@settings(max_examples=200, deadline=None)
@given(questions(), st.randoms(use_true_random=False))
def test_the_order_of_the_links_makes_no_difference_to_path_or_words(question, shuffle: random.Random) -> None:
    links, held, needed, options = question
    shuffled = links + links[:2]
    shuffle.shuffle(shuffled)
    assert answer(shuffled, held, needed, options) == answer(links, held, needed, options)


@settings(max_examples=200, deadline=None)
@given(graphs(), st.sampled_from(NODES))
def test_since_full_splits_the_cheapest_path_from_nothing(links: list[Link], node: str) -> None:
    options = {"features": frozenset(), "excluded": {}, "max_hops": MAX_HOPS, "full": True}
    expected = min(every_path(links, None, node, **options), key=rank, default=None)
    assert since_full(links, node) == (None if expected is None else (rank(expected[1:])[0], expected[0].link.bytes))


def chain(length: int, size: int = 10) -> list[Link]:
    return [delta(f"v{number}", f"v{number + 1}", size) for number in range(length)]


def full(target: str, size: int) -> Link:
    return Link(None, target, size, f"full-{target}", "Full", False)


def delta(base: str, target: str, size: int, *, reversible: bool | None = True, requires: tuple[str, ...] = ()) -> Link:
    return Link(base, target, size, f"{base}-{target}", "Delta", reversible, requires)


def merge(base: str, target: str, size: int) -> Link:
    return Link(base, target, size, f"{base}-{target}", "Merge", True)


def names(path) -> list[str]:
    return [("back " if hop.reverse else "") + hop.link.name for hop in path.hops]


def test_siblings_switch_by_one_delta_back_and_one_forward() -> None:
    path = cheapest([full("v0", 900), delta("v0", "left", 7), delta("v0", "right", 5)], "left", "right")
    assert names(path) == ["back v0-left", "v0-right"]
    assert path.bytes == 12
    assert path.why == "2 deltas (1 backwards), 12 bytes; 1 full copy and 1 delta would be 905 bytes"


@pytest.mark.parametrize(("size", "expected"), [(19, ["v0-v2"]), (20, ["v0-v2"]), (21, ["v0-v1", "v1-v2"])])
def test_a_merge_is_taken_when_it_is_cheaper_or_saves_a_hop(size: int, expected: list[str]) -> None:
    assert names(cheapest([*chain(2), merge("v0", "v2", size)], "v0", "v2")) == expected


def test_equal_paths_are_told_apart_by_name() -> None:
    links = [Link("a", "b", 1, "2"), Link("a", "b", 1, "1"), Link("b", "a", 1, "3"), Link("b", "a", 1, "0")]
    assert names(cheapest(links, "a", "b")) == ["back 0"]
    assert names(cheapest(links[:3], "a", "b")) == ["1"]


def test_a_full_copy_is_taken_when_many_deltas_cost_more() -> None:
    path = cheapest([*chain(4, size=1_000), full("v3", 2_500)], "v0", "v4")
    assert names(path) == ["full-v3", "v3-v4"]
    assert path.why == "1 full copy and 1 delta, 3,500 bytes; 4 deltas would be 4,000 bytes"


def test_what_was_learnt_of_a_link_changes_the_next_plan() -> None:
    links = [delta("v0", "v1", 3, reversible=None), full("v0", 50)]
    assert names(cheapest(links, "v1", "v0")) == ["back v0-v1"]
    links[0] = delta("v0", "v1", 3, reversible=False)
    assert names(cheapest(links, "v1", "v0")) == ["full-v0"]


def test_a_full_edge_is_never_taken_back_to_nothing() -> None:
    links = [Link(None, "a", 0, "1"), Link(None, "b", 9, "2")]
    with pytest.raises(NoPath):
        cheapest(links, "a", "b", full=False)
    assert names(cheapest(links, "a", "b")) == ["2"]


def test_a_link_made_from_an_edge_says_all_that_the_edge_says() -> None:
    edge = Edge("Merge", End("aa11", "m"), End("bb22", "n"), (Data("x", 3), Data("y", 4)), 5, True, requires=("rope",))
    assert Link.of(edge, "name", key=lambda digest: digest[:2]) == Link("aa", "bb", 7, "name", "Merge", True, ("rope",))
    first = Edge("Full", None, End("bb22", "n"), (), 0, False)
    assert Link.of(first, "name") == Link(None, "bb22", 0, "name", "Full", False)


@pytest.mark.parametrize(
    ("links", "held", "options", "why"),
    [
        ([], "v2", {}, "nothing to fetch: what is needed is held"),
        ([], "v2", {"max_hops": 0, "full": False}, "nothing to fetch: what is needed is held"),
        (
            [*chain(2, size=1_572_864), full("v2", 223_399_632)],
            "v0",
            {},
            "2 deltas, 3,145,728 bytes; 1 full copy would be 223,399,632 bytes",
        ),
        ([full("v2", 1)], None, {}, "1 full copy, 1 byte"),
        ([full("v2", 9)], "v0", {}, "1 full copy, 9 bytes; no way from what is held within 64 edges"),
        (chain(2), "v0", {}, "2 deltas, 20 bytes; no way with a full copy within 64 edges"),
        (
            [*chain(2), full("v2", 9)],
            "v0",
            {"full": False},
            "2 deltas, 20 bytes; a full copy is not allowed here (1 full copy would be 9 bytes)",
        ),
        (
            [*chain(2), full("v2", 99)],
            "v0",
            {"max_hops": 1},
            "1 full copy, 99 bytes; no way from what is held within 1 edge",
        ),
        (
            [Link("v0", "v1", 4, "x"), merge("v1", "v2", 5), full("v2", 99)],
            "v0",
            {},
            "1 edge and 1 merge, 9 bytes; 1 full copy would be 99 bytes",
        ),
        (
            [*chain(2), full("v2", 99)],
            "v0",
            {"excluded": {"v0-v1": "corrupt", "elsewhere": "missing"}},
            "1 full copy, 99 bytes; no way from what is held within 64 edges; left out: 1 corrupt (with them 20 bytes)",
        ),
        (
            [*chain(2), full("v2", 99), delta("v0", "v2", 30)],
            "v0",
            {"excluded": {"v0-v2": "corrupt"}},
            "2 deltas, 20 bytes; 1 full copy would be 99 bytes; left out: 1 corrupt",
        ),
        (
            [*chain(2), delta("v0", "v2", 1, requires=("rope", "ranks")), delta("v0", "w", 1, requires=("ranks",))],
            "v0",
            {"features": frozenset(["ranks"])},
            "2 deltas, 20 bytes; no way with a full copy within 64 edges; "
            "left out: 1 requiring rope (with them 1 byte)",
        ),
        (
            [delta("v2", "v3", 5, reversible=False), full("v2", 99), delta("v8", "v9", 5, reversible=False)],
            "v3",
            {},
            "1 full copy, 99 bytes; no way from what is held within 64 edges; "
            "left out: 1 not reversible (with them 5 bytes)",
        ),
        (
            [delta("v2", "v3", 5, reversible=False), delta("v3", "v2", 5)],
            "v3",
            {},
            "1 delta, 5 bytes; no way with a full copy within 64 edges",
        ),
        (
            [*chain(2, size=1), full("v2", 99)],
            "v0",
            {"excluded": {"v1-v2": "corrupt"}, "max_hops": 1},
            "1 full copy, 99 bytes; no way from what is held within 1 edge; left out: 1 corrupt",
        ),
    ],
)
def test_why_says_in_words(links: list[Link], held: str | None, options: dict[str, object], why: str) -> None:
    assert cheapest(links, held, "v2", **options).why == why


@pytest.mark.parametrize(
    ("links", "held", "options", "message"),
    [
        ([], None, {}, "no way from nothing to v2: no edge leads there at all"),
        (chain(1), "v0", {}, "no way from v0 to v2: no edge leads there at all"),
        (
            [delta("w", "v2", 1)],
            "v0",
            {},
            "no way from v0 to v2: edges lead there, but none from what is held or as a full copy",
        ),
        (
            [full("v2", 9)],
            "v0",
            {"full": False},
            "no way from v0 to v2: edges lead there, but none from what is held; "
            "a full copy is not allowed here (1 full copy would be 9 bytes)",
        ),
        (
            [full("v2", 9)],
            "v0",
            {"full": False, "excluded": {"full-v2": "corrupt"}},
            "no way from v0 to v2: edges lead there, but none from what is held; "
            "a full copy is not allowed here (no way with a full copy within 64 edges); left out: 1 corrupt",
        ),
        (
            chain(2),
            "v0",
            {"max_hops": 1},
            "no way from v0 to v2: the shortest way has 2 edges, more than the 1 allowed",
        ),
        (
            [*chain(1), delta("v1", "v2", 90), delta("v1", "w", 1), delta("w", "v2", 1)],
            "v0",
            {"max_hops": 1},
            "no way from v0 to v2: the shortest way has 2 edges, more than the 1 allowed",
        ),
        (
            [*chain(2), full("v2", 9)],
            "v0",
            {"excluded": {"v0-v1": "corrupt", "full-v2": "missing"}},
            "no way from v0 to v2: every way uses edges that were left out; left out: 1 corrupt, 1 missing",
        ),
        (
            [delta("v0", "v1", 1, requires=("rope",)), delta("v2", "v1", 1, reversible=False)],
            "v0",
            {},
            "no way from v0 to v2: every way uses edges that were left out; left out: 1 not reversible, 1 requiring rope",
        ),
        ([delta("v0", "v2", -1)], "v0", {}, "no way from v0 to v2: no edge leads there at all"),
    ],
)
def test_no_path_says_what_is_missing(
    links: list[Link], held: str | None, options: dict[str, object], message: str
) -> None:
    with pytest.raises(NoPath) as caught:
        cheapest(links, held, "v2", **options)
    assert str(caught.value) == message


def test_digests_are_shortened_in_messages() -> None:
    with pytest.raises(NoPath, match=f"no way from {'a' * 16} to {'b' * 16}: "):
        cheapest([], "a" * 64, "b" * 64)


def test_thousands_of_versions_with_merges_are_crossed_within_the_bound_of_hops() -> None:
    """A merge costs a byte more than its deltas, so the bound alone decides how many must be taken."""
    links = [full("v0", 10**9), *chain(5_000)]
    for span in (2, 4, 8, 16, 32, 64):
        links += [merge(f"v{at}", f"v{at + span}", 10 * span + 1) for at in range(0, 5_000 - span, span)]
    # 3,000 = 46 × 64 + 56, and 18 hops are left for the 56: merges of 32 and of 8, then 16 deltas.
    path = cheapest(links, "v0", "v3000")
    assert len(path.hops) <= MAX_HOPS
    taken = sum(hop.link.kind == "Merge" for hop in path.hops)
    assert path.bytes == 30_000 + taken
    assert taken == 46 + 2
    back = cheapest(links, "v3000", "v0")
    assert all(hop.reverse for hop in back.hops)
    assert back.bytes == path.bytes
    assert since_full(links, "v2000") == (20_000 + 31, 10**9)


def test_a_chain_longer_than_the_bound_is_told_from_a_broken_one() -> None:
    links = chain(10_000)
    with pytest.raises(NoPath, match="the shortest way has 10,000 edges, more than the 64 allowed"):
        cheapest(links, "v0", "v10000")
    del links[5_000]
    with pytest.raises(NoPath, match="none from what is held"):
        cheapest(links, "v0", "v10000")
