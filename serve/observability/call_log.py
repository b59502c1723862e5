"""The log: one line for each call that has ended, as text or as JSON. It never contains a prompt, an output or a key.

Calls that succeeded, were cancelled by their client or were rejected are logged at INFO. Internal failures are logged
at ERROR, once, with the stack but not the text of the exception, which may contain anything. Lines of cancelled and
rejected calls are rate-limited: ten lines per second for each reason, then one line with the number of omitted
lines. For calls rejected because the server is starting, the limit is one line in ten seconds, to keep lines about
its progress visible.
"""

import asyncio
import contextlib
import datetime
import logging
import os
import re
import sys
import traceback
from collections.abc import Callable
from typing import Any, Literal, TextIO

from pythonjsonlogger.json import JsonFormatter

from apt_jax.errors import counted
from serve.observability.call_record import NO_ID, CallRecord

Format = Literal["text", "json"]
FORMATS: tuple[Format, ...] = ("text", "json")

_MOST_LINES = 10
_WINDOW_S = 1.0
_START_WINDOW_S = 10.0
_STARTING = "starting"
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029]")


def configure(log_format: Format, level: str) -> None:
    """Log to standard error: warnings from every package, and records of apt-jax at `level` or above."""
    handler = _LineHandler(sys.stderr)
    handler.setFormatter(TextFormatter() if log_format == "text" else json_formatter())
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    for name in ("apt_jax", "serve"):
        logging.getLogger(name).setLevel(level.upper())
    for name in ("uvicorn", "python_multipart"):  # they warn about every line that is not valid HTTP or form data
        logging.getLogger(name).setLevel("ERROR")


def announcer(log_format: Format) -> Callable[[str], None]:
    """Return a function that writes a line to standard output at once (`write_line`): unchanged, or as a JSON object in
    the format of the log."""
    formatter = logging.Formatter() if log_format == "text" else json_formatter()

    def say(line: str) -> None:
        record = logging.LogRecord("serve", logging.INFO, "", 0, line, None, None)
        write_line(formatter.format(record), sys.stdout)

    return say


def write_line(line: str, stream: TextIO) -> None:
    """Write a line at once. If that fails, drop the line: a full disk or a closed pipe must not stop a server.

    A dropped line is not kept in the buffer of the stream, which Python would try to write at exit.
    """
    try:
        descriptor = stream.fileno()
    except (OSError, ValueError):  # not a file
        stream.write(f"{line}\n")
        return
    with contextlib.suppress(OSError):
        stream.flush()
        os.write(descriptor, f"{line}\n".encode(errors="replace"))


class _LineHandler(logging.StreamHandler[TextIO]):
    """Writes records with `write_line`."""

    def emit(self, record: logging.LogRecord) -> None:
        """See `logging.Handler`."""
        try:
            write_line(self.format(record), self.stream)
        except Exception:
            self.handleError(record)


