"""Web pages of others: names that resolve to this machine, other origins, CORS."""

import argparse
from typing import Any

import pytest

from apt_jax.errors import ConfigError
from serve.cli.commands import serve as serve_command
from serve.http_api.browsers import browser_rules
from serve.launcher.plan import _check_gateway
from serve.observability.profiler import Profiler
from serve.security.api_keys import ApiKeys
from tests.support.http_serving import HttpServed, bearer, run

KEY = "sk-0123456789abcdefghij"
LOCAL = browser_rules("127.0.0.1", (), ())
BODY = {"prompt": "hello", "max_tokens": 2}


async def status_with_hosts(
    served: HttpServed, *hosts: str, path: str = "/v1/models", version: str = "1.1"
) -> tuple[int, Any]:
    """Status and JSON of a GET with these lines of `Host`."""
    lines = "".join(f"host: {host}\r\n" for host in hosts)
    connection = await served.raw(f"GET {path} HTTP/{version}\r\n{lines}\r\n".encode())
    answer = await connection.answer()
    await connection.close()
    return answer


@pytest.mark.parametrize("path", ["/v1/models", "/health", "/dashboard", "/dashboard/events", "/metrics", "/none"])
def test_on_loopback_only_names_of_this_machine_are_served(path):
    hostile = (
        "evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "127.0.0.1@evil.example",
        "evil.example#localhost", "localhost:1:2", "localhost:", "[::1", "::1", "0.0.0.0", "169.254.169.254", "[::2]",
        "localhost.", "127.0.0.1, evil.example", "\xb2",
    )  # fmt: skip

    async def scenario(served):
        for host in hostile:
            status, body = await status_with_hosts(served, host, path=path)
            assert status == 421, host
            assert body["error"]["code"] == "misdirected_request"
            assert "--allowed-hosts" in body["error"]["message"]
        assert (await status_with_hosts(served, "evil.example", path=path, version="1.0"))[0] == 421
        for hosts in ((), ("127.0.0.1", "evil.example"), ("evil.example", "127.0.0.1")):
            assert (await status_with_hosts(served, *hosts, path=path))[0] in (400, 421)
        if path == "/v1/models":
            for host in (
                "127.0.0.1",
                "127.0.0.1:8000",
                "localhost",
                "LocalHost:1",
                "[::1]",
                "[::1]:65535",
                "127.8.9.1",
            ):
                assert (await status_with_hosts(served, host))[0] == 200, host

    run(scenario, app={"browsers": LOCAL})


def test_balancers_that_ask_by_http_1_0_name_no_host():
    async def scenario(served):
        for path in ("/health", "/v1/models"):
            assert (await status_with_hosts(served, path=path, version="1.0"))[0] == 200

    run(scenario, app={"browsers": LOCAL})


@pytest.mark.parametrize("version", ["2.0", "3.0", "0.9"])
def test_other_versions_of_http_are_refused(version):
    async def scenario(served):
        status, body = await status_with_hosts(served, "localhost", version=version)
        assert status == 505
        assert body["error"]["code"] == "http_version_not_supported"
        assert (await status_with_hosts(served, "localhost"))[0] == 200

    run(scenario)


def test_the_host_is_checked_before_the_key():
    async def scenario(served):
        assert (await status_with_hosts(served, "evil.example"))[0] == 421
        assert (await status_with_hosts(served, "localhost"))[0] == 401

    run(scenario, app={"browsers": LOCAL, "keys": ApiKeys([KEY])})


