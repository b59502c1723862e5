"""The process that renders chat templates: `python -P chat_worker.py`, driven by `apt_jax.text.chat`.

A template is an untrusted program. Jinja's sandbox keeps it from Python's internals; operating-system limits on this
process bound its time and memory. The process reads one JSON object per line from stdin and writes one per line to
stdout: first `{"template": text}`, then any number of

    {"context": variables, "written": variables, "limit": characters}

The strings in `written` and the roles of messages count as written by the template. The answer is
`{"text": text, "runs": [[start, end], ...]}`: the runs are the ranges that the template wrote
(`apt_jax.text.marked_text`).

This file imports little of the package, so that the process is small and starts quickly.
"""

import contextlib
import datetime
import itertools
import json
import resource
import signal
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jinja2
import jinja2.compiler
import jinja2.ext
import jinja2.filters
import jinja2.nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter

sys.path.insert(0, str(Path(__file__).parents[2]))  # -P leaves out directories that may contain the package

from apt_jax.text import marked_text
from apt_jax.text.marked_text import Text

_MEMORY_BYTES = 512 * 2**20
_CPU_S = 1.0


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks the model's output for training; here only its body is rendered."""

    tags = {"generation"}  # noqa: RUF012  # as in Jinja

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Namespace(jinja2.utils.Namespace):
    def __setitem__(self, name: str, value: Any) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a namespace cannot store {name!r}")
        super().__setitem__(name, value)


class _Generator(jinja2.compiler.CodeGenerator):
    """Compiles templates so that the literal text of the template is marked as written by it."""

    def _constant(self, value: Any) -> str:
        constants = self.environment.constants  # type: ignore[attr-defined]
        constants.append(marked_text.constant(value))
        return f"environment.constants[{len(constants) - 1}]"

    def _output_const_repr(self, group: Iterable[Any]) -> str:
        return self._constant("".join(group))

    def visit_Const(self, node: jinja2.nodes.Const, frame: jinja2.compiler.Frame) -> None:
        if isinstance(node.value, str | list | tuple | dict) and not hasattr(node.value, "__html__"):
            self.write(self._constant(node.value))
        else:
            super().visit_Const(node, frame)

    def visit_TemplateData(self, node: jinja2.nodes.TemplateData, frame: jinja2.compiler.Frame) -> None:
        del frame
        self.write(self._constant(node.data))

    @jinja2.compiler.optimizeconst
    def visit_Concat(self, node: jinja2.nodes.Concat, frame: jinja2.compiler.Frame) -> None:
        self.write("concat(map(environment.finalize, (")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write(")))")


class _Formatter(SandboxedFormatter):
    def pieces(self, text: str, args: Any, kwargs: Any) -> list[str]:
        """Return the pieces of `text.format(*args, **kwargs)`; `text` itself counts as written by the template."""
        made: list[str] = []
        numbers = itertools.count()
        for literal, name, spec, conversion in self.parse(text):
            made.append(marked_text.written(literal))
            if name is None:
                continue
            value, _ = self.get_field(f"{next(numbers)}{name}" if name[:1] in ("", ".", "[") else name, args, kwargs)
            plain = not spec and conversion in (None, "s")
            made.append(marked_text.as_text(value) if plain else self._field(value, spec or "", conversion))
        return made

    def _field(self, value: Any, spec: str, conversion: str | None) -> str:
        return self.vformat(f"{{0{f'!{conversion}' if conversion else ''}:{spec}}}", (value,), {})


class _Environment(ImmutableSandboxedEnvironment):
    """A Jinja environment whose strings record which parts the template wrote."""

    code_generator_class = _Generator
    concat = staticmethod(marked_text.concat)

    def __init__(self, **options: Any) -> None:
        super().__init__(finalize=marked_text.as_text, **options)
        self.constants: list[Any] = []
        """Constants of the compiled templates."""

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        usual, text = super().wrap_str_format(value), getattr(value, "__self__", None)
        if usual is None or not isinstance(text, Text) or marked_text.runs_of(text) != ((0, len(text)),):
            return usual

        def wrapper(*args: Any, **kwargs: Any) -> str:
            whole, named = usual(*args, **kwargs), args[0] if value.__name__ == "format_map" else kwargs
            with contextlib.suppress(ValueError, LookupError):  # nested fields: the result counts as content
                pieces = marked_text.concat(_Formatter(self).pieces(text, args, named))
                return pieces if pieces == whole else whole
            return whole

        return wrapper


@jinja2.pass_eval_context
def _join(context: Any, value: Any, d: str = "", attribute: Any = None) -> Any:
    return jinja2.filters.do_join(context, value, Text(d) if type(d) is str else d, attribute)


def _title(s: Any) -> str:
    return marked_text.changed(marked_text.as_text(s), jinja2.filters.do_title(s))


def _indent(s: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    newline, indent = Text("\n"), width if isinstance(width, str) else Text(" " * width)
    lines = (s + newline).splitlines()
    if blank:
        text = (newline + indent).join(lines)
    else:
        text = newline.join([lines[0], *(indent + line if line else line for line in lines[1:])])
    return indent + text if first else text


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: Any) -> None:
    raise jinja2.exceptions.TemplateError(str(message))


def _strftime_now(format: str) -> str:
    return marked_text.changed(marked_text.as_text(format), datetime.datetime.now().strftime(format))


def environment() -> ImmutableSandboxedEnvironment:
    """Return an environment with the settings and helpers that transformers gives to chat templates."""
    env = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols])
    env.filters |= {"tojson": _tojson, "join": _join, "title": _title, "indent": _indent, "string": marked_text.as_text}
    env.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now, namespace=_Namespace)
    return env


def _render(template: jinja2.Template, job: dict[str, Any]) -> Text:
    context = marked_text.content_of(job["context"]) | {
        name: marked_text.constant(value) for name, value in job["written"].items()
    }
    for message in context["messages"]:
        message["role"] = marked_text.written(message["role"])
    parts, size = [], 0
    for part in template.generate(**context):
        size += len(part)
        if size > job["limit"]:
            raise ValueError(f"its output is longer than {job['limit']} characters")
        parts.append(part)
    return marked_text.concat(parts)


def _limit_process() -> None:
    for kind, value in (
        (resource.RLIMIT_AS, _MEMORY_BYTES),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
    ):
        with contextlib.suppress(ValueError, OSError):  # not on every system
            resource.setrlimit(kind, (value, value))


def _answer(line: str, template: jinja2.Template | None) -> tuple[dict[str, Any], Any]:
    """Return the answer to one line, and the template to use for the next lines."""
    try:
        job = json.loads(line)
        if "template" in job:
            return {}, environment().from_string(job["template"])
        assert template is not None
        text = _render(template, job)
        return {"text": text, "runs": marked_text.runs_of(text)}, template
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
        # The default action of the signal kills the process, even during a long operation in C.
        signal.setitimer(signal.ITIMER_PROF, _CPU_S)
        answer, template = _answer(line, template)
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
