"""API keys and TLS, over both protocols."""

import argparse
import asyncio
import itertools
import json
import os
import ssl
import stat
from pathlib import Path
from typing import Any

import grpc
import httpx2
import pytest
import trustme
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from apt_jax.errors import ConfigError
from apt_jax.text.chat import ChatTemplate
from serve import cli
from serve.cli.commands.serve import _reload
from serve.client import AsyncAptClient
from serve.http_api.app import OPEN_PATHS
from serve.security.api_keys import ApiKeys
from serve.security.tls import Tls
from tests.support.http_serving import bearer, run
from tests.support.toy_serving import executor_of

KEY = "sk-0123456789abcdefghij"
OTHER = "sk-another-key-of-a-tenant"
Code = grpc.StatusCode


# --- keys ----------------------------------------------------------------------------------------------------------


def test_P16_O6_every_endpoint_but_health_wants_a_key():
    keys = ApiKeys([KEY, OTHER])

    async def scenario(served):
        routes = served.server.app.paths
        assert len(routes) > 9
        # The page has no data; what it shows wants the key.
        page = ("", "/style.css", "/dashboard.js", "/charts.js", "/icon.svg")
        scripts = ("/chat.js", "/chats.js", "/markdown.js", "/marked.js", "/timeline.js")
        assert set(OPEN_PATHS) == {
            b"/",
            b"/health",
            b"/ping",
            b"/ready",
            *(f"/dashboard{p}".encode() for p in page),
            *(f"/chat{p}".encode() for p in ("", "/chat.css", *scripts)),
        }
        for method, path in routes:
            where = path.replace("{name:path}", "toy")
            is_open = path.encode() in OPEN_PATHS
            for headers in (
                {},
                bearer("wrong-0123456789abcdefghij"),
                {"authorization": KEY},
                {"authorization": f"Basic {KEY}"},
                {"authorization": "Bearer"},
                {"authorization": "Bearer Bearer"},
                {"x-api-key": f"Bearer {KEY}"},
                {"x-api-key": KEY, **bearer(OTHER)},
                {"x-api-key": KEY, **bearer(KEY[:-1])},
                bearer(KEY[:-1]),
                bearer(KEY + "x"),
            ):
                response = await served.http.request(method, where, headers=headers)
                if is_open:
                    assert response.status_code == 200
                    continue
                assert response.status_code == 401, (method, path)
                assert response.headers["www-authenticate"] == "Bearer"
                if method != "HEAD":
                    error = response.json()["error"]
                    if path.startswith("/api/"):  # Ollama's form
                        assert "API key" in error
                        continue
                    anthropic = path.startswith("/v1/messages")
                    assert error.get("code") == (None if anthropic else "invalid_api_key")
                    assert error["type"] == ("authentication_error" if anthropic else "invalid_request_error")
            for headers in (bearer(KEY), bearer(OTHER), {"x-api-key": KEY}, {"x-api-key": KEY, **bearer(KEY)}):
                # The events of the dashboard have no end.
                async with served.http.stream(method, where, headers=headers) as response:
                    assert response.status_code != 401

    run(scenario, app={"keys": keys})


@pytest.mark.parametrize(
    "target",
    [
        "http://127.0.0.1/health",
        "http://x/v1/models",
        "//health",
        "/health/../v1/models",
        "/%68ealth",
        "/health?x",
        "/health/",
        "/health%2f..%2fv1/models",
        "/Health",
        "/v1/models",
        "/ready;/v1/models",
        "*",
    ],
)
def test_R23_the_path_as_it_was_sent_decides(target):
    async def scenario(served):
        for host in ("127.0.0.1", "a/health?", "x/health"):
            connection = await served.raw(f"GET {target} HTTP/1.1\r\nhost: {host}\r\n\r\n".encode())
            status, _ = await connection.answer()
            assert status == (200 if target == "/health?x" else 401)
            await connection.close()

    run(scenario, app={"keys": ApiKeys([KEY])})


def test_two_keys_at_once_are_none():
    async def scenario(served):
        data = f"GET /v1/models HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\nauthorization: Bearer y\r\n\r\n"
        connection = await served.raw(data.encode())
        assert (await connection.answer())[0] == 401
        await connection.close()

    run(scenario, app={"keys": ApiKeys([KEY])})


def test_the_official_client_sends_the_key():
    async def scenario(served):
        client = served.openai.with_options(api_key=KEY)
        assert [m.id for m in (await client.models.list()).data] == ["toy"]

    run(scenario, app={"keys": ApiKeys([KEY])})


