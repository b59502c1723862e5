"""A batch beside interactive traffic: latency of the one, throughput of both.

Measured are interactive traffic alone (Poisson arrivals), the batch alone, and the batch beside the same traffic, in
turn and several times. The first token of an interactive request may take twice as long beside the batch as alone
(P99), and both together must generate 85 % of the tokens per second of the batch alone.
"""

import argparse
import contextlib
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import psutil
from openai import OpenAI

from benchmarks.server.clients import Clients, Load, Record, random_requests
from benchmarks.server.protocols import LoadRequest
from benchmarks.server.report import Run, progress
from benchmarks.server.server_process import Server
from serve.batches.window import MEMORY_S

_ENDED = ("failed", "completed", "expired", "cancelled")
_POLL_S = 0.1


class _BatchRun(NamedTuple):
    """One batch."""

    begun_s: float
    """When its first requests ran, on the monotonic clock."""
    ended_s: float
    tokens: int
    custom_ids: list[str]
    """Ids in its output file."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=int, default=1000, help="of the batch (default: 1000)")
    parser.add_argument("--rate", type=float, default=4.0, help="interactive arrivals per second (default: 4)")
    parser.add_argument("--alone", type=float, default=30.0, help="seconds of interactive traffic alone (default: 30)")
    parser.add_argument("--repeats", type=int, default=3, help="repeats, of which medians are taken (default: 3)")
    parser.add_argument("--prompt-len", type=int, default=64, help="tokens (default: 64)")
    parser.add_argument("--output-len", type=int, default=64, help="tokens of the batch (default: 64)")
    parser.add_argument("--interactive-output-len", type=int, default=32, help="tokens (default: 32)")
    parser.add_argument("--vocab-size", type=int, default=4000, help="prompts have token ids below it (default: 4000)")
    parser.add_argument("--latency-limit", type=float, default=2.0, help="of TTFT P99, as a multiple (default: 2)")
    parser.add_argument("--throughput-limit", type=float, default=0.85, help="as a share (default: 0.85)")


def run(args: argparse.Namespace) -> Run:
    found = Run("batch", args)
    interactive = _requests(args, 512, args.interactive_output_len, args.seed)
    batch = _requests(args, args.requests, args.output_len, args.seed + 1)
    rows: list[dict[str, Any]] = []
    total = 3 * args.repeats
    with tempfile.TemporaryDirectory() as directory:
        flags = [f"--batch-dir={directory}", *args.engine_flags, *args.server_flags]
        with Server(args.model, flags) as server, progress("batch", total, "run") as bar:
            client = OpenAI(base_url=f"http://{server.http}/v1", api_key="none", timeout=60)
            _traffic(args, server, interactive, 3.0)  # warm up
            _batch(client, batch[:64], args.model)
            for repeat in range(args.repeats):
                cpu = psutil.getloadavg()[0]
                alone = _traffic(args, server, interactive, args.alone)
                bar(3 * repeat + 1)
                time.sleep(MEMORY_S + 1)  # the batch runs alone
                only = _batch(client, batch, args.model)
                bar(3 * repeat + 2)
                beside, records = _both(args, server, client, interactive, batch, only.ended_s - only.begun_s)
                bar(3 * repeat + 3)
                during = [r for r in records if beside.begun_s <= r.started_s and r.ended_s <= beside.ended_s]
                rows.append(_row(args, alone, only, beside, during) | {"load_before": cpu})
                for one in (only, beside):
                    found.promise(
                        "every request of a batch is in its output file, once",
                        sorted(one.custom_ids) == sorted(f"r{i}" for i in range(args.requests)),
                        f"{len(one.custom_ids)} lines",
                    )
                found.promise(
                    "every interactive request is served", all(r.status == "complete" for r in (*alone, *during)), f"{len(alone)} and {len(during)}"
                )  # fmt: skip
    found.values["rows"] = rows
    for row in rows:
        found.say(
            f"interactive TTFT alone P50 {row['alone_ttft_p50_ms']:.1f}, P99 {row['alone_ttft_p99_ms']:.1f} ms; beside the batch P50 "
            f"{row['beside_ttft_p50_ms']:.1f}, P99 {row['beside_ttft_p99_ms']:.1f} ms; batch alone {row['batch_tokens_per_s']:.0f} tokens/s, "
            f"beside {row['beside_batch_tokens_per_s']:.0f} and {row['beside_interactive_tokens_per_s']:.0f} of the interactive requests"
        )
    latencies, shares = ([row[name] for row in rows] for name in ("latency_ratio", "throughput_ratio"))
    latency, share = statistics.median(latencies), statistics.median(shares)
    found.promise(
        f"TTFT P99 at most {args.latency_limit:g} times that of interactive traffic alone",
        latency <= args.latency_limit,
        f"{latency:.2f} ({', '.join(f'{one:.2f}' for one in latencies)})",
    )
    found.promise(
        f"throughput at least {args.throughput_limit:.0%} of the batch alone",
        share >= args.throughput_limit,
        f"{share:.1%} ({', '.join(f'{one:.1%}' for one in shares)})",
    )
    return found


def _requests(args: argparse.Namespace, count: int, output_len: int, seed: int) -> list[LoadRequest]:
    return random_requests(
        count, vocab_size=args.vocab_size, prompt_len=(args.prompt_len // 2, args.prompt_len),
        output_len=(output_len // 2, output_len), seed=seed, sampled_share=0.0,
    )  # fmt: skip


def _traffic(
    args: argparse.Namespace, server: Server, requests: Sequence[LoadRequest], duration_s: float
) -> list[Record]:
    with Clients([_load(args, server, requests, duration_s)]) as clients:
        return clients.reports()[0].records


def _load(args: argparse.Namespace, server: Server, requests: Sequence[LoadRequest], duration_s: float) -> Load:
    return Load(
        http=server.http, grpc=server.grpc, requests=requests, protocols=("http",), rate=args.rate, duration_s=duration_s, seed=args.seed
    )  # fmt: skip


def _both(
    args: argparse.Namespace,
    server: Server,
    client: OpenAI,
    interactive: Sequence[LoadRequest],
    batch: Sequence[LoadRequest],
    expected_s: float,
) -> tuple[_BatchRun, list[Record]]:
    with Clients([_load(args, server, interactive, 5 + 1.5 * expected_s)]) as clients:
        while not clients.num_done:
            time.sleep(0.05)
        ran = _batch(client, batch, args.model)
        return ran, clients.reports()[0].records


def _batch(client: OpenAI, requests: Sequence[LoadRequest], model: str) -> _BatchRun:
    """Run a batch, and delete its files."""
    lines = [
        {"custom_id": f"r{i}", "method": "POST", "url": "/v1/completions", "body": {"model": model, "prompt": list(r.prompt_ids), **r.params}}
        for i, r in enumerate(requests)
    ]  # fmt: skip
    data = "\n".join(map(json.dumps, lines)).encode()
    file = client.files.create(file=("requests.jsonl", data), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
    begun_s = None
    while batch.status not in _ENDED:
        time.sleep(_POLL_S)
        batch = client.batches.retrieve(batch.id)
        if begun_s is None and batch.status != "validating":
            begun_s = time.monotonic()
    ended_s = time.monotonic()
    if batch.status != "completed" or batch.output_file_id is None or batch.usage is None:
        raise RuntimeError(f"the batch is {batch.status}: {batch.errors}")
    output = [json.loads(line) for line in client.files.content(batch.output_file_id).text.splitlines()]
    for file_id in (file.id, batch.output_file_id):
        with contextlib.suppress(Exception):
            client.files.delete(file_id)
    return _BatchRun(begun_s or ended_s, ended_s, batch.usage.output_tokens, [line["custom_id"] for line in output])


def _row(
    args: argparse.Namespace, alone: Sequence[Record], only: _BatchRun, beside: _BatchRun, during: Sequence[Record]
) -> dict[str, Any]:
    seconds = beside.ended_s - beside.begun_s
    batch_rate, beside_rate = only.tokens / (only.ended_s - only.begun_s), beside.tokens / seconds
    of_interactive = sum(record.num_tokens for record in during) / seconds
    row: dict[str, Any] = {
        "interactive_alone": len(alone), "interactive_beside": len(during), "seconds": seconds,
        "batch_tokens_per_s": batch_rate, "beside_batch_tokens_per_s": beside_rate,
        "beside_interactive_tokens_per_s": of_interactive,
        "throughput_ratio": (beside_rate + of_interactive) / batch_rate,
    }  # fmt: skip
    for name, records in (("alone", alone), ("beside", during)):
        first_ms = [1e3 * (r.first_s - r.started_s) for r in records if r.first_s is not None]
        for percentile in (50, 99):
            row[f"{name}_ttft_p{percentile}_ms"] = float(np.percentile(first_ms, percentile))
    row["latency_ratio"] = row["beside_ttft_p99_ms"] / row["alone_ttft_p99_ms"]
    return row
