"""Which programs steps run while others are still compiled."""

import numpy as np
import pytest

from apt_jax.executor.compiling.buckets import EVERYTHING, GREEDY, SAMPLED, Buckets, PromptSize, SamplerVariant
from apt_jax.executor.compiling.ready_programs import ProgramName, ReadyPrograms

BUCKETS = Buckets.for_limits(
    max_num_seqs=8, max_num_batched_tokens=64, max_model_len=96, hidden_block_size=4, rows_multiple=4
)
PENALISED = SamplerVariant(penalised=True)
MASKED = SamplerVariant(masked=True)


@pytest.fixture
def ready() -> ReadyPrograms:
    """The fewest programs that serve every step."""
    ready = ReadyPrograms(BUCKETS)
    names = ready.first()
    ready.forget()
    for name in names:
        ready.add(name)
    return ready


def test_at_first_and_at_last_all_programs_may_run(ready: ReadyPrograms) -> None:
    assert not ready.is_complete
    ready.finish()
    for programs in (ready, ReadyPrograms(BUCKETS)):
        assert programs.is_complete
        assert programs.sizes == BUCKETS
        assert programs.sampler(3, GREEDY) == (4, GREEDY)
        assert programs.sampler(3, MASKED) == (BUCKETS.masked[-1], MASKED)


def test_the_first_programs_serve_every_step(ready: ReadyPrograms) -> None:
    for field in ("decode", "prefill", "copies", "conversions"):
        assert getattr(ready.sizes, field) == getattr(BUCKETS, field)[-1:]
    for variant in (GREEDY, SAMPLED, PENALISED, MASKED, EVERYTHING):
        for rows in range(1, 9):
            assert ready.sampler(rows, variant) == (8, EVERYTHING)


def test_what_is_ready_is_used_and_the_smallest_that_fits(ready: ReadyPrograms) -> None:
    ready.add(ProgramName("sample", 8, SAMPLED))
    assert ready.sampler(1, GREEDY) == (8, SAMPLED)  # cheaper than everything
    assert ready.sampler(1, PENALISED) == (8, EVERYTHING)
    ready.add(ProgramName("sample", 1, GREEDY))
    assert ready.sampler(1, GREEDY) == (1, GREEDY)
    assert ready.sampler(2, GREEDY) == (8, SAMPLED)
    ready.add(ProgramName("decode", 1))
    ready.add(ProgramName("decode", 4))
    assert ready.sizes.decode == [1, 4, 8]


def test_a_broader_sampler_has_all_that_the_rows_need() -> None:
    for variant in (GREEDY, SAMPLED, PENALISED, MASKED, EVERYTHING):
        for other in variant.broader():
            assert not other.greedy
            assert (other.penalised, other.masked) >= (variant.penalised, variant.masked)
            assert other.penalised >= variant.penalised
            assert other.masked >= variant.masked
    assert EVERYTHING.broader() == []
    assert np.all([v.broader()[-1] == EVERYTHING for v in (GREEDY, SAMPLED, PENALISED, MASKED)])


def test_the_first_programs_for_prompts_hold_any_hidden_prefix_and_none() -> None:
    buckets = Buckets.for_limits(
        max_num_seqs=64, max_num_batched_tokens=512, max_model_len=2048, hidden_block_size=16, rows_multiple=8, sparse=True,
        has_rooms=True,
    )  # fmt: skip
    ready = ReadyPrograms(buckets)
    names = ready.first()
    ready.forget()
    for name in names:
        ready.add(name)
    assert ready.sizes.prompts == [PromptSize(512, 0), PromptSize(512, None)]
    assert [ready.sizes.prompt_size(10, n) for n in (0, 1)] == [(512, 0), (512, None)]
    ready.add(ProgramName("prefill", 256, prefix_room=8192))
    assert [ready.sizes.prompt_size(10, n) for n in (0, 8192, 8193)] == [(256, 8192), (256, 8192), (512, None)]
    ready.add(ProgramName("prefill", 64, prefix_room=0))
    assert [ready.sizes.prompt_size(10, n) for n in (0, 1)] == [(64, 0), (256, 8192)]
    assert ready.sizes.prompt_size(65, 0) == (256, 8192)
    ready.finish()
    assert ready.sizes == buckets
