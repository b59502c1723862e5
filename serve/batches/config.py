"""Bounds of files and batches."""

import dataclasses
import re
from pathlib import Path

from apt_jax.errors import InvalidRequestError

FLAG = "--batch-dir"

MAX_CUSTOM_ID_CHARS = 512
MAX_ERRORS = 100
"""Errors that a failed validation lists."""
MAX_FILENAME_CHARS = 255
MAX_METADATA = 16
"""Entries of the metadata of a batch."""
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
    """Where files and batches are kept, and their bounds. A tenant is the owner of an API key; where there are no keys
    everybody is the same one."""

    directory: Path
    max_file_bytes: int = 100 << 20
    """Size of one uploaded file."""
    max_requests: int = 50_000
    """Lines of one batch."""
    max_line_bytes: int = 2 << 20
    """Length of one line; as the body of a call over HTTP."""
    max_disk_bytes: int = 4 << 30
    """All files, and the requests and responses of running batches, of all tenants."""
    max_concurrency: int | None = None
    """Requests of batches in the engine at once; None: as many as run in one step (`--max-num-seqs`)."""
    max_files: int = 10_000
    """Files of one tenant."""
    max_open_batches: int = 100
    """Batches of one tenant that have not ended."""
    max_ended_batches: int = 10_000
    """Batches of one tenant that have ended and are remembered; the oldest are forgotten."""
    max_uploads: int = 8
    """Uploads at once; a tenant or an address can have half of them."""
    upload_bytes_per_s: int = 64 << 10
    """Slowest upload, on average."""

    def disk_share_bytes(self, tenant: str) -> int:
        """Bytes that one tenant may have on disk: half of all where there are others."""
        return self.max_disk_bytes // 2 if tenant else self.max_disk_bytes


def window_s(text: object) -> int:
    """Seconds of a completion window such as ``24h`` or ``30m``.

    Raises:
        InvalidRequestError: it is none, or out of bounds.
    """
    if isinstance(text, str) and _WINDOW.fullmatch(text):
        seconds = int(text[:-1]) * _UNITS[text[-1]]
        if MIN_WINDOW_S <= seconds <= MAX_WINDOW_S:
            return seconds
    raise InvalidRequestError(
        "completion_window", "must be a number of minutes or hours from '1m' to '336h', such as '24h'"
    )
