from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FromRank(_message.Message):
    __slots__ = ("hello", "proof", "introduction", "drain", "failed")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    INTRODUCTION_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    proof: Proof
    introduction: Introduction
    drain: Drain
    failed: Failure
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., proof: _Optional[_Union[Proof, _Mapping]] = ..., introduction: _Optional[_Union[Introduction, _Mapping]] = ..., drain: _Optional[_Union[Drain, _Mapping]] = ..., failed: _Optional[_Union[Failure, _Mapping]] = ...) -> None: ...

class FromLeader(_message.Message):
    __slots__ = ("challenge", "accepted", "refused", "welcome", "call", "end", "failed")
    CHALLENGE_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    CALL_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    challenge: Challenge
    accepted: Proof
    refused: Failure
    welcome: Welcome
    call: ProgramCall
    end: End
    failed: Failure
    def __init__(self, challenge: _Optional[_Union[Challenge, _Mapping]] = ..., accepted: _Optional[_Union[Proof, _Mapping]] = ..., refused: _Optional[_Union[Failure, _Mapping]] = ..., welcome: _Optional[_Union[Welcome, _Mapping]] = ..., call: _Optional[_Union[ProgramCall, _Mapping]] = ..., end: _Optional[_Union[End, _Mapping]] = ..., failed: _Optional[_Union[Failure, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("nonce",)
    NONCE_FIELD_NUMBER: _ClassVar[int]
    nonce: bytes
    def __init__(self, nonce: _Optional[bytes] = ...) -> None: ...

class Challenge(_message.Message):
    __slots__ = ("nonce", "keyed")
    NONCE_FIELD_NUMBER: _ClassVar[int]
    KEYED_FIELD_NUMBER: _ClassVar[int]
    nonce: bytes
    keyed: bool
    def __init__(self, nonce: _Optional[bytes] = ..., keyed: _Optional[bool] = ...) -> None: ...

class Proof(_message.Message):
    __slots__ = ("mac",)
    MAC_FIELD_NUMBER: _ClassVar[int]
    mac: bytes
    def __init__(self, mac: _Optional[bytes] = ...) -> None: ...

class Introduction(_message.Message):
    __slots__ = ("rank", "host", "settings")
    class SettingsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    RANK_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    rank: int
    host: str
    settings: _containers.ScalarMap[str, str]
    def __init__(self, rank: _Optional[int] = ..., host: _Optional[str] = ..., settings: _Optional[_Mapping[str, str]] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Drain(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class End(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Failure(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class ProgramCall(_message.Message):
    __slots__ = ("program", "arrays", "static_json")
    PROGRAM_FIELD_NUMBER: _ClassVar[int]
    ARRAYS_FIELD_NUMBER: _ClassVar[int]
    STATIC_JSON_FIELD_NUMBER: _ClassVar[int]
    program: str
    arrays: _containers.RepeatedCompositeFieldContainer[Int32Array]
    static_json: str
    def __init__(self, program: _Optional[str] = ..., arrays: _Optional[_Iterable[_Union[Int32Array, _Mapping]]] = ..., static_json: _Optional[str] = ...) -> None: ...

class Int32Array(_message.Message):
    __slots__ = ("none", "shape", "values", "pieces")
    NONE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    PIECES_FIELD_NUMBER: _ClassVar[int]
    none: bool
    shape: _containers.RepeatedScalarFieldContainer[int]
    values: bytes
    pieces: bytes
    def __init__(self, none: _Optional[bool] = ..., shape: _Optional[_Iterable[int]] = ..., values: _Optional[bytes] = ..., pieces: _Optional[bytes] = ...) -> None: ...
