"""Advice for error messages about unknown flags that vLLM, SGLang, llama.cpp or an earlier version of apt-jax has."""

import shlex
from collections.abc import Collection, Sequence

_SHARE = "the share of the memory that the weights leave free"

_NAMES = {
    "--model-path": "--model",
    "--hf-model-id": "--model",
    "--alias": "--served-model-name",
    "--tp": "-tp",
    "--tp-size": "-tp",
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
    "--http-port": "--port",
}
"""Flags that have another name in apt-jax."""

_DIFFERENT = {
    "--mem-fraction-static": _SHARE,
    "--gpu-memory-utilization": _SHARE,
    "--ctx-size": "the limit of each request, not of all slots together",
    "--num-gpu-blocks-override": "twice as many, because a block holds keys or values",
    "--schedule-policy": "with different policy names (apt-jax policies)",
    "--allowed-origins": "one origin per flag",
}
"""Meaning of the value in apt-jax, for flags where it differs."""

_NOTHING = {
    **dict.fromkeys(
        ("--enable-auto-tool-choice", "--jinja"), "tools need no flag: the server always accepts them; leave it out"
    ),
    **dict.fromkeys(
        ("--trust-remote-code", "--no-trust-remote-code"), "code from model directories is never run; leave it out"
    ),
    **dict.fromkeys(("--enforce-eager", "--disable-cuda-graph"), "programs are compiled at the start; leave it out"),
    **dict.fromkeys(
        ("--disable-log-requests", "--no-enable-log-requests", "--enable-log-requests"),
        "the log has one line per request and never its text (--log-level); leave it out",
    ),
    "--disable-log-stats": "the log has no statistics (/metrics has them); leave it out",
    **dict.fromkeys(("--enable-chunked-prefill", "--cont-batching"), "it is always on; leave it out"),
    **dict.fromkeys(
        ("--data-parallel-size", "-dp", "--dp", "--dp-size"), "for replicas, use apt-jax launch --replicas N"
    ),
    **dict.fromkeys(
        ("--pipeline-parallel-size", "-pp", "--pp-size"), "only tensor parallelism is supported (-tp DEVICES)"
    ),
    "--cpu-offload-gb": "weights stay on the device; host memory for the cache is --swap-space GIB",
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
        ("--n-gpu-layers", "-ngl", "--gpu-layers"), "the whole model is on the device that JAX finds; leave it out"
    ),
    "--generation-config": "only end tokens come from generation_config.json, and requests set the rest; leave it out",
    "--tokenizer-mode": "the tokenizer is the model's tokenizer.json; leave it out",
}
"""Flags without a counterpart in apt-jax, and the reason."""


def advice(word: str, value: str | None, flags: Collection[str]) -> str:
    """Return advice on a flag of another server or version, to append to an error message; empty: no advice.

    Args:
        word: the unknown flag.
        value: value of the flag; None: it has no value.
        flags: flags of the command.
    """
    name = _NAMES.get(word)
    if name is not None and name in flags:
        return f"; it is {name} here{f', {_DIFFERENT[word]}' if word in _DIFFERENT else ''}"
    if word == "--violation-decay" and "--scheduling-policy" in flags:
        policy = shlex.quote(f"apt?violation_decay={value or 'VALUE'}")
        return f"; it is an option of the policies apt and apt-plus: --scheduling-policy {policy}"
    if word == "--enable-lora":
        needs = "; --lora-modules names the adapters; leave it out"
        return needs if "--lora-modules" in flags else "; LoRA adapters are not supported"
    if word in _NOTHING and "--max-num-seqs" in flags:
        return f"; {_NOTHING[word]}"
    return ""


def value_of(word: str, words: Sequence[str]) -> str | None:
    """Return the value of a flag in a command line: the text after ``=``, or the next word unless that is a flag."""
    at = next(number for number, given in enumerate(words) if given.partition("=")[0] == word)
    _, equals, value = words[at].partition("=")
    if equals:
        return value
    after = words[at + 1] if at + 1 < len(words) else ""
    is_flag = after.startswith("-") and not after[1:].replace(".", "", 1).isdecimal()
    return None if not after or is_flag else after
