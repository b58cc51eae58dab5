"""What can be typed. Imports nothing heavy, so that `--help` and shell completion are instant."""

from __future__ import annotations

import argparse
from pathlib import Path

from weightsync import __version__

EXITS = """exit status:
  0 done   1 verify found a difference   2 wrong usage   42 wrong input, do not retry
  69 store not available, retry later   70 a bug   74 not enough room or memory here
  75 directory in use   130 interrupted"""

STORE = "hf://buckets/OWNER/NAME[/PREFIX], or a directory"


def parser() -> argparse.ArgumentParser:
    """The whole command line."""
    top = argparse.ArgumentParser(
        prog="weightsync",
        description="Ship only what changed between two model checkpoints, and prove that the result is bit-identical.",
        epilog=EXITS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=f"weightsync {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    common.add_argument("--threads", type=_count, help="threads to use (default: the cores we may use, at most 8)")
    common.add_argument("--quiet", action="store_true", help="no progress bar")

    def add(name: str, summary: str) -> argparse.ArgumentParser:
        return commands.add_parser(
            name,
            help=summary,
            description=summary,
            parents=[common],
            epilog=EXITS,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    diff = add("diff", "Write the delta that leads from checkpoint OLD to checkpoint NEW, both ways.")
    diff.add_argument("old", type=Path, metavar="OLD", help="a directory of safetensors files, or one such file")
    diff.add_argument("new", type=Path, metavar="NEW")
    diff.add_argument("-o", "--output", type=Path, required=True, metavar="DIR", help="a new directory for the delta")
    diff.add_argument("--model", default="model", help="lineage name that the manifests carry (default: model)")
    diff.add_argument("--profile", choices=["lan", "wan"], default="lan", help="what to favour: speed or size")
    diff.add_argument("--full", action="store_true", help="if the tensors differ, write all of NEW instead of failing")

    apply = add("apply", "Bring the checkpoint directory TARGET along one or more deltas, in place.")
    apply.add_argument("target", type=Path, metavar="TARGET", help="new, if the first delta holds a whole checkpoint")
    apply.add_argument("deltas", type=Path, nargs="+", metavar="DIR", help="deltas in the order old to new")
    apply.add_argument("--reverse", action="store_true", help="walk them backwards; undoes an interrupted apply")
    apply.add_argument("-o", "--output", type=Path, metavar="NEW", help="leave TARGET as it is and make NEW")

    verify = add(
        "verify", "Prove that a checkpoint is what a delta or a published version says, or that a delta is whole."
    )
    verify.add_argument("path", type=Path, metavar="PATH", help="a checkpoint, or the directory of a delta")
    verify.add_argument("--delta", type=Path, metavar="DIR", help="a delta whose base or target PATH should be")
    _published(verify, required=False)

    inspect = add("inspect", "Say what a checkpoint, a delta or a data file holds.")
    inspect.add_argument("path", type=Path, metavar="PATH")

    merge = add("merge", "Fold consecutive deltas into one, without the weights.")
    merge.add_argument("deltas", type=Path, nargs="+", metavar="DIR", help="deltas in the order old to new")
    merge.add_argument("-o", "--output", type=Path, required=True, metavar="OUT", help="a new directory")

    publish = add("publish", "Put a checkpoint into a store as a version, as a delta from its parent.")
    publish.add_argument("source", type=Path, metavar="CHECKPOINT")
    _published(publish, required=True)
    publish.add_argument("--parent", metavar="VERSION", help="the version it was trained from; none for a root")
    publish.add_argument(
        "--parent-source", type=Path, metavar="DIR", help="where the parent's checkpoint may still lie"
    )
    publish.add_argument("--scratch", type=Path, metavar="DIR", help="folder to work in (default: a temporary one)")
    publish.add_argument(
        "--full-ratio",
        type=_ratio,
        default=0.5,
        metavar="R",
        help="also write a full copy when the deltas since the last one exceed R of it (default: 0.5)",
    )

    pull = add("pull", "Make a directory hold a published version, by the fewest bytes.")
    pull.add_argument("dest", type=Path, metavar="DIR", help="a new directory, or one that holds another version")
    _published(pull, required=True)
    pull.add_argument("--max-hops", type=_count, default=64, metavar="N", help="longest chain (default: 64)")

    graph = add("graph", "List a model's versions and edges, or say how to get from one version to another.")
    _published(graph, required=True, version=False)
    graph.add_argument("--to", metavar="VERSION", help="show the path to this version")
    graph.add_argument("--from", dest="origin", metavar="VERSION", help="from this version (default: from nothing)")
    return top


def _published(command: argparse.ArgumentParser, *, required: bool, version: bool = True) -> None:
    command.add_argument("--store", required=required, metavar="STORE", help=STORE)
    command.add_argument("--model", required=required, metavar="NAME", help="lineage name")
    if version:
        command.add_argument("--version", required=required, metavar="VERSION", help="name, or sha256 of a manifest")


def _count(text: str) -> int:
    if not text.isdigit() or not 1 <= int(text) <= 1024:
        raise argparse.ArgumentTypeError("must be a whole number from 1 to 1024")
    return int(text)


def _ratio(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError("must be a number of 0 or more")
    return value
