"""How a step is laid out for the device, on literal examples; needs no JAX."""

import numpy as np

from apt_jax.core.kinds import HIDDEN, KV
from apt_jax.core.step import Conversions, StepBatch
from apt_jax.executor.compiling.buckets import GREEDY, Buckets, SamplerVariant
from apt_jax.executor.programs.packing import StepFormat, pack_conversions, pack_forward, pack_masks
from apt_jax.request import SamplingParams

DROPPED = 44
BUCKETS = Buckets(
    decode=[1, 2, 4], masked=[1, 4], prefill=[4, 8], prefixed=[], scored=[8], copies=[8], conversions=[1, 2]
)
FORMAT = StepFormat(
    block_size=4, hidden_block_size=4, num_blocks=10, max_num_seqs=4, table_len=8, vocab_size=40,
    num_biases=8, buckets=BUCKETS,
)  # fmt: skip


def batch(num_tokens: list[int], start: list[int], kind: list[int], tables: list) -> StepBatch:
    n = len(num_tokens)
    return StepBatch(
        slots=np.arange(n, dtype=np.int32), num_tokens=np.array(num_tokens, np.int32), start=np.array(start, np.int32),
        kind=np.array(kind, np.int8), token_ids=10 + np.arange(sum(num_tokens), dtype=np.int32),
        block_tables=np.array(tables, np.int32), samples=np.ones(n, bool), position=np.zeros(n, np.int32),
        params=[SamplingParams(temperature=0.0)] * n, history=[np.zeros(0, np.int32)] * n, prompt_len=np.zeros(n, np.int32),
    )  # fmt: skip


STEP = batch([1, 3, 1], [5, 0, 2], [HIDDEN, KV, KV], [[[1, 2], [0, 0]], [[5, 0], [6, 0]], [[7, 0], [8, 0]]])


def test_decode_rows_come_before_chunks_and_keys_before_layer_inputs():
    changes = np.array([[3, 16], [1, 5]], np.int32)
    step = pack_forward(STEP, FORMAT, changes, mixed=True)
    assert (step.num_decode, step.num_prefill) == (4, 4)
    found = FORMAT.forward_layout(4, 4).split(step.ints)
    assert found["token_ids"].tolist() == [14, 10, 0, 0, 11, 12, 13, 0]
    assert found["token_slots"].tolist() == [2, 0, 4, 4, 1, 1, 1, 4]
    assert found["positions"].tolist() == [2, 5, 0, 0, 0, 1, 2, 0]
    assert found["first_slots"].tolist() == [30, 9, DROPPED, DROPPED, 20, 21, 22, DROPPED]
    assert found["second_slots"].tolist() == [34, DROPPED, DROPPED, DROPPED, 24, 25, 26, DROPPED]
    assert found["token_hidden"].tolist() == [0, 1, 0, 0, 0, 0, 0, 0]
    assert found["decode_lens"].tolist() == [3, 6, 0, 0]
    assert found["prefill_slots"].tolist() == [1, 4, 4, 4]
    # Two entries for each of eight rows and for the chunk of a block, and places that are dropped.
    assert found["table_changes"].tolist() == [[3, 16] + 16 * [64], [1, 5] + 16 * [0]]
    assert step.table_changes.size == 0
    assert found["counts"].tolist() == [1, 2, 1]
    assert found["sample_rows"].tolist() == [1, 6, 0, 8]


def test_all_rows_are_chunks_where_programs_are_not_mixed():
    step = pack_forward(STEP, FORMAT, np.ones((2, 40), np.int32), mixed=False)
    assert (step.num_decode, step.num_prefill) == (0, 8)
    found = FORMAT.forward_layout(0, 8).split(step.ints)
    assert found["token_ids"].tolist() == [10, 11, 12, 13, 14, 0, 0, 0]
    assert found["prefill_offsets"].tolist() == [0, 1, 4, 0]
    assert found["prefix_lens"].tolist() == [5, 0, 2, 0]
    assert found["prefill_slots"].tolist() == [0, 1, 2, 4]
    assert step.table_changes.shape == (2, 40 - 12)
    assert found["sample_rows"].tolist() == [0, 3, 4, 8]


def test_conversions_are_cut_into_programs():
    step = batch([1], [9], [KV], [[[1, 2, 3], [4, 5, 6]]])
    conversions = Conversions(rows=np.zeros(1, np.int64), inputs=np.array([[7, 8, 9]], np.int32))
    found = [(FORMAT.convert_layout(n).split(ints), n) for ints, n in pack_conversions(step, conversions, FORMAT)]
    assert [n for _, n in found] == [2, 1]
    assert found[0][0]["blocks"].tolist() == [7, 8]
    assert found[1][0]["first_slots"].tolist() == [12, DROPPED, DROPPED, DROPPED]
    assert found[1][0]["second_slots"].tolist() == [24, DROPPED, DROPPED, DROPPED]


def test_tokens_beyond_a_narrow_mask_are_forbidden():
    masks = pack_masks(np.array([[5]], np.int32), np.array([1]), 2, FORMAT)
    assert masks.tolist() == [[-1, -1], [5, 0]]


def test_rows_get_a_variant_that_is_compiled():
    rows = [
        SamplingParams(temperature=0.0), SamplingParams(temperature=1.0), SamplingParams(temperature=1.0, top_k=3),
        SamplingParams(presence_penalty=1.0), SamplingParams(logprobs=1),
    ]  # fmt: skip
    plain = [SamplerVariant.for_rows([p], masked=False) for p in rows]
    assert plain[0] == GREEDY
    assert list(dict.fromkeys(plain)) == SamplerVariant.variants()
    masked = [SamplerVariant.for_rows([p], masked=True) for p in rows]
    assert set(masked) == set(SamplerVariant.masked_variants())
