"""Where each invariant of the failure model is checked: a table, and a test that it is complete and true."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

_ENGINE = "tests/support/simulation_harness.py"
_SERVING = "tests/support/serving_simulation/simulation.py"
_ANSWERS = "tests/support/serving_simulation/answer_check.py"
_REPLICA = "tests/support/serving_simulation/replica_checks.py"
_ADMISSION = "tests/support/serving_simulation/admission_recount.py"
_RECOUNT = "tests/support/recount.py"
_FAKE = "tests/support/fake_executor.py"
_CACHE = "apt_jax/cache/integrity.py"
_STATES = "apt_jax/engine/integrity.py"

CHECKED: dict[str, list[tuple[str, str]]] = {
    # free + allocated + cached alone = total
    "I1": [
        (_CACHE, "blocks are lost"),
        (_STATES, "blocks are charged to two requests, or to no request"),
        (_ENGINE, "blocks are lost"),
    ],
    # references to a block = tables that hold it
    "I2": [(_CACHE, "references are miscounted")],
    # free list: no duplicate, none allocated
    "I3": [(_CACHE, "a block is both owned and free"), (_CACHE, "an idle block is free as well")],
    # table length = ceil(computed / block size) by kind
    "I4": [
        (_CACHE, "a block table is not ceil(tokens / block size) long"),
        (_STATES, "cache and request table have different numbers of positions"),
    ],
    # a waiting request owns nothing
    "I5": [
        (_STATES, "a request that is not running has cache"),
        (_STATES, "a running request has no slot, or another request has one"),
    ],
    # one state each, the end is final
    "I6": [(_STATES, "a row does not refer to its live request"), (_ENGINE, "an output after the end")],
    # 0 <= computed <= prompt + output
    "I7": [
        (_STATES, "more cached positions than tokens, or fewer than 0"),
        (_STATES, "a request has more tokens than max_tokens allows"),
    ],
    # budget, rows, at least a token a row
    "I8": [("apt_jax/sched/plan_check.py", "max_num_batched_tokens"), (_FAKE, "an empty row")],
    # no block is writable by two
    "I9": [(_FAKE, "a row writes into a block of another row"), (_CACHE, "a block is owned twice")],
    # token positions contiguous
    "I10": [(_ENGINE, "num_outputs"), (_ANSWERS, "tokens differ")],
    # one end, nothing after it, usage = tokens delivered
    "I11": [(_ANSWERS, "something comes after the end"), (_ANSWERS, "goes on after its end"), (_ANSWERS, "usage")],
    # the stream is the reference
    "I12": [(_ENGINE, "got == expected"), (_ANSWERS, "got == tokens")],
    # other traffic, preemptions and switches change no stream: the reference knows none of them
    "I13": [(_FAKE, "computed without a cache"), (_ENGINE, "reference_tokens"), (_ANSWERS, "reference_tokens")],
    # bounds of queues, of unread output and of buffers
    "I14": [
        (_ADMISSION, "was admitted although the queue or its share is full"),
        (_REPLICA, "unread tokens"),
        (_REPLICA, "bytes were not read, and more written"),
        (_REPLICA, "bytes are left in buffers"),
    ],
    # a rejected request takes nothing
    "I15": [(_ENGINE, "a refused request took blocks"), (_ANSWERS, "and it was run")],
    # not scheduled after its deadline, its cancellation or its client's end
    "I16": [
        (_REPLICA, "is scheduled after its deadline"),
        (_REPLICA, "is scheduled although it was cancelled"),
        (_REPLICA, "after its client left"),
    ],
    # every cache read is of what was expected
    "I17": [(_FAKE, "wrong = (self._tag[at] != tag)")],
    # progress
    "I18": [
        (_ENGINE, "times without a new token"),
        (_ENGINE, "nothing was run and nothing delivered"),
        (_ENGINE, "do not end within"),
    ],
    # gauges and counters = recount
    "I19": [
        (_RECOUNT, '"recomputed_tokens"'),
        (_RECOUNT, "tokens_since_preemption"),
        (_RECOUNT, '"used_blocks"'),
        (_REPLICA, "num_rejected is"),
        (_ENGINE, "preemptions are miscounted"),
    ],
    # after the end nothing is left
    "I20": [
        (_SERVING, "tasks are left"),
        (_SERVING, "timers are left"),
        (_REPLICA, "assert_clean"),
        (_ENGINE, "slots or rows are lost"),
    ],
    # block ids of a launch are in range
    "I21": [(_FAKE, "a block that is not there"), ("apt_jax/engine/batch/builder.py", "check_writable")],
    # nothing is compiled after warm-up: real programs
    "I22": [("tests/executor/test_jax_executor.py", "def test_Q8_serving_after_warm_up_compiles_nothing")],
    # the pool is not deleted: real arrays
    "I23": [("tests/engine/test_faults.py", "pool.is_deleted() for pool in executor.runner.pools")],
    # descriptors and threads: real processes
    "I25": [("benchmarks/server/soak.py", "descriptors"), (_SERVING, "tasks are left")],
    # durations are not negative
    "I26": [
        (_ENGINE, "metrics.finished_s >= metrics.arrival_s"),
        (_ENGINE, "token times"),
        (_ANSWERS, "its deadline has not passed"),
    ],
}
"""By invariant: a file, and text of the check in it."""

NOT_CHECKED = {
    "I24": "ranks have no tables of their own to differ in: rank 0 sends each step's block tables to all of them",
}
"""Invariants without a check, and why."""


def test_every_invariant_has_its_check_or_a_reason():
    assert CHECKED.keys() | NOT_CHECKED.keys() == {f"I{i}" for i in range(1, 27)}
    assert not CHECKED.keys() & NOT_CHECKED.keys()


@pytest.mark.parametrize("name", CHECKED)
def test_the_check_is_there(name):
    for path, text in CHECKED[name]:
        assert text in (ROOT / path).read_text(), f"{name}: {path} has no {text!r}"


def test_the_docs_list_them():
    page = (ROOT / "docs/lab/testing.md").read_text()
    assert {f"I{i}" for i in range(1, 27)} <= set(re.findall(r"^\| (I\d+) \|", page, re.MULTILINE))
