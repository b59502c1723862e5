"""Advice for error messages about unknown flags and options that vLLM, SGLang, llama.cpp or an earlier version of
apt-jax has."""

import re
import shlex
from collections.abc import Collection, Sequence

from apt_jax.errors import nearest
from apt_jax.validation.limits import MAX_LOGPROBS

SIMILAR = 0.8
"""Least similarity of a name that is suggested for an unknown one, in [0, 1] (`difflib.SequenceMatcher.ratio`)."""
_SHARE = "the share of the memory that the weights leave free"

_NAMES = {
    "--url": "--target",
    "--base-url": "--target",
    "--api-key": "--api-key-file",
    "--model-name": "--model",
    "--system-prompt": "--system",
    "--model-path": "--model",
    "--hf-model-id": "--model",
    "--alias": "--served-model-name",
    "--tp": "--tensor-parallel-size",
    "--tp-size": "--tensor-parallel-size",
    "--mem-fraction-static": "--device-memory-utilization",
    "--gpu-memory-utilization": "--device-memory-utilization",
    "--context-length": "--max-model-len",
    "--ctx-size": "--max-model-len",
    "--max-running-requests": "--max-num-seqs",
    "--parallel": "--max-num-seqs",
    "--chunked-prefill-size": "--max-num-batched-tokens",
    "--num-gpu-blocks-override": "--num-blocks-override",
    "--schedule-policy": "--scheduling-policy",
    "--uvicorn-log-level": "--log-level",
    "--allowed-origins": "--cors-allow-origin",
    "--ssl-certfile": "--tls-cert",
    "--ssl-keyfile": "--tls-key",
    "--ssl-ca-certs": "--tls-client-ca",
    "--ssl-cert-file": "--tls-cert",
    "--ssl-key-file": "--tls-key",
    "--random-seed": "--seed",
    "--tokenizer-path": "--tokenizer",
    "--chat-template-file": "--chat-template",
    "--max-queued-requests": "--max-num-queued-reqs",
    "--lora-paths": "--lora-modules",
    "--kv-offloading-size": "--swap-space",
    "--http-port": "--port",
}
"""Flags of servers that have another name in apt-jax; docs/coming_from_vllm.md lists them."""

_NAMES_OF_CLIENTS = {
    **dict.fromkeys(("--model-id", "--hf-repo", "-m"), "--model"),
    **dict.fromkeys(("--policy", "--policies", "--scheduler", "--scheduling"), "--scheduling-policy"),
    **dict.fromkeys(("--request-rate", "--arrival-rate", "--qps"), "--rate"),
    **dict.fromkeys(("--num-prompts", "--num-prompt", "--requests", "--n-requests"), "--num-requests"),
    **dict.fromkeys(("--dataset", "--dataset-name"), "--trace"),
    "--dataset-path": "--prompts",
    **dict.fromkeys(("--input-len", "--random-input", "--prompt-tokens"), "--random-input-len"),
    **dict.fromkeys(("--output-len", "--random-output"), "--random-output-len"),
    "--warmup-requests": "--num-warmups",
    **dict.fromkeys(("--save-result", "--result-filename", "--output-file", "--output-json"), "--json"),
    **dict.fromkeys(("--ttft", "--ttft-slo", "--slo-ttft"), "--slo-ttft-ms"),
    **dict.fromkeys(("--tbt", "--tpot", "--itl", "--tbt-slo", "--slo-tbt"), "--slo-tbt-ms"),
    **dict.fromkeys(("--gpu", "--device"), "--hardware"),
    **dict.fromkeys(("--n-predict", "-n", "--predict", "--max-new-tokens", "--max-completion-tokens"), "--max-tokens"),
    "--temp": "--temperature",
    "--repeat-penalty": "--repetition-penalty",
    **dict.fromkeys(("--reverse-prompt", "-r"), "--stop"),
    "-sys": "--system",
    **dict.fromkeys(("--json-schema-file", "--guided-json"), "--json-schema"),
    "--guided-regex": "--regex",
    "--guided-choice": "--choice",
    **dict.fromkeys(("--grammar-file", "--guided-grammar"), "--grammar"),
}
"""Flags of load generators, simulators and command-line clients, and slips, that have another name in apt-jax."""

