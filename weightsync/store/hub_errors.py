"""What the Hub client's exceptions mean for a user of the store.

The client raises its own HTTP errors, the HTTP library's, and from its storage layer builtin `ConnectionError`,
`PermissionError`, `FileNotFoundError` and `RuntimeError` whose text alone says what happened. Here they become
`StoreDenied`, `StoreNotFound`, `StoreUnavailable` or `NoSpace`, in the Hub's own words and with what helps.

Must not import the client: its classes are told by their names, which also serves versions that lack some.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from weightsync.errors import StoreDenied, StoreError, StoreNotFound, StoreUnavailable, WeightsyncError
from weightsync.files import FULL
from weightsync.store import files

_STATUS = re.compile(r"HTTP status (?:client|server) error \((\d{3})")
_SYSTEM = re.compile(r"\(os error (\d+)\)")
_WORDS = 400  # characters kept of what the Hub says


@dataclass(frozen=True, slots=True)
class Asked:
    """What the client was asked to do: for messages, in words that follow "while".

    `write` says which right that needs; `needed` bytes go to the local `folder` (None: nothing is written).
    """

    doing: str
    write: bool
    folder: Path | None = None
    needed: int = 0


def translate(error: Exception, asked: Asked, url: str, bucket: str) -> WeightsyncError:
    """Our error for one of the client's, raised while it did what was `asked` in the store at `url`."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    said = f"{url}: {asked.doing} failed: {_words(error)}"
    right = "write" if asked.write else "read"
    status = _status(error)
    if _full(error) and asked.folder is not None:
        return files.no_space(asked.folder, f"{asked.doing} in {url}", asked.needed)
    if "BucketBatchError" in kinds:
        return StoreError(
            f"{url}: {_failures(getattr(error, 'failures', []))}. The same call again does what is missing"
        )
    if "OfflineModeIsEnabled" in kinds:
        return StoreUnavailable(f"{said}. Unset HF_HUB_OFFLINE to reach the Hub")
    if status in (401, 403) or (isinstance(error, PermissionError) and error.errno is None):
        return StoreDenied(
            f"{said}. Renew the token for bucket {bucket} (HF_TOKEN, or the secret that holds it): it must be valid and "
            f"have the right to {right}"
        )
    if "BucketNotFoundError" in kinds or (status == 404 and "-token" in str(error)):
        return StoreNotFound(
            f"{said}. Create bucket {bucket}, correct its name, or use a token (HF_TOKEN, or the secret that holds it) "
            f"with the right to {right} it: the Hub does not tell these apart"
        )
    if "EntryNotFoundError" in kinds or status == 404:
        return StoreNotFound(f"{said}. The object is gone, or was never published")
    return StoreUnavailable(f"{said}. Try again later")


def _status(error: Exception) -> int | None:
    """The HTTP status behind an error: of the answer it carries, or from its text."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(status, int):
        return status
    found = _STATUS.search(str(error))
    return int(found[1]) if found else None


def _full(error: Exception) -> bool:
    """Whether a full local disk is behind an error; the storage layer says so in its text only."""
    found = _SYSTEM.search(str(error))
    number = int(found[1]) if found else getattr(error, "errno", None)
    return number in FULL


def _words(error: Exception) -> str:
    """What the Hub or the network says, on one line and without advice meant for users of the client."""
    said = getattr(error, "server_message", None)
    status = _status(error)
    text = f"{status} {said}" if said and status else str(error)
    identity = getattr(error, "request_id", None)
    text = " ".join(text.split())[:_WORDS] or type(error).__name__
    return f"{text} (request {identity})" if identity else text


def _failures(failures: list[dict[str, str]]) -> str:
    """The first refused operations of a batch by name."""
    named = [f"{failure.get('path')} ({failure.get('error')})" for failure in failures[:5]]
    more = f" and {len(failures) - 5} more" if len(failures) > 5 else ""
    return f"the Hub did not do {len(failures)} operations of a batch: {', '.join(named)}{more}"
