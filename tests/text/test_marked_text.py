"""Texts that know what a chat template wrote: what `str` and Jinja do with them, and where the marks are."""

import itertools
import string

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apt_jax.text import chat_worker
from apt_jax.text.marked_text import Text, as_text, changed, concat, content_of, runs_of, written

_OWN = string.ascii_uppercase + "<>"
"""Characters that the template writes in these tests; all others are content."""
_PIECES = st.lists(st.sampled_from(["A", "B", "AB", "<A>", "a", "b", "ab", " ", "\n", "", "x,y", "é"]), max_size=8)


def _text(pieces) -> Text:
    return concat([written(piece) if set(piece) <= set(_OWN) else Text(piece) for piece in pieces])


def _marks(text: str) -> list[bool]:
    marks = [False] * len(text)
    for start, end in runs_of(text):
        assert 0 <= start < end <= len(text)
        marks[start:end] = [True] * (end - start)
    return marks


def _check(got, want) -> None:
    """The same values, with every character marked that is the template's, and no other."""
    if isinstance(want, str):
        assert str.__eq__(got, want)
        assert _marks(got) == [c in _OWN for c in want]
        runs = runs_of(got)
        assert all(a[1] < b[0] for a, b in itertools.pairwise(runs))
    elif isinstance(want, list | tuple):
        assert len(got) == len(want)
        for one, other in zip(got, want, strict=True):
            _check(one, other)
    else:
        assert got == want


_NUMBER = st.integers(-4, 12)
_OPERATIONS = {
    "add": lambda t, o, i, j: t + o,
    "mul": lambda t, o, i, j: (t * (i % 4), (j % 4) * t),
    "index": lambda t, o, i, j: t[i % len(t)] if t else t,
    "slice": lambda t, o, i, j: (t[i:j], t[j:], t[:i], t[::-1], t[i:j:2]),
    "iterate": lambda t, o, i, j: [*t, *reversed(t)],
    "split": lambda t, o, i, j: (t.split(), t.split(o, i) if o else [], t.rsplit(o, i) if o else [], t.rsplit(None, 1)),
    "lines": lambda t, o, i, j: (t.splitlines(), t.splitlines(True)),
    "partition": lambda t, o, i, j: (t.partition(o), t.rpartition(o)) if o else (),
    "strip": lambda t, o, i, j: (t.strip(), t.lstrip(), t.rstrip(), t.strip(o), t.lstrip(o), t.rstrip(o)),
    "affix": lambda t, o, i, j: (t.removeprefix(o), t.removesuffix(o)),
    "replace": lambda t, o, i, j: (t.replace("a", o), t.replace("B", o, i), t.replace(o, "") if o else t),
    "join": lambda t, o, i, j: (t.join([o, o, t]), o.join([t, t]), t.join([])),
    "tests": lambda t, o, i, j: (t == o, hash(t), o in t, t.find(o), t.startswith(o), t.count("a"), bool(t), {t: 1}[t]),
}


@pytest.mark.parametrize("name", _OPERATIONS)
@settings(max_examples=150)
@given(first=_PIECES, second=_PIECES, i=_NUMBER, j=_NUMBER)
def test_operations_are_those_of_str_and_marks_go_along(name, first, second, i, j):
    operation, text, other = _OPERATIONS[name], _text(first), _text(second)
    want = operation("".join(first), "".join(second), i, j)
    _check(operation(text, other, i, j), want)
    if name == "add":
        plain = "".join(c for c in other if c not in _OWN)
        _check((plain + text, text + plain), (plain + "".join(first), "".join(first) + plain))


@settings(max_examples=100)
@given(pieces=_PIECES)
def test_a_change_of_case_keeps_marks_in_their_places(pieces):
    text, plain = _text(pieces), "".join(pieces)
    for name in ("upper", "lower", "casefold", "title", "capitalize", "swapcase"):
        got = getattr(text, name)()
        assert str.__eq__(got, getattr(plain, name)())
        assert _marks(got) == _marks(text)
    assert runs_of(written("ß").upper()) == ((0, 2),)
    assert runs_of((written("ß") + "a").upper()) == ()


def test_what_does_not_keep_marks_returns_content():
    text = written("<A>")
    for lost in (text.center(9), text.zfill(9), text.expandtabs(), text.translate({65: "b"}), f"{text:>9}", repr(text)):
        assert not runs_of(lost)
    assert as_text(5) == "5"
    assert runs_of(changed(Text("a"), "b")) == ()
    assert content_of({"a": ["b", 1, None]}) == {"a": ["b", 1, None]}
    with pytest.raises(TypeError, match="expected str"):
        text.join([Text("a"), 5])  # type: ignore[list-item]
    with pytest.raises(TypeError, match="unsupported"):
        _ = text + 5


