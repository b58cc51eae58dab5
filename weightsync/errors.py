"""Every error that leaves this library, as a type a caller can act on.

Three families, told apart by what helps: `InputError` (nothing but different input helps, so a Job
must not retry), `StoreError` (waiting or other credentials may help) and `TargetError` (the
directory that was to be changed needs a hand). Nothing else crosses the library's boundary for a
fault that is not a bug. `exit_code` is the command line's documented exit status; `reason` is a
stable CamelCase word for conditions, metrics and `--json`.
"""

from __future__ import annotations


class WeightsyncError(Exception):
    """Base class of all errors of this package."""

    reason = "Error"
    exit_code = 1


class InputError(WeightsyncError):
    """The input is wrong; the same call will fail again."""

    reason = "InputInvalid"
    exit_code = 42


class CheckpointError(InputError):
    """A checkpoint cannot be read: not safetensors, truncated, duplicate names. Names file and byte offset."""

    reason = "SourceInvalid"


class SourceChanged(InputError):
    """A checkpoint changed while it was read, or a version of that name holds something else."""

    reason = "SourceChanged"


class FormatError(InputError):
    """A delta file, manifest, edge or blob breaks its format; nothing was written."""

    reason = "FormatInvalid"


class Unsupported(InputError):
    """Valid, but it requires a feature that this version does not have."""

    reason = "Unsupported"


class SchemaMismatch(InputError):
    """Two sets of tensors differ in names, types or shapes, so that no delta can lead between them."""

    reason = "SchemaMismatch"


class BaseMismatch(InputError):
    """The delta was made for other weights than the target holds; nothing was written."""

    reason = "BaseMismatch"


class DigestMismatch(InputError):
    """Bytes do not have the digest that a manifest or edge states."""

    reason = "DigestMismatch"


class NoPath(InputError):
    """No usable chain of edges leads from what is held to what is wanted."""

    reason = "NoPath"


class StoreError(WeightsyncError):
    """The store did not do what was asked; carries the store's own words."""

    reason = "StoreError"
    exit_code = 69


class StoreUnavailable(StoreError):
    """Down, throttled or unreachable after retries: try again later."""

    reason = "StoreUnavailable"


class StoreDenied(StoreError):
    """Token missing, expired or without the right to do this."""

    reason = "StoreDenied"


class StoreNotFound(StoreError):
    """The object, version, model or bucket is not there."""

    reason = "StoreNotFound"
    exit_code = 42


class StoreConflict(StoreError):
    """An immutable name exists with other content; nothing was overwritten."""

    reason = "StoreConflict"
    exit_code = 42


class StoreCorrupt(StoreError):
    """What the store returned does not have the digest or size it must have, also on retry."""

    reason = "StoreCorrupt"


class LocalError(WeightsyncError):
    """This machine could not do it now: too many open files, not enough memory, a failing disk."""

    reason = "LocalError"
    exit_code = 74


class TargetError(WeightsyncError):
    """The directory to be changed is not safe or not fit to be changed; it is as it was."""

    reason = "TargetUnsafe"
    exit_code = 42


class TargetExists(TargetError):
    """A directory that was to be made is there already."""

    reason = "TargetExists"


class TargetBusy(TargetError):
    """Another process is changing this directory."""

    reason = "TargetBusy"
    exit_code = 75


class NoSpace(TargetError):
    """Not enough room; needed and available bytes are in the message."""

    reason = "NoSpace"
    exit_code = 74
