"""A long prompt in chunks computes what one pass computes, in both kinds, with every rotary scaling."""

import json

import pytest

from benchmarks.engine import long_context


def test_a_long_prompt_in_chunks(tmp_path, capsys) -> None:
    file = tmp_path / "rows.json"
    arguments = [
        "--tokens",
        "3000",
        "--chunk",
        "512",
        "--rope",
        *long_context.ROPES,
        "--json",
        str(file),
    ]
    assert long_context.main(arguments) == 0
    rows = json.loads(file.read_text())
    assert {(r["rope"], r["kind"]) for r in rows} == {(r, k) for r in long_context.ROPES for k in ("kv", "hidden")}
    assert all(r["difference"] < 1e-4 < 1.0 < r["largest_logit"] for r in rows)
    assert "pool MiB" in capsys.readouterr().out


@pytest.mark.slow
def test_a_hundred_thousand_tokens() -> None:
    assert long_context.main(["--tokens", "100000"]) == 0
