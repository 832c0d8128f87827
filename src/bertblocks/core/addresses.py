"""Addresses of files elsewhere, such as `s3://bucket/folder/texts.jsonl`, by fsspec."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, TypeGuard

from bertblocks.core.requirements import require_packages

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")


def is_address(text: str | Path) -> TypeGuard[str]:
    """Whether a text names a file by an address, as opposed to a path.

    Example:
        >>> is_address("s3://bucket/a.csv"), is_address("data/a.csv")
        (True, False)
    """
    return isinstance(text, str) and _SCHEME.match(text) is not None


def to_path(text: str) -> str:
    """The path behind a `file://` address; anything else as it is."""
    return text[len("file://") :] if text.startswith("file://") else text


def open_filesystem(address: str) -> tuple[Any, str]:
    """The fsspec file system of an address, and the path of the address in it."""
    require_packages(["fsspec"], f"reading or writing {address}")
    from fsspec.core import url_to_fs

    try:
        return url_to_fs(address)
    except (ValueError, ImportError) as error:  # an unknown protocol, or one whose package is missing
        raise ValueError(f"{address}: {str(error).rstrip('.')}.") from error
