"""A long prompt in chunks computes what one pass computes, in both kinds, with every rotary scaling."""

import json

import pytest

from benchmarks.engine import long_context


@pytest.mark.in_turn(4, group="whole commands")
@pytest.mark.parametrize(
    ("ropes", "kind"),
    [
        (("llama3",), "kv"),
        (("yarn",), "hidden"),  # keys are rotated again where they are read
        pytest.param(("llama3", "linear", "dynamic"), "hidden", marks=pytest.mark.slow),
        pytest.param(("yarn", "linear", "dynamic"), "kv", marks=pytest.mark.slow),
    ],
)
def test_a_long_prompt_in_chunks(tmp_path, capsys, ropes, kind) -> None:
    file = tmp_path / "rows.json"
    sizes = ("--tokens", "3000", "--chunk", "512")
    assert long_context.main([*sizes, "--rope", *ropes, "--kind", kind, "--json", str(file)]) == 0
    rows = json.loads(file.read_text())
    assert [(r["rope"], r["kind"]) for r in rows] == [(rope, kind) for rope in ropes]
    assert all(r["difference"] < 1e-4 < 1.0 < r["largest_logit"] for r in rows)
    assert "pool MiB" in capsys.readouterr().out


@pytest.mark.slow
def test_a_hundred_thousand_tokens() -> None:
    assert long_context.main(["--tokens", "100000"]) == 0
