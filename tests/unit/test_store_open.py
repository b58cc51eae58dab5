"""From an address to a store, without touching the store."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from weightsync.errors import InputError
from weightsync.store import HubStore, VolumeStore, open_store


@pytest.mark.parametrize(
    ("url", "kind", "shown"),
    [
        ("hf://buckets/owner/name", HubStore, "hf://buckets/owner/name"),
        ("hf://buckets/owner/name/", HubStore, "hf://buckets/owner/name"),
        ("hf://buckets/Owner-1/my.bucket_2/runs/7/", HubStore, "hf://buckets/Owner-1/my.bucket_2/runs/7"),
        ("/data/store", VolumeStore, "/data/store"),
        ("file:///data/my%20store", VolumeStore, "/data/my store"),
        ("relative/store", VolumeStore, str(Path.cwd() / "relative/store")),
    ],
)
def test_an_address_opens_its_kind_of_store(url: str, kind: type, shown: str) -> None:
    """Each form of address gives its back end, which shows an address that opens the same store again."""
    store = open_store(url)
    assert isinstance(store, kind)
    assert store.url == shown
    assert open_store(store.url).url == shown


@pytest.mark.parametrize(
    "url",
    [
        "",
        " ",
        "a\0b",
        "s3://bucket/prefix",
        "https://huggingface.co/buckets/owner/name",
        "hf://owner/name",
        "hf://buckets/owner",
        "hf://buckets/owner/",
        "file://host/data",
        "file:data",
        "file:///data?x=1",
    ],
)
def test_other_addresses_are_refused_with_the_forms_there_are(url: str) -> None:
    """A mistyped address is refused at once, never taken for a directory's name."""
    with pytest.raises(InputError, match=r"hf://buckets/owner/name.*file:///directory, or a directory's path"):
        open_store(url)


@pytest.mark.parametrize(
    "url", ["hf://buckets/owner/na me", "hf://buckets/../name", "hf://buckets/a/b/../c", "hf://buckets/a/b//c"]
)
def test_buckets_and_prefixes_that_cannot_exist_are_refused(url: str) -> None:
    """What would make a wrong request or leave the prefix is refused before any request."""
    with pytest.raises(InputError):
        open_store(url)


def test_the_hub_client_is_not_imported_before_it_is_needed() -> None:
    """Opening a Hub store costs no import of the client: the command line stays quick."""
    script = (
        "import sys, weightsync.store as s; s.open_store('hf://buckets/a/b'); print('huggingface_hub' in sys.modules)"
    )
    assert (
        subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout == "False\n"
    )
