"""The command line: `weightsync diff · apply · verify · inspect · merge · publish · pull · graph`.

Exit status: 0 done; 1 `verify` found a difference; 2 wrong usage; 42 the input is wrong, the same call will fail
again; 69 the store did not answer as it must, try later; 70 a bug; 74 this machine lacks room, memory or open files;
75 another process uses the directory; 130 interrupted; 143 terminated. With `--json` one object goes to stdout, on failure `{"error": {"reason", "message"}}`.
"""

from __future__ import annotations

import errno
import io
import json
import os
import resource
import signal
import sys
import threading
import traceback
from collections.abc import Sequence
from contextlib import suppress

from weightsync.cli.arguments import parser
from weightsync.errors import InputError, LocalError, WeightsyncError

INTERRUPTED = 130
TERMINATED = 143
BUG = 70

MISTAKES = {errno.EACCES, errno.EINVAL, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.ENOENT, errno.ENOTDIR}
MISTAKES |= {errno.EPERM, errno.EROFS}
"""What the system says about a path that the user should not have given."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status. A user's mistake gives one line on stderr, never a traceback."""
    _prepare_process()
    arguments = parser().parse_args(argv)
    try:
        from weightsync.cli import commands  # the heavy imports come after --help

        result = commands.run(arguments)
        print(json.dumps(result.data, indent=2) if arguments.json else "\n".join(result.lines), flush=True)
        return result.status
    except WeightsyncError as e:
        return _fail(arguments.json, e.reason, str(e), e.exit_code)
    except _Terminated:
        return _fail(arguments.json, "Interrupted", "terminated; run the same command again to go on", TERMINATED)
    except KeyboardInterrupt:
        return _fail(arguments.json, "Interrupted", "interrupted; run the same command again to go on", INTERRUPTED)
    except BrokenPipeError:
        # whoever read our output has what they wanted; nothing may be flushed into the broken pipe at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 0
    except MemoryError:
        return _fail(arguments.json, "LocalError", "not enough memory; try fewer --threads", LocalError.exit_code)
    except OSError as e:
        status = InputError.exit_code if e.errno in MISTAKES else LocalError.exit_code
        return _fail(arguments.json, "LocalError", f"{e.filename or 'output'}: {e.strerror or e}", status)
    except Exception as e:
        traceback.print_exc()
        return _fail(arguments.json, "Bug", f"this is a bug in weightsync, please report it: {e!r}", BUG)


class _Terminated(KeyboardInterrupt):
    """SIGTERM: like Ctrl-C, so that temporary folders are removed on the way out."""


def _terminate(*_: object) -> None:
    raise _Terminated


def _prepare_process() -> None:
    """Open standard streams, file names as bytes, many open files, an orderly end on SIGTERM."""
    for handle in range(3):  # a file that is mapped for writing must never get the number of a closed stream
        try:
            os.fstat(handle)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="surrogateescape")  # file names are bytes, and are printed as such
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _terminate)
    _allow_open_files()


def _allow_open_files() -> None:
    """Raise the limit on open files to what the system permits: each file of a checkpoint stays open while mapped."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _fail(as_json: bool, reason: str, message: str, status: int) -> int:
    with suppress(OSError):
        if as_json:
            print(json.dumps({"error": {"message": message, "reason": reason}}, indent=2), flush=True)
    with suppress(OSError):
        print(f"weightsync: {message}", file=sys.stderr, flush=True)
    return status
