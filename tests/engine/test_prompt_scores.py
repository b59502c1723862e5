"""Log probabilities of prompts come whole and once, whatever happens to their requests."""

import numpy as np
import pytest

from apt_jax.engine.prompt_scores import PromptScores
from apt_jax.request import PromptLogprobs
from tests.support.cases import num_cases
from tests.support.fake_executor import reference_prompt_logprobs
from tests.support.fake_serving import Served, prompt, prompt_with_shared_beginning, unsteady


def assert_right(served: Served) -> None:
    for name, request in served.requests.items():
        most = request.params.prompt_logprobs
        assert name in served.ended
        if most is None:
            assert name not in served.prompt_logprobs
        if most is None or (served.ended[name] == "abort" and name not in served.prompt_logprobs):
            continue
        found, wanted = served.prompt_logprobs[name], reference_prompt_logprobs(request.prompt_token_ids)
        np.testing.assert_array_equal(found.logprob, wanted.logprob)
        np.testing.assert_array_equal(found.rank, wanted.rank)
        np.testing.assert_array_equal(found.top_ids, wanted.top_ids[:, :most])
        np.testing.assert_array_equal(found.top_logprobs, wanted.top_logprobs[:, :most])
    for name in [name for name, reason in served.ended.items() if reason == "abort"]:
        del served.tokens[name]  # which are the first ones only
    served.assert_as_expected()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("budget", [8, 11, 64])
@pytest.mark.parametrize("offered", [(True, False), (False, True), (True, True)])
def test_chunks_of_any_size_give_all_of_them(overlap, budget, offered):
    served = Served(budget=budget, overlap=overlap, offered=offered)
    for i, length in enumerate((1, 2, 17, 40, 23)):
        served.add(prompt(length, i), 3, prompt_logprobs=(0, 1, 5, None, 20)[i])
    served.drain()
    assert_right(served)


def test_cached_prefixes_are_not_skipped_and_are_left_for_others():
    served = Served()
    text = prompt(17)
    served.serve(text)
    scored = served.add(text, prompt_logprobs=1)
    served.drain()
    assert served.cached[scored] == 0
    assert served.prefilled(-4) == (0, 17)
    assert served.cached[served.serve(text)] == 16
    other = prompt(17, 1)
    served.add(other, prompt_logprobs=1)
    served.drain()
    assert served.cached[served.serve(other)] == 16
    assert_right(served)


@pytest.mark.seeds
@pytest.mark.parametrize("seed", range(num_cases(20, 300)))
def test_preemptions_switches_conversions_failures_and_aborts(seed):
    rng = np.random.default_rng([19, seed])
    fails = {int(rng.integers(2, 12))} if seed % 3 == 0 else set()
    served = unsteady(rng, seed, fails=fails, overlap=bool(seed % 2))
    for i in range(6):
        most = None if rng.random() < 0.3 else int(rng.integers(0, 21))
        served.add(prompt_with_shared_beginning(rng, i), int(rng.integers(1, 6)), prompt_logprobs=most)
        served.step()
    if seed % 4 == 1:
        served.engine.abort("r2")
    served.drain()
    assert_right(served)


def test_a_model_that_is_not_finite_ends_its_request_alone():
    scores = PromptScores(np.arange(9, dtype=np.int32), 2)
    targets = scores.targets(0, 4)
    assert targets is not None
    bad = PromptLogprobs(
        logprob=np.array([-1, np.nan, -2, -3], np.float32),
        rank=np.ones(4, np.int32),
        top_ids=np.zeros((4, 20), np.int32),
        top_logprobs=np.zeros((4, 20), np.float32),
    )
    assert not scores.add(targets, bad)
    assert scores.num_done == 0
    late = scores.targets(4, 5)
    assert late is not None
    with pytest.raises(ValueError, match="expected 0"):
        scores.add(late, bad)


def test_what_is_there_is_neither_asked_for_nor_kept_twice():
    token_ids = np.arange(9, dtype=np.int32)
    scores, whole = PromptScores(token_ids, 2), reference_prompt_logprobs(token_ids)

    def found(begin: int, end: int) -> PromptLogprobs:
        return PromptLogprobs(
            logprob=whole.logprob[begin:end],
            rank=whole.rank[begin:end],
            top_ids=whole.top_ids[begin:end],
            top_logprobs=whole.top_logprobs[begin:end],
        )

    first, in_flight = scores.targets(0, 5), scores.targets(2, 5)  # both before either is there
    assert first is not None
    assert in_flight is not None
    assert scores.add(first, found(0, 5))
    assert scores.add(in_flight, found(2, 7))
    assert scores.num_done == 7
    assert scores.targets(0, 7) is None
    last = scores.targets(0, 9)  # after a preemption
    assert last is not None
    assert (last.position, last.token_ids.tolist()) == (7, [8])
    assert scores.add(last, found(7, 8))
    assert scores.add(first, found(0, 5))
    assert scores.is_complete
    np.testing.assert_array_equal(scores.joined().logprob, whole.logprob)
    np.testing.assert_array_equal(scores.joined().top_ids, whole.top_ids[:, :2])
