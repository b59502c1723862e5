"""Chooses between copying cached groups from host memory and computing them again, based on the cost model.

A waiting request may find groups that are only in host memory. Copying them takes time on the link to the device, and
computing them takes time on the device; which is faster depends on the machine, the model, the kind and the lengths.
Keys and values can also be computed from cached layer inputs: this copies fewer bytes than copying keys and values, and
computes less than starting from the tokens (the idea of HCache).
"""

from collections.abc import Callable, Sequence

from apt_jax.cache.prefix_hits import Hit
from apt_jax.core.kinds import HIDDEN, KV
from apt_jax.costs.model import StepCosts

RESTORES = ("kv", "hidden", "converted", "recomputed")
"""Ways to restore a request whose cached groups are only in host memory (keys of `EngineStats.restores`)."""


class RestoreChoice:
    """Decides whether to copy groups from host memory; used as `PrefixHitTracker.restores`.

    Args:
        costs: function that returns the current cost model; copies count as free if their costs are not known.
        block_sizes, blocks_per_group: properties of the cache for each kind.
        max_num_batched_tokens: maximum number of tokens in a step; the base cost is added for each step.
    """

    def __init__(
        self,
        costs: Callable[[], StepCosts],
        block_sizes: Sequence[int],
        blocks_per_group: Sequence[int],
        max_num_batched_tokens: int,
    ) -> None:
        self._costs = costs
        self._block_sizes, self._per_group = tuple(block_sizes), tuple(blocks_per_group)
        self._budget = max_num_batched_tokens

    def __call__(self, kind: int, tokens: int, resident: int, host: int, total: int) -> bool:
        """Return True if copying the groups is not slower than computing them.

        Args:
            kind: cache kind.
            tokens: number of positions that need not be computed if groups are copied.
            resident: number of positions that need not be computed without copies.
            host: number of positions to copy.
            total: number of positions of the request.
        """
        copy_s = self.copy_s(kind, host) + self.compute_s(kind, total - tokens, tokens)
        return copy_s <= self.compute_s(kind, total - resident, resident)

    def converts(self, converted: Hit, kv: Hit, total: int) -> bool:
        """Return True if converting cached layer inputs is cheaper than using `kv`; see `PrefixHitTracker.converts`."""
        own_s = self.copy_s(KV, kv.host) + self.compute_s(KV, total - kv.tokens, kv.tokens)
        conversion_s = self._costs().conversion_s(converted.tokens)
        rest_s = self.compute_s(KV, total - converted.tokens, converted.tokens)
        return self.copy_s(HIDDEN, converted.host) + conversion_s + rest_s < own_s

    def copy_s(self, kind: int, num_tokens: int) -> float:
        """Return the time to copy positions from host memory, seconds."""
        costs = self._costs()
        num_blocks = -(-num_tokens // self._block_sizes[kind]) * self._per_group[kind]
        return costs.transfer_s(0, num_blocks)

    def compute_s(self, kind: int, num_tokens: int, start: int) -> float:
        """Return the time to compute positions that follow `start` cached positions, seconds."""
        costs = self._costs()
        if num_tokens == 1 and start:
            return costs.decode_base_s + costs.experts_read_s(1) + costs.decode_row_s(start, kind)
        num_steps = -(-num_tokens // self._budget)
        return costs.prefill_base_s * num_steps + costs.chunk_s(num_tokens, start, kind)
