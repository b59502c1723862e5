"""Fetches the tokenizer and the chat template of a running server, so that a gRPC client can chat.

The server sends both in an archive (`serve.grpc_api.tokenizer_bundle`), through vLLM's method ``GetTokenizer``. The
template is rendered like a local model's: in a separate process, with limits. The archive is untrusted: its size is
limited, and nothing in it is written to disk.
"""

import hashlib
import io
import json
import zipfile
from collections.abc import Sequence
from typing import Any

import grpc
import tokenizers
from smg_grpc_proto import vllm_engine_pb2_grpc
from smg_grpc_proto.generated import common_pb2

from apt_jax.errors import ModelLoadError, one_line
from apt_jax.text.chat import ChatTemplate, Message
from apt_jax.text.tokenizer import Tokenizer, special_token
from serve.client import AsyncAptClient
from serve.errors import CommandError

common: Any = common_pb2  # generated without types that checkers can follow

_TIMEOUT_S = 60.0
_MAX_ARCHIVE_BYTES = 128 << 20
_MAX_FILE_BYTES = 256 << 20
_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")
_NO_TOKENIZER = (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.FAILED_PRECONDITION)
"""Status codes of servers that do not offer GetTokenizer, and of servers whose model has no tokenizer."""


class ServerChat:
    """Tokenizer and chat template of a server.

    Args:
        tokenizer: tokenizer of the server's model.
        template: chat template of the server's model.
    """

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate) -> None:
        self._tokenizer, self._template = tokenizer, template

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Encode a conversation as token ids, up to where the model's answer starts. Blocks on a child process.

        Raises:
            InvalidRequestError: the template rejects the conversation.
        """
        return self._template.encode(self._tokenizer, messages)

    def close(self) -> None:
        self._template.close()


async def fetch_chat(client: AsyncAptClient) -> ServerChat | None:
    """Fetch the tokenizer and the chat template; None: the model has no tokenizer or no template, or the server does
    not offer them.

    Raises:
        CommandError: the archive is damaged, too large or cannot be used.
        grpc.RpcError: the server cannot be called.
    """
    stub: Any = vllm_engine_pb2_grpc.VllmEngineStub(client.channel)
    data, digest = bytearray(), ""
    try:
        call = stub.GetTokenizer(common.GetTokenizerRequest(), timeout=_TIMEOUT_S, metadata=client.metadata)
        async for chunk in call:
            data += chunk.data
            digest = chunk.sha256 or digest
            if len(data) > _MAX_ARCHIVE_BYTES:
                call.cancel()
                raise CommandError(f"the server's tokenizer is larger than {_MAX_ARCHIVE_BYTES >> 20} MiB")
    except grpc.aio.AioRpcError as error:
        if error.code() in _NO_TOKENIZER:
            return None
        raise
    if digest != hashlib.sha256(data).hexdigest():
        raise CommandError("the server's tokenizer is damaged: its SHA-256 does not match")
    return read_archive(bytes(data))


def read_archive(data: bytes) -> ServerChat | None:
    """Load the tokenizer and the chat template from an archive; None: it has no template.

    Raises:
        CommandError: the archive cannot be used.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            settings = json.loads(_read(archive, "tokenizer_config.json"))
            source = settings.get("chat_template")
            if not isinstance(source, str):
                return None
            backend = tokenizers.Tokenizer.from_str(_read(archive, "tokenizer.json").decode())
        tokens = {name: special_token(settings, name) for name in _TOKEN_NAMES}
        special = {name: token for name, token in tokens.items() if token is not None}
        template = ChatTemplate(source, special_tokens=special, where="the server's chat template")
    except (zipfile.BadZipFile, KeyError, AttributeError, ValueError, ModelLoadError) as error:
        raise CommandError(f"the server's tokenizer is damaged ({one_line(str(error)):.160})") from None
    except CommandError:
        raise
    except Exception as error:  # from the library, which raises plain `Exception`
        raise CommandError(f"the server's tokenizer cannot be used ({one_line(str(error)):.160})") from None
    return ServerChat(Tokenizer(backend), template)


def _read(archive: zipfile.ZipFile, name: str) -> bytes:
    """Return the contents of a file in the archive. Raises CommandError: the file is too large."""
    if archive.getinfo(name).file_size > _MAX_FILE_BYTES:
        raise CommandError(f"the server's tokenizer is too large: {name} exceeds {_MAX_FILE_BYTES >> 20} MiB")
    return archive.read(name)


__all__ = ["ServerChat", "fetch_chat", "read_archive"]
