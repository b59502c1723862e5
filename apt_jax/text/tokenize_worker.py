"""The process that tokenizes long texts: `python -P tokenize_worker.py`, driven by `apt_jax.text.long_texts`.

The `tokenizers` library takes 100 to 200 bytes of memory per token for seconds, and aborts its process if memory runs
out. In this process, that fails only one text.

Protocol: one line of JSON in each direction. First `{"tokenizer", "memory_bytes", "nice", "alarm_s"}`, answered by
`{}`; then any number of

* `{"encode": text, "add_special_tokens": bool}`,
* `{"continuation": text}`,
* `{"template": text, "written": [[start, end], ...]}`,

each answered by `{"payload_bytes": n}` and n bytes of token ids, int32 in the machine's byte order.
"""

import json
import sys
from array import array
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # -P leaves out directories that may contain the package


def limit(memory_bytes: int) -> None:
    """Limit the memory growth of this process; an allocation beyond the limit kills it."""
    import os
    import resource

    with open("/proc/self/statm", encoding="ascii") as file:
        now = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = now + memory_bytes if hard == resource.RLIM_INFINITY else min(now + memory_bytes, hard)
    resource.setrlimit(resource.RLIMIT_AS, (most, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def serve() -> None:
    import contextlib
    import os
    import signal

    import tokenizers

    from apt_jax.text.tokenizer import Tokenizer
    from apt_jax.utils.memory import give_back_memory

    def answer(ids: list[int] | None) -> None:
        payload = b"" if ids is None else array("i", ids).tobytes()
        head: dict[str, Any] = {} if ids is None else {"payload_bytes": len(payload)}
        sys.stdout.buffer.write(json.dumps(head).encode() + b"\n" + payload)
        sys.stdout.buffer.flush()

    setup = json.loads(sys.stdin.readline())
    tokenizer = Tokenizer(tokenizers.Tokenizer.from_str(setup["tokenizer"]))
    tokenizer.encode("a")  # starts the library's threads, so that they have their stacks before memory is limited
    with contextlib.suppress(OSError, ValueError):  # not Linux: only the time is limited
        limit(setup["memory_bytes"])
    with contextlib.suppress(OSError):
        os.nice(setup["nice"])
    answer(None)
    while line := sys.stdin.readline():
        job = json.loads(line)
        # If the parent has exited and cannot kill this process, the default action of the signal does.
        signal.alarm(setup["alarm_s"])
        if "template" in job:
            ids = tokenizer.encode_template(job["template"], job["written"])
        elif "continuation" in job:
            ids = tokenizer.encode_continuation(job["continuation"])
        else:
            ids = tokenizer.encode(job["encode"], add_special_tokens=job["add_special_tokens"])
        signal.alarm(0)
        answer(ids)
        del job, line, ids
        give_back_memory()


if __name__ == "__main__":
    serve()
