"""Program calls, and the arrays on the device that they donate and replace.

If the devices belong to several hosts, rank 0 announces every call to the other ranks (`apt_jax.distributed.hosts`),
which make the same calls through `ProgramRunner.run_plan`.
"""

import dataclasses
import logging
import math
import time
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec as P
from jax.stages import Compiled

from apt_jax.core.kinds import KindSet
from apt_jax.distributed.hosts import Leader
from apt_jax.distributed.messages import Plan
from apt_jax.executor.compiling.buckets import SamplerVariant
from apt_jax.executor.compiling.executables import described, described_static
from apt_jax.executor.pool_memory import PoolMemory
from apt_jax.executor.programs.block_tables import Changes, SentTables
from apt_jax.executor.programs.packing import Ints, empty_changes, pack_changes, pack_copies
from apt_jax.executor.programs.programs import Pools, Programs
from apt_jax.executor.programs.token_counts import SentCounts
from apt_jax.models.params import ModelParams, output_head

logger = logging.getLogger(__name__)

BUILT = "program %s %s: lowered in %.3f s, compiled or loaded in %.3f s"
"""Log message for each program that is created; a lowering time of 0 means that it was loaded."""
_VARYING = {"copy": 1, "save": 1, "load": 1, "save_slots": 1, "load_slots": 1, "score_prompts": 1, "pool_prompts": 0}
"""For each of these programs, the index of the argument whose size varies independently of the static arguments."""


def _to_plan(static: dict[str, Any]) -> dict[str, Any]:
    """Return static arguments as plain values, for other hosts."""
    return {k: dataclasses.astuple(v) if isinstance(v, SamplerVariant) else v for k, v in static.items()}


def _from_plan(static: dict[str, Any]) -> dict[str, Any]:
    types = {"kinds": KindSet, "variant": SamplerVariant}
    return {k: types[k](*v) if k in types else v for k, v in static.items()}


@dataclasses.dataclass(frozen=True)
class ProgramCall:
    """A program call; it may donate some of the runner's arrays, whose replacements are then its first results."""

    runner: "ProgramRunner"
    program: str
    args: tuple[Any, ...]
    """Arguments of the program. Arguments from the host come last, and the first of these is a NumPy array."""
    static: dict[str, Any]
    replaces: tuple[str, ...] = ()
    """Names of the runner's attributes that the first results replace, in order."""

    @property
    def key(self) -> tuple[Any, ...]:
        """Key of the executable within one runner: the program, its static arguments, and, for some programs, the size
        of an argument."""
        at = _VARYING.get(self.program)
        size = None if at is None else self.args[at].shape[0]
        return (self.program, size, *self.static.values())

    def lower(self) -> Any:
        """Return the program lowered for these arguments."""
        return self.runner.programs.jitted[self.program].lower(*self.args, **self.static)

    @property
    def num_tokens(self) -> int:
        """Number of rows of the program's matrix products, padding included; 0: unknown or no products."""
        return sum(self.static.get(name, 0) for name in ("num_decode", "num_prefill", "rows"))

    @property
    def options(self) -> dict[str, Any]:
        """Compiler options specific to this program."""
        return self.runner.programs.options_of(self.num_tokens)

    def compile(self) -> Compiled:
        """Return the executable for calls with this `key`, loaded or compiled at the first use. May be called from any
        thread."""
        programs, key = self.runner.programs, self.key
        found = programs.executables.get(key)
        if found is None:
            begin, lowered_s = time.perf_counter(), 0.0

            def lower() -> Any:
                nonlocal lowered_s
                lowered = self.lower()
                lowered_s = time.perf_counter() - begin
                return lowered

            if programs.store is None:
                found = lower().compile(compiler_options=self.options or None)
            else:
                facts = (self.program, described_static(self.static | self.options))
                arguments = map(self.runner.described, self.args)
                found = programs.store.executable((*facts, *arguments), lower, self.options)
            programs.executables[key] = found
            compile_s = time.perf_counter() - begin - lowered_s
            logger.debug(BUILT, self.program, described_static(self.static), lowered_s, compile_s)
        return found

    def run(self) -> Any:
        """Dispatch the program, compiling it first if needed; return the results other than replacements."""
        runner = self.runner
        if runner.leader is not None:
            first = next(i for i, a in enumerate(self.args) if isinstance(a, np.ndarray))
            host = self.args[first:]
            runner.leader.announce(Plan(program=self.program, arrays=host, static=_to_plan(self.static)))
        compiled = runner.programs.executables.get(self.key)
        results = self._unprepared() if compiled is None else compiled(*self.args)
        for name in self.replaces:
            replacement, *results = results
            if replacement is not None:  # else the array was not donated
                setattr(runner, name, replacement)
        return results[0] if len(results) == 1 else results

    def _unprepared(self) -> Any:
        """Dispatch a program that was not prepared and may have to be compiled first."""
        programs = self.runner.programs
        begin, num_compiled = time.perf_counter(), programs.num_compiled()
        if self.options:
            programs.count_late()
            results = self.compile()(*self.args)
        else:
            results = programs.jitted[self.program](*self.args, **self.static)
        if programs.num_compiled() > num_compiled:
            seconds = time.perf_counter() - begin
            logger.info(
                "compiled the program %s in %.1f s: it was not prepared, and a step waited for it",
                self.program,
                seconds,
            )
        return results


