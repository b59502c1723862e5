"""Policies from outside the package: how they are named, found and refused."""

import dataclasses
import importlib
import itertools
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

import apt_jax.sched.step_packer
from apt_jax.config import SchedulerConfig
from apt_jax.errors import ConfigError
from apt_jax.lab.recording import difference, run_recorded, run_replayed
from apt_jax.sched import (
    ENTRY_POINTS,
    INTERFACE_VERSION,
    AptPolicy,
    CacheKindSpec,
    FcfsPolicy,
    Plan,
    RequestTable,
    SchedulerView,
    StepCosts,
    UnifiedPolicy,
    all_policies,
    check_policy,
    make_policy,
    policy_digest,
)
from apt_jax.sched.policies.unified import First
from apt_jax.sim.config import SimulationConfig
from apt_jax.sim.hardware import load_hardware
from apt_jax.sim.simulator import simulate
from apt_jax.sim.sweep import Store, run_key, sweep
from serve.cli import main
from tests.support import outside_policies
from tests.support.cases import num_cases
from tests.support.sched_world import Arrival, World, drain

DOCS = Path(__file__).parents[3] / "docs"
LATEST = "tests.support.outside_policies:Latest"
QUICK = SimulationConfig(trace="humaneval", num_requests=10, rate=4.0)

COUNTING = '''
"""A policy in a file of its own."""
from apt_jax.sched import FcfsPolicy

class Counting:
    name = "counting"
    interface_version = {version}

    def schedule(self, view):
        {what}
        return FcfsPolicy().schedule(view)
'''


@pytest.fixture
def module(tmp_path, monkeypatch):
    """`module(text)` writes a module to the current directory, where nothing of it is imported, and returns its
    name."""
    names = (f"policy_{tmp_path.name.replace('-', '_')}_{i}" for i in itertools.count())
    written = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def write(text: str, name: str | None = None) -> str:
        name = next(names) if name is None else name
        Path(f"{name}.py").write_text(text)
        written.append(name)
        return name

    yield write
    for name in written:
        sys.modules.pop(name, None)


def counting(what: str = "pass") -> str:
    return COUNTING.format(version=INTERFACE_VERSION, what=what)


# --- names and options ---------------------------------------------------------------------------------------------


def test_a_class_by_its_module():
    policy = make_policy(LATEST, SchedulerConfig(), seed=7)
    assert isinstance(policy, outside_policies.Latest)
    assert (policy.name, policy.seed, policy.most) == ("latest", 7, None)
    assert make_policy(config=SchedulerConfig(policy=LATEST)).name == "latest"


def test_a_file_in_the_current_directory(module):
    name = module(counting())
    assert make_policy(f"{name}:Counting").name == "counting"


