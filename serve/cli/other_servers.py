"""Flags of vLLM, SGLang and llama.cpp that have another name here, or nothing to do: what to say to who gives one."""

from collections.abc import Collection

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
    "--kv-cache-dtype": "--dtype",
}
"""Flags of the same meaning."""

_NOTHING = {
    **dict.fromkeys(
        ("--enable-auto-tool-choice", "--jinja"), "tools need no flag: the server takes them as it is; leave it out"
    ),
    **dict.fromkeys(
        ("--trust-remote-code", "--no-trust-remote-code"), "code from model directories is never run; leave it out"
    ),
    **dict.fromkeys(("--enforce-eager", "--disable-cuda-graph"), "programs are compiled at the start; leave it out"),
    **dict.fromkeys(
        ("--disable-log-requests", "--no-enable-log-requests", "--enable-log-requests", "--disable-log-stats"),
        "the log has one line per request and never its text (--log-level); leave it out",
    ),
    **dict.fromkeys(("--enable-chunked-prefill", "--cont-batching"), "it is always on; leave it out"),
    **dict.fromkeys(("--data-parallel-size", "-dp", "--dp", "--dp-size"), "replicas are apt-jax launch --replicas N"),
    **dict.fromkeys(
        ("--pipeline-parallel-size", "-pp", "--pp-size"), "models are sharded by tensors alone (-tp DEVICES)"
    ),
    "--cpu-offload-gb": "weights stay on the device; host memory for the cache is --swap-space GIB",
    **dict.fromkeys(
        ("--guided-decoding-backend", "--structured-outputs-config", "--grammar-backend"),
        "llguidance serves every constraint; leave it out",
    ),
    **dict.fromkeys(
        ("--speculative-config", "--speculative-model", "--speculative-algorithm"),
        "speculative decoding is not supported; leave it out",
    ),
    **dict.fromkeys(("--runner", "--task", "--is-embedding"), "the model decides what is served; leave it out"),
    **dict.fromkeys(
        ("--n-gpu-layers", "-ngl", "--gpu-layers"), "the whole model is on the device that JAX finds; leave it out"
    ),
    "--generation-config": "requests say what they want, generation_config.json sets the end tokens alone; leave it out",
    "--tokenizer-mode": "the tokenizer is the model's tokenizer.json; leave it out",
}
"""Flags that have nothing to do, and why."""


def advice(word: str, flags: Collection[str]) -> str:
    """End of a message on an unknown flag that another server has; empty: none has it.

    Args:
        word: the flag.
        flags: those of the command.
    """
    name = _NAMES.get(word)
    if name is not None and name in flags:
        return f"; it is {name} here"
    if word == "--enable-lora":
        needs = "; adapters are named by --lora-modules alone; leave it out"
        return needs if "--lora-modules" in flags else "; LoRA adapters are not supported"
    if word in _NOTHING and "--max-num-seqs" in flags:
        return f"; {_NOTHING[word]}"
    return ""
