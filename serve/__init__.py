"""Servers, command line and clients of apt-jax.

Old module paths resolve to the modules' new places until the last importer is rewritten.
"""

import importlib
import importlib.abc
import importlib.machinery
import sys
from types import ModuleType

_MOVED = {
    "serve.call_record": "serve.observability.call_record",
    "serve.completer": "serve.cli.completion_client",
    "serve.dashboard_feed": "serve.dashboard.feed",
    "serve.dashboard_page": "serve.dashboard.page",
    "serve.grpc_calls": "serve.grpc_api.calls",
    "serve.grpc_server": "serve.grpc_api.server",
    "serve.http_app": "serve.http_api.app",
    "serve.http_protocol": "serve.http_api.protocol",
    "serve.http_server": "serve.http_api.server",
    "serve.http_status": "serve.http_api.errors",
    "serve.keys": "serve.security.api_keys",
    "serve.launch": "serve.launcher.supervisor",
    "serve.logs": "serve.observability.call_log",
    "serve.messages": "serve.grpc_api.messages",
    "serve.objectives": "serve.slo_headers",
    "serve.openai_api": "serve.http_api.openai_request",
    "serve.openapi": "serve.http_api.openapi",
    "serve.options": "serve.cli.options",
    "serve.output": "serve.cli.output",
    "serve.profiler": "serve.observability.profiler",
    "serve.prometheus": "serve.observability.prometheus",
    "serve.status": "serve.grpc_api.errors",
    "serve.stopped_readers": "serve.http_api.stalled_clients",
    "serve.tied": "serve.launcher.exec_with_pdeathsig",
    "serve.tls": "serve.security.tls",
    "serve.tokenizer_bundle": "serve.grpc_api.tokenizer_bundle",
    "serve.traces": "serve.observability.tracing",
    "serve.verbs": "serve.cli.commands",
    "serve.verbs.bench": "serve.cli.commands.bench",
    "serve.verbs.calibrate": "serve.cli.commands.calibrate",
    "serve.verbs.chat": "serve.cli.commands.chat",
    "serve.verbs.convert": "serve.cli.commands.convert",
    "serve.verbs.generate": "serve.cli.commands.generate",
    "serve.verbs.info": "serve.cli.commands.info",
    "serve.verbs.launch": "serve.cli.commands.launch",
    "serve.verbs.optimal": "serve.cli.commands.optimal",
    "serve.verbs.serve": "serve.cli.commands.serve",
    "serve.verbs.simulate": "serve.cli.commands.simulate",
    "serve.vllm_grpc": "serve.grpc_api.vllm_service",
    "serve.workload": "serve.demo.workload",
}


class _MovedModules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds a module of `_MOVED` at its new place; both names are the same module object."""

    def find_spec(
        self, fullname: str, path: object = None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        """See `importlib.abc.MetaPathFinder`."""
        return importlib.machinery.ModuleSpec(fullname, self) if fullname in _MOVED else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """See `importlib.abc.Loader`."""
        module = importlib.import_module(_MOVED[spec.name])
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Undo what the import system noted of the old name; the module has been executed."""
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state


sys.meta_path.insert(0, _MovedModules())