@pytest.mark.parametrize(
    ("host", "allowed", "served_hosts", "refused"),
    [
        ("127.0.0.1", ("apt.example", "10.0.0.1"), ("apt.example:80", "APT.example", "10.0.0.1", "localhost"), ("example",)),
        ("127.0.0.1", ("*",), ("evil.example",), ()),
        ("127.0.0.1", ("fe80::1",), ("[fe80::1]:80",), ("[fe80::2]",)),
        ("0.0.0.0", (), ("evil.example",), ()),
        ("0.0.0.0", ("apt.example",), ("apt.example", "127.0.0.1:1"), ("evil.example", "0.0.0.0:8000x", "my-apt.example", "apt.example.evil")),
        ("10.1.2.3", ("apt.example",), ("10.1.2.3:8000", "apt.example"), ("10.1.2.4",)),
    ],
)  # fmt: skip
def test_allowed_hosts(host, allowed, served_hosts, refused):
    async def scenario(served):
        for name in served_hosts:
            assert (await status_with_hosts(served, name))[0] == 200, name
        for name in refused:
            assert (await status_with_hosts(served, name))[0] == 421, name

    run(scenario, app={"browsers": browser_rules(host, allowed, ())})


def test_what_pages_of_other_origins_send_has_no_effect(tmp_path):
    async def scenario(served):
        ours = f"127.0.0.1:{served.server.port}"
        foreign = [
            {"origin": "http://evil.example"},
            {"origin": "null"},
            {"origin": ""},
            {"origin": f"https://{ours}"},
            {"origin": "http://127.0.0.1"},
            {"origin": f"http://localhost:{served.server.port}"},
            {"origin": f"http://{ours}.evil.example"},
            {"origin": f"http://{ours}/"},
            {"sec-fetch-site": "cross-site"},
            {"origin": "http://evil.example", "sec-fetch-site": "same-origin"},
        ]
        posts = [path for method, path in served.server.app.paths if method == "POST"]
        assert len(posts) >= 6
        for path in (*posts, "/none"):
            for headers in foreign:
                response = await served.http.post(path, json=BODY, headers=headers)
                assert response.status_code == 403, (path, headers)
                error = response.json()["error"]
                if path.startswith("/api/"):  # Ollama's form
                    assert "origin" in error
                    continue
                assert error["type"] == "permission_error" or error["code"] == "origin_not_allowed"
                assert (error["type"] == "permission_error") == path.startswith("/v1/messages")
                assert "access-control-allow-origin" not in response.headers
        twice = [("origin", f"http://{ours}"), ("origin", "http://evil.example")]
        assert (await served.http.post("/tokenize", json=BODY, headers=twice)).status_code == 403
        for method in ("PUT", "DELETE", "PATCH", "X"):
            response = await served.http.request(method, "/v1/completions", headers=foreign[0])
            assert response.status_code == 403
        assert served.parts.engine.stats().finished == {}
        for headers in (
            {"origin": f"http://{ours}"},
            {"sec-fetch-site": "same-origin"},
            {"sec-fetch-site": "none"},
            {},
        ):
            assert (await served.post("/v1/completions", BODY, headers=headers)).status_code == 200
        # Pages of other origins may ask, but cannot read: there is no header that lets them.
        response = await served.http.get("/v1/models", headers=foreign[0])
        assert (response.status_code, response.headers.get("access-control-allow-origin")) == (200, None)
        preflight = {"origin": "http://evil.example", "access-control-request-method": "POST"}
        assert (await served.http.options("/v1/completions", headers=preflight)).status_code == 405

    run(scenario, app={"profiler": Profiler(tmp_path), "browsers": LOCAL})


def test_the_usual_port_may_be_left_out():
    async def scenario(served):
        head = "POST /tokenize HTTP/1.1\r\nhost: {}\r\norigin: {}\r\ncontent-length: 0\r\n\r\n"
        for host, origin, status in (
            ("localhost", "http://localhost:80", 415),
            ("localhost:80", "http://localhost", 415),
            ("localhost:443", "https://localhost", 403),
            ("localhost:8000", "http://localhost", 403),
        ):
            connection = await served.raw(head.format(host, origin).encode())
            assert (await connection.answer())[0] == status
            await connection.close()

    run(scenario, app={"browsers": LOCAL})