@pytest.mark.parametrize("share", [False, True])
def test_prefixes_are_found_by_the_same_key_and_salt_unless_keys_share(share):
    async def scenario(served):
        async def found(key: str, path: str, **fields: Any) -> int:
            body = {"max_tokens": 2, **fields}
            response = await served.post(path, body, headers={"authorization": f"Bearer {key}"})
            assert response.status_code == 200, response.text
            usage = response.json()["usage"]
            details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or usage
            return details.get("cached_tokens", details.get("cache_read_input_tokens", 0))

        text = "the same long beginning of a prompt"
        chat, message = f"a chat of {text}", f"a message of {text}"
        for path, fields in (
            ("/v1/completions", {"prompt": text}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": chat}]}),
            ("/v1/messages", {"messages": [{"role": "user", "content": message}]}),
        ):
            seen = set()
            for key, salt in itertools.product((KEY, OTHER), (None, "red", "blue")):
                what = (None if share else key, salt)
                assert (await found(key, path, cache_salt=salt, **fields) > 0) is (what in seen), (path, key, salt)
                seen.add(what)
                assert await found(key, path, cache_salt=salt, **fields) > 0
        for salt in ("", 5, "x" * 513, ["a"], "\ud800"):
            body = json.dumps({"prompt": text, "cache_salt": salt}).encode()
            headers = {"authorization": f"Bearer {KEY}", "content-type": "application/json"}
            response = await served.http.post("/v1/completions", content=body, headers=headers)
            assert (response.status_code, response.json()["error"]["param"]) == (400, "cache_salt")

    template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}")
    run(scenario, chat_template=template, share_prefixes=share, num_blocks=2000, app={"keys": ApiKeys([KEY, OTHER])})


def test_P17_Q3_keys_share_neither_queue_nor_cached_prefixes():
    prompt = "the same long beginning of a prompt, asked by two"

    async def scenario(served):
        first, second = (served.openai.with_options(api_key=key) for key in (KEY, OTHER))

        async def ask(client, text=prompt, tokens=2):
            return await client.completions.create(model="toy", prompt=text, max_tokens=tokens)

        async def found(client):
            usage = (await ask(client)).usage
            return usage.prompt_tokens_details.cached_tokens if usage.prompt_tokens_details else 0

        await ask(first)
        assert await found(first) > 0
        assert await found(second) == 0
        assert await found(second) > 0

        executor_of(served.parts).step_s = 0.02
        flood = [asyncio.create_task(ask(first, f"{i}", 200)) for i in range(24)]
        # One runs; of 18 places the key gets those that leave it an eighth as many free.
        await served.until(lambda: sum(t.done() for t in flood) == 24 - 1 - 16)
        errors: list[Any] = [t.exception() for t in flood if t.done()]
        assert all(e.status_code == 429 and "full share" in str(e) for e in errors)
        assert all(float(e.response.headers["retry-after"]) > 0 for e in errors)
        others = asyncio.create_task(ask(second, "b"))
        asked = served.grpc_server.port
        third = AsyncAptClient(f"127.0.0.1:{asked}", api_key=KEY)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await drained(third.generate("hello", max_tokens=2))
        assert caught.value.code() is Code.RESOURCE_EXHAUSTED
        assert "full share" in str(caught.value.details())
        await third.close()
        for task in flood:
            task.cancel()
        assert (await others).choices

    run(
        scenario,
        app={"keys": ApiKeys([KEY, OTHER])},
        grpc={"keys": ApiKeys([KEY, OTHER])},
        max_num_seqs=1,
        max_num_queued_reqs=18,
    )


def test_what_became_of_a_request_is_told_to_whoever_sent_it():
    async def scenario(served):
        mine, theirs = ({"authorization": f"Bearer {k}"} for k in (KEY, OTHER))
        body = {"prompt": "hello", "max_tokens": 5, "temperature": 0.0, "ignore_eos": True}
        answer = (await served.post("/v1/completions", body, headers=mine)).json()
        path = f"/v1/requests/{answer['id']}/decisions"
        told = (await served.http.get(path, headers=mine)).json()
        assert [e["event"] for e in told["events"]] == ["prefill", "decode", "ended"]
        assert told["events"][0]["tokens"] == answer["usage"]["prompt_tokens"]
        assert told["events"][-1]["reason"] == "length"
        for headers, where in ((theirs, path), (mine, "/v1/requests/none/decisions")):
            refused = await served.http.get(where, headers=headers)
            assert refused.status_code == 404
            assert "no recent request has the id" in refused.json()["error"]["message"]
        assert (await served.http.get(path)).status_code == 401

    run(scenario, app={"keys": ApiKeys([KEY, OTHER])})


