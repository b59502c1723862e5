"""`apt-jax policies`."""

import importlib.metadata
import json

from apt_jax.sched import POLICIES, all_policies
from serve.cli import main


def test_every_policy_is_listed_with_its_source(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    assert main(["policies", "--json", str(tmp_path / "policies.json")]) == 0
    out = capsys.readouterr().out
    for name, maker in all_policies().items():
        assert f"{name} " in out
        assert maker.summary in out
        assert maker.source in out
    rows = json.loads((tmp_path / "policies.json").read_text())["policies"]
    assert [row["name"] for row in rows] == list(all_policies())
    assert {row["name"] for row in rows if row["use"] == "serving"} == set(POLICIES)
    assert "violation_decay" in next(row for row in rows if row["name"] == "apt")["options"]


def test_a_policy_of_an_installed_package_is_listed(capsys, monkeypatch):
    group = "apt_jax.scheduling_policies"
    point = importlib.metadata.EntryPoint(name="lottery", value="lottery.policy:Lottery", group=group)
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: importlib.metadata.EntryPoints([point]))
    assert main(["policies", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["policies"]
    assert main(["policies", "--json", "-"]) == 0
    row = json.loads(capsys.readouterr().out)["policies"][-1]
    assert (row["name"], row["use"], row["source"]) == ("lottery", "installed", "lottery.policy:Lottery")
