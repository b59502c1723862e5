"""Output lengths as the engine learns them, and memory reserved for them while it serves."""

import numpy as np
import pytest

from apt_jax.config import SLO
from apt_jax.request import EngineRequest, SamplingParams
from apt_jax.sched.output_lengths import FEW_OUTPUTS, UNBOUNDED
from tests.support.cases import num_cases
from tests.support.fake_executor import Fault, FaultKind
from tests.support.fake_serving import VOCAB_SIZE, Served, prompt, prompt_with_shared_beginning


def add(served: Served, tokens: np.ndarray, *, adapter: str | None = None, tenant: str | None = None, **params) -> str:
    name = f"s{len(served.requests)}"
    served.requests[name] = EngineRequest(
        request_id=name,
        prompt=None,
        prompt_token_ids=tokens,
        params=SamplingParams(temperature=0.0, **params),
        slo=SLO(),
        arrival_s=served.clock.now_s(),
        adapter=adapter,
        tenant=tenant,
    )
    served.tokens[name] = []
    served.engine.add_request(served.requests[name])
    return name


def estimate(served: Served, row: int, q: float = 0.9) -> int:
    """The quantile of a live request."""
    table, rows = served.engine.table, np.array([row], np.int32)
    return int(table.lengths.quantile(table.histograms[rows], table.num_outputs[rows], q)[0])


def row_of(served: Served, name: str) -> int:
    return served.engine.states.by_id[name].row


@pytest.mark.parametrize(
    ("params", "known"),
    [
        ({"max_tokens": 5}, True),
        ({"max_tokens": 5, "ignore_eos": True}, True),
        ({"max_tokens": 5, "stop_token_ids": (3,)}, False),
        ({"max_tokens": 5, "stop": ("end",)}, False),
        ({"max_tokens": 5, "stop_token_ids": (3,), "min_tokens": 4}, False),
        ({"max_tokens": 5, "stop_token_ids": (3,), "min_tokens": 5}, True),
    ],
)
def test_lengths_are_known_where_nothing_else_ends_a_request(params, known):
    served = Served()
    name = add(served, prompt(9), **params)
    assert served.engine.table.known_length[row_of(served, name)] == known


def test_ends_are_learned_as_what_they_are():
    """Stop tokens end at a length; `max_tokens` and aborts cut off; declared lengths say nothing."""
    served = Served(prefix_caching=False)
    stream = served.expected(served.serve(prompt(9), 8))
    never = (set(range(VOCAB_SIZE)) - set(stream)).pop()
    for _ in range(40):
        served.serve(prompt(9), 8)  # declared
    new = add(served, prompt(9), max_tokens=200, stop_token_ids=(never,))
    assert estimate(served, row_of(served, new)) == 0
    for _ in range(FEW_OUTPUTS + 5):
        add(served, prompt(9), max_tokens=8, stop_token_ids=(never,))
    for _ in range(20):
        served.step()
    served.engine.abort(new)
    served.drain()
    ask = add(served, prompt(9), max_tokens=200, stop_token_ids=(never,))
    assert estimate(served, row_of(served, ask)) == UNBOUNDED
    served.engine.abort(ask)
    for _ in range(2 * FEW_OUTPUTS):
        add(served, prompt(9), max_tokens=8, stop_token_ids=(stream[3],))
    served.drain()
    length = stream.index(stream[3]) + 1
    ask = add(served, prompt(9), max_tokens=200, stop_token_ids=(never,))
    assert estimate(served, row_of(served, ask), 0.5) == length
    assert estimate(served, row_of(served, ask), 0.99) == UNBOUNDED


def test_requests_that_begin_alike_have_their_own_estimate():
    served = Served(num_blocks=400, adapters=("a", "b"))
    systems = [prompt(40, seed) for seed in (1, 2)]
    lengths = {}
    for number, system in enumerate(systems):
        stream = served.expected(served.serve(system, 12))
        lengths[number] = at = (2, 9)[number]
        for _ in range(FEW_OUTPUTS + 3):
            add(served, system, max_tokens=12, stop_token_ids=(stream[at - 1],))
        served.drain()
        lengths[number] = stream.index(stream[at - 1]) + 1
    rows = [row_of(served, add(served, np.append(s, 5).astype(np.int32), max_tokens=12, stop=("x",))) for s in systems]
    assert [estimate(served, row) for row in rows] == list(lengths.values())
    other = [add(served, systems[0], max_tokens=12, stop=("x",), **kw) for kw in ({"adapter": "a"}, {"tenant": "t"})]
    assert [served.engine.table.histograms[row_of(served, name)].tolist() for name in other] == [[0, 0, 0]] * 2
    served.drain()
    assert not any(served.engine.table.lengths._num_users[1:])  # all were given back


@pytest.mark.in_turn(1)
@pytest.mark.seeds
@pytest.mark.parametrize("policy", ["vllm-v1", "fcfs"])
@pytest.mark.parametrize("overlap", [False, True], ids=["in step", "overlap"])
def test_nobody_is_preempted_while_serving(policy, overlap):
    """With shared prefixes, overlapping steps, declared lengths and others; steps fail in between."""
    with_, without = 0, 0
    for seed in range(num_cases(2, 100)):
        for option in ("", "?reserve=1", "?reserve=0.7"):
            rng = np.random.default_rng(seed)
            fails = {int(n) for n in rng.integers(5, 60, 1)} if rng.random() < 0.3 else set()
            steps = iter(range(10_000))
            served = Served(
                policy + option,
                num_blocks=int(rng.integers(36, 50)),
                max_num_seqs=6,
                budget=int(rng.choice([8, 24, 64])),
                overlap=overlap,
                offered=(True, bool(rng.random() < 0.5)),
                prefix_caching=bool(rng.random() < 0.7),
                debug=False,
                fault=lambda _, s=steps, f=fails: Fault(kind=FaultKind.RAISE_BEFORE) if next(s) in f else None,
            )
            todo = [(prompt_with_shared_beginning(rng, i), int(rng.integers(1, 29))) for i in range(12)]
            while todo or served.engine.has_work:
                for _ in range(int(rng.integers(0, 3))):
                    if todo:
                        tokens, length = todo.pop()
                        stops = (int(rng.integers(VOCAB_SIZE)),) if "=1" in option and length % 2 else ()
                        add(served, tokens, max_tokens=length, stop_token_ids=stops)
                served.step()
            preempted = served.engine.stats().num_preemptions
            if option:
                with_ += preempted
            else:
                without += preempted
                served.assert_as_expected()
    assert with_ == 0 < without


def test_without_the_option_nothing_is_asked(monkeypatch):
    served = Served("vllm-v1")
    monkeypatch.setattr(served.engine.table.lengths, "quantile", lambda *_: pytest.fail("asked"))
    for i in range(5):
        add(served, prompt(9, i), max_tokens=6, stop=("x",))
    served.drain()
