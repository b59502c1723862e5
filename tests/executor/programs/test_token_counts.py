"""Penalties by what the device has counted for each slot: it gets the new tokens, and draws what it drew from histories."""

import functools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from apt_jax.core.kinds import HIDDEN, KV
from apt_jax.executor.jax_executor import JaxExecutor
from apt_jax.executor.programs.token_counts import IN_PROMPT, SentCounts
from apt_jax.request import SamplingParams
from tests.support.paged_driver import Driver, draw_greedily, few_programs, make_executor, padded_forward

SLOTS, VOCAB = 3, 9


def counts_of(history: list[int], prompt_len: int) -> list[int]:
    return [history[prompt_len:].count(t) + IN_PROMPT * (t in history[:prompt_len]) for t in range(VOCAB)]


@given(st.data())
def test_the_device_has_the_counts_of_every_history(data):
    """Histories grow, slots go to other requests, or to a part of the same; and once all is lost."""
    sent, device = SentCounts(SLOTS, VOCAB), np.zeros(SLOTS * VOCAB, np.int32)
    histories: dict[int, tuple[list[int], int]] = {}
    tokens = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=9)
    for _ in range(data.draw(st.integers(1, 8))):
        if data.draw(st.integers(0, 5)) == 5:
            sent.clear()
            device[:] = 0
        slots = data.draw(st.lists(st.integers(0, SLOTS - 1), unique=True))
        for slot in slots:
            history, prompt_len = histories.get(slot, ([], 0))
            if history and data.draw(st.booleans()):
                history = history + data.draw(tokens)
            else:
                history = data.draw(tokens)
                prompt_len = data.draw(st.integers(1, len(history)))
            histories[slot] = history, prompt_len
        given = [np.array(histories[s][0], np.int32) for s in slots], [histories[s][1] for s in slots]
        np.add.at(device, *sent.take_changes(slots, *given))
        found = device.reshape(SLOTS, VOCAB)
        for slot in slots:
            assert found[slot].tolist() == counts_of(*histories[slot])
        sent.check(found)
        assert sent.take_changes(slots, *given).size == 0


def test_a_row_sends_its_new_tokens():
    sent = SentCounts(SLOTS, VOCAB)
    first = np.array([4, 4, 7, 1, 1], np.int32)
    sent.take_changes([2], [first], [3])
    grown = np.array([4, 4, 7, 1, 1, 8, 4, 4], np.int32)
    assert sent.take_changes([2], [grown], [3]).tolist() == [[2 * VOCAB + 8, 2 * VOCAB + 4, 2 * VOCAB + 4], [1, 1, 1]]
    # Another request: what it shares with the one before is not sent.
    other = sent.take_changes([2], [np.array([4, 8], np.int32)], [1])
    assert other.tolist() == [[2 * VOCAB + 1, 2 * VOCAB + 4, 2 * VOCAB + 7], [-2, -2, -IN_PROMPT]]


def test_other_counts_on_the_device_are_noticed():
    sent = SentCounts(SLOTS, VOCAB)
    sent.take_changes([1], [np.array([3], np.int32)], [1])
    with pytest.raises(RuntimeError, match="token counts on the device are wrong in slot 1"):
        sent.check(np.zeros((SLOTS, VOCAB), np.int32))


# --- on the device ---------------------------------------------------------------------------------------------------

PENALTIES = {
    "repetition": SamplingParams(temperature=0.0, repetition_penalty=1.7),
    "presence": SamplingParams(temperature=0.0, presence_penalty=1.5),
    "frequency": SamplingParams(temperature=0.0, frequency_penalty=0.8),
    "negative": SamplingParams(temperature=0.0, frequency_penalty=-0.7, repetition_penalty=1.1),
}
PROMPTS = {0: [5, 6, 7, 5], 1: list(range(10, 47)), 2: [3], 3: list(range(60, 77))}


@pytest.fixture(autouse=True, scope="module")
def no_draws():
    with pytest.MonkeyPatch.context() as patch:
        draw_greedily(patch)
        yield


