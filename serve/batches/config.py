"""Limits on files and batches."""

import dataclasses
import re
from pathlib import Path

from apt_jax.errors import InvalidRequestError

FLAG = "--batch-dir"

MAX_CUSTOM_ID_CHARS = 512
MAX_ERRORS = 100
"""Maximum number of errors that a failed validation lists."""
MAX_FILENAME_CHARS = 255
MAX_METADATA = 16
"""Maximum number of entries in the metadata of a batch."""
MAX_METADATA_KEY_CHARS = 64
MAX_METADATA_VALUE_CHARS = 512
MIN_FILE_TTL_S = 3600
MAX_FILE_TTL_S = 30 * 24 * 3600
MIN_WINDOW_S = 60
MAX_WINDOW_S = 14 * 24 * 3600
WINDOW_PATTERN = "[0-9]{1,5}[mh]"

_WINDOW = re.compile(WINDOW_PATTERN)
_UNITS = {"m": 60, "h": 3600}


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchConfig:
    """Directory and limits of files and batches. A tenant is the owner of an API key; without keys, all clients are one
    tenant."""

    directory: Path
    max_file_bytes: int = 100 << 20
    """Maximum size of one uploaded file."""
    max_requests: int = 50_000
    """Maximum number of requests (lines) of one batch."""
    max_line_bytes: int = 2 << 20
    """Maximum length of one line; the default equals the default limit on the body of an HTTP call."""
    max_disk_bytes: int = 4 << 30
    """Maximum disk space of all tenants together, for files and for the requests and responses of running batches."""
    max_concurrency: int | None = None
    """Maximum number of batch requests in the engine at once; None: as many as run in one step (`--max-num-seqs`)."""
    max_files: int = 10_000
    """Maximum number of files per tenant."""
    max_open_batches: int = 100
    """Maximum number of batches per tenant that have not ended."""
    max_ended_batches: int = 10_000
    """Maximum number of ended batches per tenant that are kept; beyond it, the oldest are deleted."""
    max_uploads: int = 8
    """Maximum number of concurrent uploads; one tenant or client address may use half of them."""
    upload_bytes_per_s: int = 64 << 10
    """Minimum average upload rate; slower uploads time out."""

    def disk_share_bytes(self, tenant: str) -> int:
        """Return the maximum number of bytes that a tenant may have on disk: half of the total if API keys are used."""
        return self.max_disk_bytes // 2 if tenant else self.max_disk_bytes


def window_s(text: object) -> int:
    """Return the length in seconds of a completion window such as ``24h`` or ``30m``.

    Raises:
        InvalidRequestError: the text is not a completion window, or is out of bounds.
    """
    if isinstance(text, str) and _WINDOW.fullmatch(text):
        seconds = int(text[:-1]) * _UNITS[text[-1]]
        if MIN_WINDOW_S <= seconds <= MAX_WINDOW_S:
            return seconds
    raise InvalidRequestError(
        "completion_window", "must be a number of minutes or hours from '1m' to '336h', such as '24h'"
    )
