"""Which programs there are for the sum of scores over devices, whose size is fixed."""

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from apt_jax.backends import attention_ops
from apt_jax.config import CacheConfig
from apt_jax.core.kinds import HIDDEN, KV, KindSet
from apt_jax.executor.plan import plan_executor
from apt_jax.executor.programs.programs import Programs
from apt_jax.executor.programs.prompt_logprobs import PromptPrograms
from apt_jax.executor.programs.runner import ProgramCall
from apt_jax.models.sharding import TensorParallel
from tests.support.parallel_cases import MODELS

BOTH = KindSet(kv=True, hidden=True)


def programs(backend: str = "triton-interpret", hidden_attention: str = "absorb", num_devices: int = 4) -> Programs:
    plan = plan_executor(
        MODELS["opt"],
        cache=CacheConfig(mode="hybrid", block_size=4, hidden_attention=hidden_attention),  # type: ignore[arg-type]
        max_num_seqs=64,
        max_num_batched_tokens=64,
        max_model_len=128,
        num_devices=num_devices,
        platform="cpu",
        chip=None,
        attention=attention_ops("cpu", backend),
    )
    tensor = TensorParallel(num_devices, plan.config) if num_devices > 1 else None
    made = plan.programs(100, None, None)
    return Programs(
        made.config,
        plan.ops,
        made.step_format,
        kinds_offered=plan.kinds_offered,
        hidden_mode=plan.hidden_mode,
        tensor=tensor,
        mesh=None,
        specs=None,
        platform="cpu",
    )


def test_many_absorbed_rows_on_kernels_over_several_devices_have_less_room_where_that_is_enough() -> None:
    several = programs()
    assert several.hidden_rooms(64, BOTH) == [64 * 128 // 4, None]
    kind, lens = np.full(64, HIDDEN, np.int8), np.full(64, 1, np.int32)
    lens[20:] = 0
    assert several.hidden_room_of(64, BOTH, kind, lens) is None  # 20 rows of 128
    kind[16:20] = KV
    assert several.hidden_room_of(64, BOTH, kind, lens) == 2048  # 16
    lens[0] = 129
    assert several.hidden_room_of(64, BOTH, kind, lens) is None


@pytest.mark.parametrize(
    ("made", "rows", "kinds"),
    [
        ({}, 4, BOTH),
        ({}, 64, KindSet(kv=True, hidden=False)),
        ({"num_devices": 1}, 64, BOTH),
        ({"hidden_attention": "reproject"}, 64, BOTH),
        ({"backend": "xla"}, 64, BOTH),
    ],
)
def test_others_are_compiled_once(made: dict, rows: int, kinds: KindSet) -> None:
    assert programs(**made).hidden_rooms(rows, kinds) == [None]


def test_programs_that_are_compiled_while_requests_wait_have_a_line(caplog):
    caplog.set_level(logging.INFO, logger="apt_jax.executor")
    compiled: list[str] = []

    class Call:
        def compile(self) -> None:
            compiled.append("x")

    class Stub:
        empty_forward_all_call = empty_pool_call = lambda self, bucket: Call()
        empty_score_call = lambda self, bucket, rows: Call()  # noqa: E731
        leader = None
        executables: Mapping[Any, Any] = {}

        def __init__(self) -> None:
            self.programs = self
            self.jitted = {"forward": lambda array: compiled.append("forward")}

        def num_compiled(self) -> int:
            return len(set(compiled))

        def options_of(self, num_tokens: int) -> dict[str, Any]:
            return {}

    runner: Any = Stub()
    prompts = PromptPrograms(runner, [16, 32])
    prompts.prepare()
    prompts.prepare()
    assert compiled == ["x"] * 6
    assert [record.getMessage() for record in caplog.records] == [
        "compiling 6 programs for log probabilities of prompts and for embeddings; the first request for them waits"
    ]
    caplog.clear()
    call = ProgramCall(runner, "forward", (np.zeros(1),), {}, ())
    runner.jitted["forward"] = lambda array: [compiled.append("forward")]
    call.run()
    call.run()
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("compiled the program forward in 0.0 s")