def test_an_installed_package(tmp_path, monkeypatch):
    def install(name: str, *points: str) -> None:
        """Write the metadata that installing a package leaves on the import path."""
        place = tmp_path / f"{name}-1.0.dist-info"
        place.mkdir()
        (place / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (place / "entry_points.txt").write_text("\n".join([f"[{ENTRY_POINTS}]", *points]) + "\n")

    old = "old = outside_policies:OtherVersion"
    install("some", f"latest = {LATEST}", f"fcfs = {LATEST}", f"both = {LATEST}", old)
    install("other", "both = outside_policies:Broken")
    monkeypatch.syspath_prepend(tmp_path)
    assert isinstance(make_policy("latest?most=3"), outside_policies.Latest)
    assert make_policy("fcfs").name == "fcfs"  # nobody replaces a bundled one
    with pytest.raises(ConfigError, match=r"several packages.*outside_policies:Broken"):
        make_policy("both")
    with pytest.raises(ConfigError, match=r"policy='old' \(outside_policies:OtherVersion\)"):
        make_policy("old")
    with pytest.raises(ConfigError, match="did you mean latest"):
        make_policy("lates")


def test_options_reach_bundled_policies():
    policy = make_policy("apt?violation_decay=0.4")
    assert isinstance(policy, AptPolicy)
    assert policy.violation_decay == 0.4
    policy = make_policy("apt?prefill_memory=held&count_violated=false&keep_kind=true")
    assert isinstance(policy, AptPolicy)
    assert (policy.prefill_memory, policy.count_violated, policy.keep_kind) == ("held", False, True)
    policy = make_policy("sarathi-ef?prefill_tokens=64&chunked=false&first=nobody")
    assert isinstance(policy, UnifiedPolicy)
    assert (policy.name, policy.prefill_tokens, policy.chunked, policy.first, policy.reserve) == (
        "sarathi-ef", 64, False, "nobody", "all",
    )  # fmt: skip


def test_options_reach_policies_from_outside():
    policy = make_policy(f"{LATEST}?most=5&first=b&seed=9", seed=1)
    assert isinstance(policy, outside_policies.Latest)
    assert (policy.most, policy.first, policy.seed) == (5, "b", 9)
    policy = make_policy(f"{LATEST}?most=none")
    assert isinstance(policy, outside_policies.Latest)
    assert policy.most is None


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("apt?violation_decay", "'violation_decay' is not option=value"),
        ("apt?", "'' is not option=value"),
        ("apt?violation_decay=0.4&violation_decay=0.5", "violation_decay is given twice"),
        ("apt?violation_decay=0,4", "violation_decay='0,4' is not a number"),
        ("apt?violation_decay=nan", "violation_decay='nan' is not a number"),
        ("apt?violation_decay=7", "must lie in [0, 1]"),
        ("apt?decay=1", "no option 'decay'; it has the options "),
        ("apt?violation_deca=1", "did you mean violation_decay?"),
        ("tests.support.outside_policies:NoName?x=1", "no option 'x'; it has no options"),
        ("sarathi?prefill_tokens=0", "cannot be built: prefill_tokens=0 must be at least 1"),
        ("sarathi?name=x", "no option 'name'; it has the options first"),
        ("sarathi?first=me", f"first='me' must be one of {', '.join(get_args(First))}"),
        ("sarathi?chunked=1", "chunked='1' is not true or false"),
        ("sarathi?prefill_tokens=1.5", "prefill_tokens='1.5' is not an integer"),
        ("tests.support.outside_policies:WithFunction?order=int", "order='int' cannot be given as text"),
        (f"{LATEST}?most=many", "most='many' is not an integer or none"),
        ("no_such_module:Class", "cannot be imported: ModuleNotFoundError: No module named 'no_such_module'"),
        ("tests.support.outside_policies:Lates", "outside_policies has no 'Lates'; did you mean Latest?"),
        ("tests.support.outside_policies:not_a_class", "is not a class but Latest"),
        ("tests.support.outside_policies:NoVersion", f"this apt-jax has `interface_version = {INTERFACE_VERSION}`"),
        (
            "tests.support.outside_policies:OtherVersion",
            f"interface_version {INTERFACE_VERSION + 1}; this apt-jax has {INTERFACE_VERSION}",
        ),
        ("tests.support.outside_policies:NoSchedule", "has no method schedule(view)"),
        ("tests.support.outside_policies:NoName", "has no `name`"),
        (
            "tests.support.outside_policies:CannotBeMade",
            "cannot be built: OSError: a file is missing (outside_policies.py, line",
        ),
        ("tests.support.outside_policies:", "is not package.module:Class"),
        (":Class", "is not package.module:Class"),
        ("..x:Class", "is not package.module:Class"),
        ("../my_policy:Class", "is not package.module:Class; the module is searched for"),
        ("my_policy.py:Class", "did you mean my_policy:Class?"),
        ("numpy.no_such:Class", "No module named 'numpy.no_such'; it is searched for on Python's path and in "),
        (
            "apt?violation_decay=-1",
            "policy='apt?violation_decay=-1' cannot be built: violation_decay=-1.0 must lie in [0, 1] (--scheduling-policy)",
        ),
        ("__main__:MyPolicy", "has no 'MyPolicy': other processes do not see classes defined in a notebook"),
        ("latest", "others are package.module:Class"),
        ("", "is unknown; `apt-jax policies` lists all"),
        ("x" * 10_000, "is unknown; `apt-jax policies` lists all"),
    ],
)
def test_a_wrong_name_is_one_line(name, message):
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        make_policy(name)
    text = str(caught.value)
    assert "\n" not in text
    assert len(text) < 1000
    assert "--scheduling-policy" in text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1 / 0", r"ZeroDivisionError: division by zero \(.*\.py, line 1\)"),
        ("import no_such_thing", r"No module named 'no_such_thing' \(.*\.py, line 1\)"),
        ("def broken(:", "SyntaxError"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("raise ValueError('a\\nb')", "ValueError: a b"),
    ],
)
def test_a_module_that_fails_is_one_line(module, text, message):
    name = module(text)
    with pytest.raises(ConfigError, match=f"cannot be imported: .*{message}") as caught:
        check_policy(f"{name}:X")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "command",
    [
        ("serve", "tiny-opt"),
        ("generate", "tiny-opt", "hi"),
        ("info", "tiny-opt"),
        ("launch", "tiny-opt"),
        ("simulate", "--rate", "2"),
    ],
)
@pytest.mark.parametrize("policy", ["tests.support.outside_policies:OtherVersion", "no_such_module:Class", "fcfs?x=1"])
def test_every_command_says_so_at_once(command, policy, capsys):
    assert main([*command, "--scheduling-policy", policy]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"apt-jax {command[0]}: policy=")
    assert len(error.strip().splitlines()) == 1


