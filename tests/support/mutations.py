"""Changes to files: of bytes, of JSON documents, of lengths in binary formats."""

import json
import random
from typing import Any

_NUMBERS = [0, 1, 7, 2**15, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 1]
_TOKENS = [b"0", b"9" * 30, b"-1", b"1e999", b"NaN", b"null", b"true", b"[]", b"{}", b'""', b'"', b"\\u0000", b"\\ud800", b",", b":", b"[" * 2000, b"\xff", b"\0", b"../", b"/etc/passwd"]  # fmt: skip
_VALUES: list[Any] = [
    None, True, False, 0, -1, 1, 2, 3, 5, 255, 2**31, 2**32, 2**63, 2**70, -(2**63), 0.5, -0.0, 1e-320, 1e308, float("inf"), float("nan"), "", " ", "a", "\0", "\ud800",
    "é" * 50, "x" * 70_000, "../../etc/passwd", "/etc/passwd", "..", "<s>", "▁", "BPE", "Unigram", "WordPiece", "F32", "float16", [], [None], [[]], [0], ["a"], ["a", "b"], list(range(40)),
    {}, {"type": "x"}, {"a": {}}, {"": 0},
]  # fmt: skip


def _paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path]
    items = value.items() if isinstance(value, dict) else enumerate(value[:200]) if isinstance(value, list) else ()
    for key, inner in items:
        found += _paths(inner, (*path, key))
    return found


def _one_json_change(rng: random.Random, value: Any) -> Any:
    # Half of the time near the top, where structure is, not in a long vocabulary.
    paths = _paths(value)
    if rng.random() < 0.6:
        paths = [path for path in paths if len(path) <= 3] or paths
    path = rng.choice(paths)
    if not path:
        return rng.choice(_VALUES) if rng.random() < 0.1 else value
    holder = value
    for key in path[:-1]:
        holder = holder[key]
    key, kind = path[-1], rng.randrange(8)
    if kind <= 2:
        holder[key] = rng.choice(_VALUES)
    elif kind == 3:
        del holder[key]
    elif kind == 4 and isinstance(holder, dict):
        holder[rng.choice(["x", "", "type", "version", *map(str, holder)])] = holder[key]
    elif kind == 4:
        holder.append(holder[key])
    elif kind == 5 and isinstance(holder[key], int | float):
        number = holder[key]
        holder[key] = rng.choice([-number, number + 1, number - 1, number * 1000, str(number), [number], float(number)])
    elif kind == 5 and isinstance(holder[key], str):
        text = holder[key]
        holder[key] = rng.choice([text[:-1], text + "x", text * 300, text.upper(), "", [text], len(text)])
    elif kind == 6:
        other = rng.choice(paths)
        taken = value
        for step in other:
            taken = taken[step]
        holder[key] = json.loads(json.dumps(taken))
    else:
        nested = holder[key]
        for _ in range(rng.choice([1, 3, 200, 3000])):
            nested = [nested] if rng.random() < 0.5 else {"a": nested}
        holder[key] = nested
    return value


