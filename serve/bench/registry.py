"""The names of the backends, and a function that opens a backend by name."""

from serve.bench.backends import Backend, Target

BACKENDS = ("aptjax-grpc", "vllm-grpc", "openai", "openai-chat")


async def open_backend(name: str, target: Target) -> Backend:
    """Connect to the server and ask it for its model and vocabulary size.

    Raises:
        CommandError: the server does not respond, or its response is not as expected.
        ConfigError: a flag cannot be used with this backend.
    """
    if name in ("aptjax-grpc", "vllm-grpc"):
        from serve.bench.grpc_backends import open_grpc

        return await open_grpc(name, target)
    from serve.bench.http_backends import HttpBackend

    return await HttpBackend.open(target, chat=name == "openai-chat")
