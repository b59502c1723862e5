"""InferMax Algorithm 1: held against a direct transcription, and its configurations one by one."""

from typing import Any

import numpy as np
import pytest

from apt_jax.sched import Plan, SchedulerView, UnifiedPolicy, make_policy
from apt_jax.sched.policies.unified import FEW_OUTPUTS
from apt_jax.sched.step_packer import allowed_kinds
from tests.support.cases import num_cases
from tests.support.sched_world import HIDDEN, KV, World, blocks

# --- the algorithm, line by line ------------------------------------------------------------------------------------


class Transcription:
    """Lines 8 to 18 of Algorithm 1, one request at a time, with the choices that `UnifiedPolicy` documents."""

    def __init__(self, policy: UnifiedPolicy, view: SchedulerView) -> None:
        self.policy, self.view, self.table = policy, view, view.table
        self.running: list[int] = view.running.tolist()
        self.batch: dict[int, int] = {}
        self.admitted: dict[int, int] = {}
        self.evicted: list[int] = []
        self.limit = min(policy.prefill_tokens, view.max_num_batched_tokens)

    def remaining(self, row: int) -> int:
        return int(self.table.num_tokens[row] - self.table.num_cached[row])

    def is_decode(self, row: int) -> bool:
        return row in self.view.running and self.remaining(row) == 1

    def kind(self, row: int) -> int:
        if row in self.view.running:
            return int(self.table.kind[row])
        return int(allowed_kinds(self.view, np.array([row], np.int32))[0].argmax())

    def blocks(self, row: int, tokens: int) -> int:
        return blocks(tokens, self.kind(row), self.view.block_size)

    def key(self, row: int) -> tuple[int, int]:
        table, order = self.table, self.policy.order
        rank = int(table.rank[row])
        if order == "input":
            return int(table.prompt_len[row]), rank
        if order == "output":
            return int(table.max_tokens_total[row] - table.prompt_len[row]), rank
        if self.policy.longest_first and self.is_decode(row):
            return -int(table.num_cached[row]), rank
        return rank, rank

    def groups(self) -> list[list[int]]:
        decodes = [row for row in self.running if self.is_decode(row)]
        prefills = [row for row in self.running if not self.is_decode(row)]
        waiting = self.view.waiting.tolist()
        groups = {
            "decode": [decodes, prefills, waiting],
            "prefill": [prefills, waiting, decodes],
            "nobody": [decodes + prefills + waiting],
        }[self.policy.first]
        return [sorted(group, key=self.key) for group in groups]

    def final(self, row: int) -> int:
        if self.policy.reserve == "input":
            return 0
        table = self.table
        most = int(table.max_tokens_total[row])
        if self.policy.reserve == "estimate":
            counts, done = table.output_lengths.tolist(), int(table.num_outputs[row])
            longer = [n for n in range(done + 1, len(counts)) for _ in range(counts[n])]
            mean = -(-sum(longer) // len(longer)) if len(longer) >= FEW_OUTPUTS else 0
            most = min(max(int(table.prompt_len[row]) + mean, int(table.num_tokens[row])), most)
        return self.blocks(row, most - 1)

    def taken(self, row: int, for_admission: bool) -> int:
        """Blocks that a request of the batch or of the running queue counts with."""
        whole = self.blocks(row, int(self.table.num_tokens[row]))
        if self.is_decode(row) and row not in self.batch:
            whole = int(self.table.num_blocks[row])
        return max(whole, self.final(row)) if for_admission else whole

    def has_memory(self, row: int, without: list[int]) -> bool:
        admission = row not in self.view.running
        others = set(self.running + list(self.admitted)) - {row, *without}
        need = self.blocks(row, int(self.table.num_tokens[row]))
        if admission:
            need = max(need, self.final(row))
        return need + sum(self.taken(r, admission) for r in others) <= self.view.total_blocks

    def run(self) -> tuple[dict[int, int], set[int]]:
        groups = self.groups()
        priority = [row for group in groups for row in group]
        admission_ended = False
        for group in groups:
            for cand in group:
                is_waiting = cand not in self.view.running
                if cand in self.evicted or (is_waiting and admission_ended):
                    continue
                decode = self.is_decode(cand)
                if not self.policy.hybrid and any(self.is_decode(r) != decode for r in self.batch):
                    continue
                c, used = self.remaining(cand), sum(self.batch.values())
                if decode:
                    left = self.view.max_num_batched_tokens - used
                else:
                    left = self.limit - used
                    if self.policy.chunked or not is_waiting or c > self.limit:
                        c = min(c, left)
                below = priority[priority.index(cand) + 1 :]
                victims = [r for r in below if r in self.running]
                if is_waiting:
                    slots = self.view.max_num_seqs - len(self.view.running) - len(self.admitted)
                    may_evict = victims if self.policy.first == "nobody" else []
                    above = set(priority[: priority.index(cand)])
                    admission_ended = (
                        not 1 <= c <= left
                        or slots < 1
                        or not above.isdisjoint(self.evicted)
                        or not self.has_memory(cand, may_evict)
                    )
                    if admission_ended:
                        continue
                elif not 1 <= c <= left:
                    if not decode and not self.has_memory(cand, []):
                        pytest.fail("a prompt under way lost what was set aside for it")
                    continue
                while not self.has_memory(cand, []) and cand in [*self.running, *group]:
                    victim = victims.pop() if victims else cand
                    self.running.remove(victim)
                    self.evicted.append(victim)
                    if victim == cand:
                        break
                if cand in self.evicted:
                    continue
                self.batch[cand] = c
                if is_waiting:
                    self.admitted[cand] = c
        return self.batch, set(self.evicted)


def random_world(rng: np.random.Generator) -> World:
    """Any state that the algorithm could have led to: what is set aside for prompts fits the pool."""
    slots = int(rng.integers(1, 10))
    world = World(
        num_blocks=0,
        block_size=int(rng.choice([1, 2, 4])),
        mode=str(rng.choice(["kv", "hidden", "hybrid"])),
        max_num_seqs=slots,
        max_num_batched_tokens=slots + int(rng.choice([0, 2, 10, 40])),
    )
    offered = [k for k in (KV, HIDDEN) if world.kinds[k].offered]
    running = int(rng.integers(0, slots + 1))
    set_aside = 0
    for i in range(running + int(rng.integers(0, 6))):
        row = world.add(int(rng.integers(1, 30)), int(rng.integers(2, 20)))
        if i < running:
            kind = int(rng.choice(offered))
            world.hold(row, kind, num_outputs=int(rng.integers(1, 3)))
            total = int(world.table.num_tokens[row])
            if total > 2 and rng.random() < 0.3:
                world.hold(row, kind, cached=int(rng.integers(1, total - 1)))
                set_aside += blocks(total, kind, world.block_size)
            else:
                set_aside += int(world.table.num_blocks[row])
    most = max((int(t) for t in world.table.max_tokens_total[world.table.live]), default=1)
    world.num_blocks = max(set_aside, blocks(most, KV, world.block_size))
    world.num_blocks += int(rng.choice([0, 1, 2, 5, 20, 100]))
    return world


CONFIGURATIONS: list[dict[str, Any]] = [
    {},
    {"prefill_tokens": 7},
    {"chunked": False},
    {"chunked": False, "prefill_tokens": 9},
    {"hybrid": False, "chunked": False},
    {"longest_first": True},
    {"first": "prefill"},
    {"first": "prefill", "chunked": False, "prefill_tokens": 12},
    {"first": "prefill", "hybrid": False, "chunked": False},
    {"first": "nobody"},
    {"first": "nobody", "order": "input", "prefill_tokens": 10},
    {"first": "nobody", "order": "output", "chunked": False},
    {"reserve": "all"},
    {"first": "prefill", "hybrid": False, "chunked": False, "reserve": "all"},
    {"first": "prefill", "chunked": False, "reserve": "all"},
    {"longest_first": True, "reserve": "estimate"},
    {"first": "prefill", "chunked": False, "reserve": "estimate"},
]


@pytest.mark.seeds
@pytest.mark.parametrize("settings", CONFIGURATIONS, ids=repr)
def test_the_same_batch_and_evictions_as_the_algorithm_line_by_line(settings):
    policy = UnifiedPolicy("some", **settings)
    evictions = mixed = admissions = 0
    for seed in range(num_cases(220, 300)):
        rng = np.random.default_rng(seed)
        world = random_world(rng)
        for length in rng.integers(1, 20, rng.integers(0, 40)).tolist():
            world.table.record_output_length(length)
        view = world.view()
        batch, evicted = Transcription(policy, view).run()
        plan = world.schedule(policy)
        got = dict(zip(plan.rows.tolist(), plan.num_tokens.tolist(), strict=True))
        assert (got, set(plan.preempt.tolist())) == (batch, evicted), f"seed {seed}"
        evictions += bool(evicted)
        mixed += plan.iteration == "mixed"
        admissions += bool(np.isin(plan.rows, view.waiting).any())
    assert evictions > 4
    assert admissions > 20
    assert (mixed > 20) == policy.hybrid


# --- the configurations ---------------------------------------------------------------------------------------------


def step(world: World, name: str) -> tuple[str, dict[int, int], list[int]]:
    plan: Plan = world.schedule(make_policy(name))
    tokens = dict(zip(plan.rows.tolist(), plan.num_tokens.tolist(), strict=True))
    return plan.iteration, tokens, plan.preempt.tolist()


def busy(*, num_blocks: int = 100_000, budget: int = 4096) -> World:
    """Two requests that decode (rows 0 and 1), a prompt under way (2, 300 of 900 tokens), three waiting prompts."""
    world = World(num_blocks=num_blocks, mode="kv", max_num_batched_tokens=budget, max_num_seqs=budget)
    world.hold(world.add(40), KV, num_outputs=3)
    world.hold(world.add(20), KV, num_outputs=9)
    world.hold(world.add(900), KV, cached=300)
    for prompt_len in (2000, 1500, 100):
        world.add(prompt_len, 50)
    return world


@pytest.mark.parametrize(
    ("name", "iteration", "tokens"),
    [
        ("sarathi", "mixed", {0: 1, 1: 1, 2: 510}),
        ("infermax", "mixed", {0: 1, 1: 1, 2: 510}),
        ("sarathi-pc", "mixed", {0: 1, 1: 1, 2: 600, 3: 2000, 4: 1494}),
        ("sarathi-nocp", "mixed", {0: 1, 1: 1, 2: 600, 3: 2000}),
        ("sarathi-nohy", "decode", {0: 1, 1: 1}),
        ("vllm-hy", "mixed", {2: 600, 3: 2000, 0: 1, 1: 1}),
        ("rank-i", "mixed", {1: 1, 0: 1, 5: 100, 2: 410}),
        ("rank-org", "mixed", {0: 1, 1: 1, 2: 510}),
    ],
)
def test_table_1_in_one_step_each(name, iteration, tokens):
    assert step(busy(), name) == (iteration, tokens, [])
    if not name.startswith(("rank", "infermax")):
        assert step(busy(), f"{name}-ef") == (iteration, tokens, [])


def test_a_decode_takes_one_token_of_the_chunk_budget():
    world = World(num_blocks=10**6, mode="kv", max_num_seqs=1024, max_num_batched_tokens=2048, block_size=16)
    for _ in range(600):
        world.hold(world.add(10), KV)
    waiting = world.add(100)
    assert step(world, "sarathi")[1].get(waiting) is None
    assert step(world, "sarathi-pc")[1][waiting] == 100
    assert len(step(world, "sarathi")[1]) == 600


@pytest.mark.parametrize("name", ["sarathi-nocp", "sarathi-nohy", "vllm-hy", "fcfs-ef"])
def test_prompts_longer_than_a_step_are_computed_all_the_same(name):
    world = World(num_blocks=10**4, mode="kv", max_num_batched_tokens=64)
    world.add(150, 2)
    policy = make_policy(name)
    assert [world.step(policy).num_tokens.tolist() for _ in range(4)] == [[64], [64], [22], [1]]


def test_decodes_evict_prompts_under_way_and_then_the_latest():
    def world(num_blocks: int) -> World:
        world = World(num_blocks=num_blocks, mode="kv", block_size=4)
        for _ in range(3):
            world.hold(world.add(8), KV)  # 4 blocks each, 6 with the next position
        world.hold(world.add(20), KV, cached=4)  # 2 blocks of 10
        world.add(4)
        return world

    assert step(world(28), "sarathi") == ("mixed", {0: 1, 1: 1, 2: 1, 3: 16}, [])
    assert step(world(27), "sarathi") == ("decode", {0: 1, 1: 1, 2: 1}, [3])
    assert step(world(18), "sarathi") == ("decode", {0: 1, 1: 1, 2: 1}, [3])
    assert step(world(17), "sarathi") == ("decode", {0: 1, 1: 1}, [2, 3])


def test_vllm_with_hybrid_batches_admits_into_room_that_decodes_need():
    world = World(num_blocks=14, mode="kv", block_size=4)
    for _ in range(3):
        world.hold(world.add(8), KV)
    world.add(4)
    assert step(world, "vllm-hy") == ("mixed", {3: 4, 0: 1, 1: 1}, [2])
    assert step(world, "sarathi") == ("decode", {0: 1, 1: 1}, [2])


def test_infermax_keeps_the_long_ones():
    world = World(num_blocks=18, mode="kv", block_size=4)
    for prompt_len in (4, 16, 8):
        world.hold(world.add(prompt_len), KV)  # 2, 8 and 4 blocks, 2 more each
    assert step(world, "sarathi") == ("decode", {0: 1, 1: 1}, [2])
    assert step(world, "infermax") == ("decode", {1: 1, 2: 1}, [0])


def test_eviction_free_reserves_all_that_a_request_may_take():
    world = World(num_blocks=48, mode="kv", block_size=1, max_num_batched_tokens=200)
    world.hold(world.add(4, 8), KV)  # 11 positions in the end: 22 blocks
    world.add(4, 10)  # 13 positions: 26 blocks
    assert step(world, "sarathi-ef") == ("mixed", {0: 1, 1: 4}, [])
    world = World(num_blocks=47, mode="kv", block_size=1, max_num_batched_tokens=200)
    world.hold(world.add(4, 8), KV)
    world.add(4, 10)
    assert step(world, "sarathi-ef") == ("decode", {0: 1}, [])
    assert step(world, "sarathi") == ("mixed", {0: 1, 1: 4}, [])


EVICTION_FREE = ["fcfs-ef", "sarathi-ef", "sarathi-nocp-ef", "sarathi-nohy-ef", "vllm-hy-ef"]


@pytest.mark.parametrize("name", EVICTION_FREE)
def test_eviction_free_evicts_none_where_its_original_does(name):
    def preempted(name: str) -> int:
        rng = np.random.default_rng(5)
        world = World(num_blocks=60, mode="kv", block_size=2, max_num_batched_tokens=60)
        for _ in range(20):
            world.add(int(rng.integers(1, 20)), int(rng.integers(5, 30)))
        policy, count = make_policy(name), 0
        while world.table.live.any():
            count += world.step(policy).preempt.size
        return count

    assert preempted(name) == 0
    assert preempted(name.removesuffix("-ef")) > 0


def test_shorter_inputs_or_outputs_make_the_others_wait():
    def world() -> World:
        world = World(num_blocks=24, mode="kv", block_size=4, max_num_batched_tokens=100)
        world.hold(world.add(24, 4), KV)  # 12 blocks, 14 with the next position
        world.hold(world.add(8, 12), KV)  # 4 blocks, 6
        world.add(12, 8)  # 6 blocks
        return world

    assert step(world(), "sarathi") == ("decode", {0: 1, 1: 1}, [])
    assert step(world(), "rank-i") == ("mixed", {1: 1, 2: 12}, [0])
    assert step(world(), "rank-o") == ("mixed", {0: 1, 2: 12}, [1])


def test_nobody_is_evicted_in_vain():
    world = World(num_blocks=14, mode="kv", block_size=4, max_num_batched_tokens=100)
    world.hold(world.add(8, 4), KV)  # 4 blocks, 6 with the next position
    world.hold(world.add(16, 4), KV, cached=8)  # 4 of 8 blocks
    world.add(14, 8)  # 8 blocks, above the second; 6 and 8 fit the pool
    world.add(15, 4)
    assert step(world, "rank-i") == ("mixed", {0: 1, 2: 14}, [1])
    world.num_blocks = 13
    assert 2 not in step(world, "rank-i")[1]


def test_estimates_are_the_mean_of_longer_outputs():
    world = World(num_blocks=1000, mode="kv", block_size=1)
    policy = make_policy("infermax")
    assert isinstance(policy, UnifiedPolicy)
    rows = np.array([world.hold(world.add(10, 100), KV, num_outputs=n) for n in (1, 4, 60)], np.int32)
    fresh = np.array([world.add(10, 100), world.add(10, 3)], np.int32)

    def expected(rows: np.ndarray) -> list[int]:
        return policy._final_tokens(world.view(), rows).tolist()

    assert expected(rows) == [10, 13, 69]  # nothing is known: what they have
    for length in [4] * 8 + [12] * 8:
        world.table.record_output_length(length)
    assert expected(rows) == [10 + 8 - 1, 10 + 12 - 1, 69]
    assert expected(fresh) == [10 + 8 - 1, 10 + 3 - 1]


def test_estimated_lengths_hold_admission_back():
    def world(known: int) -> World:
        world = World(num_blocks=200, mode="kv", block_size=1)
        world.hold(world.add(10, 100), KV)
        world.add(10, 100)
        for _ in range(known):
            world.table.record_output_length(40)
        return world

    assert step(world(0), "infermax") == ("mixed", {0: 1, 1: 10}, [])
    assert step(world(20), "infermax") == ("mixed", {0: 1, 1: 10}, [])  # 98 blocks each
    crowded = world(20)
    crowded.add(1, 100)
    assert step(crowded, "infermax")[1] == {0: 1, 1: 10}


def test_a_waiting_request_takes_a_free_slot():
    world = World(num_blocks=1000, mode="kv", max_num_seqs=2)
    world.hold(world.add(30), KV)
    world.hold(world.add(20), KV)
    world.add(5)
    assert step(world, "rank-i") == ("decode", {1: 1, 0: 1}, [])


def test_nothing_to_do():
    for name in ("sarathi", "vllm-hy", "rank-i", "infermax", "fcfs-ef"):
        assert step(World(num_blocks=10), name) == ("idle", {}, [])


def test_the_histogram_grows_with_the_longest_output():
    table = World(num_blocks=10).table
    for length in (3, 5000, 3):
        table.record_output_length(length)
    assert (table.output_lengths[3], table.output_lengths[5000]) == (2, 1)
    assert table.output_lengths.sum() == table.num_output_lengths == 3