_DIFFERENT = {
    "--api-key": "a file with the key; or set APT_JAX_API_KEY",
    "--mem-fraction-static": _SHARE,
    "--gpu-memory-utilization": _SHARE,
    "--ctx-size": "the limit of each request, not of all slots together",
    "--num-gpu-blocks-override": "twice as many, because a block holds keys or values",
    "--schedule-policy": "with different policy names (apt-jax policies)",
    "--allowed-origins": "one origin per flag",
    **dict.fromkeys(("--dataset", "--dataset-name"), "a CSV file or a bundled trace"),
    "--dataset-path": "JSON lines with prompt or messages",
    **dict.fromkeys(
        ("--ttft", "--ttft-slo", "--slo-ttft", "--tbt", "--tpot", "--itl", "--tbt-slo", "--slo-tbt"), "in milliseconds"
    ),
    "--guided-choice": "separated by commas",
}
"""Meaning of the value in apt-jax, for flags where it differs."""

_NOTHING = {
    **dict.fromkeys(
        ("--enable-auto-tool-choice", "--jinja"), "tools need no flag: the server always accepts them; leave it out"
    ),
    "--trust-remote-code": "code from model directories is never run; leave it out",
    **dict.fromkeys(
        ("--enforce-eager", "--disable-cuda-graph", "--compilation-config", "-cc", "-O"),
        "programs are compiled at the start; leave it out",
    ),
    **dict.fromkeys(
        (
            "--enable-log-requests",
            "--disable-log-requests",
            "--disable-uvicorn-access-log",
        ),
        "the log has one line per request and never its text (--log-level); leave it out",
    ),
    "--disable-log-stats": "the log has no statistics (/metrics has them); leave it out",
    **dict.fromkeys(
        ("--enable-chunked-prefill", "--cont-batching"),
        "long prompts are always split into chunks (--max-num-batched-tokens); leave it out",
    ),
    "--async-scheduling": "a step is always planned while the one before it runs; leave it out",
    **dict.fromkeys(
        ("--max-num-partial-prefills", "--max-long-partial-prefills", "--long-prefill-token-threshold"),
        "the scheduling policy divides each step; leave it out",
    ),
    **dict.fromkeys(
        ("--data-parallel-size", "-dp", "--dp", "--dp-size", "--api-server-count"),
        "for replicas, use apt-jax launch --replicas N",
    ),
    **dict.fromkeys(
        ("--pipeline-parallel-size", "-pp", "--pp-size", "--enable-expert-parallel"),
        "only tensor parallelism is supported (--tensor-parallel-size)",
    ),
    **dict.fromkeys(
        ("--distributed-executor-backend", "--disable-custom-all-reduce"),
        "one process per host runs all its devices; leave it out",
    ),
    "--cpu-offload-gb": "weights stay on the device; host memory for the cache is --swap-space GIB",
    "--kv-cache-memory-bytes": (
        "the cache takes a share of free memory (--device-memory-utilization) or a number of blocks (--num-blocks-override)"
    ),
    "--kv-cache-dtype": (
        "the cache has the data type of --dtype; leave it out. --cache hybrid, the default, stores layer inputs at half the "
        "memory where the model allows it; --swap-space GIB adds host memory"
    ),
    **dict.fromkeys(
        ("--guided-decoding-backend", "--structured-outputs-config", "--grammar-backend"),
        "llguidance serves every constraint; leave it out",
    ),
    **dict.fromkeys(
        ("--speculative-config", "--speculative-model", "--speculative-algorithm"),
        "speculative decoding is not supported; leave it out",
    ),
    **dict.fromkeys(("--runner", "--task", "--is-embedding"), "every model generates and embeds; leave it out"),
    **dict.fromkeys(
        ("--limit-mm-per-prompt", "--mm-processor-kwargs"), "prompts are text, without images or audio; leave it out"
    ),
    **dict.fromkeys(
        ("--n-gpu-layers", "-ngl", "--gpu-layers"), "the whole model is on the device that JAX finds; leave it out"
    ),
    **dict.fromkeys(
        ("--generation-config", "--override-generation-config"),
        "only end tokens come from generation_config.json, and requests set the rest; leave it out",
    ),
    "--default-chat-template-kwargs": "requests give chat_template_kwargs; leave it out",
    "--max-logprobs": f"requests may ask for up to {MAX_LOGPROBS} log probabilities per token; leave it out",
    "--enable-prompt-tokens-details": "answers always have prompt_tokens_details; leave it out",
    "--stream-interval": "every step streams its tokens; leave it out",
    **dict.fromkeys(
        ("--tokenizer-mode", "--skip-tokenizer-init"), "the tokenizer is the model's tokenizer.json; leave it out"
    ),
    "--revision": "the model's name has it: owner/model@REVISION",
    "--download-dir": "the variable HF_HOME names the directory of downloads",
    "--hf-overrides": "the model's config.json is served as it is: change a copy of it",
    "--config": "flags are not read from a file: write them on the command line",
    "--enable-sleep-mode": "a server keeps its memory until it stops; leave it out",
}
"""Flags without a counterpart in apt-jax, and the reason."""


