"""The command line: `weightsync diff · apply · verify · inspect · merge · publish · pull · graph`.

Exit status: 0 done; 1 `verify` found a difference; 2 wrong usage; 42 the input is wrong, the same call will fail
again; 69 the store did not answer as it must, try later; 74 not enough room; 75 another process is changing the
directory; 130 interrupted. With `--json` one object goes to stdout, on failure `{"error": {"reason", "message"}}`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from weightsync.cli.arguments import parser
from weightsync.errors import WeightsyncError

INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status. A user's mistake gives one line on stderr, never a traceback."""
    arguments = parser().parse_args(argv)
    try:
        from weightsync.cli import commands  # the heavy imports come after --help

        result = commands.run(arguments)
    except WeightsyncError as e:
        return _fail(arguments.json, e.reason, str(e), e.exit_code)
    except KeyboardInterrupt:
        return _fail(arguments.json, "Interrupted", "interrupted; run the same command again to go on", INTERRUPTED)
    except MemoryError:
        return _fail(arguments.json, "NoMemory", "not enough memory; try fewer --threads", 1)
    except BrokenPipeError:
        return 0  # whoever read our output has what they wanted
    if arguments.json:
        print(json.dumps(result.data, indent=2))
    else:
        print("\n".join(result.lines))
    return result.status


def _fail(as_json: bool, reason: str, message: str, status: int) -> int:
    if as_json:
        print(json.dumps({"error": {"message": message, "reason": reason}}, indent=2))
    print(f"weightsync: {message}", file=sys.stderr)
    return status
