"""Requests that begin alike share cache, and nobody can tell from the tokens."""

import dataclasses
import itertools

import numpy as np
import pytest

from apt_jax.cache.prefix_tree import extend_digests, root_digest
from apt_jax.core.kinds import HIDDEN, KV
from apt_jax.engine import Engine
from apt_jax.sched import all_policies
from tests.support.cases import num_cases
from tests.support.fake_executor import Fault, FaultKind
from tests.support.fake_serving import VOCAB_SIZE, Served, prompt


@pytest.fixture(params=[KV, HIDDEN], ids=["kv", "hidden"])
def offered(request) -> tuple[bool, bool]:
    return (request.param == KV, request.param == HIDDEN)


@pytest.fixture(params=[False, True], ids=["in step", "overlap"])
def overlap(request) -> bool:
    return request.param


def test_waiting_work_is_counted_without_what_is_cached():
    served = Served(max_num_seqs=1)
    served.serve(prompt(17))
    busy = served.add(prompt(9, seed=1), max_tokens=20)
    served.step()
    served.add(prompt(17))  # 16 of its positions are cached
    served.add(prompt(12, seed=2))
    stats = served.engine.stats()
    assert (stats.num_waiting, stats.waiting_prompt_tokens) == (2, 29)
    assert stats.waiting_uncached_tokens == 1 + 12
    served.drain()
    assert served.ended[busy] == "length"
    assert served.engine.stats().waiting_uncached_tokens == 0


class TestDigests:
    def test_are_of_whole_groups_and_of_all_before_them(self):
        root = root_digest(b"salt")
        digests: list[bytes] = []
        extend_digests(digests, root, np.arange(7, dtype=np.int32), 4)
        assert len(digests) == 1
        extend_digests(digests, root, np.arange(12, dtype=np.int32), 4)
        whole: list[bytes] = []
        extend_digests(whole, root, np.arange(12, dtype=np.int32), 4)
        assert digests == whole
        other: list[bytes] = []
        extend_digests(other, root, np.array([9, *range(1, 12)], np.int32), 4)
        assert not set(other) & set(whole)

    def test_depend_on_both_salts(self):
        roots = {
            root_digest(b"a"),
            root_digest(b"b"),
            root_digest(b"a", b"x"),
            root_digest(b"a", b"y"),
        }
        assert len(roots) == 4

    def test_M7_have_128_bits_and_what_collides_is_told_apart(self):
        digests: list[bytes] = []
        extend_digests(digests, root_digest(b"a"), np.arange(4 * 5000, dtype=np.int32), 4)
        assert len(set(digests)) == 5000
        assert {len(digest) for digest in digests} == {16}
        served = Served()
        request = served.requests[served.add(prompt(4))]
        assert len(served.engine.states.prefixes.root_of(request)) == 16

    def test_M7_a_narrow_digest_would_give_a_request_the_cache_of_another(self, monkeypatch):
        """That two prefixes never share a digest is all that keeps them apart: no hit compares tokens."""

        def wrong_of(num: int) -> int:
            served, wrong = Served(num_blocks=400), 0
            for seed in range(num):
                name = served.serve(prompt(5, seed), 2)
                wrong += served.tokens[name] != served.expected(name)
            return wrong

        assert wrong_of(60) == 0
        monkeypatch.setattr("apt_jax.cache.prefix_tree.DIGEST_BYTES", 1)
        assert wrong_of(60) > 0


