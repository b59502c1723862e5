"""Cost of structured output: time per token with and without it, time to fill masks, time to compile constraints.

*Tokens*: batches of C concurrent requests through the engine in process, each with its own random JSON schema
(`benchmarks.engine.random_schemas`), alternate with the same prompts, numbers of tokens and settings without a
constraint (end of sequence ignored), so that both runs have the same steps. Wall time over output tokens; medians over
the repeats, and for the cost over the differences of neighbouring runs. Constraints are compiled before. *Masks*: those
of one request, at every token of random outputs. *Constraints*: a new schema in the child process and in this one, the
same schema again, and the start of the child. Limits: a mask walks the trie of the vocabulary on the host; a masked
step uses a separate sampling program, which starts after the tokens of the previous step are known.

    python -m benchmarks.engine.structured_output --out benchmarks/results/structured-output
"""

import argparse
import csv
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from apt_jax import LLM, SamplingParams, StructuredOutputsParams
from apt_jax.request import RequestOutput
from apt_jax.structured.compile_worker import first_allowed
from apt_jax.structured.compiler import GrammarCompiler
from apt_jax.structured.constraint import MaskFiller, fill_one_by_one
from apt_jax.validation import build_request
from benchmarks.engine.random_schemas import SchemaMaker


def schemas(count: int, first_seed: int) -> list[dict[str, Any]]:
    return [SchemaMaker(np.random.default_rng(seed)).make() for seed in range(first_seed, first_seed + count)]


def run(llm: LLM, params: list[SamplingParams]) -> tuple[float, list[RequestOutput]]:
    """Seconds and outputs of one batch; grammars are known already."""
    requests = [llm.parts.build_request(prompt="The king said", params=p) for p in params]
    del requests  # compiled and in the cache
    started = time.perf_counter()
    outputs = llm.generate(["The king said"] * len(params), params, use_tqdm=False)
    return time.perf_counter() - started, outputs


def tokens(llm: LLM, concurrency: int, temperature: float, repeats: int) -> dict[str, Any]:
    """One row: the same batch with and without grammars."""
    grammars = [
        SamplingParams(
            max_tokens=256,
            temperature=temperature,
            seed=i,
            structured_outputs=StructuredOutputsParams(json=schema, disable_any_whitespace=True),
        )
        for i, schema in enumerate(schemas(max(24, 4 * concurrency), 1000))
    ]
    _, outputs = run(llm, grammars)
    lengths = [len(o.outputs[0].token_ids) for o in outputs]
    plain = [
        SamplingParams(max_tokens=n, temperature=temperature, seed=i, ignore_eos=True) for i, n in enumerate(lengths)
    ]
    run(llm, plain)
    seconds: dict[str, list[float]] = {"structured": [], "plain": []}
    for _ in range(repeats):
        for name, params in (("structured", grammars), ("plain", plain)):
            took_s, outputs = run(llm, params)
            assert [len(o.outputs[0].token_ids) for o in outputs] == lengths
            seconds[name].append(took_s)
    total = sum(lengths)
    with_form, without = (statistics.median(seconds[n]) / total for n in ("structured", "plain"))
    pairs = list(zip(seconds["structured"], seconds["plain"], strict=True))
    return {
        "concurrency": concurrency,
        "sampling": "drawn" if temperature else "greedy",
        "requests": len(lengths),
        "output_tokens": total,
        "plain_ms_per_token": 1e3 * without,
        "structured_ms_per_token": 1e3 * with_form,
        "cost_ms_per_token": 1e3 * statistics.median(a - b for a, b in pairs) / total,
        "cost_percent": 100 * (statistics.median(a / b for a, b in pairs) - 1),
    }


def compiler_of(llm: LLM) -> GrammarCompiler:
    """A fresh one, without a cache and without a child."""
    assert llm.tokenizer is not None
    limits = llm.parts.limits
    return GrammarCompiler(
        llm.tokenizer,
        vocab_size=limits.vocab_size,
        eos_token_ids=limits.eos_token_ids,
    )


def percentiles(name: str, seconds: list[float]) -> dict[str, Any]:
    p50, p99 = np.percentile(seconds, [50, 99]) * 1e3
    return {
        "what": name,
        "count": len(seconds),
        "p50_ms": float(p50),
        "p99_ms": float(p99),
        "max_ms": 1e3 * max(seconds),
    }


def checked(llm: LLM, schema: dict[str, Any], **options: Any) -> StructuredOutputsParams:
    """As validation hands it to the compiler."""

    class Source:
        wanted: Any = None

        def compile(self, wanted: StructuredOutputsParams, *, ends_at_eos: bool) -> Any:
            self.wanted = wanted

    source = Source()
    params = SamplingParams(structured_outputs=StructuredOutputsParams(json=schema, **options))
    build_request(llm.parts.limits, None, prompt_token_ids=[5], params=params, arrival_s=0.0, grammars=source)
    return source.wanted


