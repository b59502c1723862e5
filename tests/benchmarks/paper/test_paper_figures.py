"""The scripts behind the figures of InferMax and BROS run with tiny settings and judge what they find."""

import csv
import dataclasses
import importlib
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import numpy as np
import pytest

from tests.support import sched_world


@pytest.fixture
def script(request: pytest.FixtureRequest) -> ModuleType:
    return importlib.import_module(f"benchmarks.paper.{request.param}")


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.in_turn(4, group="whole commands")
@pytest.mark.parametrize("script", ["infermax"], indirect=True)
def test_infermax_compares_eviction_with_waiting_and_goes_on_from_its_store(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["fig9", "--quick", "--out", str(tmp_path), "--store", str(tmp_path / "runs.jsonl")]
    assert script.main(arguments) == 0
    rows = read(tmp_path / "infermax_fig9.csv")
    assert all(row["evictions"] == "0" for row in rows if row["policy"].endswith("-ef"))
    assert any(row["evictions"] != "0" for row in rows)
    assert {row["num_completed"] for row in rows} == {"16"}
    targets = {row["id"]: row for row in read(tmp_path / "infermax.csv")}
    assert targets["I-45-vllm-100"]["paper"] == "1.9"
    assert targets["I-45-vllm-100"]["verdict"] in ("reproduced", "same direction", "differs")
    assert (tmp_path / "infermax_fig9_linear.png").stat().st_size > 0

    assert "20/20 " in capsys.readouterr().err
    assert script.main(arguments) == 0
    assert "/20 " not in capsys.readouterr().err


@pytest.mark.in_turn(4, group="whole commands")
@pytest.mark.parametrize("script", ["bros"], indirect=True)
def test_bros_beats_first_come_first_served_beside_best_effort_batches(script: ModuleType, tmp_path: Path) -> None:
    common = ["--quick", "--out", str(tmp_path), "--store", str(tmp_path / "runs.jsonl")]
    common += ["--duration", "3", "--be-batch", "16"]
    assert script.main(["fig11", "fig14", *common]) == 0
    rows = read(tmp_path / "bros_fig10_11.csv")
    attained = {
        (row["policy"], f"{row['model']} {row['dataset']} {row['rate']}"): float(row["ttft_attainment"]) for row in rows
    }
    assert {policy for policy, _ in attained} == {"fcfs", "round-robin", "bros"}
    assert all(attained["bros", point] > attained["fcfs", point] for _, point in attained)
    assert all(float(row["be_per_s"]) > 0 for row in rows)
    targets = {row["id"]: row for row in read(tmp_path / "bros.csv")}
    assert targets["B-ttft-share-vllm"]["verdict"] in ("reproduced", "same direction")
    assert targets["B-ovh13"]["paper"] == "9.12 to 9.52"
    share = [float(row["schedule_share_percent"]) for row in read(tmp_path / "bros_fig14.csv")]
    assert all(0 < value < 100 for value in share)
    for name in ("fig11", "fig14"):
        assert (tmp_path / f"bros_{name}.png").stat().st_size > 0


@pytest.mark.parametrize("script", ["bros_runs"], indirect=True)
def test_the_next_best_effort_batch_comes_when_the_one_before_has_ended(
    script: ModuleType,
) -> None:
    class Sizes(script.Feed):
        waiting: ClassVar[list[int]] = []

        def _send_batch(self, now_s: float) -> None:
            self.waiting.append(self._num_be - len(self.be_ended_s))
            super()._send_batch(now_s)

    case = script.Mixed(policy="fcfs", model="opt-13b", dataset="lmsys", rate=1.0, duration_s=10.0, be_batch=8)
    rng = np.random.default_rng(0)
    feed = Sizes(case, script._pick("bros-lmsys", 5, rng), np.linspace(1.0, 10.0, 5), rng)
    feed.run()
    assert len(feed.ended) == 5
    assert len(Sizes.waiting) > 1
    assert not any(Sizes.waiting)


@pytest.mark.in_turn(4, group="whole commands")
@pytest.mark.parametrize("script", ["bros"], indirect=True)
def test_bros_commands_run_and_judge(script: ModuleType, tmp_path: Path) -> None:
    common = ["--quick", "--out", str(tmp_path), "--store", str(tmp_path / "runs.jsonl")]
    common += ["--duration", "1.5", "--be-batch", "8"]
    assert script.main(["fig3", "fig12", *common]) == 0
    targets = {(row["id"], row["variant"]): row for row in read(tmp_path / "bros.csv")}
    assert {"B-fig3-normalised", "B-fig3-queueing", "B-rt-lat", "B-rt-tgi"} <= {name for name, _ in targets}
    preempting = [row for row in read(tmp_path / "bros_fig3.csv") if row["policy"].endswith("-memory")]
    assert {float(row["swap_gib"]) for row in preempting} == {8.0}
    pure = read(tmp_path / "bros_fig12.csv")
    assert {row["policy"] for row in pure} == {"fcfs", "tgi", "bros-recompute"}
    assert all(row["preemptions"] == "0" for row in pure if row["policy"] == "tgi")
    for name in ("fig3", "fig12"):
        assert (tmp_path / f"bros_{name}.png").stat().st_size > 0


@pytest.mark.in_turn(4, group="whole commands")
@pytest.mark.parametrize("script", ["bros_runs"], indirect=True)
def test_memory_of_bros_is_on_off_or_in_between(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    load_hardware = script.load_hardware
    small = {"num_blocks": 700}
    monkeypatch.setattr(script, "load_hardware", lambda *a: dataclasses.replace(load_hardware(*a), **small))
    common = {"model": "opt-13b", "dataset": "share", "rate": 20.0, "duration_s": 2.0, "be_batch": 12}

    def numbers(**memory: Any) -> dict[str, Any]:
        return script.Mixed(policy="bros", **common, **memory).run()

    lazy = numbers(swap_gib=8.0, share_blocks=True)
    at_once = numbers(swap_gib=8.0, share_blocks=True, is_lazy=False)
    whole, none = numbers(swap_gib=8.0), numbers()
    assert 0 < lazy["saved_slots"] < at_once["saved_slots"]
    assert lazy["loaded_slots"] > 0
    assert whole["saved_slots"] == none["saved_slots"] == none["saved_blocks"] == 0
    assert whole["loaded_blocks"] > 0
    assert none["recomputed_tokens"] > 2 * whole["recomputed_tokens"]


@pytest.mark.parametrize("script", ["bros"], indirect=True)
def test_points_of_bros_are_the_papers_when_asked(script: ModuleType, tmp_path: Path) -> None:
    def points(num: int) -> list[tuple[str, float]]:
        options = script.Options(
            out=tmp_path,
            store=None,
            workers=1,
            quick=False,
            duration_s=600.0,
            be_batch=256,
            max_num_seqs=None,
            num_points=num,
            num_seeds=1,
            swap_gib=4.0,
            overhead_s=0.0,
        )
        return options.points

    assert [len(points(n)) for n in (2, 9, 15)] == [2, 9, 15]
    assert set(points(2)) < set(points(9)) < set(points(15))
    assert max(rate for _, rate in points(9)) == 15.0


@pytest.mark.parametrize("script", ["bros_runs"], indirect=True)
def test_queueing_is_what_is_left_of_the_latency(script: ModuleType) -> None:
    """A request alone is in every step of its life; of two that do not fit together the later one waits."""
    rng = np.random.default_rng(0)
    case = script.Mixed(policy="fcfs", model="opt-13b", dataset="share", rate=1.0, be_batch=0, max_num_seqs=1)
    trace = script._pick("bros-sharegpt", 2, rng)
    feed = script.Feed(case, trace, np.array([0.0, 0.0]), rng)
    feed.run()
    waits = [1 - s / (m.finished_s - m.arrival_s) for s, m in zip(feed.served_s, feed.ended, strict=True)]
    first, second = feed.ended
    assert waits[0] == pytest.approx(0.0, abs=1e-6)
    assert waits[1] == pytest.approx(first.finished_s / second.finished_s, abs=1e-6)


@pytest.mark.parametrize("script", ["longest_wait"], indirect=True)
def test_who_has_waited_longest_goes_first_and_may_preempt(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:

    def world(quantum_had: int) -> tuple[Any, list[int], int]:
        world = sched_world.World(num_blocks=18, mode="kv")
        # 6 blocks each, 8 with the next position.
        held = [world.hold(world.add(12), sched_world.KV) for _ in range(2)]
        world.table.tokens_since_preemption[held] = quantum_had
        world.now_s = 1.0
        world.table.last_token_s[held] = [0.8, 0.9]
        return world, held, world.add(12, arrival_s=0.2)

    policy = script.LongestWaitPolicy(quantum=8)
    state, held, new = world(8)
    plan = state.schedule(policy)
    assert (plan.rows.tolist(), plan.preempt.tolist()) == ([new], held[1:])
    state, held, new = world(7)
    assert state.schedule(policy).rows.tolist() == held


@pytest.mark.in_turn(4, group="whole commands")
@pytest.mark.parametrize("script", ["infermax"], indirect=True)
def test_infermax_commands_run_and_judge(script: ModuleType, tmp_path: Path) -> None:
    common = ["--quick", "--out", str(tmp_path), "--store", str(tmp_path / "runs.jsonl")]
    common += ["--profiles", str(tmp_path / "nowhere")]
    assert script.main(["fig3", "fig4", "fig6", "sorting", *common]) == 0
    targets = {row["id"]: row for row in read(tmp_path / "infermax.csv")}
    assert targets["I-42-evict"]["verdict"] == targets["I-42-vllm"]["verdict"] == "reproduced"
    assert "I-r2-decode" not in targets
    assert targets["I-abs-sim"]["paper"] == "1.4"
    assert {row["policy"] for row in read(tmp_path / "infermax_sorting.csv")} >= {"sorting", "fcfs"}
    assert (tmp_path / "infermax_fig6_linear.png").stat().st_size > 0


@pytest.mark.parametrize("script", ["infermax"], indirect=True)
def test_lines_that_fit_have_an_r2_of_one(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = [(float(n), 2.0 + 0.5 * n) for n in (1, 2, 5, 9)]
    bent = [(float(n), float(n**4)) for n in range(9)]
    parts = {"layer": line, "decode attention": line, "prefill attention": bent}
    monkeypatch.setattr(script, "_operators", lambda directory: parts)
    assert script.main(["fig3", "--out", str(tmp_path)]) == 0
    found = {row["id"]: float(row["ours"]) for row in read(tmp_path / "infermax.csv")}
    assert found["I-r2-nonattn"] == found["I-r2-decode"] == 1.0
    assert found["I-r2-prefill"] < 0.9


@pytest.mark.parametrize("script", ["infermax"], indirect=True)
def test_statements_about_memory_count_the_runs_that_they_are_about(script: ModuleType) -> None:
    def run(policy: str, prompt: int, output: int, use: float) -> tuple[Any, dict[str, Any]]:
        return script.Offline(policy=policy, prompt=prompt, output=output), {"memory_use": use}

    runs = [run("fcfs", 1024, 1, 0.0), run("sarathi", 1024, 1, 0.1), run("sarathi-pc", 1024, 1, 0.1)]
    runs += [run("fcfs", 1, 1024, 0.91), run("sarathi", 256, 1024, 0.89), run("sarathi", 256, 32, 0.2)]
    found = {row["id"]: (row["ours"], row["unit"]) for row in script.memory_claims("linear", runs)}
    assert found == {"I-43-kv": ("2", "of 3 cases"), "I-43-full": ("1", "of 2 cases")}
    assert script.memory_claims("linear", [run("fcfs", 256, 32, 0.5)]) == []


@pytest.mark.parametrize("script", ["infermax"], indirect=True)
def test_tpot_rises_with_input_and_memory_where_it_does(script: ModuleType) -> None:
    tpot_s = {(100, 1): 9.0, (100_000, 1): 1.0, (100_000, 16): 3.0, (100_000, 64): 2.0}
    tpot_s |= {(1_000_000, 1): 1.0, (1_000_000, 16): 4.0, (1_000_000, 64): 5.0}
    found = {row["id"]: (row["ours"], row["unit"]) for row in script.tpot_claims("linear", tpot_s)}
    assert found == {"I-45-tpot-i": ("3", "of 4 cases"), "I-45-tpot-m": ("3", "of 3 cases")}
    assert script.tpot_claims("linear", {(100, 1): 9.0}) == []


@pytest.mark.parametrize("script", ["infermax_fig15"], indirect=True)
def test_what_evictions_save_is_set_beside_the_paper(script: ModuleType) -> None:
    def row(prompt: int, evictions: int, saved: float, over_fcfs: float) -> dict[str, Any]:
        return {
            "costs": "linear",
            "prompt_tokens": prompt,
            "evictions": evictions,
            "saved_by_eviction": saved,
            "saved_over_fcfs": over_fcfs,
        }

    rows = [row(1, 4, 0.17, 0.0), row(32, 2, 0.05, 0.0), row(64, 2, 0.3, 0.5), row(1024, 0, 0.0, 0.39)]
    short, long = script.target_rows(rows)
    assert (short["id"], short["ours"], short["dataset"], short["verdict"]) == ("I-51-short", "17", "I=1", "reproduced")
    assert (long["id"], long["ours"], long["dataset"], long["verdict"]) == ("I-51-long", "39", "I=1024", "reproduced")


@pytest.mark.parametrize("script", ["infermax"], indirect=True)
def test_a_term_a_prefill_request_makes_refills_dearer(script: ModuleType) -> None:
    def latency(costs: str, num: int) -> float:
        case = script.Offline(policy="fcfs", num_requests=num, prompt=4, output=2, costs=costs)
        return case.run()["latency_s"]

    added = [latency("per-prefill", n) - latency("per-prefill", 1) for n in (9, 17)]
    linear = [latency("linear", n) - latency("linear", 1) for n in (9, 17)]
    assert added[0] - linear[0] == pytest.approx(8 * 1.5e-3, rel=0.05)
    assert added[1] - linear[1] == pytest.approx(16 * 1.5e-3, rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("script", ["infermax"], indirect=True)
def test_infermax_on_the_engine_itself(script: ModuleType, tmp_path: Path) -> None:
    common = ["--quick", "--out", str(tmp_path), "--store", str(tmp_path / "runs.jsonl")]
    assert script.main(["fig13", "fig14", *common]) == 0
    rows = read(tmp_path / "infermax_fig13.csv")
    assert {row["num_completed"] for row in rows} == {"8"}
    assert all(float(row["device_s"]) > 0 < float(row["host_s"]) for row in rows)
    targets = {row["id"] for row in read(tmp_path / "infermax.csv")}
    assert {"I-err-max", "I-err-avg", "I-45-real-100"} <= targets
    twins = [row for row in read(tmp_path / "infermax_fig14.csv") if row["policy"].endswith("-ef")]
    assert twins
    assert all(row["evictions"] == "0" for row in twins)