# --- simulations ---------------------------------------------------------------------------------------------------


def test_a_list_of_policies_in_spawned_processes(module, capsys):
    name = module(counting())
    args = ["simulate", "--trace", "humaneval", "--num-requests", "8", "--rate", "4", "--workers", "2", "--json", "out.json",
            "--scheduling-policy", f"fcfs,{name}:Counting,apt?violation_decay=0.4"]  # fmt: skip
    assert main(args) == 0
    runs = json.loads(Path("out.json").read_text())["runs"]
    assert [r["config"]["policy"] for r in runs] == ["fcfs", f"{name}:Counting", "apt?violation_decay=0.4"]
    assert runs[0]["ttft_s"] == runs[1]["ttft_s"]
    assert [r["fallback_iterations"] for r in runs] == [0, 0, 0]
    assert "fcfs scheduled" not in capsys.readouterr().out


def test_the_key_of_a_run_follows_the_source(module):
    name = module(counting())
    config = dataclasses.replace(QUICK, policy=f"{name}:Counting")
    store = Store(Path("runs.jsonl"))
    (first,) = sweep([config], store=store, workers=1)
    assert first["fallback_iterations"] == 0
    key = run_key(config)
    assert sweep([config], store=Store(Path("runs.jsonl")), workers=1) == [first]
    Path(f"{name}.py").write_text(counting("raise KeyError('changed')"))
    assert run_key(config) != key
    (second,) = sweep([config], store=store, workers=1)  # it is the changed file that runs
    assert second["fallback_iterations"] > 10
    assert second["ttft_s"] == first["ttft_s"]  # fcfs either way
    Path(f"{name}.py").write_text(counting())
    assert run_key(config) == key


def test_base_classes_count_as_source(module):
    base = module(counting())
    name = module(f"import {base}\n\nclass Mine({base}.Counting):\n    pass\n")
    digest = policy_digest(f"{name}:Mine")
    assert digest is not None
    Path(f"{base}.py").write_text(counting("x = 1"))
    assert policy_digest(f"{name}:Mine") != digest
    assert policy_digest("fcfs") is policy_digest("apt?violation_decay=0.4") is None