def mutate_json(rng: random.Random, data: bytes) -> bytes:
    """A document with other values in some places, keys gone, doubled or nested."""
    value = json.loads(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        try:
            value = _one_json_change(rng, value)
            text = json.dumps(value)
        except (RecursionError, AttributeError, TypeError, IndexError, KeyError):  # the last change took the place away
            continue
    try:
        text = json.dumps(value)
    except (RecursionError, ValueError):
        return b"[" * 5000
    if rng.random() < 0.05 and text.startswith("{") and len(text) > 2:
        key = text[1:].split(":", 1)[0]
        text = "{" + key + ": 0, " + text[1:]  # the key twice
    return text.encode()


def mutate_bytes(rng: random.Random, data: bytes, most: int) -> bytes:
    """Bits, lengths, insertions, deletions, doubled and cut parts; mostly within the first `most` bytes."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 6))):
        size = len(changed) or 1
        at = rng.randrange(min(most, size) if rng.random() < 0.8 else size)
        kind = rng.randrange(8)
        if kind == 0 and changed:
            changed[min(at, len(changed) - 1)] ^= 1 << rng.randrange(8)
        elif kind == 1:
            width = rng.choice((1, 2, 4, 8))
            changed[at : at + width] = (rng.choice(_NUMBERS) % (1 << 8 * width)).to_bytes(width, "little")
        elif kind == 2:
            del changed[at : at + rng.randrange(1, 40)]
        elif kind == 3:
            changed[at:at] = rng.randbytes(rng.randrange(1, 40))
        elif kind == 4:
            token = rng.choice(_TOKENS)
            changed[at : at + rng.choice((0, 1, len(token)))] = token
        elif kind == 5:
            part = changed[at : at + rng.randrange(1, 200)]
            changed[at:at] = part * rng.choice((1, 2, 50))
        elif kind == 6 and changed:
            changed[min(at, len(changed) - 1)] = rng.choice(b'0123456789-{}[]",: \n\0')
        elif kind == 7 and rng.random() < 0.3:
            del changed[at:]
    return bytes(changed)


_PARTS = [
    "{{", "}}", "{%", "%}", "{#", "#}", "{% endfor %}", "{% endif %}", "{% else %}", "{% if true %}", "{{ messages }}", "{{ x.y.z }}", "{{ messages[99].content }}", "{{ none + 1 }}",
    "{% for i in range(10**9) %}x{% endfor %}", "{{ 'a' * 10**9 }}", "{{ ('a' * 10**6) * 50 }}", "{% for a in range(999) %}{% for b in range(999) %}{% for c in range(999) %}{% endfor %}{% endfor %}{% endfor %}",
    "{{ ''.__class__.__mro__ }}", "{{ raise_exception('x\\ny') }}", "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "{% include '/etc/passwd' %}", "{% import 'os' as os %}", "{{ 10 ** 10 ** 8 }}",
    "{% set ns = namespace(x=messages) %}", "{{ '%999999999d' % 1 }}", "{{ 'a'.join(['b'] * 10**8) }}", "{{ '\ud800' }}", "\x00", "{{ range(10**12) | list }}", "{{ messages | tojson(indent=10**8) }}", "{{ '{:>999999999}'.format('a') }}",
    "{{ strftime_now('%Y' * 10**7) }}", "{{ messages | map(attribute='content') | join }}", "{{ " + "(" * 500, "{{ " + "-" * 3000 + "1 }}", "{% break %}", "{{ '(a+)+$' }}", "{{ lipsum(n=10**5) }}", "{{ cycler }}", "{{ self }}", "{{ ((((1.e999)))) }}",
]  # fmt: skip


def mutate_template(rng: random.Random, data: bytes) -> bytes:
    """A Jinja template with parts gone, moved, or put in."""
    text = data.decode()
    for _ in range(rng.choice((1, 1, 2))):
        at, other = (rng.randrange(len(text) + 1) for _ in range(2))
        # Mostly between statements, where another one can stand.
        if rng.random() < 0.8:
            at = max(text.find("%}", at) + 2, 0) if "%}" in text[at:] else len(text)
        kind = rng.randrange(5)
        if kind == 0:
            text = text[:at] + text[at + rng.randrange(1, 30) :]
        elif kind == 1:
            text = text[:at] + text[other : other + rng.randrange(1, 60)] + text[at:]
        else:
            text = text[:at] + rng.choice(_PARTS) + text[at:]
    return text.encode("utf-8", "surrogatepass")


def mutate(rng: random.Random, name: str, data: bytes) -> bytes:
    """A file of this name with changes that its format invites."""
    if name.endswith(".json") and rng.random() < 0.7:
        return mutate_json(rng, data)
    if name.endswith(".jinja") and rng.random() < 0.95:
        return mutate_template(rng, data)
    header = 4000
    if name.endswith(".safetensors"):
        header = 8 + int.from_bytes(data[:8], "little")
        if rng.random() < 0.4:
            text = mutate_json(rng, data[8:header])
            return len(text).to_bytes(8, "little") + text + data[header:]
    return mutate_bytes(rng, data, header)
