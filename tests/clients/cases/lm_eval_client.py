"""lm-eval: a multiple-choice, a log-likelihood and a generation task over data of its own, with both tokenizer backends."""

import json
import os
import tempfile
from pathlib import Path

from harness import BASE_URL, MODEL, expect, feature, run
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

QUESTIONS = [
    {"question": "The capital of France is", "choices": ["Paris", "a banana", "seven"], "answer": 0, "text": "Paris"},
    {"question": "Grass is usually", "choices": ["made of iron", "green", "loud"], "answer": 1, "text": "green"},
    {"question": "Two and two make", "choices": ["blue", "sleep", "four"], "answer": 2, "text": "four"},
    {"question": "Fish live in", "choices": ["water", "books", "fire"], "answer": 0, "text": "water"},
]


TOKENIZER = os.environ.get("CLIENTS_TOKENIZER", "")
"""Directory with the model's tokenizer, for lm-eval's own."""


def evaluate(kind: str) -> dict:
    """The metrics of a task, which are the same with the tokenizer of the server and, where it is at hand, with lm-eval's own."""
    made = _evaluate(kind, "tokenizer_backend=remote")
    if TOKENIZER:
        other = _evaluate(kind, f"tokenizer_backend=huggingface,tokenizer={TOKENIZER}")
        expect(made == other, f"{made} with one tokenizer, {other} with the other")
    return made


def _evaluate(kind: str, tokenizer: str) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data.jsonl"
        data.write_text("".join(json.dumps(line) + "\n" for line in QUESTIONS))
        task = {
            "task": f"local_{kind}",
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(data)}},
            "test_split": "test",
            "output_type": kind,
            "doc_to_text": "{{question}}",
            "num_fewshot": 0,
        }
        if kind == "multiple_choice":
            task |= {"doc_to_target": "answer", "doc_to_choice": "choices"}
            task["metric_list"] = [{"metric": "acc"}, {"metric": "acc_norm"}]
        elif kind == "loglikelihood":
            task |= {"doc_to_target": " {{text}}", "metric_list": [{"metric": "perplexity"}, {"metric": "acc"}]}
        elif kind == "loglikelihood_rolling":
            task |= {
                "doc_to_text": "",
                "doc_to_target": "{{question}} {{text}}",
                "metric_list": [{"metric": "word_perplexity"}],
            }
        else:
            task |= {"doc_to_target": "{{text}}", "metric_list": [{"metric": "exact_match"}]}
            task["generation_kwargs"] = {"until": [".", "\n", "?", "!", ";", ","], "max_gen_toks": 8}
        arguments = f"model={MODEL},base_url={BASE_URL}/completions,{tokenizer},num_concurrent=2,max_length=512"
        made = simple_evaluate(
            model="local-completions",
            model_args=arguments,
            tasks=[task],
            batch_size=32,
            task_manager=TaskManager(include_defaults=False),
            bootstrap_iters=0,
        )
    metrics = made["results"][f"local_{kind}"]
    return {name: value for name, value in metrics.items() if isinstance(value, float) and "stderr" not in name}


@feature("multiple choice")
def multiple_choice() -> None:
    expect(evaluate("multiple_choice")["acc,none"] >= 0.5)


@feature("log likelihood")
def loglikelihood() -> None:
    expect(evaluate("loglikelihood")["perplexity,none"] < 200)
    expect(evaluate("loglikelihood_rolling")["word_perplexity,none"] > 1)


@feature("completions")
def generation() -> None:
    expect("exact_match,none" in evaluate("generate_until"))


run()
