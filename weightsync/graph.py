"""Which edges lead most cheaply from the weights that are held to those that are needed, and why those.

The versions of a model are no line: sweeps branch, trainers restart from older steps. The sidecar asks for a path to
act, the operator to foresee, and both must get the same answer: so this is pure. It must not read, fetch or remember
anything, nor let its answer depend on the order in which edges are given.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from weightsync.errors import NoPath
from weightsync.manifest import FEATURES, Edge, Kind

MAX_HOPS = 64
"""How many edges a path may have unless the caller says otherwise: each is a fetch and a pass over the weights."""


@dataclass(frozen=True, slots=True)
class Link:
    """What is known of an edge from one node to another. A listing of a store leaves the last three fields unknown.

    Nodes are weights digests in hex, or prefixes of them, written alike everywhere; `base` None is nothing. `name` is
    the sha256 (hex) of the edge, and unique. `reversible` None counts as both ways: the caller then reads the edge
    and asks again with what it learnt. Links of negative size or from a node to itself are ignored.
    """

    base: str | None
    target: str
    bytes: int
    name: str
    kind: Kind | None = None
    reversible: bool | None = None
    requires: tuple[str, ...] = ()

    @classmethod
    def of(cls, edge: Edge, name: str, key: Callable[[str], str] = str) -> Link:
        """All that `edge` says. `name` is the sha256 of its bytes as received; `key` makes a node of a digest."""
        base = key(edge.base.weights) if edge.base else None
        return cls(base, key(edge.target.weights), edge.size, name, edge.kind, edge.reversible, edge.requires)


@dataclass(frozen=True, slots=True)
class Hop:
    """One link, followed from base to target or, with `reverse`, back."""

    link: Link
    reverse: bool

    @property
    def start(self) -> str | None:
        """The node it leaves."""
        return self.link.target if self.reverse else self.link.base

    @property
    def end(self) -> str | None:
        """The node it reaches."""
        return self.link.base if self.reverse else self.link.target


@dataclass(frozen=True, slots=True)
class Path:
    """Hops in the order in which to apply them, the bytes to fetch for them, and a sentence that explains them."""

    hops: tuple[Hop, ...]
    bytes: int
    why: str


def cheapest(
    links: Iterable[Link],
    held: str | None,
    needed: str,
    *,
    features: frozenset[str] = FEATURES,
    excluded: Mapping[str, str] = MappingProxyType({}),
    max_hops: int = MAX_HOPS,
    full: bool = True,
) -> Path:
    """The path of fewest bytes from `held` to `needed`; of equals the fewest hops, then the smallest names.

    With `full` a path may also start from nothing, whatever is held; without, it never does. `excluded` maps the name
    of a link that must not be used to a reason in a word or two ("corrupt"). Links that require a word outside
    `features` are left out. Raises `NoPath`, which says what is missing and what was left out.
    """
    if held == needed:
        return Path((), 0, "nothing to fetch: what is needed is held")
    hops = _hops(links, features, excluded)
    usable = [hop for hop, fault in hops.items() if fault is None]
    starts = ([held] if held is not None else []) + ([None] if full else [])
    ways = _Ways(usable, needed, max_hops)
    best = ways.best(*starts)
    if best is None:
        shortest = _Ways(usable, needed, len(usable), count=True).best(*starts)
        anyhow = _Ways(hops, needed, len(hops), count=True).best(*starts)
        if shortest:
            cause = f"the shortest way has {_many(len(shortest.hops), 'edge')}, more than the {max_hops} allowed"
        elif anyhow:
            cause = "every way uses edges that were left out"
        elif any(hop.end == needed for hop in hops):
            cause = f"edges lead there, but none from what is held{' or as a full copy' if full else ''}"
        else:
            cause = "no edge leads there at all"
        cause += "" if full else "; " + _instead(ways, None, full)
        raise NoPath(f"no way from {(held or 'nothing')[:16]} to {needed[:16]}: {cause}{_left_out(hops, anyhow)}")
    why = f"{best.why}, {_many(best.bytes, 'byte')}"
    why += "; " + _instead(ways, held if best.hops[0].start is None else None, full) if held is not None else ""
    better = _Ways(hops, needed, max_hops).best(*starts) if len(usable) < len(hops) else None
    if better is None or better.bytes == best.bytes:
        return replace(best, why=why + _left_out(hops, None))
    return replace(best, why=f"{why}{_left_out(hops, better)} (with them {_many(better.bytes, 'byte')})")


def since_full(links: Iterable[Link], node: str) -> tuple[int, int] | None:
    """Of the cheapest path from nothing to `node`: bytes after its Full edge, and bytes of the Full edge.

    A publisher adds a Full edge when the first grow large against the second, or when there is no such path (None).
    """
    hops = _hops(links, FEATURES, {})
    path = _Ways((hop for hop, fault in hops.items() if fault is None), node, MAX_HOPS).best(None)
    return (path.bytes - path.hops[0].link.bytes, path.hops[0].link.bytes) if path else None


class _Ways:
    """The best ways from every node to `needed` in at most `max_hops`; with `count` only the number of hops matters.

    Bellman and Ford's relaxation, backwards and by number of hops: `rounds[h]` holds the fewest bytes of h hops from a
    node, if no fewer hops do as well. Every rest of a best way is such an entry: otherwise it could be swapped for a
    better one. So a way can be read off forwards, hop by hop, taking the smallest name each time.
    """

    def __init__(self, hops: Iterable[Hop], needed: str, max_hops: int, *, count: bool = False) -> None:
        self.max_hops = max_hops
        self._leaving: dict[str | None, list[tuple[int, Hop]]] = {}
        arriving: dict[str | None, list[tuple[int, str | None]]] = {}
        for hop in hops:
            cost = 0 if count else hop.link.bytes
            self._leaving.setdefault(hop.start, []).append((cost, hop))
            arriving.setdefault(hop.end, []).append((cost, hop.start))
        self._rounds: list[dict[str | None, int]] = [{needed: 0}]
        least: dict[str | None, int] = {needed: 0}
        while self._rounds[-1] and len(self._rounds) <= max_hops:
            found: dict[str | None, int] = {}
            for node, rest in self._rounds[-1].items():
                for cost, source in arriving.get(node, ()):
                    if source not in least or rest + cost < least[source]:
                        least[source] = found[source] = rest + cost
            self._rounds.append(found)

    def best(self, *starts: str | None) -> Path | None:
        """The best way from any of `starts`, or None."""
        ends = [(found[start], hops) for hops, found in enumerate(self._rounds) for start in starts if start in found]
        if not ends:
            return None
        rest, hops = min(ends)
        nodes = [start for start in starts if self._rounds[hops].get(start) == rest]
        way: list[Hop] = []
        for found in reversed(self._rounds[:hops]):
            fit = (hop for node in nodes for cost, hop in self._leaving[node] if found.get(hop.end) == rest - cost)
            way.append(min(fit, key=lambda hop: hop.link.name))
            nodes, rest = [way[-1].end], found[way[-1].end]
        kinds = Counter("full copy" if hop.start is None else (hop.link.kind or "edge").lower() for hop in way)
        back = sum(hop.reverse for hop in way)
        words = " and ".join(_many(kinds[kind], kind) for kind in kinds) + (f" ({back} backwards)" if back else "")
        return Path(tuple(way), sum(hop.link.bytes for hop in way), words)


def _hops(links: Iterable[Link], features: frozenset[str], excluded: Mapping[str, str]) -> dict[Hop, str | None]:
    """Every hop that makes sense, and why it must not be used, if so."""
    hops: dict[Hop, str | None] = {}
    for link in links:
        unknown = " and ".join(sorted(set(link.requires) - features))
        fault = excluded.get(link.name, f"requiring {unknown}" if unknown else None)
        if link.bytes >= 0 and link.base != link.target:
            hops[Hop(link, False)] = fault
            if link.base is not None:
                hops[Hop(link, True)] = fault or "not reversible" if link.reversible is False else fault
    return hops


def _left_out(hops: Mapping[Hop, str | None], way: Path | None) -> str:
    """Counts the links not used, by reason. Most of a store may be irreversible: that is news only on `way`."""
    news = set(way.hops if way else ())
    faults = {hop.link: fault for hop, fault in hops.items() if fault is not None and (not hop.reverse or hop in news)}
    listed = ", ".join(f"{count:,} {fault}" for fault, count in sorted(Counter(faults.values()).items()))
    return f"; left out: {listed}" if listed else ""


def _instead(ways: _Ways, start: str | None, full: bool) -> str:
    way, place = ways.best(start), "with a full copy" if start is None else "from what is held"
    none = f"no way {place} within {_many(ways.max_hops, 'edge')}"
    text = f"{way.why} would be {_many(way.bytes, 'byte')}" if way else none
    return text if full else f"a full copy is not allowed here ({text})"


def _many(count: int, one: str) -> str:
    return f"{count:,} {one}{'' if count == 1 else 's'}"
