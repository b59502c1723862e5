"""Outputs that come while nobody reads them are one output."""

import time
from typing import Any, cast

from apt_jax.frontend.outputs import OutputDelta


def delta(text: str) -> OutputDelta:
    return OutputDelta(request=cast("Any", None), text=text, token_ids=[1], metrics=cast("Any", None))


def test_merging_token_by_token_takes_linear_time() -> None:
    def seconds(num: int) -> float:
        whole, later = delta(""), delta("word")
        begun = time.thread_time()
        for _ in range(num):
            whole.merge(later)
        took_s = time.thread_time() - begun
        assert whole.text == "word" * num
        assert len(whole.token_ids) == num + 1
        return took_s

    quick = min(seconds(6000) for _ in range(3))
    assert min(seconds(48_000) for _ in range(2)) < 24 * quick + 0.02  # 8 times the length; copied whole it is 64
