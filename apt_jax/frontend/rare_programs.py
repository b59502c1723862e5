"""Programs that few requests need, compiled while the engine serves, when the first request that needs them arrives."""

import concurrent.futures
import threading
from collections.abc import Sequence

from apt_jax.executor import Executor
from apt_jax.request import EngineRequest


class RarePrograms:
    """Compiles the programs for log probabilities and pooled states of prompts.

    Args:
        executor: owner of the programs; it compiles them in a separate thread while it runs steps.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._lock = threading.Lock()
        self._compiled: concurrent.futures.Future[None] | None = None
        """Done when the programs are compiled; None: no request has needed them."""

    @property
    def is_compiling(self) -> bool:
        """True while a thread compiles; the compilation cannot be stopped."""
        compiled = self._compiled
        return compiled is not None and not compiled.done()

    def compile_for(self, requests: Sequence[EngineRequest]) -> "concurrent.futures.Future[None] | None":
        """Start compiling the rare programs that the requests need; return a future that is done when they are
        compiled, or None if the requests need none."""
        if all(request.params.prompt_logprobs is None and request.params.pooling is None for request in requests):
            return None
        with self._lock:
            compiled = self._compiled
            if compiled is None:
                compiled = self._compiled = concurrent.futures.Future()
                compiled.set_running_or_notify_cancel()  # so that no waiter can cancel it for the others
                threading.Thread(target=self._compile, args=(compiled,), daemon=True).start()
        return compiled

    def _compile(self, compiled: "concurrent.futures.Future[None]") -> None:
        try:
            self._executor.prepare_prompt_logprobs()
        except Exception as error:
            self._compiled = None  # the next request tries again
            compiled.set_exception(error)
        else:
            compiled.set_result(None)