class TextFormatter(logging.Formatter):
    """Formats one line per record. Further lines of a record are indented and control characters escaped, so that no
    logged text can forge a line."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        """See `logging.Formatter`."""
        text = super().format(record)
        stack = getattr(record, "stack", None)
        if stack is not None:
            text += f"\n{stack}"
        escaped = _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text.rstrip("\n"))
        return escaped.replace("\n", "\n    ")


def json_formatter() -> logging.Formatter:
    """Return a formatter of one JSON object per line: timestamp (UTC), level, logger, message and the fields of calls
    (docs/serving.md)."""
    return _Json(["levelname", "name", "message"], rename_fields={"levelname": "level", "name": "logger"})


class _Json(JsonFormatter):
    def add_fields(self, log_data: dict[str, Any], record: logging.LogRecord, message_dict: dict[str, Any]) -> None:
        at = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        log_data["timestamp"] = at.isoformat(timespec="milliseconds")
        super().add_fields(log_data, record, message_dict)


class CallLog:
    """The log lines of one protocol's calls. Used from one event loop only.

    Args:
        logger: logger of the protocol.
    """

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._recent: dict[str, tuple[int, asyncio.TimerHandle]] = {}
        """For each reason, the number of lines in the current window and the timer that ends the window."""
        self._closed = False

    def write(self, record: CallRecord) -> None:
        """Log a call that has ended."""
        level = logging.ERROR if record.outcome == "failed" else logging.INFO
        if not self._logger.isEnabledFor(level):
            return
        if record.outcome in ("rejected", "cancelled"):
            is_over = self._is_over_start_limit() if record.before_start else self._is_over_limit(record.reason)
            if is_over:
                return
        known = {
            "request_id": record.request_id,
            "protocol": record.protocol,
            "method": record.method,
            "http_method": record.http_method,
            "tenant": record.tenant,
            "class": record.slo_class,
            "reason": record.reason,
            "code": record.code,
            "param": record.param,
            "prompt_tokens": record.num_prompt_tokens,
            "output_tokens": record.num_output_tokens,
            "blocks": record.num_blocks,
            "duration_ms": _ms(record.duration_s),
            "queue_ms": _ms(record.queue_s),
            "ttft_ms": _ms(record.ttft_s),
            "stack": None if record.error is None else stack_of(record.error),
        }
        self._logger.log(
            level,
            "%s: %s, %d tokens, %.0f ms",
            *_headline(record),
            record.num_output_tokens,
            1e3 * record.duration_s,
            extra={name: value for name, value in known.items() if value is not None},
        )

    def close(self) -> None:
        """Log the number of lines omitted so far, and end all windows."""
        self._closed = True
        for reason, (_, timer) in list(self._recent.items()):
            timer.cancel()
            self._log_left_out(reason)

    def _is_over_limit(self, reason: str) -> bool:
        if reason not in self._recent:
            timer = asyncio.get_running_loop().call_later(_WINDOW_S, self._log_left_out, reason)
            self._recent[reason] = 0, timer
        lines, timer = self._recent[reason]
        self._recent[reason] = lines + 1, timer
        return lines >= _MOST_LINES

    def _is_over_start_limit(self) -> bool:
        is_first = _STARTING not in self._recent
        if is_first:
            self._begin_start_window()
        else:
            count, timer = self._recent[_STARTING]
            self._recent[_STARTING] = count + 1, timer
        return not is_first

    def _begin_start_window(self) -> None:
        timer = asyncio.get_running_loop().call_later(_START_WINDOW_S, self._log_left_out, _STARTING)
        self._recent[_STARTING] = 0, timer

    def _log_left_out(self, reason: str) -> None:
        left_out = self._recent.pop(reason)[0] - (0 if reason == _STARTING else _MOST_LINES)
        if left_out <= 0:
            return
        self._logger.info(
            "%s: %s", counted(left_out, "more request"), reason, extra={"reason": reason, "left_out": left_out}
        )
        if reason == _STARTING and not self._closed:
            self._begin_start_window()  # the line just logged is the first of the next window


def _headline(record: CallRecord) -> tuple[str, str]:
    """Return the call's name and how it ended, without text from its client."""
    if record.outcome == "succeeded":
        return f"request {record.request_id}", record.reason
    call = record.method if record.http_method is None else f"{record.http_method} {record.method}"
    named = "" if record.request_id == NO_ID else f" (request {record.request_id})"
    why = (record.reason, record.code, record.param)
    return call + named, " ".join(word for word in why if word is not None)


def log_failure(logger: logging.Logger, what: str, error: BaseException) -> None:
    """Log an unexpected failure at ERROR.

    Args:
        logger: logger to write to.
        what: the operation that failed; never text from a client.
        error: its stack is logged, but not its text.
    """
    logger.error("%s failed", what, extra={"stack": stack_of(error)})


def stack_of(error: BaseException) -> str:
    """Format the stack of an exception and of its causes, without their messages."""
    parts: list[str] = []
    seen: set[int] = set()
    at: BaseException | None = error
    while at is not None and id(at) not in seen:
        seen.add(id(at))
        parts.append("".join([*traceback.format_tb(at.__traceback__), type(at).__qualname__]))
        at = at.__cause__ or (None if at.__suppress_context__ else at.__context__)
    return "\nfollowed by\n".join(reversed(parts))


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(1e3 * seconds, 3)
