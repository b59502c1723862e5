"""Host memory of loading onto several devices, measured in processes of their own."""

import json

import pytest

from benchmarks.engine.sharded_loading import BOUND, FORMATS, main


@pytest.mark.slow
def test_the_host_never_holds_much_more_than_the_largest_tensor(tmp_path):
    assert main(["--gib", "2", "--devices", "4", "--json", str(tmp_path / "rows.json")]) == 0
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [row["format"] for row in rows] == list(FORMATS)
    for row in rows:
        assert row["on_devices_bytes"] >= row["weights_bytes"] > 2e9
        assert 0.25 < row["of_largest"] <= BOUND
