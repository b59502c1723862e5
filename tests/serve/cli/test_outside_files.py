"""Files from outside that commands read: whatever they hold, they are read rightly or refused in one line."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from apt_jax.errors import ConfigError
from apt_jax.sim.hardware import known_hardware, load_hardware, save_hardware
from apt_jax.sim.sweep import Store
from apt_jax.sim.trace import load_trace
from apt_jax.utils.text_files import read_text
from serve.bench.load import prompts_source
from serve.cli.options import read_api_key

CSV = "prompt_tokens,output_tokens,prompt\n10,5,a\n11,6,b\n"
MODEL, CARD, DEVICES = known_hardware()[0]


def described(directory: Path) -> str:
    path = directory / "card.json"
    save_hardware(load_hardware(MODEL, CARD, DEVICES), path)
    return path.read_text(encoding="utf-8")


READERS: dict[str, Callable[[Path], Any]] = {
    "--trace": load_trace,
    "--prompts": lambda path: prompts_source(str(path), output_len=4),
    "--hardware": lambda path: load_hardware(MODEL, str(path), DEVICES),
    "--store": Store,
    "--json-schema": lambda path: read_text(path, "--json-schema"),
    "--api-key-file": lambda path: read_api_key(str(path)),
}
GOOD: dict[str, Callable[[Path], str]] = {
    "--trace": lambda _: CSV,
    "--prompts": lambda _: '{"prompt": "a"}\n{"prompt": [1, 2]}\n',
    "--hardware": described,
    "--store": lambda _: '{"key": "a", "run": {}}\n',
    "--json-schema": lambda _: "{}",
    "--api-key-file": lambda _: "a-long-enough-key\n",
}
HOSTILE = {
    "empty": b"", "NUL": b"\0" * 40, "bytes": bytes(range(256)), "Latin-1": "prompt_tokens,output_tokens,é\n1,2,é\n".encode("latin-1"),
    "UTF-16 cut off": b"\xff\xfep", "UTF-32": CSV.encode("utf-32"), "nested": b"[" * 100_000, "nested objects": b'{"a":' * 100_000,
    "digits": b"9" * 10_000, "numbers": b"[1e999, NaN, -Infinity]", "a quote": b'"', "damaged gzip": gzip.compress(CSV.encode())[:-9] + b"x" * 12,
    "gzip without end": gzip.compress(CSV.encode())[:-12], "a list": b"[]", "null": b"null", "half a surrogate": b'{"prompt": "\\ud800"}',
    "a text": b'"prompt"', "CSV of others": b"a;b\n1;2\n",
}  # fmt: skip


def outcome(read: Callable[[Path], Any], path: Path) -> str | None:
    """Return what a reader says about a file; None: it has read it."""
    try:
        read(path)
    except ConfigError as error:
        return str(error)
    return None


@pytest.mark.parametrize("flag", READERS)
@pytest.mark.parametrize("name", HOSTILE)
def test_any_content_is_read_or_refused_in_one_line(flag: str, name: str, tmp_path: Path) -> None:
    path = tmp_path / "given.json"
    path.write_bytes(HOSTILE[name])
    says = outcome(READERS[flag], path)
    assert says is None or ("\n" not in says and len(says) < 400 and str(path) in says), says


@pytest.mark.parametrize("flag", READERS)
@pytest.mark.parametrize("path", ["nul\0byte", "x" * 5000, "/proc/self/mem", ".", "/dev/null/x"])
def test_any_path_is_refused_in_one_line(flag: str, path: str) -> None:
    says = outcome(READERS[flag], Path(path) if flag != "--trace" else path)  # type: ignore[arg-type]  # a name or a path
    assert says is not None
    assert "\n" not in says
    assert len(says) < 6000


@pytest.mark.parametrize("flag", [flag for flag in READERS if flag not in ("--store", "--api-key-file")])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
@pytest.mark.parametrize("ends", ["\n", "\r\n", "\r"])
def test_line_ends_and_marks_of_encodings_do_not_matter(flag: str, encoding: str, ends: str, tmp_path: Path) -> None:
    path = tmp_path / "given.json"
    path.write_bytes(GOOD[flag](tmp_path).replace("\n", ends).encode(encoding))
    assert outcome(READERS[flag], path) is None
    if flag == "--trace":
        assert load_trace(path).output_tokens.tolist() == [5, 6]
    if flag == "--prompts":
        assert prompts_source(str(path), output_len=4).prompts == ("a", [1, 2])


TRACES = {
    "a prompt of 200,000 characters": (CSV + f"12,7,{'x' * 200_000}\n", [5, 6, 7]),
    "a prompt of several lines": (CSV + '12,7,"x\ry\n""z"""\n13,8,\n', [5, 6, 7, 8]),
    "further columns that come twice": ("a,prompt_tokens,a,output_tokens\n1,10,1,5\n", [5]),
    "NUL in a prompt": (CSV + "12,7,\0\n", [5, 6, 7]),
    "a column twice": ("prompt_tokens,output_tokens, output_tokens\n1,2,3\n", "'output_tokens' occurs twice"),
    "a quote never closed": (CSV + '12,7,"x\n13,8,y\n', "line 4: not CSV (unexpected end of data)"),
    "text behind a quote": (CSV + '12,7,"x" y\n', "line 4: not CSV"),
    "Latin-1": (b"prompt_tokens,output_tokens,prompt\n10,5,\xe9\n", "line 2 is not UTF-8); save it as UTF-8"),
    "another separator": (CSV.replace(",", ";"), "column 'prompt_tokens' is missing"),
}


@pytest.mark.parametrize("name", TRACES)
def test_traces(name: str, tmp_path: Path) -> None:
    content, expected = TRACES[name]
    path = tmp_path / "trace.csv"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    if isinstance(expected, list):
        assert load_trace(path).output_tokens.tolist() == expected
    else:
        says = outcome(load_trace, path)
        assert says is not None
        assert expected in says
        assert "--trace" in says


def test_line_ends_within_texts_of_json_lines_stay(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    text = "a\u2028b\x85c"
    path.write_text(json.dumps({"prompt": text}, ensure_ascii=False) + "\n", encoding="utf-8")
    assert prompts_source(str(path), output_len=4).prompts == (text,)


def test_runs_that_were_cut_off_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "runs"
    path.write_text('{"key": "a", "run": {"x": 1}}\n[[1]]\n{"key": "b", "run": 3}\n{"key": "c", "ru', encoding="utf-8")
    store = Store(path)
    assert (store.get("a"), store.get("b"), store.get("c")) == ({"x": 1}, None, None)