X = "messages[0].content"
_EXPRESSIONS = {
    f"'<A>' + {X} + '<B>'": "[<A>]x1\n[<B>]",
    f"'<A>' ~ {X} ~ 5 ~ true": "[<A>]x1\n[5True]",
    f"'<%s>%s' % (messages[0].role, {X})": "[<user>]x1\n",
    f"'<A>%s%5d' % ({X}, 5)": "<A>x1\n    5",
    "'<A>%s' % 5": "[<A>5]",
    f"'%(a)s%%<A>' % {{'a': {X}}}": "x1\n[%<A>]",
    f"'<{{}}>{{:>5}}{{x}}{{{{'.format('A', {X}, x=bos_token)": "[<A>]  x1\n[<s>{]",
    f"'{{0}}{{0[1]}}'.format({X})": "x1\n1",
    f"'{{a}}<A>'.format_map({{'a': {X}}})": "x1\n[<A>]",
    f"['<A>', {X}, 3] | join('<B>')": "[<A><B>]x1\n[<B>]3",
    f"['<A>', {X}] | join": "[<A>]x1\n",
    "messages | map(attribute='content') | join('<A>') + messages | join('<A>', attribute='role')": "x1\n[user]",
    f"('<a>' + {X}) | upper": "[<A>]X1\n",
    f"('<a>' + {X} + '<b>') | title": "[<A>]x1\n[<B>]",
    f"('<a>\n' + {X} + '<b>') | indent(2, true)": "  [<a>]\n  x1\n  [<b>]",
    f"('<a>' + {X} + '<b>') | indent('.', blank=true)": "[<a>]x1\n[.<b>]",
    f"(' <a> ' + {X}) | trim": "[<a> ]x1",
    f"{X} | replace('1', '<A>') | replace('x', bos_token)": "[<s><A>]\n",
    f"('<a>' + {X}) | list | first ~ ('<a>' + {X}) | last ~ ('<a>' + {X}) | reverse": "[<]\n\n1x[>a<]",
    f"[{X}, '<A>'] | tojson": '["x1\\n", "<A>"]',
    f"{X} | string ~ 5 | string ~ {X} | length": "x1\n[53]",
    f"'<A>' | safe + {X}": "<A>x1\n",
    "messages[0].role ~ strftime_now('%%')": "[user%]",
    f"strftime_now({X})": "x1\n",
    "{'<A>': '<B>'}.items() | map('join', '|') | join": "[<A>|<B>]",
    "['<A>', '<B>'] | map('upper') | list | join": "[<A><B>]",
    f"('<A>' + {X}).split('1')[0] + undefined_name | default('<B>')": "[<A>]x[<B>]",
}


def _render(source: str) -> str:
    """The rendered text with what the template wrote in brackets; the content of its one message is `x1`, a newline."""
    template = chat_worker.environment().from_string(source)
    context = {"messages": [{"role": "user", "content": "x1\n"}]}
    text = chat_worker._render(template, {"context": context, "written": {"bos_token": "<s>"}, "limit": 1000})
    pieces, at = [], 0
    for start, end in runs_of(text):
        pieces += [text[at:start], "[", text[start:end], "]"]
        at = end
    return "".join([*pieces, text[at:]])


@pytest.mark.parametrize(("expression", "expected"), _EXPRESSIONS.items())
def test_expressions_of_templates_keep_marks(expression, expected):
    assert _render(f"{{{{ {expression} }}}}") == expected


def test_statements_of_templates_keep_marks():
    assert _render(
        "{% macro f(x) %}<m>{{ x }}{{ caller() }}{% endmacro %}{% call f(" + X + ") %}<c>{% endcall %}"
        "{% set y %}<y>{{ " + X + " }}{% endset %}{{ y }}{% filter upper %}<f>{{ " + X + " }}{% endfilter %}"
        "{% set ns = namespace(a='<n>') %}{% set ns.a = ns.a + " + X + " %}{{ ns.a }}"
        "{% for a in ['<l>', '<k>'] %}{{ a }}{% endfor %}{{ {'a': '<d>'}['a'] }}"
    ) == "[<m>]x1\n[<c><y>]x1\n[<F>]X1\n[<n>]x1\n[<l><k><d>]"  # fmt: skip


def test_an_optimised_constant_is_the_template_s():
    assert _render("{{ '<' ~ 'A' | upper ~ '>' }}{{ 5 }}{{ ('a', '<B>')[1] }}") == "[<A>5<B>]"
