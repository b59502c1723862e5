"""A short storm over toy replicas with another seed every day, and the checks of the ledger."""

import dataclasses
import importlib.util
import os
from collections.abc import Sequence

import pytest

from benchmarks.server import chaos
from benchmarks.server.fleet import Execution, Fleet
from benchmarks.server.ledger import Entry, Outcome, audit, differences
from benchmarks.server.offline import Answer
from tests.support.toy_server import server_parts
from tests.support.toy_serving import expected_tokens

needs_gateway = pytest.mark.skipif(
    importlib.util.find_spec("smg") is None, reason="needs the gateway (pip install smg)"
)
SHORT = (
    "delay",
    "loss",
    "trickle",
    "half-open",
    "cut after bytes",
    "refuse",
    "reset",
    "freeze replica",
    "few descriptors",
)
ROUGH = ("kill replica", "kill gateway", "drain replica", "little memory", "full disk", "reload")


def toy_requests(count: int) -> tuple[list[dict], list[Answer]]:
    """Requests and their answers, half of them greedy, half with a seed."""
    parts = server_parts()
    assert parts.tokenizer is not None
    bodies, answers = [], []
    for number in range(count):
        prompt = f"request {number} " + "abc" * (number % 7)
        params = {"max_tokens": 4 + 7 * (number % 12), "temperature": 0.75 * (number % 2), "ignore_eos": True}
        params |= {"seed": number} if number % 2 else {}
        ids = parts.tokenizer.encode(prompt, add_special_tokens=False)
        tokens = expected_tokens(parts.build_request(prompt_token_ids=ids, params=params))
        bodies.append({"model": "toy", "prompt": prompt, **params})
        answers.append(Answer(token_ids=tuple(tokens), text=parts.tokenizer.decode(tokens), finish_reason="length"))
    return bodies, answers


def storm(kinds: Sequence[str], seed: int) -> None:
    bodies, answers = toy_requests(24)
    flags = ["--max-restarts=100", "--routing-policy=round_robin"]
    with Fleet(flags, script=("-m", "tests.support.toy_launch"), seed=seed) as fleet:
        shown = chaos.Storm(fleet, bodies, answers, seed=seed, num_clients=4).run(kinds)
        log = "".join(fleet.lines[-200:])
        assert fleet.terminate() == 0, log
        assert fleet.orphans() == []
    assert not shown.problems, (seed, shown.problems, log)
    assert not shown.unhealed, (seed, shown.unhealed, log)
    assert not shown.wrong_ends, (seed, shown.wrong_ends, log)
    assert shown.idle_after_s is not None, (seed, log)
    assert all(0 <= after <= before + 8 for before, after in shown.descriptors.values()), (seed, shown.descriptors)
    assert sum(entry.outcome is Outcome.OK for entry in shown.entries) >= len(kinds)


@pytest.mark.in_turn(4, group="whole commands")
@pytest.mark.timeout(900)  # seconds: a minute, but several on a machine with much other work
@needs_gateway
def test_a_short_storm_with_another_seed_every_day():
    seed = int(os.environ["APT_JAX_FUZZ_SEED"])  # the date
    storm([*chaos.draw(6, seed, SHORT), "kill replica"], seed)


@pytest.mark.slow
@needs_gateway
@pytest.mark.parametrize("seed", [1, 2])
def test_a_storm_of_all_kinds(seed):
    storm(chaos.draw(40, seed), seed)


def test_every_kind_is_drawn_and_a_seed_draws_the_same():
    assert set(SHORT) | set(ROUGH) == set(chaos.FAULTS)
    assert set(chaos.draw(200, 3)) == set(chaos.FAULTS)
    assert len(chaos.draw(200, 3)) == 200
    assert chaos.draw(200, 3) == chaos.draw(200, 3)
    assert chaos.draw(200, 3) != chaos.draw(200, 4)


# --- the ledger ----------------------------------------------------------------------------------------------------

ANSWER = Answer(token_ids=(1, 2, 3), text="abc", finish_reason="length")
UUID = "01a21096-a075-70f2-bc1b-e18f4e9677ec"


def entry(outcome: Outcome, text: str = "", finish: str | None = None, **more) -> Entry:
    return Entry(
        request_id="one", number=0, stream=True, sent_s=10.0, ended_s=12.0, outcome=outcome, text=text,
        finish_reason=finish, **more,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("given", "is_right"),
    [
        (entry(Outcome.OK, "abc", "length"), True),
        (entry(Outcome.OK, "ab", "length"), False),
        (entry(Outcome.OK, "abc", "stop"), False),
        (entry(Outcome.ERROR, "ab"), True),
        (entry(Outcome.ERROR, "b"), False),
        (entry(Outcome.ERROR, "abc", "length"), False),
        (entry(Outcome.TRUNCATED, "a"), True),
        (entry(Outcome.TRUNCATED, "abb"), False),
        (entry(Outcome.TRUNCATED, "ab", "length"), False),
        (entry(Outcome.TRUNCATED, "abc", "length"), True),
        (entry(Outcome.INDETERMINATE), True),
    ],
)
def test_the_ledger_compares_what_came_with_the_offline_answer(given, is_right):
    assert (differences(given, ANSWER) == []) == is_right


def execution(**changes) -> Execution:
    made = Execution(request_id=f"one-{UUID}", reason="length", output_tokens=3, started_s=10.5)
    return dataclasses.replace(made, **changes)


def test_N2_a_request_that_is_sent_again_after_its_first_token_is_a_violation():
    streamed = entry(Outcome.OK, "abc", "length", first_s=10.6)
    assert audit([streamed], [execution()], []) == ([], 0)
    violations, _ = audit([streamed], [execution(), execution(started_s=11.0, reason="cancelled")], [(0.0, 99.0)])
    assert len(violations) == 1
    assert "after its first token" in violations[0]


def test_N1_a_request_runs_twice_only_while_something_is_at_fault():
    answered = entry(Outcome.OK, "abc", "length")
    twice = [execution(), execution(started_s=11.0)]
    assert len(audit([answered], twice, [(0.0, 9.0)])[0]) == 1
    assert audit([answered], twice, [(11.0, 13.0)]) == ([], 1)


def test_what_is_refused_for_good_must_not_have_run():
    bad = entry(Outcome.REFUSED, status=400)
    assert audit([bad], [execution(reason="invalid_argument")], []) == ([], 0)
    assert len(audit([bad], [execution()], [(0.0, 99.0)])[0]) == 1
    away = entry(Outcome.REFUSED, status=503)
    assert audit([away], [execution()], [(0.0, 99.0)]) == ([], 1)
    assert len(audit([away], [execution()], [])[0]) == 1