class ProgramRunner:
    """Makes the program calls of an executor.

    Attributes:
        pools: arrays (blocks + 1, block_size, lane), one per layer or shared by layers (`models.layer_groups`), donated to
            every program that writes cache.
        last_tokens: (max_num_seqs,) the token sampled last for each slot; steps read tokens from here that the host has
            not fetched yet.
        tables: `StepFormat.tables_shape`, the block tables of each slot; steps send only changes.
        token_counts: (max_num_seqs, V) for penalties: number of occurrences of each token in the outputs of each slot,
            and whether it is in the prompt (`SentCounts`).
        is_allocated: True if the attributes above are arrays; False if they are only shapes.
        sent_tables, sent_counts: the host's record of `tables` and `token_counts`.
        leader: announces every call to other hosts; None: one host.
    """

    def __init__(self, params: ModelParams, programs: Programs, memory: PoolMemory) -> None:
        self.params, self.programs, self.step_format, self._memory = params, programs, programs.step_format, memory
        self._head = output_head(params)
        self.is_allocated = False
        # Shapes until `clear` allocates the arrays: they suffice to compile programs.
        self.pools: Pools = memory.described_pools(self.step_format.num_blocks)
        self.last_tokens: Any = memory.described((self.step_format.max_num_seqs,), jnp.int32)
        self.tables: Any = memory.described(self.step_format.tables_shape, jnp.int32)
        self.token_counts: Any = memory.described(self.step_format.counts_shape, jnp.int32)
        self.sent_tables = SentTables(self.step_format.tables_shape)
        self.sent_counts = SentCounts(*self.step_format.counts_shape)
        self.leader: Leader | None = None
        self._described: dict[int, str] = {}
        self._states: Array | None = None  # of the last forward program that `run_plan` ran
        self._all_states: Array | None = None

    def clear(self) -> None:
        """Replace the pool and the per-slot arrays with zeros, on all hosts; all cache is lost."""
        if self.leader is not None:
            self.leader.announce(Plan(program="clear", arrays=[], static={}))
        for array in (*self.pools, self.tables, self.token_counts) if self.is_allocated else ():
            array.delete()  # exists if a step failed before donating it; memory does not suffice for two pools
        self.pools = self._memory.new_pools(self.step_format.num_blocks)
        alike = self._memory.placed(P())
        self.last_tokens = jnp.zeros(self.step_format.max_num_seqs, jnp.int32, device=alike)
        self.tables = jnp.zeros(self.step_format.tables_shape, jnp.int32, device=alike)
        self.token_counts = jnp.zeros(self.step_format.counts_shape, jnp.int32, device=alike)
        self.sent_tables.clear()
        self.sent_counts.clear()
        self.is_allocated = True

    def described(self, argument: Any) -> str:
        """Return `executables.described` of an argument, computed only once for the weights."""
        if argument is not self.params and argument is not self._head:
            return described(argument)
        if id(argument) not in self._described:
            self._described[id(argument)] = described(argument)
        return self._described[id(argument)]

    def send_tables(self, changes: Changes) -> None:
        """Dispatch changes of the block tables."""
        for part in pack_changes(changes, math.prod(self.step_format.tables_shape)):
            self.tables_call(part).run()

    def send_counts(self, changes: Changes) -> None:
        """Dispatch changes of the token counts."""
        for part in pack_changes(changes, math.prod(self.step_format.counts_shape)):
            self.counts_call(part).run()

    def check_integrity(self) -> None:
        """Check the device's arrays against the record of sent changes.

        Raises:
            RuntimeError: they differ.
        """
        self.sent_tables.check(np.asarray(self.tables))
        self.sent_counts.check(np.asarray(self.token_counts))

    def _empty_states(self, rows: int) -> Any:
        """Return zeros with the shape and placement of a forward program's hidden states, because another placement
        would need another program. If nothing is allocated, return only their description."""
        shape, dtype = self._memory.states_shape(rows), self.params.dtype
        if not self.is_allocated:
            return self._memory.described(shape, dtype)
        return jnp.zeros(shape, dtype, device=self._memory.placed(P()))

    def forward_call(
        self,
        ints: Ints,
        num_decode: int,
        num_prefill: int,
        kinds: KindSet,
        hidden_room: int | None = None,
        prefix_room: int | None = None,
    ) -> ProgramCall:
        """Return the call that computes hidden states of the sampling rows."""
        args = (self.params, self.pools, self.tables, self.last_tokens, ints)
        static = {
            "num_decode": num_decode,
            "num_prefill": num_prefill,
            "kinds": kinds,
            "hidden_room": hidden_room,
            "prefix_room": prefix_room,
        }
        return ProgramCall(self, "forward", args, static, replaces=("pools", "tables"))

    def forward_all_call(self, ints: Ints, num_prefill: int) -> ProgramCall:
        """Return the call that computes hidden states of the sampling rows and of all tokens."""
        args, static = (self.params, self.pools, self.tables, self.last_tokens, ints), {"num_prefill": num_prefill}
        return ProgramCall(self, "forward_all", args, static, replaces=("pools", "tables"))

    def score_call(self, states: Array, ints: Ints, rows: int) -> ProgramCall:
        """Return the call that computes log probabilities of prompt tokens."""
        return ProgramCall(self, "score_prompts", (self._head, states, ints), {"rows": rows})

    def pool_call(self, states: Array, segments: Ints) -> ProgramCall:
        """Return the call that computes sums of hidden states by row."""
        return ProgramCall(self, "pool_prompts", (states, segments), {})

    def decode_call(
        self,
        forward_ints: Ints,
        sample_ints: Ints,
        num_decode: int,
        kinds: KindSet,
        variant: SamplerVariant,
        hidden_room: int | None = None,
    ) -> ProgramCall:
        """Return the call that runs forward and sampling of decode rows and computes tokens."""
        args = (self.params, self.pools, self.tables, self.last_tokens, forward_ints, sample_ints)
        static = {"num_decode": num_decode, "kinds": kinds, "variant": variant, "hidden_room": hidden_room}
        return ProgramCall(self, "decode", args, static, replaces=("pools", "tables", "last_tokens"))

    def sample_call(
        self,
        hidden: Array,
        ints: Ints,
        penalties: Ints | None,
        masks: Ints | None,
        rows: int,
        variant: SamplerVariant,
    ) -> ProgramCall:
        """Return the call that samples tokens, with log probabilities if the variant has them."""
        counts = self.token_counts if variant.penalised else None
        args, static = (
            (self._head, hidden, self.last_tokens, counts, ints, penalties, masks),
            {"rows": rows, "variant": variant},
        )
        return ProgramCall(self, "sample", args, static, replaces=("last_tokens", "token_counts"))

    def copy_call(self, copies: Ints, size: int) -> ProgramCall:
        """Return the call that copies blocks."""
        pairs = pack_copies(copies, size, self.step_format)
        return ProgramCall(self, "copy", (self.pools, pairs), {}, replaces=("pools",))

    def tables_call(self, changes: Ints) -> ProgramCall:
        """Return the call that applies changes to the block tables."""
        return ProgramCall(self, "change_tables", (self.tables, changes), {}, replaces=("tables",))

    def counts_call(self, changes: Ints) -> ProgramCall:
        """Return the call that applies changes to the token counts."""
        return ProgramCall(self, "change_counts", (self.token_counts, changes), {}, replaces=("token_counts",))

    def convert_call(self, ints: Ints, num_blocks: int) -> ProgramCall:
        """Return the call that converts layer inputs to keys and values."""
        args, static = (self.params, self.pools, ints), {"num_blocks": num_blocks}
        return ProgramCall(self, "convert", args, static, replaces=("pools",))

    def save_call(self, blocks: Ints) -> ProgramCall:
        """Return the call that reads the contents of blocks."""
        return ProgramCall(self, "save", (self.pools, blocks), {})

    def load_call(self, blocks: Ints, rows: Any) -> ProgramCall:
        """Return the call that writes contents of blocks."""
        return ProgramCall(self, "load", (self.pools, blocks, rows), {}, replaces=("pools",))

    def save_slots_call(self, places: Ints, width: int) -> ProgramCall:
        """Return the call that reads the contents of slots of `width` values each."""
        return ProgramCall(self, "save_slots", (self.pools, places), {"width": width})

    def load_slots_call(self, places: Ints, slots: Any, width: int) -> ProgramCall:
        """Return the call that writes contents of slots."""
        args = (self.pools, places, slots)
        return ProgramCall(self, "load_slots", args, {"width": width}, replaces=("pools",))

    def empty_forward_call(
        self,
        num_decode: int,
        num_prefill: int,
        kinds: KindSet,
        hidden_room: int | None = None,
        prefix_room: int | None = None,
    ) -> ProgramCall:
        """Return a `forward_call` on padding only."""
        _, ints = self.step_format.empty_forward(num_decode, num_prefill)
        return self.forward_call(ints, num_decode, num_prefill, kinds, hidden_room, prefix_room)

    def empty_tables_call(self) -> ProgramCall:
        """Return a `tables_call` on padding only."""
        return self.tables_call(empty_changes(math.prod(self.step_format.tables_shape)))

    def empty_counts_call(self) -> ProgramCall:
        """Return a `counts_call` on padding only."""
        return self.counts_call(empty_changes(math.prod(self.step_format.counts_shape)))

    def empty_forward_all_call(self, num_prefill: int) -> ProgramCall:
        """Return a `forward_all_call` on padding only."""
        return self.forward_all_call(self.step_format.empty_forward(0, num_prefill)[1], num_prefill)

    def empty_score_call(self, num_states: int, rows: int) -> ProgramCall:
        """Return a `score_call` on padding only."""
        states = self._empty_states(num_states)
        return self.score_call(states, np.zeros((2, rows), np.int32), rows)

    def empty_pool_call(self, num_states: int) -> ProgramCall:
        """Return a `pool_call` on padding only."""
        states = self._empty_states(num_states)
        return self.pool_call(states, np.full(num_states, self.step_format.max_num_seqs, np.int32))

    def empty_sample_call(self, rows: int, variant: SamplerVariant) -> ProgramCall:
        """Return a `sample_call` on padding only."""
        step_format = self.step_format
        _, ints = step_format.empty_sample(rows)
        hidden = self._empty_states(step_format.buckets.decode[-1])
        penalties = step_format.penalty_layout(rows).zeros()[1] if variant.penalised else None
        masks = step_format.empty_masks(rows) if variant.masked else None
        return self.sample_call(hidden, ints, penalties, masks, rows, variant)

    def empty_decode_call(
        self, rows: int, kinds: KindSet, variant: SamplerVariant, hidden_room: int | None = None
    ) -> ProgramCall:
        """Return a `decode_call` on padding only."""
        _, ints = self.step_format.empty_forward(rows, 0)
        _, sample_ints = self.step_format.empty_sample(rows)
        return self.decode_call(ints, sample_ints, rows, kinds, variant, hidden_room)

    def run_plan(self, plan: Plan) -> Any:
        """Make a call that rank 0 announced, and return arrays that the caller can wait for."""
        arrays: Sequence[Any] = plan.arrays
        static = _from_plan(plan.static)
        if plan.program == "forward":
            self._states = self.forward_call(*arrays, **static).run()
            return self._states
        if plan.program == "forward_all":
            self._states, self._all_states = self.forward_all_call(*arrays, **static).run()
            return self._all_states
        if plan.program == "score_prompts":
            assert self._all_states is not None, "rank 0 scores prompts after a forward program of all tokens"
            return self.score_call(self._all_states, *arrays, **static).run()
        if plan.program == "pool_prompts":
            assert self._all_states is not None, "rank 0 pools prompts after a forward program of all tokens"
            return self.pool_call(self._all_states, *arrays, **static).run()
        if plan.program == "decode":
            return self.decode_call(*arrays, **static).run()
        if plan.program == "sample":
            assert self._states is not None, "rank 0 samples after a forward program"
            return self.sample_call(self._states, *arrays, **static).run()
        if plan.program == "clear":
            return self.clear()
        if plan.program == "convert":
            return self.convert_call(*arrays, **static).run()
        if plan.program == "change_tables":
            return self.tables_call(*arrays).run()
        if plan.program == "change_counts":
            return self.counts_call(*arrays).run()
        return self.copy_call(arrays[0], len(arrays[0])).run()
