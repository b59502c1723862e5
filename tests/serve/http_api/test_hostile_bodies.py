"""Bodies that are made to take long: the time to read one grows with its size, whatever it holds."""

import contextlib
import itertools
import json
import random
import re
import threading
import time

import pytest

from apt_jax.errors import InvalidRequestError
from apt_jax.text.chat import MAX_MESSAGES
from benchmarks.server.hostile_bodies import MAX_BODY_BYTES, SHAPES
from serve.http_api import openai_request
from serve.http_api.openai_request import MAX_NAMES, MAX_VALUES, parse_json


def processor_s(data: bytes) -> float:
    begun = time.thread_time()
    with contextlib.suppress(InvalidRequestError):
        parse_json(data)
    return time.thread_time() - begun


@pytest.mark.parametrize("shape", SHAPES)
def test_time_grows_with_size(shape):
    small, large = (SHAPES[shape](size) for size in (MAX_BODY_BYTES // 4, MAX_BODY_BYTES))
    quick = min(processor_s(small) for _ in range(3))
    assert min(processor_s(large) for _ in range(2)) < 12 * quick + 0.05  # 4 times the size; quadratic would be 16


def random_value(rng: random.Random, depth: int = 0):
    kind = rng.random()
    if depth > 4 or kind < 0.3:
        return "".join(rng.choice('[{"\\a]}') for _ in range(rng.randrange(8)))
    if kind < 0.6:
        return [random_value(rng, depth + 1) for _ in range(rng.randrange(4))]
    return {random_value(rng, 9): random_value(rng, depth + 1) for _ in range(rng.randrange(3))}


@pytest.mark.parametrize(("bound", "marks"), [("MAX_CONTAINERS", "[{"), ("MAX_NAMES", ":"), ("MAX_VALUES", ",")])
def test_what_is_bounded_is_counted_outside_of_strings(monkeypatch, bound, marks):
    monkeypatch.setattr(openai_request, bound, 2)
    rng, verdicts = random.Random(0), []
    for _ in range(3000):
        text = json.dumps(random_value(rng))
        outside = re.sub(r'"(?:[^"\\]|\\.)*"', "", text)
        verdicts.append(openai_request._surplus(text.encode()) is not None)
        assert verdicts[-1] == (sum(map(outside.count, marks)) > 2), text
    assert 300 < sum(verdicts) < 2700


def test_what_no_call_needs_is_refused_by_name():
    for most, what, data in (
        (MAX_NAMES, "names", lambda n: b"{" + b",".join(b'"%d":0' % i for i in range(n)) + b"}"),
        (MAX_VALUES, "values", lambda n: b'{"prompt": [' + b"1," * n + b"1]}"),
    ):
        parse_json(data(most))
        with pytest.raises(InvalidRequestError, match=f"body: contains more than {most} {what}; send less at once"):
            parse_json(data(most + 1))


def test_the_longest_prompts_conversations_and_texts_are_taken():
    assert len(parse_json(json.dumps({"input": [[50_000 + i % 9 for i in range(2**15)]] * 8}).encode())["input"]) == 8
    parts = [{"type": "text", "text": "x"}] * 3
    longest = {"messages": [{"role": "user", "content": parts}] * MAX_MESSAGES}
    assert len(parse_json(json.dumps(longest).encode())["messages"]) == MAX_MESSAGES
    essay = "What, then: {a, b}? [c, d]" * 60_000
    assert parse_json(json.dumps({"prompt": essay}).encode())["prompt"] == essay


def test_others_run_while_fractions_are_parsed():
    """Between two numbers the parser gives the interpreter's lock to whoever waits for it."""
    data = b'{"prompt": [' + b"1.5," * (MAX_VALUES - 1) + b"1]}"
    turns, is_over = [], threading.Event()

    def other() -> None:
        while not is_over.is_set():
            turns.append(time.perf_counter())

    thread = threading.Thread(target=other)
    thread.start()
    try:
        begun = time.perf_counter()
        parse_json(data)
        took_s = time.perf_counter() - begun
    finally:
        is_over.set()
        thread.join()
    within = [0.0, *(turn - begun for turn in turns if 0 <= turn - begun <= took_s), took_s]
    assert max(b - a for a, b in itertools.pairwise(within)) < took_s / 2
