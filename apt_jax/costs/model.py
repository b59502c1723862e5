"""The cost of a step as policies see it: linear in tokens, contexts and requests."""

import dataclasses

import numpy as np
from numpy.typing import NDArray

from apt_jax.core.kinds import HIDDEN


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepCosts:
    """Time of a step as a linear model of its contents (docs/design/scheduling.md, Cost model; InferMax §3.2, BROS
    §4.1).

    From calibration or a hardware description; all in seconds, zero where nothing is known. A row decodes when it
    computes one token over cached positions, else it is a prefill chunk of c tokens over m cached ones. Per phase:

        linear   prefill:  base + per_request * chunks + per_token * sum(c)
                 decode:   base + per_request * requests (a coefficient a kind)
        read     prefill:  per_pair * sum(c^2 + 2 m c) + per_kv_prefix * m (or per_hidden_prefix * m)
                 decode:   per_token * (m + 1), a coefficient a kind

    A step of one phase takes linear + read. In a mixed step the linear layers run once over all tokens, so it takes
    both reads, and the linear part of whichever phase is slower with all tokens counted to it. Where it is two programs
    (`one_program` is False, as on CPUs) it takes both phases one after another. A prompt of one token counts as a chunk
    here, though an executor may run it with the decodes.
    """

    prefill_base_s: float = 0.0
    prefill_per_token_s: float = 0.0
    prefill_per_pair_s: float = 0.0
    prefill_per_request_s: float = 0.0
    prefill_per_kv_prefix_s: float = 0.0
    """Per cached KV token that a chunk attends to."""
    prefill_per_hidden_prefix_s: float = 0.0
    """Per cached hidden token that a chunk attends to."""
    decode_base_s: float = 0.0
    decode_per_request_s: float = 0.0
    decode_per_token_s: float = 0.0
    """Per cached KV token read."""
    decode_per_hidden_request_s: float = 0.0
    decode_per_hidden_token_s: float = 0.0
    """Per cached hidden token read."""
    convert_per_hidden_token_s: float = 0.0
    """Per cached token whose keys and values are computed from its layer input (`Plan.convert`), once; the step itself
    then counts the row as a KV one. 0: not known."""
    load_base_s: float = 0.0
    """Per step that loads blocks from host memory."""
    load_per_block_s: float = 0.0
    """Per block loaded, over all layers. 0: not known."""
    save_per_block_s: float = 0.0
    """Per block saved to host memory, over all layers. 0: not known."""
    one_program: bool = True
    """A mixed step is one program; else its decodes and its chunks are two."""

    def step_s(
        self,
        num_tokens: NDArray[np.int32],
        start: NDArray[np.int32],
        kind: NDArray[np.int8],
    ) -> float:
        """Predicted time of one step, seconds.

        Args:
            num_tokens: (n,) tokens that each row computes.
            start: (n,) positions cached before.
            kind: (n,) cache kinds.
        """
        n = num_tokens.size
        if n == 0:
            return 0.0
        decode = (num_tokens == 1) & (start > 0)
        num_decode = int(np.count_nonzero(decode))
        linear_s = read_s = 0.0
        if num_decode:
            read = start + 1
            hidden = kind == HIDDEN
            if num_decode < n:
                hidden = hidden & decode
                read = np.where(decode, read, 0)
            num_hidden = int(np.count_nonzero(hidden))
            num_read = int(read.sum())
            hidden_read = int(read[hidden].sum()) if num_hidden else 0
            linear_s = (
                self.decode_base_s
                + self.decode_per_request_s * (num_decode - num_hidden)
                + self.decode_per_hidden_request_s * num_hidden
            )
            read_s = self.decode_per_token_s * (num_read - hidden_read) + self.decode_per_hidden_token_s * hidden_read
            if num_decode == n:
                return linear_s + read_s
        chunk = ~decode
        c = num_tokens[chunk].astype(np.float64)
        m = start[chunk].astype(np.float64)
        tokens = float(c.sum())
        read_s += self.prefill_per_pair_s * float(c @ (c + 2 * m))
        if m.any():
            hidden_m = float(m[kind[chunk] == HIDDEN].sum())
            read_s += self.prefill_per_kv_prefix_s * (float(m.sum()) - hidden_m)
            read_s += self.prefill_per_hidden_prefix_s * hidden_m
        prefill_s = self.prefill_base_s + self.prefill_per_request_s * (n - num_decode)
        if not self.one_program:
            return linear_s + prefill_s + self.prefill_per_token_s * tokens + read_s
        prefill_s += self.prefill_per_token_s * (tokens + num_decode)
        return max(linear_s, prefill_s) + read_s

    def chunk_s(self, num_tokens: int, start: int, kind: int) -> float:
        """Time that one more prefill chunk adds to a step, seconds: without the step's base."""
        prefix_s = self.prefill_per_hidden_prefix_s if kind == HIDDEN else self.prefill_per_kv_prefix_s
        pairs = num_tokens * (num_tokens + 2 * start)
        return self.prefill_per_token_s * num_tokens + self.prefill_per_pair_s * pairs + prefix_s * start

    def decode_row_s(self, start: int, kind: int) -> float:
        """Time that one more decode row adds to a step, seconds: without the step's base."""
        if kind == HIDDEN:
            return self.decode_per_hidden_request_s + self.decode_per_hidden_token_s * (start + 1)
        return self.decode_per_request_s + self.decode_per_token_s * (start + 1)

    def transfer_s(self, num_saved: float, num_loaded: float) -> float:
        """Time of the transfers of a step, whose two ways go on side by side, seconds."""
        load_s = self.load_base_s + self.load_per_block_s * num_loaded if num_loaded else 0.0
        return max(load_s, self.save_per_block_s * num_saved)

    def conversion_s(self, num_tokens: int) -> float:
        """Extra time of a step for `Plan.convert` of rows with these cached tokens in total, seconds."""
        return self.convert_per_hidden_token_s * num_tokens


def prefix_step_s(
    costs: StepCosts,
    num_tokens: NDArray[np.int32],
    start: NDArray[np.int32],
    kind: NDArray[np.int8],
) -> NDArray[np.float64]:
    """Return (n,) `costs.step_s` of the first 1, 2, .. n rows, computed in one pass."""
    c, m = num_tokens.astype(np.float64), start.astype(np.float64)
    decode = (num_tokens == 1) & (start > 0)
    chunk = ~decode
    hidden = kind == HIDDEN
    read_s = np.where(
        decode,
        (m + 1) * np.where(hidden, costs.decode_per_hidden_token_s, costs.decode_per_token_s),
        costs.prefill_per_pair_s * c * (c + 2 * m)
        + m * np.where(hidden, costs.prefill_per_hidden_prefix_s, costs.prefill_per_kv_prefix_s),
    )
    request_s = np.where(hidden, costs.decode_per_hidden_request_s, costs.decode_per_request_s)
    decode_s = np.where(decode, request_s, 0.0).cumsum()
    decode_s += costs.decode_base_s * np.logical_or.accumulate(decode)
    tokens = c if costs.one_program else np.where(chunk, c, 0.0)
    prefill_s = (costs.prefill_per_token_s * tokens + costs.prefill_per_request_s * chunk).cumsum()
    prefill_s += costs.prefill_base_s
    both_s = np.maximum(decode_s, prefill_s) if costs.one_program else decode_s + prefill_s
    return np.where(np.logical_or.accumulate(chunk), both_s, decode_s) + read_s.cumsum()
