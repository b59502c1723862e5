"""The join key: a secret shared by all ranks of a replica, read from --join-key-file.

Each side proves that it has the key with an HMAC of its role and a random nonce from each side, before it sends
anything else. The key itself is never sent and never logged. Without a key, which is allowed only if all ranks are on
one machine, both proofs are empty.
"""

import hmac
import os
import secrets
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from apt_jax.errors import AptJaxError, ConfigError, HostError, one_line

if TYPE_CHECKING:
    from apt_jax.distributed.transport import Stream

FLAG = "--join-key-file"
SAME_KEY = f"give all ranks the same key ({FLAG})"

_MIN_BYTES, _MAX_BYTES = 32, 4096
_NONCE_BYTES = 32
_RANK, _LEADER = b"apt-jax rank", b"apt-jax rank 0"


class RejectedError(AptJaxError):
    """The other end of a stream to rank 0 did not prove that it has the join key."""


class JoinKey:
    """A join key, whose text does not appear in its `repr`."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    @classmethod
    def load(cls, path: str) -> "JoinKey":
        """Read a file that holds the key in one line.

        Raises:
            ConfigError: the file cannot be read, is accessible to all users of the machine, or holds no usable key.
        """
        try:
            with Path(path).open("rb") as file:
                mode = os.fstat(file.fileno()).st_mode
                key = file.read(_MAX_BYTES + 1).strip()
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read ({error.strerror}) ({FLAG})") from None
        if mode & (stat.S_IROTH | stat.S_IWOTH):
            raise ConfigError(f"{path}: every user of this machine can read or write it; chmod 600 it ({FLAG})")
        if not _MIN_BYTES <= len(key) <= _MAX_BYTES or b"\n" in key:
            raise ConfigError(
                f"{path}: must hold one line of {_MIN_BYTES} to {_MAX_BYTES} bytes, such as `openssl rand -hex 32` prints ({FLAG})"
            )
        return cls(key)

    def mac(self, role: bytes, nonces: bytes) -> bytes:
        """Return the proof that the side with this role has the key."""
        return hmac.digest(self._key, role + b"\0" + nonces, "sha256")


def _mac(key: JoinKey | None, role: bytes, nonces: bytes) -> bytes:
    return b"" if key is None else key.mac(role, nonces)


def check_rank(stream: "Stream", key: JoinKey | None) -> None:
    """Require the other end to prove that it has rank 0's key, then prove to it that rank 0 has the key.

    Raises:
        RejectedError: the other end does not have the key.
        StreamError: the other end is not a rank of apt-jax, or has disconnected.
    """
    hello = stream.expect("hello").hello
    nonce = secrets.token_bytes(_NONCE_BYTES)
    stream.send(challenge={"nonce": nonce, "keyed": key is not None})
    proof = stream.expect("proof").proof
    nonces = hello.nonce + nonce
    if len(hello.nonce) != _NONCE_BYTES or not hmac.compare_digest(proof.mac, _mac(key, _RANK, nonces)):
        stream.send(refused={"reason": f"rank 0 has another join key; {SAME_KEY}"})
        raise RejectedError("does not have the join key")
    stream.send(accepted={"mac": _mac(key, _LEADER, nonces)})


def prove_to_leader(stream: "Stream", key: JoinKey | None) -> None:
    """Prove to rank 0 that this rank has the key, and require the same proof from it.

    Raises:
        HostError: the keys differ, or one side has no key.
        StreamError: the other end is not rank 0 of apt-jax, or has disconnected.
    """
    own_nonce = secrets.token_bytes(_NONCE_BYTES)
    stream.send(hello={"nonce": own_nonce})
    challenge = stream.expect("challenge").challenge
    if challenge.keyed != (key is not None):
        who = "this rank has no join key, and rank 0" if key is None else "rank 0 has no join key, and this rank"
        raise HostError(f"{who} has one; {SAME_KEY}")
    nonces = own_nonce + challenge.nonce
    stream.send(proof={"mac": _mac(key, _RANK, nonces)})
    answer = stream.expect("accepted", "refused")
    if answer.HasField("refused"):
        raise HostError(one_line(answer.refused.reason))
    if not hmac.compare_digest(answer.accepted.mac, _mac(key, _LEADER, nonces)):
        raise HostError(f"{stream.name} does not have the join key of this rank; {SAME_KEY}")
