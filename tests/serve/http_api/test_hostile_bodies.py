"""Bodies that are made to take long: the time to read one grows with its size, whatever it holds."""

import contextlib
import json
import random
import re
import time

import pytest

from apt_jax.errors import InvalidRequestError
from serve.http_api import openai_request
from serve.http_api.openai_request import MAX_CONTAINERS, parse_json

MAX_BODY_BYTES = 2 << 20
OPENING = b'{"prompt": "' + b"[" * (MAX_CONTAINERS + 1)
SHAPES = {
    "escaped quotes of a string without end": lambda n: OPENING + b'\\"' * (n // 2),
    "backslashes of a string without end": lambda n: OPENING + b"\\" * n,
    "quotes": lambda n: OPENING + b'"' * n,
    "short strings": lambda n: b'{"prompt": [' + b'"[",' * (n // 4),
    "strings of escapes": lambda n: b'{"prompt": [' + b'"\\\\[",' * (n // 6),
    "brackets": lambda n: b'{"prompt": ' + b"[" * n,
    "closed brackets": lambda n: b'{"prompt": ' + b"[]," * (n // 3),
    "objects": lambda n: b'{"prompt": ' + b'{"":' * (n // 4),
    "digits": lambda n: b'{"max_tokens": ' + b"9" * n,
    "digits of a fraction": lambda n: b'{"temperature": 0.' + b"0" * n + b"}",
    "an exponent": lambda n: b'{"temperature": 1e' + b"9" * n + b"}",
    "numbers": lambda n: b'{"prompt": [' + b"1," * (n // 2),
    "names": lambda n: b"{" + b",".join(b'"%d":0' % i for i in range(n // 10)) + b"}",
    "one name": lambda n: b"{" + b'"a":0,' * (n // 6) + b'"a":0}',
    "surrogates": lambda n: b'{"prompt": "' + b"\\ud800" * (n // 6),
    "halves of pairs": lambda n: b'{"prompt": "' + b"\\udc00\\ud800" * (n // 12) + b'"}',
    "white space": lambda n: b"{" + b" \n" * (n // 2),
    "no UTF-8 at the end": lambda n: b'{"prompt": "' + b"a" * n + b'\xff"}',
    "words": lambda n: b'{"prompt": ' + b"NaN," * (n // 4),
}


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


def test_containers_are_counted_outside_of_strings(monkeypatch):
    monkeypatch.setattr(openai_request, "MAX_CONTAINERS", 3)
    rng, verdicts = random.Random(0), []
    for _ in range(3000):
        text = json.dumps(random_value(rng))
        outside = re.sub(r'"(?:[^"\\]|\\.)*"', "", text)
        verdicts.append(openai_request._has_many_containers(text.encode()))
        assert verdicts[-1] == (outside.count("[") + outside.count("{") > 3), text
    assert 500 < sum(verdicts) < 2500