async def code_of(awaitable) -> Code:
    try:
        await awaitable
    except grpc.aio.AioRpcError as error:
        return error.code()
    return Code.OK


async def drained(call) -> list:
    return [message async for message in call]


def test_P16_every_method_of_grpc_but_health_wants_a_key():
    async def scenario(served):
        plain = served.grpc
        for key, want in ((None, Code.UNAUTHENTICATED), ("x" * 25, Code.UNAUTHENTICATED), (KEY, Code.OK)):
            client = AsyncAptClient(f"127.0.0.1:{served.grpc_server.port}", api_key=key)
            assert await code_of(client.stats()) is want
            watch = client.watch_scheduler()
            watching = asyncio.create_task(code_of(anext(watch)))
            await asyncio.sleep(0.1)
            assert await code_of(drained(client.generate("hello", max_tokens=2))) is want
            assert await asyncio.wait_for(watching, 10) is want
            await watch.aclose()
            assert await client.is_serving()
            await client.close()
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(plain.channel)
        asked = [reflection_pb2.ServerReflectionRequest(list_services="")]
        assert await code_of(drained(stub.ServerReflectionInfo(iter(asked)))) is Code.UNAUTHENTICATED
        unknown = plain.channel.unary_unary("/aptjax.v1.AptServe/Nothing")
        assert await code_of(unknown(b"")) is Code.UNAUTHENTICATED
        assert served.parts.engine.stats().finished == {"length": 1}

    run(scenario, grpc={"keys": ApiKeys([KEY])})


def test_our_own_commands_send_a_key(tmp_path, capsys):
    async def scenario(served):
        file = key_file(tmp_path / "key", KEY)
        target = ["--target", f"grpc://127.0.0.1:{served.grpc_server.port}"]
        info, generate = (
            ["info", *target],
            ["generate", "toy", "hello", "--max-tokens", "3", *target],
        )
        for argv in (info, generate):
            assert await asyncio.to_thread(cli.main, argv) == 1
            assert "UNAUTHENTICATED" in capsys.readouterr().err
            assert await asyncio.to_thread(cli.main, [*argv, "--api-key-file", file]) == 0
            assert capsys.readouterr().out
        missing = [*info, "--api-key-file", str(tmp_path / "none")]
        assert await asyncio.to_thread(cli.main, missing) == 2
        assert "cannot be read (--api-key-file)" in capsys.readouterr().err

    run(scenario, grpc={"keys": ApiKeys([KEY])})


def key_file(path: Path, text: str, mode: int = 0o600) -> str:
    path.write_text(text)
    path.chmod(mode)
    return str(path)


def test_a_file_of_keys(tmp_path):
    keys = ApiKeys.load(key_file(tmp_path / "keys", f"# tenants\n{KEY}\n\n  {OTHER}  \r\n"))
    assert keys.accepts(f"Bearer {KEY}")
    assert keys.accepts(f"bearer {OTHER}".encode())
    for wrong in (None, "", "Bearer", "Bearer # tenants", f"Bearer {KEY} {OTHER}", "Bearer \udc80"):
        assert not keys.accepts(wrong)
    keys.replace(ApiKeys([OTHER]))
    assert not keys.accepts(f"Bearer {KEY}")


@pytest.mark.parametrize(
    ("text", "mode", "says"),
    [
        ("", 0o600, "no API key"),
        ("# one\n\n", 0o600, "no API key"),
        ("short\n", 0o600, "20 or more"),
        ("EMPTY\n", 0o600, "20 or more"),
        ("with spaces in it which no header has\n", 0o600, "printable"),
        ("é" * 30, 0o600, "printable"),
        (KEY, 0o644, "chmod 600"),
        (KEY, 0o602, "chmod 600"),
        ("x" * (2 << 20), 0o600, "larger than"),
    ],
)
def test_O4_O9_files_of_keys_that_are_refused(tmp_path, text, mode, says):
    path, good = key_file(tmp_path / "keys", text, mode), key_file(tmp_path / "good", OTHER)
    for paths, flag in (((path,), "--api-key-file"), ((good, path), "--operator-key-file")):
        with pytest.raises(ConfigError, match=says) as caught:
            ApiKeys.load(*paths)
        message = str(caught.value)
        assert message.startswith(path)
        assert flag in message
        assert "\n" not in message
        assert KEY not in message