class TestHits:
    def test_a_second_identical_prompt_computes_its_last_block_only(self, offered, overlap):
        served = Served(num_blocks=600, block_size=16, budget=1024, offered=offered, overlap=overlap)
        first = served.serve(prompt(1000), 1)
        num = len(served.batches)
        second = served.serve(prompt(1000), 1)
        assert served.prefilled(0) == (0, 1000)
        assert served.prefilled(num) == (992, 8)
        assert served.tokens[first] == served.tokens[second]
        assert (served.cached[first], served.cached[second]) == (0, 992)
        stats = served.engine.stats()
        assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (2000, 992)
        served.assert_as_expected()

    def test_a_prompt_of_whole_blocks_computes_one_token_into_a_copy(self, offered, overlap):
        served = Served(offered=offered, overlap=overlap)
        served.serve(prompt(12), 3)
        num = len(served.batches)
        served.serve(prompt(12), 3)
        assert served.prefilled(num) == (11, 1)
        assert served.batches[num].copies.shape == (2 if offered[KV] else 1, 2)
        assert not any(len(b.copies) for b in served.batches[num + 1 :])
        served.assert_as_expected()

    def test_a_prompt_of_one_block_is_copied_too(self, offered):
        served = Served(offered=offered)
        served.serve(prompt(4))
        num = len(served.batches)
        served.serve(prompt(4))
        assert served.prefilled(num) == (3, 1)
        served.assert_as_expected()

    def test_the_next_turn_finds_the_answer_as_well(self, offered, overlap):
        served = Served(offered=offered, overlap=overlap)
        name = served.serve(prompt(10), 9)
        num = len(served.batches)
        served.serve([*prompt(10), *served.tokens[name], *prompt(5, 1)])
        # The last answered token was never fed back: of 18 positions four groups are full.
        assert served.prefilled(num) == (16, 8)
        served.assert_as_expected()

    def test_requests_that_run_share_what_they_began_with(self, offered):
        served = Served(offered=offered)
        served.serve(prompt(16), 1)
        for i in range(3):
            served.add([*prompt(16), *prompt(3, i + 1)], 6)
        served.step()
        per_group = 2 if offered[KV] else 1
        assert served.engine.stats().used_blocks == (4 + 3) * per_group
        assert served.engine.view().shared_blocks == 4 * per_group
        served.drain()
        served.assert_as_expected()

    def test_requests_that_computed_the_same_at_once_end_up_sharing(self, offered):
        served = Served(offered=offered, overlap=False)
        for _ in range(2):
            served.add(prompt(16), 6)
        served.step()
        assert served.engine.stats().used_blocks == 4 * (2 if offered[KV] else 1)
        served.drain()
        served.assert_as_expected()

    def test_kinds_do_not_mix(self):
        served = Served()
        served.serve(prompt(16))
        table = served.engine.table
        name = served.add(prompt(17))
        row = served.engine.states.by_id[name].row
        assert table.cached_prefix_tokens[row].tolist() == [16, 0]

    @pytest.mark.parametrize("inputs", [3, 5, 6])
    @pytest.mark.parametrize("kind", [KV, HIDDEN])
    def test_groups_are_as_long_as_blocks_of_their_kind(self, kind, inputs):
        served = Served(hidden_block_size=inputs, offered=(kind == KV, kind == HIDDEN))
        served.serve(prompt(32), 1)
        size = (4, inputs)[kind]
        assert served.engine.stats().cached_blocks == 32 // size * (2, 1)[kind]
        for length in (17, 24, 30):
            num = len(served.batches)
            served.serve(prompt(length), 1)
            found = min(length // size * size, length - 1)
            assert served.prefilled(num) == (found, length - found)
        served.assert_as_expected()

    def test_a_preempted_request_finds_its_own_cache(self, overlap):
        served = Served(overlap=overlap, num_blocks=40)
        name = served.add(prompt(21), 12)
        for _ in range(6):
            served.step()
        assert served.engine.preempt(name)
        num = len(served.batches)
        served.drain()
        start, length = served.prefilled(num)
        assert start >= 20
        assert served.engine.stats().recomputed_tokens == length - 1 < 5
        served.assert_as_expected()

    def test_nothing_is_found_without_it(self):
        served = Served(prefix_caching=False)
        for _ in range(2):
            served.serve(prompt(20))
        assert [b.start[0] for b in served.batches if b.num_tokens[0] > 1] == [0, 0]
        stats = served.engine.stats()
        assert (stats.prefix_cache_queries, stats.cached_blocks) == (0, 0)

    def test_other_engines_have_other_digests(self):
        first, second = Served(), Served()
        for served in (first, second):
            served.serve(prompt(20))
        trees = [s.engine.cache.prefixes for s in (first, second)]
        found = [{n.digest for n in tree.node_of.values()} for tree in trees if tree is not None]
        assert len(found[0]) == len(found[1]) == 5
        assert not found[0] & found[1]


@pytest.mark.in_turn(12)
@pytest.mark.parametrize("policy", all_policies())
def test_every_policy_reckons_with_what_is_shared(policy):
    """80 blocks hold two of these requests on their own, and all four where they share; a step computes what is new."""
    most = {}
    for on in (False, True):
        served = Served(policy, num_blocks=80, offered=(True, False), prefix_caching=on)
        served.serve(prompt(64), 1)
        num = len(served.batches)
        for i in range(4):
            served.add([*prompt(64), *prompt(3, i + 1)], 8)
        most[on] = 0
        while served.engine.has_work:
            served.step()
            most[on] = max(most[on], served.engine.stats().num_running)
        prefills = [b.num_tokens[b.position == 0].tolist() for b in served.batches[num:]]
        if on:
            assert sorted(n for ns in prefills for n in ns) == [3, 3, 3, 3]
        served.assert_as_expected()
    # Those of `nohy` begin nothing while anyone decodes, and the prefix is shared only then.
    assert most[False] <= 2
    assert most[True] == (2 if "nohy" in policy else 4)


def test_M9_outputs_share_the_blocks_of_their_prompt_while_one_is_aborted_and_another_preempted(overlap):
    served = Served(overlap=overlap)
    served.serve(prompt(18), 1)
    names = [served.add(prompt(18), 9) for _ in range(4)]
    served.step()
    cache, states = served.engine.cache, served.engine.states
    slots = [states.slot[states.by_id[name].row] for name in names]
    firsts = cache.tables[slots, 0, :4]
    assert (firsts == firsts[0]).all()
    assert np.unique(cache.tables[slots, 0, 4]).size == 4  # what is written into is everybody's own
    assert (cache.num_refs[firsts[0]] == 4).all()
    served.engine.abort(names[0])
    served.engine.preempt(names[1])
    assert (cache.num_refs[firsts[0]] == 2).all()
    served.engine.check_integrity()
    served.drain()
    assert served.ended[names[0]] == "abort"
    assert served.tokens[names[0]] == served.expected(names[0])[: len(served.tokens[names[0]])]
    del served.tokens[names[0]]
    served.assert_as_expected()


def test_M9_a_shared_group_is_copied_before_it_is_written_into(overlap):
    served = Served(overlap=overlap)
    served.serve(prompt(16), 1)
    names = [
        served.add(prompt(16), 9) for _ in range(3)
    ]  # each computes the last token again, in a group of the others
    num = len(served.batches)
    served.step()
    assert len(served.batches[num].copies) == 3 * 2
    assert np.unique(served.batches[num].copies[:, 1]).size == 3 * 2
    served.engine.abort(names[0])
    served.engine.preempt(names[1])
    served.drain()
    del served.tokens[names[0]]
    served.assert_as_expected()


def test_M5_M9_a_step_that_would_write_into_a_block_of_another_never_runs(overlap):
    """As a server runs it: the check of the host is all that is left."""
    served = Served(overlap=overlap, debug=False)
    name = served.add(prompt(6), 9)
    served.step()
    cache, states = served.engine.cache, served.engine.states
    slot = states.slot[states.by_id[name].row]
    cache.num_refs[cache.tables[slot, 0, 1]] += 1  # positions 4 to 7: somebody else holds them as well
    num = len(served.batches)
    served.step()
    assert served.engine.dead_reason == "internal error: CacheIntegrityError"
    assert len(served.batches) == num


class TestEviction:
    def test_takes_what_was_used_longest_ago_and_the_end_of_a_prefix_first(self):
        served = Served(num_blocks=24, offered=(True, False))
        for seed in (1, 2):
            served.serve(prompt(16, seed), 1)
        assert served.engine.stats().cached_blocks == 16
        served.serve(prompt(12, 1), 1)  # used again, as far as it goes
        served.serve(prompt(24, 3), 1)
        # 12 blocks were needed and 8 empty: the end of 1 (it was not used again) and of 2 are gone.
        hits = []
        for seed in (1, 2, 3):
            name = served.add(prompt(24, seed)[:16] if seed < 3 else prompt(24, 3))
            hits.append(int(served.engine.table.cached_prefix_tokens[served.engine.states.by_id[name].row, KV]))
        assert hits == [12, 12, 23]
        served.drain()
        served.assert_as_expected()

    def test_a_waiting_request_learns_of_it(self):
        served = Served(num_blocks=12, max_num_seqs=1, offered=(True, False))
        served.serve(prompt(12, 1), 1)
        served.add(prompt(20, 2), 2)
        name = served.add(prompt(12, 1), 2)
        row = served.engine.states.by_id[name].row
        assert served.engine.table.cached_prefix_tokens[row, KV] == 11
        served.step()
        assert served.engine.table.cached_prefix_tokens[row, KV] == 4
        served.drain()
        served.assert_as_expected()


class TestFaults:
    @pytest.mark.parametrize("kind", [FaultKind.NOT_FINITE, FaultKind.BAD_TOKEN])
    def test_E7_a_bad_row_is_never_found(self, kind, overlap):
        count = itertools.count()
        served = Served(overlap=overlap, fault=lambda b: Fault(kind=kind) if next(count) == 0 else None)
        assert served.ended[served.serve(prompt(16))] == "error"
        assert served.engine.stats().cached_blocks == 0
        num = len(served.batches)
        served.serve(prompt(16))
        assert served.prefilled(num) == (0, 16)
        served.assert_as_expected()

    def test_a_row_that_goes_bad_later_takes_its_own_blocks_along(self):
        count = itertools.count()
        served = Served(
            overlap=False,
            fault=lambda b: Fault(kind=FaultKind.NOT_FINITE) if next(count) == 3 else None,
        )
        served.serve(prompt(8), 1)
        assert served.ended[served.serve([*prompt(8), *prompt(8, 1)], 8)] == "error"
        num = len(served.batches)
        served.serve([*prompt(8), *prompt(9, 1)])
        assert served.prefilled(num) == (8, 9)  # what it had found was good
        served.assert_as_expected()

    def test_what_was_found_is_dropped_if_the_first_token_over_it_is_bad(self):
        count = itertools.count()
        served = Served(
            overlap=False,
            fault=lambda b: Fault(kind=FaultKind.NOT_FINITE) if next(count) == 1 else None,
        )
        served.serve(prompt(8), 1)
        served.serve([*prompt(8), *prompt(8, 1)], 8)
        assert served.engine.stats().cached_blocks == 0

    def test_a_request_whose_constraint_leaves_no_token_spoils_nothing_for_others(self, overlap):
        """The blocks that it has found stay valid: nobody can evict others' cache with a constraint that cannot be
        met."""

        class NoToken:
            ended = False

            def start(self):
                return self

            def accept(self, token_id):
                raise AssertionError

            def fill_mask(self, row):
                row[:] = 0
                return True

        served = Served(overlap=overlap)
        served.serve(prompt(16))
        name = served.add(prompt(16), grammar=NoToken())
        served.drain()
        assert served.ended[name] == "error"
        num = len(served.batches)
        served.serve(prompt(16))
        assert served.prefilled(num) == (15, 1)
        served.assert_as_expected()

    @pytest.mark.parametrize("kind", [FaultKind.RAISE_AFTER, FaultKind.RAISE_IN_RESULT])
    def test_after_a_failed_step_nothing_is_found(self, kind, overlap):
        count = itertools.count()
        served = Served(overlap=overlap, fault=lambda b: Fault(kind=kind) if next(count) == 8 else None)
        served.serve(prompt(16))
        served.add([*prompt(16), *prompt(4, 1)], 8)
        waiting = served.add(prompt(16))
        while not served.executor.num_resets:
            served.step()
        row = served.engine.states.by_id.get(waiting)
        assert row is None or not served.engine.table.cached_prefix_tokens[row.row].any()
        served.drain()
        served.assert_as_expected()


class TestPlantedBugs:
    """Bugs that break no accounting must show in the tokens."""

    def test_registering_before_the_token_is_known(self):
        class TooEarly(Engine):
            def __init__(self, *args, **kwargs):
                super().__init__(*args, **kwargs)
                self._fill, self._builder._filled = self._builder._filled, self._register  # type: ignore[method-assign]

            def _register(self, batch, rows, end):
                filled = self._fill(batch, rows, end)
                for f in filled:
                    state = self.states.state(int(rows[f.index]))
                    self.cache.register(state.rank, f.kind, state.digests[f.kind], f.begin, f.firsts, f.generations)
                return filled

        for engine_class, right in ((Engine, True), (TooEarly, False)):
            count = itertools.count()
            served = Served(
                debug=False,
                engine_class=engine_class,
                fault=lambda b, count=count: Fault(kind=FaultKind.NOT_FINITE) if next(count) == 0 else None,
            )
            served.add(prompt(16))
            served.step()
            name = served.serve(prompt(17))
            assert (served.tokens[name] == served.expected(name)) == right

    def test_a_digest_without_what_came_before(self):
        class NoParent(Engine):
            def __init__(self, *args, **kwargs):
                super().__init__(*args, **kwargs)
                self._await, self.states.await_hits = self.states.await_hits, self._forget_parents  # type: ignore[method-assign]

            def _forget_parents(self, live):
                size, _ = self.cache.block_sizes  # groups of both kinds are equally long
                for i in range(live.num_known // size):
                    alone: list[bytes] = []
                    extend_digests(alone, live.root, live.tokens[i * size : (i + 1) * size], size)
                    live.digests[KV][i:] = alone
                self._await(live)

        for engine_class, right in ((Engine, True), (NoParent, False)):
            served = Served(debug=False, engine_class=engine_class)
            served.serve(prompt(12, 1), 1)
            served.serve([*prompt(4, 2), *prompt(4, 3)], 1)
            name = served.serve([*prompt(4, 2), *prompt(12, 1)[4:], 5])
            assert (served.tokens[name] == served.expected(name)) == right


@dataclasses.dataclass
class Conversation:
    """Turns to come, and all tokens so far."""

    turns: list[np.ndarray]
    known: np.ndarray


def converse(served: Served, num: int, seed: int, p_preempt: float) -> int:
    """Random conversations of one to three turns that begin with one of a few system prompts; returns their
    requests."""
    rng = np.random.default_rng([seed, 99])
    c = int(rng.choice([served.executor.block_size, served.executor.hidden_block_size]))
    systems = [prompt(int(n), 1000 + i) for i, n in enumerate(rng.integers(1, 6 * c, 6))]
    systems.append(systems[0][: max(1, systems[0].size // 2)])
    begun = 0
    talking: dict[str, Conversation] = {}

    def say(talk: Conversation) -> None:
        talk.known = np.concatenate([talk.known, talk.turns.pop()])
        talking[served.add(talk.known, int(rng.integers(1, 6)))] = talk

    for step in range(40 * num):
        while begun < num and len(talking) < 20:
            begun += 1
            turns = [
                rng.integers(0, VOCAB_SIZE, int(rng.choice([1, 3, c, 2 * c]))).astype(np.int32)
                for _ in range(int(rng.integers(1, 4)))
            ]
            if rng.random() < 0.2:
                turns = [prompt(c - systems[0].size % c, 5)]  # many say the same, up to a whole group
            system = systems[0] if len(turns) == 1 else systems[int(rng.integers(len(systems)))]
            say(Conversation(turns, system))
        for name in served.step():
            talk = talking.pop(name)
            talk.known = np.concatenate([talk.known, np.array(served.tokens[name], np.int32)])
            if talk.turns and served.ended[name] != "error":
                say(talk)
        if rng.random() < p_preempt and talking:
            served.engine.preempt(list(talking)[int(rng.integers(len(talking)))])
        if step % 97 == 0:
            served.engine.check_integrity()
        if not talking and begun == num:
            break
    served.drain()
    return len(served.requests)


@pytest.mark.in_turn(12)
@pytest.mark.seeds
@pytest.mark.parametrize("policy", all_policies())
def test_many_conversations_say_what_they_say_without_cache(policy):
    """Held against streams that no cache was used for; tight pools, evictions, preemptions, both kinds, faults."""
    total: dict[str, int] = dict.fromkeys(("hits", "queries", "copies", "resets"), 0)
    cases = [
        # num, blocks, block size, layer inputs per block, overlap, preempt, offered, faults
        (150, 70, 4, 4, True, 0.05, (True, True), 0.0),
        (100, 60, 4, 4, False, 0.0, (True, False), 0.0),
        (75, 26, 2, 3, True, 0.1, (False, True), 0.0),
        (75, 90, 4, 4, True, 0.02, (True, True), 0.01),
        (50, 70, 4, 5, True, 0.05, (True, True), 0.0),
        (50, 90, 4, 3, True, 0.02, (True, True), 0.01),
    ]
    for seed, (num, blocks, size, inputs, ahead, p_preempt, offered, p_fault) in enumerate(cases):
        rng = np.random.default_rng(seed)
        last = [-1e9]
        served = Served(
            policy,
            num_blocks=blocks,
            block_size=size,
            hidden_block_size=inputs,
            overlap=ahead,
            offered=offered,
            debug=False,
        )

        def fault(batch, rng=rng, served=served, p=p_fault, last=last) -> Fault | None:
            if not p or rng.random() > p:
                return None
            if rng.random() < 0.5 or served.clock.now_s() - last[0] < 100:
                row = int(rng.integers(batch.slots.size))
                return Fault(kind=FaultKind.NOT_FINITE, row=row) if batch.samples[row] else None
            last[0] = served.clock.now_s()
            return Fault(kind=FaultKind.RAISE_AFTER)

        served.executor.fault = fault
        converse(served, num_cases(num // 10, num), seed, p_preempt)
        served.assert_as_expected()
        stats = served.engine.stats()
        assert stats.num_invalid_plan_rows == 0
        total["hits"] += stats.prefix_cache_hits
        total["queries"] += stats.prefix_cache_queries
        total["copies"] += sum(len(b.copies) for b in served.batches)
        total["resets"] += served.executor.num_resets
    assert total["hits"] > 0.3 * total["queries"], total
    assert total["copies"] > num_cases(-1, 10), total  # a few conversations may have none


def known_of(served: Served, name: str, before: list[str]) -> int:
    """How many tokens of a prompt earlier requests have left in the cache, whole groups, before any was evicted."""
    tokens = served.requests[name].prompt_token_ids
    best = 0
    for other in before:
        theirs = np.array([*served.requests[other].prompt_token_ids, *served.tokens[other]], np.int32)[:-1]
        num = min(tokens.size, theirs.size)
        same = int(np.argmin(np.append(tokens[:num] == theirs[:num], False)))
        best = max(best, same // 4 * 4)
    return best


@pytest.mark.parametrize("num_host_blocks", [0, 12])
@pytest.mark.parametrize("offered", [(True, False), (False, True)], ids=["kv", "hidden"])
def test_prompt_tokens_are_told_by_where_they_came_from(offered, num_host_blocks):
    """Held against what earlier requests had, one request at a time."""
    total: dict[str, int] = {}
    for seed in range(4):
        rng = np.random.default_rng(seed)
        served = Served(
            "fcfs", num_blocks=24, offered=offered, num_host_blocks=num_host_blocks, debug=False, hidden_block_size=4
        )
        before: list[str] = []
        expected = dict.fromkeys(("found", "evicted", "new"), 0)
        for i in range(30):
            tokens = prompt(int(rng.integers(1, 20)), seed=1000 * seed + i)
            if before and rng.random() < 0.7:
                beginning = served.requests[before[int(rng.integers(len(before)))]].prompt_token_ids
                tokens = np.concatenate([beginning[: int(rng.integers(1, 24))], tokens])[:30]
            name = served.serve(tokens, 3)
            found = served.cached[name]
            known = max(known_of(served, name, before), found)
            expected["found"] += found
            expected["evicted"] += known - found
            expected["new"] += tokens.size - known
            before.append(name)
        stats = served.engine.stats()
        sources = stats.prompt_tokens_by_source
        assert sum(sources.values()) == stats.prefix_cache_queries
        assert sources["device"] + sources["host"] == stats.prefix_cache_hits == expected["found"]
        assert (sources["evicted"], sources["new"]) == (expected["evicted"], expected["new"]), seed
        for source, num in sources.items():
            total[source] = total.get(source, 0) + num
        served.assert_as_expected()
    assert all(total[source] for source in ("device", "evicted", "new"))
    assert bool(total["host"]) == bool(num_host_blocks)
    assert not total["disk"]
