"""The choice between copying cached groups from host memory and computing them again, by the cost model.

A waiting request may find groups that lie in host memory alone. Copying them takes time on the link to the device,
computing them takes time on the device; which is less depends on the machine, the model, the kind and the lengths. One
that begins with keys and values may also find layer inputs alone, and compute its keys and values from those: fewer bytes
travel than for keys and values, and less is computed than from the tokens (the idea of HCache).
"""

from collections.abc import Callable, Sequence

from apt_jax.cache.prefix_hits import Hit
from apt_jax.core.kinds import HIDDEN, KV
from apt_jax.costs.model import StepCosts

RESTORES = ("kv", "hidden", "converted", "recomputed")
"""Ways to continue a request that finds groups only in host memory (`EngineStats.restores`)."""


class RestoreChoice:
    """Tells whether groups in host memory are worth copying, as `PrefixHitTracker.restores`.

    Args:
        costs: the current cost model; where nothing is known of copies they cost nothing.
        block_sizes, blocks_per_group: of the cache, by kind.
        max_num_batched_tokens: of a step: what is computed in several steps pays for each.
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
        """Compare the two.

        Args:
            kind: of the cache.
            tokens: positions that need no computing if groups are copied.
            resident: those of them that need none in any case.
            host: those that are copied.
            total: positions of the request.
        """
        copy_s = self.copy_s(kind, host) + self.compute_s(kind, total - tokens, tokens)
        return copy_s <= self.compute_s(kind, total - resident, resident)

    def converts(self, converted: Hit, kv: Hit, total: int) -> bool:
        """True if computing keys and values from cached layer inputs is cheaper, as `PrefixHitTracker.converts`."""
        own_s = self.copy_s(KV, kv.host) + self.compute_s(KV, total - kv.tokens, kv.tokens)
        conversion_s = self._costs().conversion_s(converted.tokens)
        rest_s = self.compute_s(KV, total - converted.tokens, converted.tokens)
        return self.copy_s(HIDDEN, converted.host) + conversion_s + rest_s < own_s

    def copy_s(self, kind: int, num_tokens: int) -> float:
        """Seconds to load positions."""
        costs = self._costs()
        num_blocks = -(-num_tokens // self._block_sizes[kind]) * self._per_group[kind]
        return costs.transfer_s(0, num_blocks)

    def compute_s(self, kind: int, num_tokens: int, start: int) -> float:
        """Seconds to compute positions over `start` cached ones."""
        costs = self._costs()
        if num_tokens == 1 and start:
            return costs.decode_base_s + costs.decode_row_s(start, kind)
        num_steps = -(-num_tokens // self._budget)
        return costs.prefill_base_s * num_steps + costs.chunk_s(num_tokens, start, kind)