_OPTIMIZATION = re.compile(r"-O\d")


def _canonical(word: str) -> str:
    """Return a flag as `_NAMES` and `_NOTHING` have it, from vLLM's other spellings: ``--enforce_eager``,
    ``--compilation-config.level`` and ``-O3``."""
    return "-O" if _OPTIMIZATION.fullmatch(word) else word.partition(".")[0].replace("_", "-")


def advice(word: str, value: str | None, flags: Collection[str]) -> str:
    """Return advice on a flag of another server or version, to append to an error message; empty: no advice.

    Args:
        word: the unknown flag.
        value: value of the flag; None: it has no value.
        flags: flags of the command.
    """
    word = _canonical(word)
    name = _NAMES.get(word) or _NAMES_OF_CLIENTS.get(word)
    if name is not None and name in flags:
        return f"; it is {name} here{f', {_DIFFERENT[word]}' if word in _DIFFERENT else ''}"
    if word == "--violation-decay" and "--scheduling-policy" in flags:
        policy = shlex.quote(f"apt?violation_decay={value or 'VALUE'}")
        return f"; it is an option of the policies apt and apt-plus: --scheduling-policy {policy}"
    word = word.replace("--no-", "--", 1)
    if word == "--enable-lora":
        needs = "; --lora-modules names the adapters; leave it out"
        return needs if "--lora-modules" in flags else "; LoRA adapters are not supported"
    if word in _NOTHING and "--max-num-seqs" in flags:
        return f"; {_NOTHING[word]}"
    return ""


def nearest_flag(word: str, flags: Collection[str]) -> str:
    """Return ``"; did you mean FLAG?"`` for the flag most similar to an unknown one, or an empty string if none is.

    A flag that turns something off is only taken for another one that does.
    """
    word = _canonical(word)
    alike = [flag for flag in flags if flag.startswith("--") and _turns_off(flag) == _turns_off(word)]
    longer = [flag for flag in alike if flag.startswith(f"{word}-")]
    if len(longer) == 1:
        return f"; did you mean {longer[0]}?"
    start = "--no-" if _turns_off(word) else "--"
    found = nearest(word.removeprefix(start), [flag.removeprefix(start) for flag in alike], cutoff=SIMILAR)
    return found.replace("mean ", f"mean {start}")


def _turns_off(flag: str) -> bool:
    return flag.startswith("--no-")


def option_advice(name: str, options: Collection[str]) -> str:
    """Return advice on an option of vLLM's `LLM`, in the words of `advice` but with names of options.

    Args:
        name: the unknown option.
        options: options of `apt_jax.LLM`.
    """
    told = advice(_as_flag(name), None, [_as_flag(option) for option in options])
    return re.sub(
        r"--[a-z-]+",
        lambda flag: flag[0][2:].replace("-", "_"),
        told,
    )


def _as_flag(option: str) -> str:
    return f"--{option.replace('_', '-')}"


def value_of(word: str, words: Sequence[str]) -> str | None:
    """Return the value of a flag in a command line: the text after ``=``, or the next word unless that is a flag."""
    at = next(number for number, given in enumerate(words) if given.partition("=")[0] == word)
    _, equals, value = words[at].partition("=")
    if equals:
        return value
    after = words[at + 1] if at + 1 < len(words) else ""
    is_flag = after.startswith("-") and not after[1:].replace(".", "", 1).isdecimal()
    return None if not after or is_flag else after
