"""How chunks that lie one after another are described to cuDNN."""

import numpy as np
import pytest

pytest.importorskip("benchmarks.gpu.peers_of_prompts")

from jax._src.cudnn.fused_attention_stablehlo import _fix_seqlen_offsets

from benchmarks.gpu import peers_of_prompts


def test_segments_are_chunks_one_after_another() -> None:
    """As JAX hands them on: lengths, 0 where there is none, and offsets in elements."""
    lens, offsets = peers_of_prompts.segments([3, 5], 4)
    assert (lens.tolist(), offsets.tolist()) == ([[3, 5, -1, -1]], [[0, 3, 8, -1, -1]])
    q, k = np.zeros((1, 8, 4, 16)), np.zeros((1, 8, 2, 16))
    sent = _fix_seqlen_offsets(lens, lens, offsets, offsets, q, k)
    assert [a.tolist() for a in sent] == [
        [[3, 5, 0, 0]],
        [[3, 5, 0, 0]],
        [[0, 3 * 64, 8 * 64, 8 * 64, 8 * 64]],
        [[0, 3 * 32, 8 * 32, 8 * 32, 8 * 32]],
    ]
