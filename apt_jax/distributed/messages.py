"""`Plan`, a program call that rank 0 announces to the other ranks, and its encoding (protos/ranks.proto)."""

import dataclasses
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from apt_jax.distributed.protos import ranks_pb2 as pb

_LARGE = 1 << 16
"""Number of elements above which arrays are sent without their all-zero pieces, because a large step can be mostly
padding."""
_PIECE = 1 << 10

Array = NDArray[np.int32]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """One program call of rank 0."""

    program: str
    arrays: Sequence[Array | None]
    """Arguments from the host, in order."""
    static: dict[str, Any]

    def encode(self) -> bytes:
        """Return a serialized `FromLeader` message."""
        from apt_jax.distributed.protos import (
            ranks_pb2 as pb,  # protobuf comes with the extra `serve`
        )

        arrays = [pb.Int32Array(none=True) if array is None else _pack(array, pb) for array in self.arrays]
        call = pb.ProgramCall(program=self.program, arrays=arrays, static_json=json.dumps(self.static))
        return pb.FromLeader(call=call).SerializeToString()

    @classmethod
    def decode(cls, data: bytes) -> "Plan":
        """Return the plan that `encode` serialized."""
        from apt_jax.distributed.protos import ranks_pb2 as pb

        return cls.from_message(pb.FromLeader.FromString(data).call)

    @classmethod
    def from_message(cls, call: "pb.ProgramCall") -> "Plan":
        """Return the plan contained in a received message."""
        static = json.loads(call.static_json)
        return cls(
            program=call.program,
            arrays=[None if array.none else _unpack(array) for array in call.arrays],
            static={key: tuple(value) if isinstance(value, list) else value for key, value in static.items()},
        )


def _pack(array: Array, pb: Any) -> "pb.Int32Array":
    flat = np.ascontiguousarray(array, "<i4").reshape(-1)
    if flat.size <= _LARGE:
        return pb.Int32Array(shape=array.shape, values=flat.tobytes())
    pieces = np.pad(flat, (0, -flat.size % _PIECE)).reshape(-1, _PIECE)
    kept = np.flatnonzero(pieces.any(axis=1)).astype("<i4")
    return pb.Int32Array(shape=array.shape, values=pieces[kept].tobytes(), pieces=kept.tobytes())


def _unpack(array: "pb.Int32Array") -> Array:
    values = np.frombuffer(array.values, "<i4")
    if array.HasField("pieces"):
        size = int(np.prod(array.shape, dtype=np.int64))
        pieces = np.zeros((-(-size // _PIECE), _PIECE), np.int32)
        pieces[np.frombuffer(array.pieces, "<i4")] = values.reshape(-1, _PIECE)
        values = pieces.reshape(-1)[:size]
    return values.reshape(tuple(array.shape))
