"""Shared parts of the fuzz tests: number of cases, servers in a thread, and the check for leaks.

`APT_JAX_FUZZ=full` runs the full counts (`make fuzz`); without it each test takes seconds.
"""

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Coroutine, Iterator
from typing import Any

import tqdm

from apt_jax.text.chat import ChatTemplate
from serve.security.api_keys import ApiKeys
from tests.support.chat_templates import WITH_TOOLS
from tests.support.http_serving import HttpServed, http_serving
from tests.support.toy_openai import in_thread
from tests.support.toy_serving import assert_clean, expected_tokens, toy_parts

FULL = os.environ.get("APT_JAX_FUZZ") == "full"
CHECK_EVERY = 500
"""Cases between two checks that nothing is left."""
KEY = "fuzz-0123456789-0123456789"
MAX_MODEL_LEN = 64
"""Short, so that no case takes long."""


def cases(few: int, full: int) -> int:
    """Return the number of cases: `few` here, `full` in the full run."""
    return full if FULL else few


class Fuzzed:
    """Servers in a separate thread, with an API key for HTTP.

    Attributes:
        served: the servers.
        num_cases: number of cases that `note` has counted.
    """

    def __init__(self, served: HttpServed, loop: asyncio.AbstractEventLoop, what: str, total: int) -> None:
        self.served, self._loop, self._what = served, loop, what
        self.parts = served.parts
        self.url = f"http://127.0.0.1:{served.server.port}"
        self.grpc_target = f"127.0.0.1:{served.grpc_server.port}"
        self.num_cases = 0
        self._num_tasks: int | None = None
        self._bar = tqdm.tqdm(total=total, desc=what, unit=" cases", file=sys.stderr, disable=not FULL)

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine in the event loop of the servers; return its result."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(60)

    def note(self) -> None:
        """One more case is over, and no other is under way."""
        self.num_cases += 1
        self._bar.update()
        if self.num_cases % CHECK_EVERY == 0:
            self.check_clean()

    def check_clean(self) -> None:
        """Blocks are free, nothing runs or waits, and the next request has the answer that it must have."""
        self.run(self._check_clean())

    async def _check_clean(self) -> None:
        served = self.served
        await served.idle()
        await asyncio.wrap_future(served.engine.call(lambda: assert_clean(self.parts)))
        assert (await served.engine.stats()).finished.get("error", 0) == 0
        key = {"authorization": f"Bearer {KEY}"}
        params = {"max_tokens": 8, "temperature": 0.0}
        body = {"prompt": "hello", "return_token_ids": True, **params}
        response = await served.post("/v1/completions", body, headers=key)
        assert response.status_code == 200, response.text
        request = self.parts.build_request(prompt="hello", params=params)
        assert response.json()["choices"][0]["token_ids"] == expected_tokens(request)
        await served.idle()
        num_tasks = len(asyncio.all_tasks())
        self._num_tasks = num_tasks if self._num_tasks is None else self._num_tasks
        assert num_tasks <= self._num_tasks + 2, "tasks are left"

    def close(self) -> None:
        self._bar.close()


@contextlib.contextmanager
def fuzzing(what: str, total: int) -> Iterator[Fuzzed]:
    """Servers over a toy engine with a chat template; nothing may be left at the end.

    Args:
        what: the label of the progress bar.
        total: cases that are expected.
    """
    template = ChatTemplate(WITH_TOOLS)
    parts = toy_parts(max_model_len=MAX_MODEL_LEN, chat_template=template)

    @contextlib.asynccontextmanager
    async def servers() -> AsyncIterator[tuple[HttpServed, asyncio.AbstractEventLoop]]:
        async with http_serving(parts, app={"keys": ApiKeys([KEY])}) as served:
            yield served, asyncio.get_running_loop()

    try:
        with in_thread(servers) as (served, loop):
            fuzzed = Fuzzed(served, loop, what, total)
            fuzzed.check_clean()
            yield fuzzed
            fuzzed.check_clean()
            fuzzed.close()
    finally:
        template.close()
        if parts.grammars is not None:
            parts.grammars.close()
