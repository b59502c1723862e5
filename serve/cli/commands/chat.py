"""Chat with a model in this process or on a server. Without a chat template, the model continues a plain transcript.

Lines that begin with a slash are commands: /reset clears the conversation; /quit or Ctrl-D ends it. Other lines are
questions. Ctrl-C ends the answer that is being written, or else the chat. If standard input is not a terminal, only
the answers are printed, without names.
"""

import argparse
import asyncio
import contextlib
import sys
from typing import Any, Protocol

from apt_jax.errors import InvalidRequestError
from serve.cli import options
from serve.cli.completer import Completer
from serve.cli.completion_client import open_completer, verdict
from serve.cli.http_completer import speaks_openai
from serve.signals import on_interrupt

_LOCAL_SERVER = "http://127.0.0.1:8000"
"""Default address of ``apt-jax serve``; a server there is used if neither a model nor a server is given."""
NO_TEMPLATE = "apt-jax chat: this model has no chat template, so it continues a plain transcript"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_model_argument(parser, say_default=True)
    parser.add_argument("--model", dest="model_flag", metavar="MODEL", help="MODEL, as a flag")
    options.add_target_argument(parser, http=True)
    parser.add_argument("--you", metavar="NAME", default="User", help="your name in the transcript")
    parser.add_argument("--name", metavar="NAME", default="Assistant", help="the model's name in the transcript")
    parser.add_argument(
        "--system", metavar="TEXT", default="", help="system message, or text at the top of the transcript"
    )
    parser.add_argument("--timings", action="store_true", help="print timings of each answer")
    parser.add_argument(
        "--no-warm-up",
        action="store_true",
        help="compile each program on first use; the first answers are slow",
    )
    options.add_sampling_arguments(parser, max_tokens=128)
    options.add_engine_arguments(parser)


def run(args: argparse.Namespace) -> int:
    args.model = args.model_flag or args.model
    if args.model is None and args.target is None:
        if asyncio.run(speaks_openai(_LOCAL_SERVER)):
            args.target = _LOCAL_SERVER
            told = f"no MODEL given: using the server at {_LOCAL_SERVER}"
        else:
            told = options.no_model_given("chat")
        sys.stderr.write(f"apt-jax chat: {told}\n")
    return asyncio.run(_talk(args))


class ChatSession(Protocol):
    """A conversation: its questions and answers so far."""

    @property
    def stop(self) -> str | None:
        """String at which an answer ends, in addition to the model's end tokens; None: no such string."""
        ...

    def prompt(self, question: str) -> str | list[dict[str, str]]: ...

    def add(self, question: str, answer: str) -> None: ...

    def forget_oldest(self) -> bool: ...

    def reset(self) -> None: ...


class Conversation:
    """A conversation as messages for a chat template; `forget_oldest` shortens it."""

    stop = None

    def __init__(self, system: str = "") -> None:
        self._system = [{"role": "system", "content": system}] if system else []
        self._messages: list[dict[str, str]] = []

    def prompt(self, question: str) -> list[dict[str, str]]:
        """Return the messages of the conversation, followed by the question."""
        return [*self._system, *self._messages, {"role": "user", "content": question}]

    def add(self, question: str, answer: str) -> None:
        self._messages += [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer.strip()},
        ]

    def forget_oldest(self) -> bool:
        """Forget the oldest question and its answer; return False if there is none."""
        if not self._messages:
            return False
        del self._messages[:2]
        return True

    def reset(self) -> None:
        self._messages.clear()


class Transcript:
    """A conversation as plain text; `forget_oldest` shortens it.

    Args:
        you, name: names of the user and of the model in the text.
        system: text at the top, which is never forgotten.
    """

    def __init__(self, you: str, name: str, system: str = "") -> None:
        self._you, self._name, self._system = you, name, system
        self._turns: list[tuple[str, str]] = []

    @property
    def stop(self) -> str:
        """String with which the model would begin the user's next question."""
        return f"\n{self._you}:"

    def prompt(self, question: str) -> str:
        """Return the transcript, followed by the question, for the model to continue."""
        parts = [self._system] if self._system else []
        parts += [f"{self._you}: {q}\n{self._name}: {a}" for q, a in self._turns]
        return "\n".join([*parts, f"{self._you}: {question}\n{self._name}:"])

    def add(self, question: str, answer: str) -> None:
        self._turns.append((question, answer.strip()))

    def forget_oldest(self) -> bool:
        """Forget the oldest question and its answer; return False if there is none."""
        if not self._turns:
            return False
        del self._turns[0]
        return True

    def reset(self) -> None:
        self._turns.clear()


