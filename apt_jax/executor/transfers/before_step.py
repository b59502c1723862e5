"""Saves, copies, loads and converts blocks before a step writes anything."""

from apt_jax.core.step import Conversions, StepBatch
from apt_jax.executor.compiling.buckets import bucket_for
from apt_jax.executor.compiling.ready_programs import ReadyPrograms
from apt_jax.executor.programs.packing import pack_conversions
from apt_jax.executor.programs.runner import ProgramRunner
from apt_jax.executor.transfers.host_memory import HostPool


class Transfers:
    """Dispatches the transfers of steps, in the order defined by `StepBatch`.

    Args:
        runner: calls the programs.
        ready: programs that may be called.
        host: host memory; None: there is none.
    """

    def __init__(self, runner: ProgramRunner, ready: ReadyPrograms, host: HostPool | None) -> None:
        self._runner, self._ready, self._host = runner, ready, host

    def announce(self, batch: StepBatch) -> None:
        """Announce the saves of a step. This invalidates the contents of their host blocks, even if the step fails."""
        if self._host is None:
            return
        if len(batch.saves):
            self._host.announce(batch.saves)
        if self._host.slots is not None and len(batch.slot_saves):
            self._host.slots.announce(batch.slot_saves)

    def before(self, batch: StepBatch) -> None:
        """Dispatch the transfers of a step, after `announce`."""
        host = self._host
        slots = None if host is None else host.slots
        if host is not None and len(batch.saves):
            host.save(batch.saves)
        if slots is not None and len(batch.slot_saves):
            slots.save(batch.slot_saves)
        if len(batch.copies):
            self._copy(batch)
        if host is not None and len(batch.loads):
            host.load(batch.loads)
        if slots is not None and len(batch.slot_loads):
            slots.load(batch.slot_loads)
        if batch.conversions is not None:
            self._convert(batch, batch.conversions)

    def _copy(self, batch: StepBatch) -> None:
        sizes = self._ready.sizes.copies
        for at in range(0, len(batch.copies), sizes[-1]):  # a source is never also a destination
            part = batch.copies[at : at + sizes[-1]]
            self._runner.copy_call(part, bucket_for(sizes, len(part))).run()

    def _convert(self, batch: StepBatch, conversions: Conversions) -> None:
        sizes = self._ready.sizes.conversions
        for ints, num_blocks in pack_conversions(batch, conversions, self._runner.step_format, sizes):
            self._runner.convert_call(ints, num_blocks).run()
