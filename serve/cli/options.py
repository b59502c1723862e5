"""Command-line flags that several verbs share, and the configuration that they make."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from apt_jax.config import (
    SLO,
    CacheConfig,
    EngineConfig,
    ParallelConfig,
    SchedulerConfig,
)
from apt_jax.errors import ConfigError, nearest
from apt_jax.request import StructuredOutputsParams
from apt_jax.sched import POLICIES, check_policy
from apt_jax.validation import RequestLimits, build_request
from serve.client import address, channel_credentials

DEFAULT_MODEL = "tiny-opt"
_INT32_MAX = 2**31 - 1
MODEL_HELP = (
    "bundled name (tiny-opt), directory in Hugging Face format or of apt-jax convert, .gguf file, hub id (owner/model or "
    "owner/model@revision), or with --load-format dummy a published size (opt-125m)"
)
POLICY_HELP = (
    f"{', '.join(sorted(POLICIES))}, an installed one, or package.module:Class; with options as in 'apt?violation_decay=0.4' "
    "(docs/policies.md)"
)


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows defaults that say something, once."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        text = action.help or ""
        if action.default is None or isinstance(action.default, bool) or "default" in text:
            return text
        return super()._get_help_string(action)


class Parser(argparse.ArgumentParser):
    """An `ArgumentParser` whose errors are one line that names the flag and the nearest right name; exit code 2."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("allow_abbrev", False)
        kwargs.setdefault("formatter_class", _HelpFormatter)
        super().__init__(*args, **kwargs)

        self.register("type", int, _integer)
        self.register("type", float, _number)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {' '.join(message.split())}\n")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            known = [str(choice) for choice in action.choices]
            raise argparse.ArgumentError(
                action,
                f"{str(value)!r:.60} must be one of {', '.join(known)}{nearest(str(value), known)}",
            )

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            word = unknown[0].split("=")[0]
            if word.startswith("-") and word != "-":
                flags = [f for f in self._option_string_actions if f.startswith("--")]
                self.error(f"unknown flag {word!r:.60}{nearest(word, flags)}")
            self.error(f"unexpected argument {word!r:.60}")
        return parsed


def _integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r:.40} is not an integer") from None


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r:.40} is not a number") from None


def positive(kind: type[int] | type[float]) -> Any:
    """An argparse type: a positive number of this kind."""
    read = _integer if kind is int else _number

    def convert(text: str) -> Any:
        value = read(text)
        if not 0 < value < float("inf"):
            raise argparse.ArgumentTypeError(f"{text!r:.40} must be positive")
        return value

    return convert


def not_negative(text: str) -> float:
    """An argparse type: a number of at least 0."""
    value = _number(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r:.40} must be at least 0")
    return value


def natural(text: str) -> int:
    """An argparse type: an integer of at least 0."""
    if not (text.isascii() and text.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text!r:.40} is no integer of at least 0")
    return int(text)


