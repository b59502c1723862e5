"""`apt-jax COMMAND`: find the command, read its flags, run it.

A command is a module with `add_arguments(parser)` and `run(args) -> int`. Only the requested command is imported, and
no heavy library is imported before it. Exit codes: 0 done, 1 failed, 2 wrong usage, 130 interrupted.
"""

import difflib
import importlib
import os
import shlex
import sys
from collections.abc import Sequence
from types import ModuleType

from apt_jax.errors import AptJaxError, ConfigError, InvalidRequestError, nearest
from apt_jax.version import __version__
from serve.errors import CommandError
from serve.security.single_key import KEY_VARIABLE, without_key

_COMMANDS = {
    "serve": ("serve.cli.commands.serve", "serve a model over HTTP and gRPC"),
    "launch": ("serve.cli.commands.launch", "serve a model with several replicas behind one address"),
    "generate": ("serve.cli.commands.generate", "complete prompts"),
    "chat": ("serve.cli.commands.chat", "chat with a model in the terminal"),
    "demo": ("serve.demo.demo", "compare cache kinds and policies on this machine"),
    "bench": ("serve.cli.commands.bench", "put load on a server and measure latencies, SLO attainment and the sustained rate"),
    "info": ("serve.cli.commands.info", "print versions, devices, kernels, model and cache, or a server's statistics"),
    "optimal": ("apt_jax.lab.optimal.command", "find the best possible schedule of a few requests"),
    "simulate": ("serve.cli.commands.simulate", "simulate a workload under a policy, on other hardware"),
    "plan": ("serve.cli.commands.plan", "find how many devices keep latency objectives under a load, by simulation"),
    "whatif": ("serve.cli.commands.whatif", "record a server's arrivals, and simulate other settings on them"),
    "policies": ("serve.cli.commands.policies", "list the scheduling policies"),
    "convert": ("serve.cli.commands.convert", "rewrite a model's files as Orbax or safetensors"),
    "calibrate": ("serve.cli.commands.calibrate", "measure step times on this machine"),
}  # fmt: skip

_OF_VLLM = {
    "complete": "apt-jax generate MODEL PROMPT",
    "run-batch": "apt-jax serve MODEL --batch-dir DIR, and POST /v1/batches",
    "collect-env": "apt-jax info",
}
"""Commands of vLLM that have another name here."""

_PREFIX = "APT_JAX_"
_VARIABLES = (KEY_VARIABLE, "APT_JAX_CACHE_DIR", "APT_JAX_KERNEL_FLAGS")


def _misspelt_variable() -> str | None:
    """Return an error message if the name of an environment variable nearly matches one of apt-jax's, else None."""
    known = {name.removeprefix(_PREFIX): name for name in _VARIABLES}
    for name in sorted(set(os.environ) - set(_VARIABLES)):
        near = difflib.get_close_matches(name.removeprefix(_PREFIX), known, n=1) if name.startswith(_PREFIX) else []
        if near:
            return f"unknown environment variable {name:.60}; did you mean {known[near[0]]}?"
    return None


def _usage() -> str:
    width = max(map(len, _COMMANDS))
    lines = [f"  {name:<{width}}  {what}" for name, (_, what) in _COMMANDS.items()]
    return "\n".join(
        [
            "usage: apt-jax COMMAND [flags]",
            "",
            "LLM serving in JAX with a hybrid cache and adaptive scheduling.",
            "",
            "commands:",
            *lines,
            "",
            "`apt-jax COMMAND --help` lists the flags of a command; `apt-jax --version` prints the version.",
        ]
    )


def _fail(prog: str, message: str, code: int) -> int:
    sys.stderr.write(f"{prog}: {' '.join(message.split())}\n")
    return code


def _run(command: str, module: ModuleType, argv: Sequence[str]) -> int:
    import grpc  # these imports take most of a second

    from serve.cli.flags import Parser
    from serve.cli.options import check_json
    from serve.client import is_http_port, status_text

    prog = f"apt-jax {command}"
    parser = Parser(prog=prog, description=(module.__doc__ or "").strip().split("\n\n")[0])
    module.add_arguments(parser)
    args = parser.parse_args(argv)
    args.command_line = shlex.join(["apt-jax", command, *without_key(list(argv))])
    try:
        check_json(args)
        if "-" not in (getattr(args, "json", None), getattr(args, "save_json", None)):
            return int(module.run(args) or 0)
        from serve.cli.output import tables_on_stderr  # heavy to import

        with tables_on_stderr():
            return int(module.run(args) or 0)
    except (ConfigError, InvalidRequestError) as error:
        return _fail(prog, str(error), 2)
    except (AptJaxError, CommandError) as error:
        return _fail(prog, str(error), 1)
    except grpc.RpcError as error:
        if not isinstance(error, grpc.Call | grpc.aio.AioRpcError):
            return _fail(prog, "RPC failed", 1)
        if is_http_port(error.details()):
            or_http = ", or put http:// in front of it" if command == "chat" else ""
            line = f"this port speaks HTTP; give the server's gRPC port (--target), 50051 by default{or_http}"
            return _fail(prog, line, 2)
        usage = error.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND)
        return _fail(prog, status_text(error), 2 if usage else 1)
    except BrokenPipeError:
        # The reader of our output has closed the pipe (`| head`): write nothing more, even at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run the `apt-jax` command; returns the exit code."""
    argv = sys.argv[1:] if argv is None else list(argv)
    if not argv or argv[0] in ("-h", "--help", "help"):
        (sys.stdout if argv else sys.stderr).write(_usage() + "\n")
        return 0 if argv else 2
    if argv[0] in ("-V", "--version"):
        sys.stdout.write(f"apt-jax {__version__}\n")
        return 0
    command = argv[0]
    if error := _misspelt_variable():
        return _fail("apt-jax", error, 2)
    if command not in _COMMANDS:
        kind = "flag" if command.startswith("-") else "command"
        known = ["--help", "--version"] if kind == "flag" else list(_COMMANDS)
        hint = nearest(command, known) or f"; commands: {', '.join(_COMMANDS)}"
        if command in _OF_VLLM:
            hint = f"; it is {_OF_VLLM[command]} here"
        return _fail("apt-jax", f"unknown {kind} {command!r:.60}{hint}", 2)
    return _run(command, importlib.import_module(_COMMANDS[command][0]), argv[1:])
