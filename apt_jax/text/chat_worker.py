"""The process that renders chat templates: `python -P chat_worker.py`, driven by `apt_jax.text.chat`.

A template is a program that somebody else wrote. Jinja's sandbox keeps it from Python's insides, not from running for
ever or taking all memory; limits of the operating system on this process do. It reads one JSON object a line from stdin
and answers with one a line on stdout: first `{"template": text}`, then any number of
`{"contexts": [variables, ...], "limit": characters}`.

The file imports nothing of the package, so that the process is small and quick to start.
"""

import contextlib
import datetime
import json
import resource
import signal
import sys
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

_MEMORY_BYTES = 512 * 2**20
_CPU_S = 1.0


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks the model's own words for training; here its body is rendered and nothing more."""

    tags = {"generation"}  # noqa: RUF012  # as Jinja has it

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Namespace(jinja2.utils.Namespace):
    def __setitem__(self, name: str, value: Any) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a namespace cannot store {name!r}")
        super().__setitem__(name, value)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: Any) -> None:
    raise jinja2.exceptions.TemplateError(str(message))


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)


def environment() -> ImmutableSandboxedEnvironment:
    """The settings and helpers that transformers gives to chat templates."""
    env = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    env.filters["tojson"] = _tojson
    env.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now, namespace=_Namespace)
    return env


def _render(template: jinja2.Template, context: dict[str, Any], limit: int) -> str:
    parts, size = [], 0
    for part in template.generate(**context):
        size += len(part)
        if size > limit:
            raise ValueError(f"its output is longer than {limit} characters")
        parts.append(part)
    return "".join(parts)


def _limit_process() -> None:
    for kind, value in (
        (resource.RLIMIT_AS, _MEMORY_BYTES),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
    ):
        with contextlib.suppress(ValueError, OSError):  # not on every system
            resource.setrlimit(kind, (value, value))


def _answer(line: str, template: jinja2.Template | None) -> tuple[dict[str, Any], Any]:
    """The answer to one line, and the template from then on."""
    try:
        job = json.loads(line)
        if "template" in job:
            return {"texts": []}, environment().from_string(job["template"])
        assert template is not None
        texts = [_render(template, context, job["limit"]) for context in job["contexts"]]
        return {"texts": texts}, template
    except MemoryError:
        return {"error": f"it takes more than {_MEMORY_BYTES >> 20} MiB of memory"}, template
    except RecursionError:
        return {"error": "it is nested too deeply"}, template
    except Exception as error:  # a template may raise anything
        return {"error": f"{type(error).__name__}: {error}"[:400]}, template


def main() -> None:
    _limit_process()
    template = None
    for line in sys.stdin:
        # The default action of the signal ends the process, also within one long operation in C.
        signal.setitimer(signal.ITIMER_PROF, _CPU_S)
        answer, template = _answer(line, template)
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