def add_model_argument(parser: argparse.ArgumentParser, *, required: bool = False) -> None:
    """MODEL; not required: the bundled one."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs=None if required else "?",
        default=DEFAULT_MODEL,
        help=MODEL_HELP,
    )


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the engine; `engine_config` reads them."""
    cache, scheduler, config = CacheConfig(), SchedulerConfig(), EngineConfig(model="x")
    group = parser.add_argument_group("cache")
    group.add_argument(
        "--cache",
        choices=("kv", "hidden", "hybrid"),
        default=cache.mode,
        help="cache kinds that the scheduler may use",
    )
    group.add_argument(
        "--hidden-attention",
        choices=("auto", "reproject", "absorb"),
        default=cache.hidden_attention,
        help="how attention over a hidden cache is computed",
    )
    group.add_argument(
        "--quantization",
        metavar="int8",
        help="weights as integers, half the memory of bfloat16 (docs/models.md); without it as they are",
    )
    group.add_argument(
        "--attention-backend",
        metavar="NAME",
        help="implementation of the attention kernels (docs/kernels.md); without it the platform's",
    )
    group.add_argument(
        "--block-size",
        type=int,
        metavar="TOKENS",
        default=cache.block_size,
        help="tokens whose keys, or values, a block holds; layer inputs of another width fill it as they fit",
    )
    group.add_argument(
        "--num-blocks-override",
        type=int,
        metavar="BLOCKS",
        help="size of the pool in blocks; without it from the memory at hand",
    )
    group.add_argument(
        "--device-memory-utilization",
        type=float,
        metavar="SHARE",
        default=cache.device_memory_utilization,
        help="share of the free device memory for the pool, in (0, 1]",
    )
    group.add_argument(
        "--enable-prefix-caching",
        action=argparse.BooleanOptionalAction,
        default=cache.enable_prefix_caching,
        help="share the cache of common beginnings between requests (default: on)",
    )
    group = parser.add_argument_group("scheduling")
    group.add_argument(
        "--scheduling-policy",
        metavar="POLICY",
        default=scheduler.policy,
        help=f"who runs, and with which cache: {POLICY_HELP}",
    )
    group.add_argument(
        "--violation-decay",
        type=float,
        metavar="FACTOR",
        default=scheduler.violation_decay,
        help="value of a request that has missed its objective, in [0, 1]",
    )
    group.add_argument(
        "--max-num-seqs",
        type=int,
        metavar="REQUESTS",
        default=scheduler.max_num_seqs,
        help="most requests a step",
    )
    group.add_argument(
        "--max-num-batched-tokens",
        type=int,
        metavar="TOKENS",
        default=scheduler.max_num_batched_tokens,
        help="most tokens a step",
    )
    group.add_argument(
        "--max-num-queued-reqs",
        type=int,
        metavar="REQUESTS",
        default=scheduler.max_num_queued_reqs,
        help="waiting requests beyond which new ones are refused",
    )
    group.add_argument(
        "--max-num-queued-tokens",
        type=int,
        metavar="TOKENS",
        help="waiting prompt tokens beyond which new requests are refused; without it no limit",
    )
    group.add_argument(
        "--max-queue-s",
        type=positive(float),
        metavar="S",
        help="seconds after which a request that has not begun is given up; without it it waits",
    )
    group.add_argument(
        "--slo-admission",
        choices=("off", "warn", "on"),
        default=scheduler.slo_admission,
        help="requests whose TTFT objective is out of reach by the cost model: let in, with a warning, or refused at once",
    )
    group = parser.add_argument_group("objectives of requests that bring none")
    group.add_argument(
        "--default-slo-ttft-ms",
        type=positive(float),
        metavar="MS",
        help="arrival to first token, milliseconds; without it none, which is always met",
    )
    group.add_argument(
        "--default-slo-tbt-ms",
        type=positive(float),
        metavar="MS",
        help="P99 of the gaps between tokens, milliseconds; without it none, which is always met",
    )
    group = parser.add_argument_group("model loading")
    group.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        default=config.dtype,
        help="of weights, activations and cache",
    )
    group.add_argument(
        "--load-format",
        choices=("auto", "safetensors", "orbax", "gguf", "pt", "dummy"),
        default=config.load_format,
        help="kind of checkpoint; dummy: random weights",
    )
    group.add_argument(
        "--tokenizer",
        metavar="DIR",
        help="directory with a tokenizer.json, or .gguf file; without it the model's",
    )
    group.add_argument(
        "--chat-template",
        metavar="FILE",
        help="Jinja file to use as chat template, or none; without it the model's",
    )
    group.add_argument(
        "--max-model-len",
        type=int,
        metavar="TOKENS",
        help="longest prompt plus output; without it the model's limit",
    )
    group.add_argument(
        "--served-model-name", metavar="NAME", help="name that requests use; without it MODEL"
    )
    group.add_argument(
        "--seed",
        type=int,
        metavar="SEED",
        default=config.seed,
        help="of dummy weights, and of sampled requests that bring none",
    )
    group.add_argument(
        "--tensor-parallel-size",
        "-tp",
        type=int,
        metavar="DEVICES",
        default=ParallelConfig().tensor_parallel_size,
        help="devices that share every layer, of all hosts together",
    )