def test_O4_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot be read.*--api-key-file"):
        ApiKeys.load(str(tmp_path / "none"))
    with pytest.raises(ConfigError, match=r"cannot be read.*--operator-key-file"):
        ApiKeys.load(None, str(tmp_path / "none"))


def test_files_of_keys_of_operators(tmp_path):
    tenants, operators = key_file(tmp_path / "keys", KEY), key_file(tmp_path / "operators", f"# us\n{OTHER}\n")
    both, alone = ApiKeys.load(tenants, operators), ApiKeys.load(None, operators)
    for keys, key, is_operator in ((both, KEY, False), (both, OTHER, True), (alone, OTHER, True)):
        caller = keys.caller_of(f"Bearer {key}")
        assert caller is not None
        assert caller.is_operator is is_operator
    assert not alone.accepts(f"Bearer {KEY}")
    with pytest.raises(ConfigError, match="an operator's key is also a tenant's key"):
        ApiKeys.load(operators, operators)


def test_keys_of_operators_are_read_again_too(tmp_path, caplog):
    file = Path(key_file(tmp_path / "operators", KEY))
    args = argparse.Namespace(api_key=None, api_key_file=None, operator_key_file=str(file))
    keys = ApiKeys.load(None, str(file))
    file.write_text(OTHER)
    _reload(args, keys, None)
    assert keys.accepts(f"Bearer {OTHER}")
    assert not keys.accepts(f"Bearer {KEY}")
    file.chmod(0o644)
    _reload(args, keys, None)
    assert keys.accepts(f"Bearer {OTHER}")
    assert "chmod 600" in caplog.text


# --- TLS -----------------------------------------------------------------------------------------------------------


