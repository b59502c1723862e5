"""Shapes shared by tests, tuning, benchmarks and the compile gate: heads and widths of published models, and loads."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """Static sizes that a kernel is compiled for, in addition to dtype and block size."""

    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int = 0
    """Rotated lanes of a head; 0: no rotary embedding."""
    window: int | None = None
    softcap: float | None = None
    """Soft cap of the scores, as in `calls.LogitModifiers`."""
    sinks: bool = False
    """True if heads have sinks."""

    @property
    def hidden_size(self) -> int:
        """D: width of a layer input."""
        return self.num_heads * self.head_dim

    @property
    def lane(self) -> int:
        """E: width of a pool slot."""
        return self.num_kv_heads * self.head_dim

    @property
    def has_hidden(self) -> bool:
        """True if layer inputs are smaller than keys and values together (multi-head attention)."""
        return self.lane == self.hidden_size


PUBLISHED = {
    shape.name: shape
    for shape in (
        AttentionShape(name="opt-125m", num_heads=12, num_kv_heads=12, head_dim=64),
        AttentionShape(name="opt-6.7b", num_heads=32, num_kv_heads=32, head_dim=128),
        AttentionShape(name="opt-13b", num_heads=40, num_kv_heads=40, head_dim=128),
        AttentionShape(name="opt-30b", num_heads=56, num_kv_heads=56, head_dim=128),
        AttentionShape(name="opt-66b", num_heads=72, num_kv_heads=72, head_dim=128),
        AttentionShape(name="llama-2-7b", num_heads=32, num_kv_heads=32, head_dim=128, rotary_dim=128),
        AttentionShape(name="llama-3-8b", num_heads=32, num_kv_heads=8, head_dim=128, rotary_dim=128),
        AttentionShape(name="yi-6b", num_heads=32, num_kv_heads=4, head_dim=128, rotary_dim=128),
        AttentionShape(name="mistral-7b", num_heads=32, num_kv_heads=8, head_dim=128, rotary_dim=128, window=4096),
        AttentionShape(name="phi-3", num_heads=32, num_kv_heads=32, head_dim=96, rotary_dim=96, window=2047),
        AttentionShape(name="gemma-2b", num_heads=8, num_kv_heads=1, head_dim=256, rotary_dim=256),
        AttentionShape(name="gemma-2-9b", num_heads=16, num_kv_heads=8, head_dim=256, rotary_dim=256, window=4096, softcap=50.0),
        AttentionShape(name="gpt-oss", num_heads=64, num_kv_heads=8, head_dim=64, rotary_dim=64, window=128, sinks=True),
        AttentionShape(name="gpt-neox-20b", num_heads=64, num_kv_heads=64, head_dim=96, rotary_dim=24),
    )
}  # fmt: skip
"""Shapes of published models, by name."""

GATE = ("opt-13b", "opt-30b", "opt-66b", "llama-2-7b")
"""Names of shapes that every GPU kernel must compile for without register spills."""

SMALL = {
    shape.name: shape
    for shape in (
        AttentionShape(name="one-head", num_heads=1, num_kv_heads=1, head_dim=32),
        AttentionShape(name="three-heads", num_heads=3, num_kv_heads=3, head_dim=16),
        AttentionShape(name="twelve-heads", num_heads=12, num_kv_heads=12, head_dim=16),
        AttentionShape(name="width-80", num_heads=5, num_kv_heads=5, head_dim=16),
        AttentionShape(name="grouped", num_heads=8, num_kv_heads=2, head_dim=16),
        AttentionShape(name="grouped-by-three", num_heads=6, num_kv_heads=2, head_dim=32),
        AttentionShape(name="rotary", num_heads=4, num_kv_heads=4, head_dim=32, rotary_dim=32),
        AttentionShape(name="partial-rotary", num_heads=4, num_kv_heads=4, head_dim=32, rotary_dim=8),
        AttentionShape(name="grouped-rotary", num_heads=8, num_kv_heads=4, head_dim=16, rotary_dim=16),
        AttentionShape(name="seventy-two-heads", num_heads=72, num_kv_heads=72, head_dim=16),
    )
}  # fmt: skip
"""Small shapes for interpreters, by name: head counts and widths that are not powers of two, grouped heads, rotary
lanes."""

RAGGED_LENGTHS = (0, 1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 500, 2000)
"""Cached tokens of each row in tests."""

CACHED_TOKENS = (4_000, 30_000, 120_000)
"""Cached tokens of a batch in kernel benchmarks."""
