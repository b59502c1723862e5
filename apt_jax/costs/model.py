"""Step cost as policies see it: linear in numbers of tokens, cached positions and requests, but for weights of experts
and attention with a window."""

import dataclasses

import numpy as np
from numpy.typing import NDArray

from apt_jax.core.kinds import HIDDEN


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepCosts:
    """Time of a step as a model of its contents, linear but for experts and windows (docs/design/scheduling.md, Cost
    model; InferMax §3.2, BROS §4.1).

    The coefficients come from a calibration or a hardware description, in seconds; unknown coefficients are zero. A row
    decodes if it computes one token over cached positions; otherwise it is a prefill chunk of c tokens over m cached
    positions. Per phase:

        linear   prefill:  base + per_request * chunks + per_token * sum(c)
                 decode:   base + per_request * requests (one coefficient per kind) + experts_s * share(requests)
        read     prefill:  per_pair * sum(c^2 + 2 m c) + per_kv_prefix * m (or per_hidden_prefix * m)
                 decode:   per_token * (m + 1) (one coefficient per kind) + per_window_token * min(m + 1, window)

    A step of one phase takes linear + read. In a mixed step the linear layers run once over all tokens, so the step
    takes both reads plus the larger of the two linear parts, where the prefill part counts each decode row as a token.
    If a mixed step is two programs (`one_program` is False, as on CPUs), it takes the sum of both phases. A prompt of
    one token counts as a chunk here, although an executor may run it as a decode.

    A step of a mixture of experts reads the weights of the experts that some row goes to: of E experts, k for each of n
    rows, share(n) = 1 - (1 - k/E)^n on average if experts are chosen alike. Prompts are so long that they read all
    experts, which is in their base.
    """

    prefill_base_s: float = 0.0
    prefill_per_token_s: float = 0.0
    prefill_per_pair_s: float = 0.0
    prefill_per_request_s: float = 0.0
    prefill_per_kv_prefix_s: float = 0.0
    """Seconds per cached KV token that a chunk attends to."""
    prefill_per_hidden_prefix_s: float = 0.0
    """Seconds per cached hidden token that a chunk attends to."""
    decode_base_s: float = 0.0
    decode_per_request_s: float = 0.0
    decode_per_token_s: float = 0.0
    """Seconds per cached KV token read."""
    decode_per_hidden_request_s: float = 0.0
    decode_per_hidden_token_s: float = 0.0
    """Seconds per cached hidden token read."""
    convert_per_hidden_token_s: float = 0.0
    """One-time cost in seconds per cached token whose keys and values are computed from its layer input
    (`Plan.convert`); in that step the row already counts as a KV row. 0: unknown."""
    load_base_s: float = 0.0
    """Fixed cost in seconds of a step that loads blocks from host memory."""
    load_per_block_s: float = 0.0
    """Seconds per block loaded from host memory, over all layers. 0: unknown."""
    save_per_block_s: float = 0.0
    """Seconds per block saved to host memory, over all layers. 0: unknown."""
    decode_per_window_token_s: float = 0.0
    """Seconds per cached token of the window of layers that have one; other layers take their time besides."""
    window_tokens: float = 0.0
    """Length of that window."""
    experts_s: float = 0.0
    """Seconds of reading the weights of all experts of all layers, as a decode step of many rows does."""
    experts_per_token: float = 0.0
    """k/E: share of a layer's experts that a token goes to, in [0, 1]."""
    one_program: bool = True
    """True if a mixed step is one program; False if its decodes and its chunks are two programs."""

    def step_s(
        self,
        num_tokens: NDArray[np.int32],
        start: NDArray[np.int32],
        kind: NDArray[np.int8],
    ) -> float:
        """Return the predicted time of one step, in seconds.

        Args:
            num_tokens: (n,) number of tokens that each row computes.
            start: (n,) number of positions of each row cached before the step.
            kind: (n,) cache kind of each row.
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
                + self.experts_read_s(num_decode)
            )
            read_s = self.decode_per_token_s * (num_read - hidden_read) + self.decode_per_hidden_token_s * hidden_read
            if self.decode_per_window_token_s:
                read_s += self.decode_per_window_token_s * float(np.minimum(read, self.window_tokens).sum())
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

    def experts_read_s(self, num_rows: int) -> float:
        """Return the seconds in which a step of `num_rows` decode rows reads the weights of experts."""
        return self.experts_s * (1.0 - (1.0 - self.experts_per_token) ** num_rows) if self.experts_s else 0.0

    def chunk_s(self, num_tokens: int, start: int, kind: int) -> float:
        """Return the seconds that one more prefill chunk adds to a step, without `prefill_per_request_s`."""
        prefix_s = self.prefill_per_hidden_prefix_s if kind == HIDDEN else self.prefill_per_kv_prefix_s
        pairs = num_tokens * (num_tokens + 2 * start)
        return self.prefill_per_token_s * num_tokens + self.prefill_per_pair_s * pairs + prefix_s * start

    def decode_row_s(self, start: int, kind: int) -> float:
        """Return the seconds that one more decode row adds to a step, without experts that no other row reads."""
        if kind == HIDDEN:
            return self.decode_per_hidden_request_s + self.decode_per_hidden_token_s * (start + 1)
        window_s = self.decode_per_window_token_s * min(start + 1, self.window_tokens)
        return self.decode_per_request_s + self.decode_per_token_s * (start + 1) + window_s

    def transfer_s(self, num_saved: float, num_loaded: float) -> float:
        """Return the time of a step's transfers in seconds; saves and loads run concurrently."""
        load_s = self.load_base_s + self.load_per_block_s * num_loaded if num_loaded else 0.0
        return max(load_s, self.save_per_block_s * num_saved)

    def conversion_s(self, num_tokens: int) -> float:
        """Return the extra time of a step that converts rows with `num_tokens` cached tokens in total (`Plan.convert`),
        in seconds."""
        return self.convert_per_hidden_token_s * num_tokens


def prefix_step_s(
    costs: StepCosts,
    num_tokens: NDArray[np.int32],
    start: NDArray[np.int32],
    kind: NDArray[np.int8],
) -> NDArray[np.float64]:
    """Return the (n,) results of `costs.step_s` for the first 1, 2, .. n rows, computed in one pass."""
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
    if costs.decode_per_window_token_s:
        read_s += costs.decode_per_window_token_s * np.where(decode, np.minimum(m + 1, costs.window_tokens), 0.0)
    request_s = np.where(hidden, costs.decode_per_hidden_request_s, costs.decode_per_request_s)
    decode_s = np.where(decode, request_s, 0.0).cumsum()
    decode_s += costs.decode_base_s * np.logical_or.accumulate(decode)
    if costs.experts_s:
        decode_s += costs.experts_s * (1.0 - (1.0 - costs.experts_per_token) ** decode.cumsum())
    tokens = c if costs.one_program else np.where(chunk, c, 0.0)
    prefill_s = (costs.prefill_per_token_s * tokens + costs.prefill_per_request_s * chunk).cumsum()
    prefill_s += costs.prefill_base_s
    both_s = np.maximum(decode_s, prefill_s) if costs.one_program else decode_s + prefill_s
    return np.where(np.logical_or.accumulate(chunk), both_s, decode_s) + read_s.cumsum()
