"""`apt-jax whatif` and the arrivals that it records: lengths and shared prefixes are those that were served, and neither
text nor names are in a recording."""

import asyncio
import json
import os

import numpy as np
import pytest

from apt_jax.config import SLO
from apt_jax.request import EngineRequest, RequestMetrics, SamplingParams
from apt_jax.sim.config import SimulationConfig
from apt_jax.sim.hardware import as_description, load_hardware, save_hardware
from apt_jax.sim.simulator import simulate
from apt_jax.sim.trace import load_trace
from serve.cli import main
from serve.http_api import app
from serve.observability import arrivals
from serve.observability.arrivals import BLOCK_TOKENS, ArrivalLog
from serve.security.api_keys import ApiKeys
from tests.support.http_serving import HttpServed, bearer, run

TENANT, OPERATOR = "sk-the-key-of-a-tenant", "sk-the-key-of-an-operator"
CANARY = "canary"
ON = ["--hardware", "a100-40gb", "--model", "opt-13b"]


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def request(tokens: list[int], **fields) -> EngineRequest:
    return EngineRequest(
        request_id="r", prompt=CANARY, prompt_token_ids=np.array(tokens, np.int32), params=SamplingParams(max_tokens=1),
        slo=SLO(), arrival_s=0.0, **fields,
    )  # fmt: skip


def ended(num_tokens: int = 2) -> RequestMetrics:
    return RequestMetrics(arrival_s=1.0, token_times_s=[2.0 + i for i in range(num_tokens)], finished_s=9.0)


def ids(log: ArrivalLog, *requests: EngineRequest) -> list[list[int]]:
    """The digests of requests that end now."""
    number = log.read(None)["number"]
    for one in requests:
        log.add(one, ended())
    return [entry["hash_ids"] for entry in log.read(number)["requests"]]


def test_digests_are_equal_exactly_where_prompts_of_one_owner_begin_alike():
    rng = np.random.default_rng(0)
    for _ in range(30):
        common, size = int(rng.integers(0, 5)), BLOCK_TOKENS
        a, b = (rng.integers(0, 9, size * 5 + 3).tolist() for _ in range(2))
        b = [*a[: common * size], (a[common * size] + 1) % 9, *b[common * size + 1 :]]
        of_a, of_b = ids(ArrivalLog(), request(a), request(b))
        assert len(of_a) == 5
        assert of_a[:common] == of_b[:common]
        assert not set(of_a[common:]) & set(of_b[common:])
    for fields in ({"tenant": "one"}, {"adapter": "x"}, {"cache_salt": "x"}):
        of_a, other = ids(ArrivalLog(), request(a), request(a, **fields))
        assert not set(of_a) & set(other)


def test_digests_depend_on_a_secret_of_the_process():
    tokens = list(range(300))
    assert not set(ids(ArrivalLog(), request(tokens))[0]) & set(ids(ArrivalLog(), request(tokens))[0])


def test_nothing_is_recorded_until_an_operator_asks_nor_a_minute_after_the_last_question():
    clock = Clock()
    log = ArrivalLog(clock)
    log.add(request([1]), ended())
    first = log.read(None)
    assert first == {"number": 0, "requests": [], "lost": 0}
    log.add(request([1]), ended())
    clock.now_s = 59.0
    assert len(log.read(0)["requests"]) == 1
    clock.now_s = 120.0
    log.add(request([1]), ended())
    assert log.read(1)["requests"] == []


def test_sessions_are_numbers_and_do_not_cross_owners():
    log = ArrivalLog()
    log.read(None)
    for tenant, name in (("a", CANARY), ("b", CANARY), ("a", "other"), ("a", CANARY), ("a", None)):
        log.add(request([1], tenant=tenant, session_id=name), ended())
    found = log.read(0)
    assert [one["session"] for one in found["requests"]] == [1, 2, 3, 1, None]
    assert CANARY not in json.dumps(found)


def test_the_log_is_bounded_and_says_what_was_lost(monkeypatch):
    monkeypatch.setattr(arrivals, "_MAX_REQUESTS", 10)
    monkeypatch.setattr(arrivals, "_MAX_DIGESTS", 20)
    monkeypatch.setattr(arrivals, "_MAX_SENT_DIGESTS", 6)
    log = ArrivalLog()
    log.read(None)
    for _ in range(50):
        log.add(request(list(range(4 * BLOCK_TOKENS))), ended())
    found = [log.read(0)]
    while found[-1]["requests"]:
        found.append(log.read(found[-1]["number"]))
    numbers = [one["number"] for answer in found for one in answer["requests"]]
    assert numbers == [46, 47, 48, 49, 50]
    assert [answer["lost"] for answer in found] == [45, 0, 0, 0]