def add_calibration_argument(parser: argparse.ArgumentParser, default_s: float) -> None:
    parser.add_argument(
        "--calibration-time",
        type=not_negative,
        metavar="S",
        default=default_s,
        help="about how long to measure step costs at the first start, seconds; 0: use stored ones or none",
    )


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """The configuration that the flags of `add_engine_arguments` and MODEL describe.

    Raises:
        ConfigError: one line that names the flag.
    """

    def seconds(ms: float | None) -> float:
        return float("inf") if ms is None else ms / 1e3

    check_policy(args.scheduling_policy)
    return EngineConfig(
        model=args.model,
        tokenizer=args.tokenizer,
        chat_template=args.chat_template,
        dtype=args.dtype,
        load_format=args.load_format,
        max_model_len=args.max_model_len,
        served_model_name=args.served_model_name,
        quantization=args.quantization,
        attention_backend=args.attention_backend,
        seed=args.seed,
        cache=CacheConfig(
            block_size=args.block_size,
            num_blocks_override=args.num_blocks_override,
            device_memory_utilization=args.device_memory_utilization,
            mode=args.cache,
            hidden_attention=args.hidden_attention,
            enable_prefix_caching=args.enable_prefix_caching,
        ),
        scheduler=SchedulerConfig(
            policy=args.scheduling_policy,
            violation_decay=args.violation_decay,
            max_num_seqs=args.max_num_seqs,
            max_num_batched_tokens=args.max_num_batched_tokens,
            max_num_queued_reqs=args.max_num_queued_reqs,
            max_num_queued_tokens=args.max_num_queued_tokens,
            max_queue_s=args.max_queue_s,
            slo_admission=args.slo_admission,
            default_slo=SLO(
                ttft_s=seconds(args.default_slo_ttft_ms), tbt_s=seconds(args.default_slo_tbt_ms)
            ),
        ),
        parallel=ParallelConfig(tensor_parallel_size=args.tensor_parallel_size),
    )


def add_sampling_arguments(parser: argparse.ArgumentParser, *, max_tokens: int) -> None:
    """Flags of one request; `sampling_fields` reads them. Ranges are checked with the request."""
    group = parser.add_argument_group("sampling")
    group.add_argument(
        "--max-tokens",
        type=int,
        metavar="TOKENS",
        default=max_tokens,
        help="most output tokens of one completion",
    )
    group.add_argument(
        "--temperature",
        type=float,
        metavar="T",
        default=0.0,
        help="0: always the most likely token",
    )
    group.add_argument(
        "--top-k",
        type=int,
        metavar="TOKENS",
        default=0,
        help="only so many of the most likely tokens; 0: off",
    )
    group.add_argument(
        "--top-p",
        type=float,
        metavar="P",
        default=1.0,
        help="only the most likely tokens whose probabilities sum to P; 1: off",
    )
    group.add_argument(
        "--min-p",
        type=float,
        metavar="P",
        default=0.0,
        help="only tokens at least P times as likely as the most likely one; 0: off",
    )
    group.add_argument(
        "--repetition-penalty",
        type=float,
        metavar="FACTOR",
        default=1.0,
        help="of tokens seen before; 1: off",
    )
    group.add_argument("--sampling-seed", type=int, metavar="SEED", help="of the draws")
    group.add_argument(
        "--stop",
        action="append",
        metavar="TEXT",
        help="end before this text; may be given up to 4 times",
    )
    group.add_argument(
        "--ignore-eos", action="store_true", help="go on after the end-of-sequence token"
    )
    group.add_argument(
        "--slo-ttft-ms",
        type=float,
        metavar="MS",
        help="objective: arrival to first token, milliseconds; without it the engine's default",
    )
    group.add_argument(
        "--slo-tbt-ms",
        type=float,
        metavar="MS",
        help="objective: P99 of the gaps between tokens, milliseconds; without it the engine's default",
    )