async def _talk(args: argparse.Namespace) -> int:
    fields = options.request_fields(args)
    shown, code = sys.stdin.isatty(), 0
    async with open_completer(args, chat=True) as completer:
        longest = await completer.max_model_len()
        if args.max_tokens >= longest:
            raise InvalidRequestError(
                "max_tokens", f"{args.max_tokens} leaves no tokens for a question: the model's limit is {longest} in total (--max-tokens)"
            )  # fmt: skip
        if not completer.has_chat and (args.model is not None or args.target is not None):
            sys.stderr.write(f"{NO_TEMPLATE}\n")
        talk: ChatSession = (
            Conversation(args.system) if completer.has_chat else Transcript(args.you, args.name, args.system)
        )
        stops = [*([talk.stop] if talk.stop is not None else []), *fields.get("stop", [])]
        if stops:
            fields["stop"] = list(dict.fromkeys(stops))
        while True:
            try:
                question = await _ask(args.you) if shown else await asyncio.to_thread(input)
            except EOFError:
                sys.stdout.write("\n" if shown else "")
                return code
            question = question.strip()
            if question in ("/quit", "/exit"):
                return code
            if question == "/reset":
                talk.reset()
            elif question.startswith("/"):
                sys.stderr.write("commands: /reset, /quit\n")
            elif question and not await _answer(completer, talk, question, fields, args, shown=shown):
                code = 0 if shown else 1


async def _ask(name: str) -> str:
    """Return a line typed on the terminal. No thread waits for it, so Ctrl-C ends the chat at once.

    Raises:
        EOFError: the input has ended.
    """
    loop, typed, terminal = asyncio.get_running_loop(), asyncio.Event(), sys.stdin.fileno()
    sys.stdout.write(f"{name}: ")
    sys.stdout.flush()
    loop.add_reader(terminal, typed.set)
    try:
        await typed.wait()
    except asyncio.CancelledError:
        sys.stdout.write("\n")
        raise
    finally:
        loop.remove_reader(terminal)
    return input()


async def _answer(
    completer: Completer,
    talk: ChatSession,
    question: str,
    fields: dict[str, Any],
    args: argparse.Namespace,
    *,
    shown: bool,
) -> bool:
    """Write the answer to a question, on a terminal until Ctrl-C. Returns False if the question is rejected."""
    parts: list[str] = []
    writing = asyncio.create_task(_write(completer, talk, question, fields, args, parts, shown=shown))
    try:
        with on_interrupt(writing.cancel) if shown else contextlib.nullcontext():
            done = await writing
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        sys.stdout.write("\n")
        done = True
    if parts:
        talk.add(question, "".join(parts))
    return done


async def _write(
    completer: Completer,
    talk: ChatSession,
    question: str,
    fields: dict[str, Any],
    args: argparse.Namespace,
    parts: list[str],
    *,
    shown: bool,
) -> bool:
    """Write the answer to a question and append its texts to `parts`. Returns False if the question is rejected."""
    while True:
        stream = completer.stream(talk.prompt(question), **fields)
        try:
            async with contextlib.aclosing(stream):
                async for piece in stream:
                    # Answers in a transcript begin with a space.
                    text = piece.text if "".join(parts).strip() else piece.text.lstrip()
                    if shown and not parts:
                        text = f"{args.name}: {text}"
                    sys.stdout.write(text)
                    sys.stdout.flush()
                    parts.append(piece.text)
                    if piece.finish is not None:
                        sys.stdout.write("\n")
                        if args.timings:
                            sys.stderr.write(f"[{verdict(piece.finish)}]\n")
            return True
        except InvalidRequestError as error:
            if error.field != "max_tokens" and error.field.split(".")[0] in fields:
                raise  # every question would fail in the same way
            too_long = error.field in ("messages", "prompt", "prompt_token_ids", "max_tokens")
            if not too_long or not talk.forget_oldest():
                sys.stderr.write(f"apt-jax chat: {error}\n")
                return False