async def served_calls(served: HttpServed, key: str) -> None:
    shared = f"{CANARY} " * 30
    for i in range(12):
        body = {"prompt": f"{shared}{i}", "max_tokens": 3 + i, "ignore_eos": True, "session_id": f"{CANARY}-{i % 3}"}
        response = await served.post("/v1/completions", body, headers=bearer(key))
        assert response.status_code == 200, response.text
        await asyncio.sleep(0.05)


@pytest.mark.parametrize("has_keys", [False, True])
def test_a_recording_is_what_was_served_and_settings_are_simulated_on_it(has_keys, tmp_path, monkeypatch, capfd):
    path, out = tmp_path / "seen.csv", tmp_path / "out.json"
    monkeypatch.setenv("APT_JAX_API_KEY", "")
    keys = tmp_path / "key"
    keys.write_text(OPERATOR)

    async def scenario(served: HttpServed) -> None:
        command = ["whatif", "--target", f"http://127.0.0.1:{served.server.port}", "--duration", "4", "--record", str(path),
                   *ON, "--scheduling-policy", "fcfs,apt-plus", "--max-num-seqs", "1,8", "--slo", "ttft:1000",
                   "--json", str(out), *(["--api-key-file", str(keys)] if has_keys else [])]  # fmt: skip
        recording = asyncio.create_task(asyncio.to_thread(main, command))
        log = served.engine._observer.arrivals  # pyright: ignore[reportOptionalMemberAccess, reportAttributeAccessIssue]
        await served.until(lambda: log._until_s > 0)
        await served_calls(served, TENANT if has_keys else "any")
        assert await recording == 0

    run(scenario, app={"keys": ApiKeys([TENANT], [OPERATOR])} if has_keys else {}, max_model_len=512, num_blocks=1024)
    trace = load_trace(path)
    n = trace.num_requests  # on a busy machine not all calls are made in time
    assert 4 <= n <= 12
    assert trace.output_tokens.tolist() == [3 + i for i in range(n)]
    assert trace.prompt_tokens.tolist() == [len(f"{CANARY} " * 30) + len(str(i)) + 1 for i in range(n)]
    assert trace.hash_ids is not None
    assert all(row.tolist() == trace.hash_ids[0].tolist() for row in trace.hash_ids)
    assert trace.hash_ids[0].size == trace.prompt_tokens[0] // BLOCK_TOKENS
    assert trace.arrival_s is not None
    assert 0.05 * (n - 1) <= trace.arrival_s[-1] <= 4
    for file in tmp_path.glob("seen*"):
        text = file.read_text()
        assert CANARY not in text
        assert str(tmp_path) not in text
    assert [line.split(",")[4] for line in path.read_text().splitlines()[1:5]] == ["1", "2", "3", "1"]
    running = json.loads(path.with_suffix(".running.json").read_text())
    assert (running["policy"], running["num_blocks"], running["max_num_seqs"]) == ("fcfs", 1024, 8)
    settings = {one["setting"]: one for one in json.loads(out.read_text())["settings"]}
    assert list(settings) == ["measured", "fcfs, 8 (as it runs)", "fcfs, 1", "apt-plus, 1", "apt-plus, 8"]
    assert settings["measured"]["num_completed"] == settings["fcfs, 8 (as it runs)"]["num_completed"] == n
    assert settings["measured"]["ttft_s"]["p50"] > 0
    said = capfd.readouterr()
    assert "as it runs" in said.out
    assert "step costs" not in said.err  # a device is named
    # The recording is a trace of the simulator.
    config = SimulationConfig(trace=str(path), policy="fcfs", num_requests=n, hash_block_tokens=64, max_num_seqs=8, max_num_batched_tokens=64, slo=SLO(ttft_s=1.0))  # fmt: skip
    assert simulate(config).summary.ttft_s.p90 == pytest.approx(
        settings["fcfs, 8 (as it runs)"]["ttft_s"]["p90"], abs=1e-6
    )
    # It is simulated again without a server.
    assert main(["whatif", "--record", str(path), *ON, "--slo", "ttft:1000", "--json", str(out)]) == 0
    again = json.loads(out.read_text())["settings"]
    assert [one["setting"] for one in again] == ["measured", "as it runs"]
    assert again[1]["ttft_s"] == settings["fcfs, 8 (as it runs)"]["ttft_s"]


