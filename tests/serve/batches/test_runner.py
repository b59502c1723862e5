"""The end of a batch beside others that run."""

import asyncio
import logging
import threading

from serve.batches.calls import failed_outcome
from serve.batches.config import BatchConfig
from serve.batches.feeder import RunningBatch
from serve.batches.runner import BatchRunner
from serve.batches.store import BatchStore
from serve.generate_call import CallService
from tests.serve.batches.test_store import add_batch


def test_a_batch_waits_only_for_its_own_outcomes(tmp_path):
    async def whole() -> None:
        store = BatchStore(BatchConfig(directory=tmp_path))
        runner = BatchRunner(store, CallService(logging.getLogger("test"), None))
        (record, lines), (other, _) = add_batch(store), add_batch(store)
        batch, ending, let_through = RunningBatch(record=record), RunningBatch(record=other), threading.Event()
        blocked = asyncio.create_task(store.run(let_through.wait))
        runner._note(batch, lines[0], failed_outcome("c", "m"))
        committing = asyncio.create_task(runner._commit_group())
        await asyncio.sleep(0)
        assert runner._outcomes_of(batch)
        assert not runner._outcomes_of(ending)
        assert runner._num_uncommitted() == 1
        let_through.set()
        await asyncio.gather(blocked, committing)
        assert not runner._outcomes_of(batch)
        assert (runner._num_uncommitted(), record.failed) == (0, 1)
        await runner.stop()

    asyncio.run(whole())