class Authority:
    """A CA of a test, with files of what it issues."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir()
        self._directory = directory
        self._ca = trustme.CA()
        self.cert = str(directory / "ca.pem")
        self._ca.cert_pem.write_to_path(self.cert)

    def issue(self, name: str, **kwargs: Any) -> tuple[str, str]:
        """Files of a certificate and its key."""
        issued = self._ca.issue_cert(name, **kwargs)
        stem = self._directory / f"{len(os.listdir(self._directory))}"
        cert, key = f"{stem}.pem", f"{stem}.key"
        for number, pem in enumerate(issued.cert_chain_pems):
            pem.write_to_path(cert, append=number > 0)
        issued.private_key_pem.write_to_path(key)
        return cert, key

    def client(self, cert: tuple[str, str] | None = None) -> ssl.SSLContext:
        """Return the TLS context of a client: the CA that it trusts and the certificate that it presents."""
        context = ssl.create_default_context(cafile=self.cert)
        if cert is not None:
            context.load_cert_chain(*cert)
        return context

    def grpc(self, cert: tuple[str, str] | None = None) -> grpc.ChannelCredentials:
        shown = {}
        if cert is not None:
            shown = {
                "certificate_chain": Path(cert[0]).read_bytes(),
                "private_key": Path(cert[1]).read_bytes(),
            }
        return grpc.ssl_channel_credentials(Path(self.cert).read_bytes(), **shown)


@pytest.fixture
def ours(tmp_path) -> Authority:
    return Authority(tmp_path / "ours")


@pytest.fixture
def theirs(tmp_path) -> Authority:
    return Authority(tmp_path / "theirs")


def tls_run(scenario, tls: Tls) -> None:
    run(
        scenario, http={"tls": tls}, grpc={"tls": tls},
        base="https://localhost:{port}", verify=False,
    )  # fmt: skip


async def https(served, context: ssl.SSLContext) -> int:
    """Status of a call; raises where the connection fails."""
    base = f"https://localhost:{served.server.port}"
    async with httpx2.AsyncClient(base_url=base, verify=context) as http:
        return (await http.get("/v1/models")).status_code


async def grpcs(served, credentials: grpc.ChannelCredentials | None) -> Code:
    client = AsyncAptClient(f"localhost:{served.grpc_server.port}", credentials=credentials)
    code = await code_of(client.stats(timeout_s=5.0))
    await client.close()
    return code


def test_N8_TLS_is_what_clients_check(ours, theirs):
    async def scenario(served):
        assert await https(served, ours.client()) == 200
        assert await grpcs(served, ours.grpc()) is Code.OK
        with pytest.raises(httpx2.ConnectError, match=r"CERTIFICATE_VERIFY_FAILED|certificate"):
            await https(served, theirs.client())
        assert await grpcs(served, theirs.grpc()) is Code.UNAVAILABLE
        # Plaintext to a TLS port.
        async with httpx2.AsyncClient(base_url=f"http://localhost:{served.server.port}") as http:
            with pytest.raises(httpx2.TransportError):
                await http.get("/health")
        assert await grpcs(served, None) is Code.UNAVAILABLE
        # Nothing older than TLS 1.2.
        old = ours.client()
        old.minimum_version = ssl.TLSVersion.TLSv1_2
        old.maximum_version = ssl.TLSVersion.TLSv1_2
        assert await https(served, old) == 200
        assert await https(served, ours.client()) == 200

    tls_run(scenario, Tls(*ours.issue("localhost")))


def test_N8_a_certificate_of_another_name_is_refused_by_clients(ours):
    async def scenario(served):
        with pytest.raises(httpx2.ConnectError):
            await https(served, ours.client())
        assert await grpcs(served, ours.grpc()) is Code.UNAVAILABLE

    tls_run(scenario, Tls(*ours.issue("elsewhere.example")))


def test_N8_mutual_TLS_lets_only_our_clients_in(ours, theirs):
    tls = Tls(*ours.issue("localhost"), client_ca=ours.cert)
    assert tls.asks_clients
    mine, foreign = ours.issue("client"), theirs.issue("client")

    async def scenario(served):
        assert await https(served, ours.client(mine)) == 200
        assert await grpcs(served, ours.grpc(mine)) is Code.OK
        for wrong in (None, foreign):
            with pytest.raises(httpx2.TransportError):
                await https(served, ours.client(wrong))
            assert await grpcs(served, ours.grpc(wrong)) is Code.UNAVAILABLE
        assert await https(served, ours.client(mine)) == 200

    tls_run(scenario, tls)


def test_a_stream_over_TLS(ours):
    async def scenario(served):
        base = f"https://localhost:{served.server.port}"
        async with httpx2.AsyncClient(base_url=base, verify=ours.client()) as http:
            body = {"prompt": "hello", "max_tokens": 50, "stream": True, "ignore_eos": True}
            body["stream_options"] = {"include_usage": True}
            text = (await http.post("/v1/completions", json=body)).text
        assert text.endswith("data: [DONE]\n\n")
        assert '"completion_tokens":50,' in text

    tls_run(scenario, Tls(*ours.issue("localhost")))


def test_N8_a_new_certificate_is_used_without_a_restart(ours, theirs, tmp_path):
    cert, key = ours.issue("localhost")
    tls = Tls(cert, key)

    async def scenario(served):
        assert await https(served, ours.client()) == 200
        for new, old in zip(theirs.issue("localhost"), (cert, key), strict=True):
            Path(old).write_bytes(Path(new).read_bytes())
        tls.reload()
        assert await https(served, theirs.client()) == 200
        assert await grpcs(served, theirs.grpc()) is Code.OK
        assert await grpcs(served, ours.grpc()) is Code.UNAVAILABLE
        # Files that do not belong together change nothing.
        Path(key).write_bytes(Path(ours.issue("localhost")[1]).read_bytes())
        with pytest.raises(ConfigError, match="--tls-key"):
            tls.reload()
        assert await https(served, theirs.client()) == 200

    tls_run(scenario, tls)


def test_files_of_TLS_that_are_refused(ours, tmp_path):
    cert, key = ours.issue("localhost")
    other = ours.issue("localhost")[1]
    junk = str(tmp_path / "junk")
    Path(junk).write_text("no certificate")
    for args, flag in (
        ((str(tmp_path / "none"), key), "--tls-cert"),
        ((cert, str(tmp_path / "none")), "--tls-key"),
        ((cert, other), "--tls-key"),
        ((junk, key), "--tls-cert"),
        ((cert, junk), "--tls-key"),
        ((cert, key, str(tmp_path / "none")), "--tls-client-ca"),
        ((cert, key, junk), "--tls-client-ca"),
    ):
        with pytest.raises(ConfigError, match=flag) as caught:
            Tls(*args)
        assert "\n" not in str(caught.value)


def test_keys_are_kept_from_other_users_of_the_machine(tmp_path):
    path = key_file(tmp_path / "keys", KEY, 0o640)
    assert ApiKeys.load(path).accepts(f"Bearer {KEY}")
    assert not os.stat(path).st_mode & stat.S_IROTH