@pytest.mark.parametrize("is_calibrated_later", [False, True])
def test_a_server_without_costs_is_warned_about_before_it_is_recorded(
    is_calibrated_later, tmp_path, monkeypatch, capfd
):
    path = tmp_path / "seen.csv"
    costs = as_description(load_hardware("opt-13b", "h100-80gb")) if is_calibrated_later else None
    told = iter([None, costs])
    monkeypatch.setattr(app, "description", lambda parts: next(told))

    async def scenario(served: HttpServed) -> None:
        command = [
            "whatif",
            "--target",
            f"http://127.0.0.1:{served.server.port}",
            "--duration",
            "3",
            "--record",
            str(path),
        ]
        recording = asyncio.create_task(asyncio.to_thread(main, command))
        said = ""

        def is_recording() -> bool:
            nonlocal said
            said += capfd.readouterr().err
            return "recording http" in said

        await served.until(is_recording)
        assert "has no step costs yet: it is not calibrated until it was idle" in said.partition("recording http")[0]
        await served.post("/v1/completions", {"prompt": "x", "max_tokens": 2})
        assert await recording == (0 if is_calibrated_later else 2)

    run(scenario)
    assert path.exists()
    assert ("the server's step costs are unknown" in capfd.readouterr().err) != is_calibrated_later


def test_only_operators_record(tmp_path, capsys):
    key = tmp_path / "key"
    key.write_text(TENANT)
    path = tmp_path / "seen.csv"

    async def scenario(served: HttpServed) -> None:
        command = ["whatif", "--target", f"http://127.0.0.1:{served.server.port}", "--duration", "1", "--record", str(path),
                   "--api-key-file", str(key)]  # fmt: skip
        assert await asyncio.to_thread(main, command) == 1
        for query in ("?after=-1", "?after=x", "?after=", f"?after={9**30}"):
            response = await served.http.get(f"/arrivals{query}", headers=bearer(OPERATOR))
            assert response.status_code == 400, query

    run(scenario, app={"keys": ApiKeys([TENANT], [OPERATOR])})
    assert "--operator-key-file" in capsys.readouterr().err
    assert not path.exists()


def test_costs_that_a_server_tells_are_those_of_the_simulation(tmp_path):
    """A recording with a description beside it needs no --hardware."""
    path = tmp_path / "seen.csv"
    path.write_text("prompt_tokens,output_tokens,arrival_s,class,hash_ids\n100,5,0,rt,1\n120,6,0.1,rt,1\n")
    hardware = load_hardware("opt-13b", "h100-80gb")
    path.with_suffix(".hardware.json").write_text(json.dumps(as_description(hardware)))
    save_hardware(hardware, tmp_path / "other.json")
    assert json.loads((tmp_path / "other.json").read_text()) == json.loads(
        path.with_suffix(".hardware.json").read_text()
    )
    out = tmp_path / "out.json"
    assert main(["whatif", "--record", str(path), "--json", str(out), "--scheduling-policy", "fcfs"]) == 0
    (usual, fcfs) = json.loads(out.read_text())["settings"]
    assert usual["num_completed"] == fcfs["num_completed"] == 2
    expected = simulate(SimulationConfig(trace=str(path), policy="fcfs", hardware="h100-80gb", hash_block_tokens=64))
    assert fcfs["ttft_s"]["p50"] == pytest.approx(expected.summary.ttft_s.p50, abs=1e-6)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--record", "none.csv"], "no such file; record a server with --target URL"),
        (["--record", "none.txt"], "must end in .csv"),
        (["--target", "127.0.0.1:8000"], "must be an HTTP address"),
        (["--record", "seen.csv"], "the server's step costs are unknown"),
        (["--record", "seen.csv", "--hardware", "h100"], "name the model"),
        (["--record", "seen.csv", "--hardware", "b200", "--model", "opt-13b"], "did you mean h200?"),
        (["--record", "seen.csv", *ON, "--scheduling-policy", "fcsf"], "did you mean fcfs?"),
        (["--record", "seen.csv", *ON, "--cache", "both"], "must be one of kv, hidden, hybrid"),
        (["--record", "seen.csv", *ON, "--retention", "mru"], "mru"),
    ],
)
def test_wrong_input_is_one_line(given, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "seen.csv").write_text("prompt_tokens,output_tokens,arrival_s\n100,5,0\n")
    assert main(["whatif", *given]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert said.count("\n") == 1


def test_a_server_that_is_not_there_or_not_ours_is_named(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["whatif", "--target", "http://127.0.0.1:9", "--duration", "1"]) == 1
    assert "(--target)" in capsys.readouterr().err
    assert not os.listdir(tmp_path)