@pytest.mark.parametrize("origin", ["https://app.example", "*"])
def test_cors(origin):
    page = {"origin": "https://app.example"}
    preflight = {
        **page,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type",
    }

    async def scenario(served):
        for path in ("/v1/completions", "/v1/chat/completions"):
            response = await served.http.options(path, headers=preflight)  # without a key
            assert response.status_code == 200
            headers = response.headers
            assert headers["access-control-allow-origin"] == origin
            assert "POST" in headers["access-control-allow-methods"]
            assert {"authorization", "content-type"} <= set(headers["access-control-allow-headers"].lower().split(","))
            assert "access-control-allow-credentials" not in headers
        for body, stream in ((BODY, False), ({**BODY, "stream": True}, True)):
            response = await served.post("/v1/completions", body, headers=page | bearer(KEY))
            assert response.status_code == 200
            assert response.text.endswith("[DONE]\n\n") is stream
            assert response.headers["access-control-allow-origin"] == origin
            exposed = response.headers["access-control-expose-headers"]
            assert {"x-request-id", "retry-after"} <= set(exposed.split(", "))
        response = await served.post("/v1/completions", BODY, headers=page)
        assert (response.status_code, response.headers["access-control-allow-origin"]) == (401, origin)
        evil = {"origin": "https://evil.example"}
        response = await served.post("/v1/completions", BODY, headers=evil | bearer(KEY))
        assert response.status_code == (200 if origin == "*" else 403)
        response = await served.http.options("/v1/completions", headers=preflight | evil)
        assert response.status_code == (200 if origin == "*" else 400)
        response = await served.http.get("/v1/models", headers=evil | bearer(KEY))
        assert response.headers.get("access-control-allow-origin") == ("*" if origin == "*" else None)
        # The host still has to be ours.
        assert (await served.http.options("/v1/models", headers=preflight | {"host": "evil"})).status_code == 421

    rules = browser_rules("127.0.0.1", (), (origin,))
    run(scenario, app={"browsers": rules, "keys": ApiKeys([KEY])})


def test_O6_profiles_are_begun_by_JSON_alone(tmp_path):
    profiler = Profiler(tmp_path)

    async def scenario(served):
        for path in ("/start_profile", "/stop_profile"):
            for media in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", None):
                headers = {} if media is None else {"content-type": media}
                response = await served.http.post(path, content=b"{}", headers=headers)
                assert response.status_code == 415
                assert response.json()["error"]["code"] == "unsupported_media_type"
        assert not profiler.is_running

    run(scenario, app={"profiler": profiler})


def parsed(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    serve_command.add_arguments(parser)
    return parser.parse_args(argv)


def test_the_flags():
    rules = serve_command._browsers(parsed("--allowed-hosts", "a.example,B.example", "--allowed-hosts", "[::2]"))
    assert rules.hosts == {"a.example", "b.example", "::2", "127.0.0.1"}
    assert rules.origins == frozenset()
    rules = serve_command._browsers(
        parsed("--cors-allow-origin", "https://a.example", "--cors-allow-origin", "http://b:1")
    )
    assert rules.origins == {"https://a.example", "http://b:1"}
    assert serve_command._browsers(parsed("--host", "0.0.0.0")).hosts is None
    assert serve_command._browsers(parsed("--host", "0.0.0.0", "--http-host", "::1")).hosts == {"::1"}
    for argv, flag in (
        (("--allowed-hosts", "a.example:80"), "--allowed-hosts"),
        (("--allowed-hosts", ""), "--allowed-hosts"),
        (("--allowed-hosts", "https://a.example"), "--allowed-hosts"),
        (("--cors-allow-origin", "a.example"), "--cors-allow-origin"),
        (("--cors-allow-origin", "https://a.example/"), "--cors-allow-origin"),
        (("--cors-allow-origin", "null"), "--cors-allow-origin"),
        (("--cors-allow-origin", "https://*.example"), "--cors-allow-origin"),
    ):
        with pytest.raises(ConfigError, match=flag):
            serve_command.check(parsed(*argv))


def test_the_gateway_takes_none_of_them():
    pytest.importorskip("smg")
    for argv in (
        ("--allowed-hosts", "a.example"), ("--cors-allow-origin", "*"), ("--operator-key-file", "keys"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=argv[0]):
            _check_gateway(parsed(*argv))