@functools.cache
def executor_of_four() -> JaxExecutor:
    return few_programs(make_executor(max_num_seqs=4))


class PromptDriver(Driver):
    """Tells prompt and outputs apart, and leaves out of the history what is said to be on the device."""

    def add(self, slot: int, prompt: list[int], kind: int) -> None:
        super().add(slot, prompt, kind)
        self.prompt_lens = {**getattr(self, "prompt_lens", {}), slot: len(prompt)}

    def step(self, counts, params, on_device=False):
        execute = self.executor.execute

        def with_prompts(batch):
            for row, slot in enumerate(batch.slots.tolist()):
                batch.prompt_len[row] = self.prompt_lens[slot]
                if batch.token_ids[row] < 0:
                    batch.history[row] = batch.history[row][:-1]
            return execute(batch)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self.executor, "execute", with_prompts)
            return super().step(counts, params, on_device=on_device)


@functools.cache
def reference(prompt: tuple[int, ...], name: str, steps: int) -> list[int]:
    """Greedy tokens of a plain forward pass, penalties by their rules in float64."""
    params, tokens = PENALTIES[name], list(prompt)
    for _ in range(steps):
        padded = np.zeros(80, np.int32)
        padded[: len(tokens)] = tokens
        scores = np.asarray(padded_forward(padded)[len(tokens) - 1], np.float64)
        outputs = tokens[len(prompt) :]
        for token in set(tokens):
            r = params.repetition_penalty
            scores[token] = scores[token] / r if scores[token] > 0 else scores[token] * r
        for token in set(outputs):
            scores[token] -= params.frequency_penalty * outputs.count(token) + params.presence_penalty
        tokens.append(int(scores.argmax()))
    return tokens


@pytest.mark.parametrize("name", PENALTIES)
def test_penalised_tokens_are_those_of_the_rules(name):
    """Prompts of several lengths, steps dispatched ahead, and slots that go to other requests."""
    driver = PromptDriver(executor_of_four())
    for prompts in (PROMPTS, {0: PROMPTS[3], 1: PROMPTS[0], 3: PROMPTS[1]}):
        for slot, prompt in prompts.items():
            driver.add(slot, prompt, HIDDEN if slot % 2 else KV)
        driver.step({s: len(p) for s, p in prompts.items()}, PENALTIES[name])
        for i in range(7):
            driver.step(dict.fromkeys(prompts, 1), PENALTIES[name], on_device=i % 3 > 0)
            driver.executor.check_integrity()
        for slot, prompt in prompts.items():
            assert driver.tokens[slot] == reference(tuple(prompt), name, 8)


def test_long_histories_travel_before_the_step(monkeypatch):
    monkeypatch.setattr("apt_jax.executor.programs.packing.CHANGES_PER_CALL", 6)
    executor = executor_of_four()
    executor.reset()
    calls, send = [], executor.runner.counts_call
    monkeypatch.setattr(executor.runner, "counts_call", lambda changes: calls.append(changes) or send(changes))
    driver = PromptDriver(executor)
    driver.add(0, PROMPTS[1], KV)
    driver.step({0: 37}, PENALTIES["repetition"])
    assert len(calls) == 5  # 37 tokens, of which the step takes 8
    for _ in range(3):
        driver.step({0: 1}, PENALTIES["repetition"])
    assert len(calls) == 5
    assert driver.tokens[0] == reference(tuple(PROMPTS[1]), "repetition", 4)


def test_rows_without_penalties_send_nothing():
    executor = executor_of_four()
    executor.reset()
    driver = Driver(executor)
    driver.add(0, PROMPTS[1], KV)
    driver.step({0: 37}, SamplingParams(temperature=0.0, logprobs=3, logit_bias={4: -1.0}, min_tokens=2))
    assert not np.asarray(executor.runner.token_counts).any()
    driver.step({0: 1}, PENALTIES["presence"])
    assert np.asarray(executor.runner.token_counts).any()
    executor.reset()
    assert not np.asarray(executor.runner.token_counts).any()
    executor.check_integrity()
