"""Tries grammars out in a process of its own: compiles each, and takes the first steps of an output.

A grammar can take minutes and gigabytes to compile, and a long chain of references overflows the stack of the compiler,
which ends the process. So each is tried here first, where the worst case costs one child; `apt_jax.structured.compiler`
starts it, waits for so long, and kills it.

Protocol: JSON, a line each way. First {"tokenizer", "vocab_size", "eos", "limits", "memory_bytes", "alarm_s"}, answered
by {"error": null or text}; then any number of {"grammar"}, answered by {"error": null or text, "bytes"}. Run as a file,
so that nothing but llguidance is imported.
"""

import contextlib
import ctypes
import json
import os
import random
import signal
import sys
import threading
from typing import Any

STACK_BYTES = 4 << 20
"""Stack of the thread that compiles here; the engine's process has a larger one."""
TRIAL_TOKENS = 24
"""Steps of a trial output: grammars too ambiguous to follow show it early."""
NUM_TRIALS = 2


def first_allowed(mask: bytes, rng: random.Random, eos: set[int]) -> int | None:
    """Return an allowed token other than `eos`."""
    bits = int.from_bytes(mask, "little")
    for token in eos:
        bits &= ~(1 << token)
    if not bits:
        return None
    start = rng.randrange(8 * len(mask))
    above = bits >> start
    if above:
        return start + (above & -above).bit_length() - 1
    return (bits & -bits).bit_length() - 1


def attempt(tokenizer: Any, grammar: str, limits: Any) -> tuple[str | None, int]:
    """Compile and begin outputs. Returns what is wrong, and by how much this process has grown."""
    from llguidance import LLMatcher

    give_back_memory()
    before = resident_bytes()
    root = LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
    error = begin_outputs(root, tokenizer)
    return error, max(0, resident_bytes() - before)  # while the root is there


def begin_outputs(root: Any, tokenizer: Any) -> str | None:
    """Take the first steps of a few outputs. Returns what is wrong."""
    if root.is_error():
        return root.get_error()
    eos = set(tokenizer.eos_tokens)
    mask = root.compute_bitmask()
    if root.is_error():
        return root.get_error()
    if root.is_stopped() or first_allowed(mask, random.Random(0), eos) is None:
        return "unsatisfiable: it allows no text, or the empty one alone"
    for seed in range(NUM_TRIALS):
        matcher, rng = root.deep_copy(), random.Random(seed)
        for _ in range(TRIAL_TOKENS):
            token = first_allowed(matcher.compute_bitmask(), rng, eos)
            if matcher.is_error():
                return matcher.get_error()
            if token is None:
                break
            matcher.consume_token(token)
            if matcher.is_error():
                return matcher.get_error()
            if matcher.is_stopped():
                break
    return None


def give_back_memory() -> None:
    """Return what earlier trials have freed to the system: the next one is measured by how much the process grows."""
    # Not glibc: a grammar counts as what it takes beyond the largest one before it.
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def resident_bytes() -> int:
    """Memory of this process without that of files, which come and go as the machine needs room; 0 where that cannot be
    read."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            _, resident, of_files, *_ = map(int, file.read().split())
        return (resident - of_files) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return 0


def limit_memory(more_bytes: int) -> None:
    """Let this process grow by so much; an allocation beyond it ends it."""
    try:
        import resource

        with open("/proc/self/statm", encoding="ascii") as file:
            now = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (now + more_bytes, now + more_bytes))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    except (ImportError, OSError, ValueError):
        return  # not Linux: time alone is bounded


def serve() -> None:
    def answer(**fields: Any) -> None:
        sys.stdout.write(json.dumps(fields) + "\n")
        sys.stdout.flush()

    setup = json.loads(sys.stdin.readline())
    try:
        from llguidance import LLParserLimits, LLTokenizer

        limits = LLParserLimits(**setup["limits"])
        tokenizer = LLTokenizer(setup["tokenizer"], n_vocab=setup["vocab_size"], eos_token=setup["eos"])
    except Exception as error:
        answer(error=str(error) or type(error).__name__)
        return
    limit_memory(setup["memory_bytes"])
    answer(error=None)
    while line := sys.stdin.readline():
        # Should the parent be gone, nobody kills this process: the default action of the signal does.
        signal.alarm(setup["alarm_s"])
        try:
            error, num_bytes = attempt(tokenizer, json.loads(line)["grammar"], limits)
        except Exception as caught:
            error, num_bytes = str(caught) or type(caught).__name__, 0
        signal.alarm(0)
        answer(error=error, bytes=num_bytes)


if __name__ == "__main__":
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=serve)
    thread.start()
    thread.join()
