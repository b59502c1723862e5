"""Properties of every policy: the contract of `Plan`, progress, names."""

import dataclasses
import itertools
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apt_jax.config import SchedulerConfig
from apt_jax.errors import ConfigError
from apt_jax.sched import POLICIES, AptPolicy, Plan, StepCosts, all_policies, check_plan, make_policy
from tests.support.cases import ALL, cover, num_cases
from tests.support.policy_names import LEADING, NAMES, VARIANTS
from tests.support.sched_world import HIDDEN, KV, Arrival, World, blocks, drain

SOME_COSTS = StepCosts(prefill_base_s=1e-3, prefill_per_token_s=1e-4)
MODES = ("kv", "hidden", "hybrid")
ROOMS = {"smallest": 1.0, "tight": 1.3, "ample": 4.0}
"""Blocks, in multiples of what the longest request needs."""


@st.composite
def worlds(draw: st.DrawFn) -> World:
    """Any state that an engine could be in, also after failed allocations and other policies."""
    block_size = draw(st.sampled_from([1, 2, 4, 16]))
    world = World(
        num_blocks=0,
        block_size=block_size,
        hidden_block_size=draw(st.none() | st.integers(block_size // 2 + 1, 3 * block_size)),
        mode=draw(st.sampled_from(MODES)),
        max_num_seqs=draw(st.integers(1, 8)),
        max_num_batched_tokens=draw(st.integers(8, 40)),
        costs=draw(st.sampled_from([StepCosts(), SOME_COSTS])),
        per_token_s=draw(st.sampled_from([0.0, 1e-5, 0.1, -0.01])),
    )
    offered = [k for k in (KV, HIDDEN) if world.kinds[k].offered]
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    num_running = draw(st.integers(0, world.max_num_seqs))
    objective = st.sampled_from([0.05, 1.0, np.inf])
    ttft_s, tbt_s = draw(objective), draw(objective)
    for i in range(num_running + draw(st.integers(0, 12))):
        row = world.add(
            int(rng.integers(1, 50)),
            int(rng.integers(20, 40)),
            arrival_s=float(rng.uniform(-2, 0)),
            ttft_s=ttft_s,
            tbt_s=tbt_s,
            tenant=int(rng.integers(0, 3)),
        )
        if rng.random() < 0.5:
            outputs = int(rng.integers(1, 20))
            world.table.num_outputs[row] = world.table.num_delivered[row] = outputs
            world.table.num_tokens[row] += outputs
            world.table.last_token_s[row] = rng.uniform(world.table.arrival_s[row], 0)
            world.table.num_late_gaps[row] = rng.integers(0, 2)
            world.table.ttft_missed[row] = rng.random() < 0.2
        world.table.num_preemptions[row] = rng.choice([0, 1, 9])
        world.table.num_kind_switches[row] = rng.choice([0, 1, 9])
        world.table.tokens_since_preemption[row] = rng.choice([0, 40])
        if i < num_running:
            cached = int(world.table.num_tokens[row]) - 1
            if rng.random() < 0.3 or not cached:
                cached = int(rng.integers(0, cached + 1))
            if cached:
                world.hold(row, int(rng.choice(offered)), cached=cached)
    longest = max((int(n) for n in world.table.max_tokens_total[world.table.live]), default=1)
    least = min(world.blocks(longest, k) for k in offered)
    world.num_blocks = max(world.used_blocks, least) + draw(st.sampled_from([0, 0, 1, 3, 10, 100]))
    return world


@pytest.mark.in_turn(10)
@pytest.mark.seeds
@pytest.mark.parametrize(
    ("name", "decay"),
    [(name, 0.0) for name in LEADING] + [(name, 0.4) for name in NAMES if name.startswith("apt")],
)
@settings(max_examples=num_cases(6, 60), deadline=None)
@given(world=worlds())
def test_plans_keep_their_promises_and_everything_ends(name, decay, world):
    serve_everything(name, decay, world)


@pytest.mark.seeds
@pytest.mark.parametrize("name", VARIANTS)
@settings(max_examples=num_cases(3, 15), deadline=None)
@given(world=worlds())
def test_plans_of_variants_keep_their_promises(name, world):
    serve_everything(name, 0.0, world)


REDECIDES = ("apt", "apt-s", "apt-released", "apt-in-pass")
"""Policies that choose the running requests again in every iteration, as in the paper: each token may cost the
recomputation of its whole request."""


def serve_everything(name: str, decay: float, world: World) -> None:
    has_decay = "violation_decay" in all_policies()[name].options()
    policy = make_policy(f"{name}?violation_decay={decay}" if has_decay else name)
    rows = world.table.live
    longest = world.table.max_tokens_total[rows]
    left = int(longest.sum())
    if name in REDECIDES:
        chunks = -(-longest // world.max_num_batched_tokens)
        left = int(((longest - world.table.num_tokens[rows]) * (chunks + 1)).sum()) + left
    idle = 0
    for _ in range(100 + 4 * left):
        if not world.table.live.any():
            return
        idle = 0 if world.step(policy).rows.size else idle + 1
        assert idle < 4
    raise AssertionError(f"{int(world.table.live.sum())} requests left")


def some_seeds(name: str, mode: str, room: str) -> range:
    """All seeds, or another one for each mode and room."""
    if ALL:
        return range(3 if name in VARIANTS else 12)
    one = 3 * MODES.index(mode) + list(ROOMS).index(room)
    return range(one, one + 1)


EVERY = list(itertools.product(ROOMS, MODES, NAMES))
QUICK = {(list(ROOMS)[(NAMES.index(name) + i) % 3], mode, name) for name in NAMES for i, mode in enumerate(MODES)}
QUICK |= {
    (room, mode, name) for room, mode, name in EVERY if name in LEADING and (room, mode) == ("smallest", "hybrid")
}
"""Every pair of room, mode and policy, and with leading policies the least room for both kinds."""


@pytest.mark.in_turn(40)
@pytest.mark.seeds
@pytest.mark.parametrize(("room", "mode", "name"), cover(EVERY, QUICK))
def test_Q5_every_request_ends_in_a_bounded_number_of_steps(room, mode, name):
    for seed in some_seeds(name, mode, room):
        rng = np.random.default_rng(seed)
        block_size = int(rng.choice([1, 2, 4, 16]))
        inputs = block_size if seed % 3 else int(rng.integers(block_size // 2 + 1, 3 * block_size + 1))
        slots = int(rng.choice([1, 2, 4, 16]))
        tokens = slots + int(rng.choice([0, 1, 8, 64]))
        arrivals = [
            Arrival(
                at_step=int(rng.integers(0, 40)),
                prompt_len=int(rng.integers(1, 60)),
                max_tokens=int(rng.integers(1, 40)),
                ttft_s=float(rng.choice([0.05, 0.2, np.inf])),
                tbt_s=float(rng.choice([0.01, 0.05, np.inf])),
            )
            for _ in range(int(rng.integers(1, 25)))
        ]
        longest = max(a.prompt_len + a.max_tokens for a in arrivals)
        least = blocks(longest, KV if mode == "kv" else HIDDEN, block_size, inputs)
        world = World(
            num_blocks=int(least * ROOMS[room]),
            block_size=block_size,
            hidden_block_size=inputs,
            mode=mode,
            max_num_seqs=slots,
            max_num_batched_tokens=tokens,
            costs=SOME_COSTS if seed % 2 else StepCosts(),
            per_token_s=float(rng.choice([0.0, 1e-5, 1e-2, -1e-4])),
        )
        one_by_one = sum(-(-a.prompt_len // tokens) + a.max_tokens for a in arrivals)
        if name in REDECIDES:
            one_by_one = sum(a.max_tokens * (1 - (a.prompt_len + a.max_tokens) // -tokens) for a in arrivals)
        drain(world, make_policy(name), arrivals, limit=40 + 2 * one_by_one)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("apt-released", "apt-in-pass")])
def test_without_overload_no_request_is_preempted(name):
    """But for the two that give the hidden kind to requests that exceed the tokens of a step as keys and values."""
    world = World(num_blocks=1000, block_size=4, costs=SOME_COSTS)
    policy = make_policy(name)
    for _ in range(8):
        world.add(20, 30)
    while world.table.live.any():
        assert not world.step(policy).preempt.size
    # Three prompts fit a step, and with decodes first and no mixed steps they run to their end before the next three.
    assert world.num_steps < (100 if name.startswith("sarathi-nohy") else 40)


@pytest.mark.parametrize("name", NAMES)
def test_the_same_view_gives_the_same_plan(name):
    world = World(num_blocks=60)
    for i in range(10):
        world.add(10 + i % 3, 20)
    first, second = (world.schedule(make_policy(name)) for _ in range(2))
    for field in dataclasses.fields(Plan):
        assert np.array_equal(getattr(first, field.name), getattr(second, field.name))


def test_hidden_holds_twice_the_requests():
    def most_running(mode: str) -> int:
        world = World(num_blocks=64, mode=mode, max_num_seqs=64, max_num_batched_tokens=1000)
        for _ in range(30):
            world.add(15, 1)
        return world.schedule(AptPolicy()).rows.size

    assert (most_running("kv"), most_running("hidden")) == (8, 16)


def test_policies_by_name():
    assert make_policy("apt?violation_decay=0.4").name == "apt"
    assert make_policy(config=SchedulerConfig(policy="fcfs")).name == "fcfs"
    with pytest.raises(
        ConfigError, match=r"policy='lifo' is unknown.*`apt-jax policies` lists all.*\(--scheduling-policy\)"
    ):
        make_policy("lifo")


def test_the_documents_list_every_policy_as_the_command_does():
    """The first table has the policies to serve with, the last one all others."""
    docs = Path(__file__).parents[3] / "docs"
    text = "".join((docs / folder / "policies.md").read_text() for folder in ("", "lab"))
    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text)
    tables = text.split("| name | source | in one line |\n|---|---|---|\n")[1:]
    rows = [[line.strip("| ").split(" | ") for line in t.split("\n\n")[0].splitlines()] for t in tables]
    assert len(tables) == 2
    expected = [[f"`{name}`", maker.source, maker.summary] for name, maker in all_policies().items()]
    assert rows[0] == expected[: len(POLICIES)]
    assert rows[1] == expected[len(POLICIES) :]


@pytest.mark.parametrize("name", sorted(all_policies()))
def test_a_policy_is_of_the_room_that_lists_it(name: str):
    maker = all_policies()[name]
    assert maker.is_bundled
    assert make_policy(name).name == name
    assert maker.summary
    assert maker.source
    if name in POLICIES:
        assert maker.cls.__module__.startswith("apt_jax.sched.")


def test_policies_to_serve_with_are_made_without_the_laboratory():
    code = """
import sys
from apt_jax.sched import POLICIES, check_policy, make_policy, policy_digest
for name in POLICIES:
    check_policy(name), make_policy(name), policy_digest(name)
make_policy("apt_jax.sched.policies.fcfs:FcfsPolicy")
assert not any(name.startswith("apt_jax.lab") for name in sys.modules)
make_policy("tgi")
assert "apt_jax.lab.policies.tgi" in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


# --- check_plan ----------------------------------------------------------------------------------------------------


def broken(**changes: object) -> None:
    """A world of a running request (row 0) and a waiting one (row 1), and a plan for it with `changes`."""
    world = World(num_blocks=12, mode="kv", max_num_seqs=2, max_num_batched_tokens=12)
    world.hold(world.add(7), KV, num_outputs=2)
    world.add(8)
    world.add(8)
    plan: dict[str, object] = {
        "rows": np.array([0, 1], np.int32),
        "num_tokens": np.array([1, 8], np.int32),
        "kind": np.array([KV, KV], np.int8),
        "preempt": np.zeros(0, np.int32),
        "iteration": "mixed",
    }
    check_plan(world.view(), Plan(**(plan | changes)))  # pyright: ignore[reportArgumentType] - typed by its test


def test_a_good_plan_passes():
    broken()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rows": np.array([1, 1], np.int32)}, "a row occurs twice"),
        ({"rows": np.array([0, 3], np.int32)}, "neither wait nor run"),
        ({"rows": np.array([0, 1])}, "rows is int64"),
        ({"num_tokens": np.array([2, 8], np.int32)}, "2\\] tokens of \\[1\\] remaining"),
        ({"num_tokens": np.array([0, 8], np.int32)}, "tokens of"),
        ({"num_tokens": np.array([1], np.int32)}, "shapes differ"),
        ({"kind": np.array([HIDDEN, KV], np.int8)}, "change their kind"),
        ({"kind": np.array([KV, HIDDEN], np.int8)}, "not offered"),
        ({"kind": np.array([KV, 2], np.int8)}, "unknown kinds"),
        ({"preempt": np.array([0], np.int32)}, "both run and preempted"),
        ({"preempt": np.array([2], np.int32)}, "hold no cache to preempt"),
        ({"preempt": np.array([0, 0], np.int32)}, "preempted twice"),
        ({"iteration": "idle"}, "with 2 rows"),
        ({"iteration": "lunch"}, "unknown iteration"),
        (
            {"rows": np.array([1, 2], np.int32), "num_tokens": np.array([8, 8], np.int32)},
            "the rows run 16 tokens; a step holds at most 12",
        ),
        (
            {"rows": np.array([1, 2], np.int32), "num_tokens": np.array([4, 4], np.int32)},
            "3 requests would hold cache; at most 2 may",
        ),
    ],
)
def test_broken_promises_are_named(changes, message):
    with pytest.raises(AssertionError, match=message):
        broken(**changes)


def test_blocks_beyond_the_pool_are_found():
    world = World(num_blocks=5, mode="kv", block_size=4)
    world.hold(world.add(7), KV, num_outputs=2)
    plan = Plan(
        rows=np.array([0], np.int32),
        num_tokens=np.ones(1, np.int32),
        kind=np.array([KV], np.int8),
        preempt=np.zeros(0, np.int32),
        iteration="decode",
    )
    with pytest.raises(AssertionError, match="2 blocks needed, 1 available"):
        check_plan(world.view(), plan)
