"""Checks that keep web pages of other sites from using the server through a user's browser.

* A page whose host name resolves to this machine (DNS rebinding) is detected by the `Host` header of its requests.
* A page of another origin is detected by the headers `Origin` or `Sec-Fetch-Site`. Browsers would hide the responses
  from it, but its requests would still have effects.
"""

import dataclasses
import ipaddress
import re
from collections.abc import Iterable

from starlette.types import Scope

from apt_jax.errors import ConfigError
from serve.http_api.errors import BadCallError

HOSTS_FLAG = "--allowed-hosts"
ORIGIN_FLAG = "--cors-allow-origin"

_SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
_NAME = r"\[[0-9a-f:.]+\]|[a-z0-9._-]+"
_HOST = re.compile(rf"({_NAME})(?::([0-9]{{1,5}}))?")
_ORIGIN = re.compile(rf"([a-z][a-z0-9+.-]*)://({_NAME})(?::([0-9]{{1,5}}))?")
_PORTS = {"http": "80", "https": "443"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class BrowserRules:
    """Host names and origins that the server accepts."""

    hosts: frozenset[str] | None = None
    """Names that are accepted as `Host` in addition to localhost and loopback addresses; None: any name."""
    origins: frozenset[str] = frozenset()
    """Origins of other sites whose pages may call the server; "*" means any origin."""

    def check(self, scope: Scope) -> None:
        """Check the host and the origin of a call.

        Raises:
            BadCallError: `Host` is not accepted (status 421), or a page of another origin sent the call (403).
        """
        host = _only(scope, b"host")
        names_none = scope.get("http_version") == "1.0" and all(name != b"host" for name, _ in scope["headers"])
        # Browsers always send Host; load balancers that check /health over HTTP/1.0 do not.
        if self.hosts is not None and not names_none and not self._serves(host):
            raise BadCallError(
                421,
                "misdirected_request",
                f"this host name is not accepted: use 127.0.0.1 or localhost, or allow the name ({HOSTS_FLAG})",
            )
        if scope["method"] in _SAFE_METHODS or "*" in self.origins:
            return
        if any(name == b"origin" for name, _ in scope["headers"]):
            origin = _only(scope, b"origin")
            is_foreign = origin not in self.origins and not _is_same(origin, scope["scheme"], host)
        else:
            is_foreign = _only(scope, b"sec-fetch-site") == "cross-site"
        if is_foreign:
            raise BadCallError(
                403,
                "origin_not_allowed",
                f"pages of this origin may not call this server; allow the origin ({ORIGIN_FLAG} ORIGIN)",
            )

    def _serves(self, host: str | None) -> bool:
        match = _HOST.fullmatch(host or "")
        if match is None:
            return False
        name = match[1].strip("[]")
        return is_loopback(name) or name in (self.hosts or ())


def browser_rules(host: str, allowed_hosts: Iterable[str], origins: Iterable[str]) -> BrowserRules:
    """Return the browser rules of a server.

    Args:
        host: address that the server listens on. `Host` is checked if this is a loopback address or `allowed_hosts` is
            not empty.
        allowed_hosts: additional accepted names; "*" disables the check of `Host`.
        origins: origins of other sites whose pages may call the server, or "*".

    Raises:
        ConfigError: a name or origin is malformed.
    """
    names = {name.lower().strip("[]") for name in allowed_hosts}
    for name in names - {"*"}:
        if not _HOST.fullmatch(f"[{name}]" if ":" in name else name):
            raise ConfigError(f"{name!r:.80} must be the name or address of a host, without a port ({HOSTS_FLAG})")
    checked = {origin.lower() for origin in origins}
    for origin in checked - {"*"}:
        if not _ORIGIN.fullmatch(origin):
            raise ConfigError(f"{origin!r:.80} must be an origin such as https://example.com, or * ({ORIGIN_FLAG})")
    is_checked = "*" not in names and (is_loopback(host) or bool(names))
    return BrowserRules(hosts=frozenset({*names, host}) if is_checked else None, origins=frozenset(checked))


def is_loopback(host: str) -> bool:
    """Return whether an address is reachable from this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _only(scope: Scope, name: bytes) -> str | None:
    """Return the value of a header in lower case; None if the header is missing or repeated."""
    values = [value for key, value in scope["headers"] if key == name]
    return values[0].decode("latin-1").lower() if len(values) == 1 else None


def _is_same(origin: str | None, scheme: str, host: str | None) -> bool:
    """Return whether an origin is that of the server itself, judging by the call's scheme and `Host`."""
    theirs, ours = _ORIGIN.fullmatch(origin or ""), _HOST.fullmatch(host or "")
    if theirs is None or ours is None:
        return False
    port = _PORTS.get(scheme)
    return (theirs[1], theirs[2], theirs[3] or port) == (scheme, ours[1], ours[2] or port)