def host(llm: LLM, count: int) -> list[dict[str, Any]]:
    """Compiling and masks, without a model."""
    compiler = compiler_of(llm)
    wanted = [checked(llm, schema) for schema in schemas(count, 5000)]
    timer = time.perf_counter

    def timed(function: Any) -> tuple[float, Any]:
        started = timer()
        result = function()
        return timer() - started, result

    first_s, _ = timed(lambda: compiler.compile(wanted[0]))
    new = [timed(lambda w=w: compiler.compile(w)) for w in wanted[1:]]
    known = [timed(lambda w=w: compiler.compile(w)) for w in wanted[1:]]
    copies = [timed(grammar.start) for _, grammar in new]
    compiler.close()
    eos, words = set(llm.parts.limits.eos_token_ids), -(-llm.parts.limits.vocab_size // 32)
    fills, accepts = [], []
    row = np.zeros(words, np.int32)
    for seed, (_, constraint) in enumerate(copies):
        rng = random.Random(seed)
        for _ in range(128):
            took_s, goes_on = timed(lambda c=constraint: c.fill_mask(row))
            token = first_allowed(row.tobytes(), rng, eos) if goes_on else None
            if token is None:
                break
            fills.append(took_s)
            accepts.append(timed(lambda c=constraint, t=token: c.accept(t))[0])
            if constraint.ended:
                break
    rows = 32
    masks = np.zeros((rows, words), np.int32)
    together = []
    for fill in (fill_one_by_one, MaskFiller(os.cpu_count())):
        seconds = []
        for _ in range(20):
            constraints = [grammar.start() for _, grammar in new[:rows]]
            seconds.append(timed(lambda f=fill, c=constraints: f(c, masks, list(range(rows))))[0])
        together.append(seconds)
    return [
        percentiles("first grammar: starts the child", [first_s]),
        percentiles("new grammar", [s for s, _ in new]),
        percentiles("known grammar", [s for s, _ in known]),
        percentiles("a request's copy", [s for s, _ in copies]),
        percentiles("mask of one request", fills),
        percentiles("accepting a token", accepts),
        percentiles(f"{rows} first masks, one by one", together[0]),
        percentiles(f"{rows} first masks, {os.cpu_count()} threads", together[1]),
    ]


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return
    figure = Figure(figsize=(6, 3.4), layout="constrained")
    axes = figure.subplots()
    names = [f"{r['concurrency']}\n{r['sampling']}" for r in rows]
    places = np.arange(len(rows))
    for shift, key, label in (
        (-0.2, "plain_ms_per_token", "any text"),
        (0.2, "structured_ms_per_token", "JSON schemas"),
    ):
        axes.bar(places + shift, [r[key] for r in rows], 0.4, label=label)
    axes.set_xticks(places, names)
    axes.set_xlabel("requests at once")
    axes.set_ylabel("ms per output token")
    axes.legend()
    figure.savefig(path, dpi=150)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="tiny-opt")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--grammars", type=int, default=200)
    parser.add_argument("--out", type=Path, help="directory for CSV and PNG")
    args = parser.parse_args()
    top = max(args.concurrency)
    started = time.perf_counter()
    llm = LLM(
        args.model,
        scheduling_policy="fcfs",
        max_num_seqs=top,
        num_blocks_override=2 * top * 32,
        use_tqdm=False,
    )
    warm_up_s = time.perf_counter() - started
    rows = []
    for concurrency in args.concurrency:
        scheduler = llm.parts.config.scheduler
        object.__setattr__(scheduler, "max_num_seqs", concurrency)
        llm.engine.max_num_seqs = concurrency
        for temperature in (0.0, 0.8):
            rows.append(tokens(llm, concurrency, temperature, args.repeats))
            print(rows[-1], file=sys.stderr, flush=True)
    stats = llm.engine.stats()
    times = host(llm, args.grammars)
    times.append(
        {
            "what": "masks of one step, served",
            "count": 4096,
            "p50_ms": stats.mask_p50_ms,
            "p99_ms": stats.mask_p99_ms,
            "max_ms": float("nan"),
        }
    )
    print(f"{'C':>3} {'sampling':8} {'tokens':>7} {'plain':>10} {'structured':>11} {'cost':>9}")
    for r in rows:
        print(
            f"{r['concurrency']:3} {r['sampling']:8} {r['output_tokens']:7} {r['plain_ms_per_token']:7.3f} ms {r['structured_ms_per_token']:8.3f} ms "
            f"{r['cost_ms_per_token']:+6.3f} ms ({r['cost_percent']:+.0f} %)"
        )
    for t in times:
        print(
            f"{t['what']:32} p50 {t['p50_ms']:8.4f} ms  p99 {t['p99_ms']:8.4f} ms  max {t['max_ms']:8.3f} ms  n={t['count']}"
        )
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        for name, table in (("tokens", rows), ("host", times)):
            with (args.out / f"{name}.csv").open("w", newline="") as file:
                writer = csv.DictWriter(file, fieldnames=list(table[0]))
                writer.writeheader()
                writer.writerows(table)
        plot(rows, args.out / "tokens.png")
    revision = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    facts = {
        "command": " ".join(sys.argv), "revision": revision, "date": time.strftime("%Y-%m-%d"), "jax": jax.__version__,
        "python": platform.python_version(), "device": str(jax.devices()[0]), "cores": os.cpu_count(), "start_s": warm_up_s,
        "compilations": llm.engine.stats().compilations, "rows": rows, "times": times,
    }  # fmt: skip
    print(json.dumps(facts))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