def test_a_policy_that_fails_is_seen_in_a_simulation(capsys, caplog):
    args = [
        "simulate",
        "--trace",
        "humaneval",
        "--num-requests",
        "8",
        "--rate",
        "4",
        "--workers",
        "1",
    ]
    broken = "tests.support.outside_policies:Broken?every=2"
    assert main([*args, "--scheduling-policy", broken]) == 0
    assert "iterations scheduled by fcfs" in capsys.readouterr().out
    assert main([*args, "--scheduling-policy", f"fcfs,{broken}"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert re.search(r"Broken\?every=2 failed in \d+ of \d+ iterations", out)
    assert "policy broken failed" in caplog.text


def test_starts_of_an_optimal_schedule(tmp_path, capsys):
    path = tmp_path / "lengths.csv"
    path.write_text("prompt_tokens,output_tokens\n8,3\n6,2\n")
    flags = ["optimal", "--requests", str(path), "--capacity-tokens", "40"]
    assert main([*flags, "--start", f"fcfs,{LATEST}?most=1"]) == 0
    assert f"{LATEST}?most=1" in capsys.readouterr().out
    for start, message in (
        ("tests.support.outside_policies:NoVersion", "interface_version"),
        ("tests.support.outside_policies:Broken", "broken failed: ZeroDivisionError: no reason"),
        ("tests.support.outside_policies:Broken?promise=row twice", "broken failed: PlanError: a row occurs twice"),
        (
            "tests.support.outside_policies:Broken?promise=writes to the table",
            "ValueError: assignment destination is read-only",
        ),
        ("tests.support.outside_policies:Broken?promise=nothing is run", "leaves 2 requests waiting"),
    ):
        assert main([*flags, "--start", start]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert "--start" in error
        assert len(error.splitlines()) == 1


def test_recorded_and_replayed():
    """A run with a policy from outside makes the same decisions again."""
    from apt_jax.sim.executor import SimulatedExecutor
    from apt_jax.sim.trace import load_trace
    from apt_jax.sim.workload import sample_workload
    from apt_jax.utils.clock import VirtualClock

    config = dataclasses.replace(QUICK, policy=f"{LATEST}?most=2", cache="kv", max_num_seqs=8)
    hardware = dataclasses.replace(load_hardware("opt-13b", "a100-40gb"), num_blocks=400)
    workload = sample_workload(load_trace("humaneval").scale_outputs(0.3), config)
    executor = SimulatedExecutor(
        VirtualClock(), lambda batch: 0.01, num_blocks=400, block_size=hardware.block_size, max_num_seqs=8
    )  # fmt: skip
    recorded = run_recorded(config, hardware, workload, executor)
    assert difference(recorded, run_replayed(config, hardware, workload, recorded)) is None
    fcfs = run_recorded(dataclasses.replace(config, policy="fcfs"), hardware, workload, executor)
    assert difference(recorded, fcfs) is not None


# --- the tutorial --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tutorial() -> str:
    return (DOCS / "writing_a_policy.md").read_text()


@pytest.fixture
def my_policy(tutorial, module) -> str:
    """The policy of the page, in a file as the page says."""
    code, _ = _programs(tutorial)
    return f"{module(code, 'my_policy')}:ShortestFirst"


def _programs(tutorial: str) -> tuple[str, str]:
    """The policy of the page, and its test."""
    policy, test = re.findall(r"```python\n(.*?)```", tutorial, re.DOTALL)
    return policy, test


@pytest.mark.seeds
def test_the_policy_of_the_tutorial_serves_everything(my_policy):
    for seed, mode in itertools.product(range(num_cases(3, 12)), ("kv", "hidden", "hybrid")):
        rng = np.random.default_rng(seed)
        arrivals = [
            Arrival(
                at_step=int(rng.integers(0, 40)),
                prompt_len=int(rng.integers(1, 60)),
                max_tokens=int(rng.integers(1, 40)),
            )
            for _ in range(int(rng.integers(1, 25)))
        ]
        longest = max(a.prompt_len + a.max_tokens for a in arrivals)
        world = World(
            num_blocks=int(2 * -(-longest // 4) * rng.choice([1.0, 1.3, 4.0])),
            mode=mode,
            max_num_seqs=int(rng.choice([1, 4, 16])),
            max_num_batched_tokens=16 + int(rng.choice([0, 8, 64])),
        )
        limit = 40 + 2 * sum(-(-a.prompt_len // 16) + a.max_tokens for a in arrivals)
        drain(world, make_policy(my_policy), arrivals, limit=limit)


def test_the_policy_of_the_tutorial_is_shortest_first(my_policy):
    world = World(num_blocks=1000)
    for length in (30, 10, 20):
        world.add(length)
    plan = world.schedule(make_policy(my_policy))
    assert world.table.prompt_len[plan.rows].tolist() == [10, 20, 30]
    result = simulate(dataclasses.replace(QUICK, policy=my_policy))
    assert result.fallback_iterations == 0
    assert result.summary.num_completed == 10


@pytest.mark.usefixtures("my_policy")
def test_the_test_of_the_tutorial_passes_and_notices_another_policy(tutorial, module, tmp_path, monkeypatch):
    sys.path.insert(0, str(tmp_path))
    run = importlib.import_module(module(_programs(tutorial)[1], "test_my_policy"))
    run.test_the_shortest_prompt_first()
    monkeypatch.setattr(run, "ShortestFirst", FcfsPolicy)
    with pytest.raises(AssertionError):
        run.test_the_shortest_prompt_first()


def test_the_commands_of_the_tutorial_run(tutorial, my_policy, capsys):
    """Simulations with few requests; a server is given a flag that stops it after the policy was found."""
    commands = re.findall(r"^apt-jax (.*my_policy.*)$", tutorial, re.MULTILINE)
    assert {c.split()[0] for c in commands} == {"simulate", "serve"}
    for command in commands:
        args = shlex.split(command)
        few = ["--trace", "humaneval", "--num-requests", "5", "--workers", "1", "--seeds", "1"]
        if args[0] == "simulate":
            assert main([*args, *few]) == 0
        else:
            assert main([*args, "--max-num-seqs", "0"]) == 2
            assert "--max-num-seqs" in capsys.readouterr().err


def test_the_tutorial_names_everything(tutorial):
    """Columns, fields and functions of the interface."""
    named = set(re.findall(r"`(\w+)[^`]*`", tutorial))
    columns = set(RequestTable.COLUMNS) | {"output_lengths", "num_output_lengths"}
    fields = {f.name for c in (SchedulerView, Plan, CacheKindSpec, StepCosts) for f in dataclasses.fields(c)}
    views = {
        n for n, v in vars(SchedulerView).items() if not n.startswith("_") and (callable(v) or isinstance(v, property))
    }
    assert not (columns | fields | views) - named
    section = tutorial.split("### Helpers in")[1].split("\n## ")[0]
    helpers = re.findall(r"^\| `(\w+)\(", section, re.MULTILINE)
    assert len(helpers) > 10
    assert all(hasattr(apt_jax.sched.step_packer, helper) for helper in helpers)
    assert f"interface_version = {INTERFACE_VERSION}" in tutorial
    assert ENTRY_POINTS in tutorial


def test_the_benchmark_of_speed_takes_them():
    args = ["--problems", "0", "--repeats", "3", "--policies", f"fcfs,{LATEST}"]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.scheduling.greedy_scheduler", *args],
        cwd=DOCS.parent,
        capture_output=True,
        text=True,
        check=True,
    )
    times = json.loads(done.stdout.splitlines()[-1])["schedule"]
    assert {t["policy"] for t in times} == {"fcfs", LATEST}
    assert all(t["median_ms"] > 0 for t in times)


def test_bundled_policies_are_made_as_before():
    for name in all_policies():
        assert make_policy(name, seed=1).name == name
