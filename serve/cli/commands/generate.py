"""Complete prompts and print the completions: a single completion as it is generated, several in the prompts' order."""

import argparse
import asyncio
import contextlib
import sys
from typing import Any

from google.protobuf.json_format import MessageToDict

from serve.cli import options
from serve.cli.completer import Completer
from serve.cli.completion_client import open_completer, verdict
from serve.cli.output import write_json
from serve.protos.aptjax.v1 import apt_serve_pb2 as pb


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_model_argument(parser, required=True)
    parser.add_argument("prompt", metavar="PROMPT", nargs="+", help="text to complete; -: stdin")
    options.add_target_argument(parser)
    parser.add_argument("--quiet", action="store_true", help="print only the completions, without progress or timings")
    parser.add_argument(
        "--no-warm-up",
        action="store_true",
        help="compile each program on first use; the first tokens are slow",
    )
    options.add_json_argument(parser)
    options.add_sampling_arguments(parser, max_tokens=64)
    options.add_structured_output_arguments(parser)
    options.add_engine_arguments(parser)


def run(args: argparse.Namespace) -> int:
    prompts = [sys.stdin.read() if prompt == "-" else prompt for prompt in args.prompt]
    results = asyncio.run(_generate(args, prompts))
    write_json(args.json, {"model": args.model, "target": args.target, "completions": results})
    return 0


async def _generate(args: argparse.Namespace, prompts: list[str]) -> list[dict[str, Any]]:
    fields = options.request_fields(args)
    if args.target is not None:
        fields["model"] = args.model
    single = len(prompts) == 1
    async with open_completer(args) as completer:
        tasks = [asyncio.create_task(_complete(completer, prompt, fields, show=single)) for prompt in prompts]
        results = []
        try:
            for prompt, task in zip(prompts, tasks, strict=True):
                text, finish = await task
                if not single:
                    sys.stdout.write(f"{prompt}{text}\n")
                sys.stdout.flush()
                if not args.quiet:
                    sys.stderr.write(f"[{verdict(finish)}]\n")
                results.append(
                    {"prompt": prompt, "text": text, **MessageToDict(finish, preserving_proto_field_name=True)}
                )
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    return results


async def _complete(completer: Completer, prompt: str, fields: dict[str, Any], *, show: bool) -> tuple[str, pb.Finish]:
    parts, finish = [], pb.Finish()
    stream = completer.stream(prompt, **fields)
    async with contextlib.aclosing(stream):
        async for piece in stream:
            if show and not parts:
                sys.stdout.write(prompt)
            if show:
                sys.stdout.write(piece.text)
                sys.stdout.flush()
            parts.append(piece.text)
            finish = piece.finish or finish
    if show:
        sys.stdout.write("\n")
    return "".join(parts), finish