def add_form_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of structured output; `sampling_fields` reads them too."""
    group = parser.add_argument_group("form of the output, at most one")
    form = group.add_mutually_exclusive_group()
    form.add_argument("--json-schema", metavar="FILE", help="only JSON that this schema allows")
    form.add_argument("--json-object", action="store_true", help="only a JSON object")
    form.add_argument("--regex", metavar="REGEX", help="only text that matches as a whole")
    form.add_argument("--choice", metavar="A,B,...", help="only one of these texts")
    form.add_argument(
        "--grammar",
        metavar="FILE",
        help="only text of this grammar (llguidance's dialect of Lark, or GBNF)",
    )


def sampling_fields(args: argparse.Namespace) -> dict[str, Any]:
    """Fields of `SamplingParams`."""
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
    form = _form(args) if hasattr(args, "json_schema") else None
    if form is not None:
        fields["structured_outputs"] = form
    return fields


class _AnyForm:
    """Stands for what compiles forms: the engine will."""

    def compile(self, wanted: StructuredOutputsParams, *, ends_at_eos: bool) -> Any:
        return None


class _AnyText:
    """Stands for a tokenizer: stop strings need one, and ranges do not depend on which."""

    vocab_size = _INT32_MAX

    def encode(self, text: str) -> list[int]:
        return [0]

    def min_tokens(self, text: str) -> int:
        return 0


def request_fields(args: argparse.Namespace) -> dict[str, Any]:
    """Fields of `SamplingParams` and objectives of a request, checked as far as that needs no model.

    Raises:
        InvalidRequestError: one of them is out of its range; better known before a model is loaded than after.
        ConfigError: a file cannot be read.
    """
    sampling = sampling_fields(args)
    objectives = {"slo_ttft_ms": args.slo_ttft_ms, "slo_tbt_ms": args.slo_tbt_ms}
    build_request(
        RequestLimits(vocab_size=_INT32_MAX, max_model_len=_INT32_MAX),
        _AnyText(),
        prompt_token_ids=[0],
        params=sampling,
        **objectives,
        arrival_s=0.0,
        grammars=_AnyForm(),
    )
    return {**sampling, **objectives}


def _form(args: argparse.Namespace) -> dict[str, Any] | None:
    """Fields of `StructuredOutputsParams`.

    Raises:
        ConfigError: a file cannot be read.
    """
    if args.json_schema is not None:
        return {"json": _text_of("--json-schema", args.json_schema)}
    if args.json_object:
        return {"json_object": True}
    if args.regex is not None:
        return {"regex": args.regex}
    if args.choice is not None:
        return {"choice": args.choice.split(",")}
    if args.grammar is not None:
        return {"grammar": _text_of("--grammar", args.grammar)}
    return None


def _text_of(flag: str, path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}) ({flag})") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not UTF-8 ({flag})") from None


def _target(text: str) -> str:
    try:
        address(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def add_target_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--target",
        type=_target,
        metavar="grpc://HOST:PORT",
        help="ask a running server instead of loading a model here",
    )
    add_access_arguments(parser)


def add_access_arguments(parser: Any) -> None:
    """Flags of what a server asks of its clients, for a parser or a group of it; `access` reads them."""
    parser.add_argument(
        "--api-key-file",
        metavar="FILE",
        help="for servers that ask for a key: the first line of this file",
    )
    parser.add_argument(
        "--tls-ca",
        metavar="FILE",
        help="PEM file of the CAs that the server's certificate is held against; gRPC without it: no TLS",
    )


def access(args: argparse.Namespace) -> dict[str, Any]:
    """Keyword arguments of our gRPC clients by `add_access_arguments`. Raises ConfigError: a file cannot be used."""
    return {
        "api_key": read_api_key(args.api_key_file),
        "credentials": channel_credentials(args.tls_ca),
    }


def read_api_key(path: str | None) -> str | None:
    """The first line of a file; None: no file. Raises ConfigError: there is none to be read."""
    if path is None:
        return None
    try:
        lines = Path(path).read_text(encoding="ascii").split()
    except (OSError, UnicodeDecodeError):
        raise ConfigError(f"{path}: cannot be read (--api-key-file)") from None
    if not lines:
        raise ConfigError(f"{path}: holds no key (--api-key-file)")
    return lines[0]


def add_json_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", metavar="FILE", help="write what was measured as JSON; -: stdout")
