"""Regular expressions of the packages take time that grows with their text, whatever it holds.

Two kinds do not: those that can divide a text in many ways before they fail, and those that are searched for, begin at
many places, and run far from each before they fail. The second kind is never made better by possessive quantifiers, as
each place is a search of its own.

The check is of syntax: it errs on the side of finding too much. What it finds is written in another way, mostly with a bound, or
stands in `ALLOWED` with the reason why no text can use it.
"""

import ast
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pytest

from tests.test_code_bans import modules

try:
    from re import _constants as sre  # type: ignore[attr-defined]
    from re import _parser as sre_parser  # type: ignore[attr-defined]
except ImportError:  # pragma: no cover - a Python that parses otherwise
    pytest.skip("this Python has another parser of patterns", allow_module_level=True)

ALLOWED = {
    ("apt_jax/executor/base.py", "_DEVICE_LOST"): "after the only repeat, of word characters, a boundary always is",
}
"""Patterns that look as if they took long, and why no text makes them."""
UNREAD = {
    ("apt_jax/frontend/llm.py", "_FLAG"): "has no repeats",
    ("apt_jax/models/families/with_images.py", "NORM_BUFFERS"): "has no repeats",
    ("apt_jax/models/loading/lora.py", "pattern"): "of an adapter's file: bounded in length and repeats, of no groups",
    ("apt_jax/text/patterns.py", "_tree ordered"): "has no repeats",
    ("apt_jax/text/patterns.py", "map re sorted ordered len"): "has no repeats",
}
"""Patterns that are put together of what is not known here, and why none takes long."""
FUNCTIONS = {"compile", "search", "match", "fullmatch", "split", "findall", "finditer", "sub", "subn"}
AT_ONE_PLACE = {"match", "fullmatch"}
FEW = 256
"""Repeats up to this many are bounded."""
CHARACTERS = frozenset(map(chr, range(256))) | set("ĀЖ中\u2028\ue000\U0001f600")
"""Stand for all."""

Nodes = Sequence[tuple[Any, Any]]
_REPEATS = (sre.MAX_REPEAT, sre.MIN_REPEAT, sre.POSSESSIVE_REPEAT)
_CATEGORIES = {
    sre.CATEGORY_DIGIT: r"\d", sre.CATEGORY_NOT_DIGIT: r"\D", sre.CATEGORY_SPACE: r"\s", sre.CATEGORY_NOT_SPACE: r"\S",
    sre.CATEGORY_WORD: r"\w", sre.CATEGORY_NOT_WORD: r"\W",
}  # fmt: skip


# --- what a pattern can match ----------------------------------------------------------------------------------------


def plain(nodes: Iterable[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """The nodes of a pattern with what stands in groups among them."""
    found: list[tuple[Any, Any]] = []
    for kind, value in nodes:
        found += plain(value[3]) if kind is sre.SUBPATTERN else [(kind, value)]
    return found


def characters(kind: Any, value: Any, flags: int) -> frozenset[str]:
    """Return the characters that one node of the tree, itself a character, can be."""
    match kind:
        case sre.LITERAL:
            found = {chr(value)}
        case sre.NOT_LITERAL:
            found = CHARACTERS - {chr(value)}
        case sre.ANY:
            found = CHARACTERS - (set() if flags & re.DOTALL else {"\n"})
        case sre.RANGE:
            found = {c for c in CHARACTERS if value[0] <= ord(c) <= value[1]} | {chr(value[0]), chr(value[1])}
        case sre.CATEGORY:
            found = {c for c in CHARACTERS if re.fullmatch(_CATEGORIES[value], c)}
        case _:  # sre.IN
            listed = [one for one in value if one[0] is not sre.NEGATE]
            found = set().union(*(characters(one[0], one[1], flags) for one in listed))
            found = CHARACTERS - found if len(listed) < len(value) else found
    if flags & re.IGNORECASE:
        found = {form for c in found for form in (c, c.lower(), c.upper())}
    return frozenset(found)


def is_character(kind: Any) -> bool:
    return kind in (sre.LITERAL, sre.NOT_LITERAL, sre.ANY, sre.IN)


def parts(kind: Any, value: Any) -> list[Nodes]:
    """Return the parts of a node: its alternatives, or what it repeats."""
    if kind is sre.BRANCH:
        return [plain(one) for one in value[1]]
    if kind in _REPEATS:
        return [plain(value[2])]
    return [plain(value)] if kind is sre.ATOMIC_GROUP else []


def can_be_empty(nodes: Nodes) -> bool:
    def alone(kind: Any, value: Any) -> bool:
        if kind in _REPEATS and value[0] == 0:
            return True
        return not is_character(kind) and (not parts(kind, value) or any(map(can_be_empty, parts(kind, value))))

    return all(alone(kind, value) for kind, value in nodes)


def used(nodes: Nodes, flags: int, *, first: bool = False) -> frozenset[str]:
    """The characters that a text which matches can have, or begin with."""
    found: frozenset[str] = frozenset()
    for kind, value in nodes:
        if is_character(kind):
            found |= characters(kind, value, flags)
        found = found.union(*(used(part, flags, first=first) for part in parts(kind, value)))
        if first and not can_be_empty([(kind, value)]):
            break
    return found


def is_long(kind: Any, value: Any) -> bool:
    return kind in _REPEATS and value[1] > FEW


# --- what takes long -------------------------------------------------------------------------------------------------


def ways(nodes: Nodes, flags: int, follow: Nodes = ()) -> Iterator[str]:
    """Yield why a text may be divided between repeats in many ways; `follow` is matched behind `nodes`."""
    for at, (kind, value) in enumerate(nodes):
        rest = [*nodes[at + 1 :], *follow]
        if kind in (sre.POSSESSIVE_REPEAT, sre.ATOMIC_GROUP):  # the first way is the only one
            for part in parts(kind, value):
                yield from ways(part, flags)
            continue
        if kind in _REPEATS:
            (body,) = parts(kind, value)
            if is_long(kind, value):
                if meets_itself(used(body, flags), rest, flags):
                    yield "two repeats of the same characters follow each other"
                yield from alike(body, flags)
            yield from ways(body, flags, [*(body if value[1] > 1 else ()), *rest])
        else:
            for part in parts(kind, value):
                yield from ways(part, flags, rest)


def meets_itself(repeated: frozenset[str], rest: Nodes, flags: int) -> bool:
    """Return whether another long repeat of some of the characters follows, and nothing before it says where it begins."""
    for kind, value in rest:
        inner = parts(kind, value)
        if is_long(kind, value) and repeated & used(inner[0], flags):
            return True
        if any(meets_itself(repeated, part, flags) for part in inner):
            return True
        if not can_be_empty([(kind, value)]) and not repeated & used([(kind, value)], flags, first=True):
            return False
    return False


def alike(body: Nodes, flags: int) -> Iterator[str]:
    """Yield why what is repeated can be matched in two ways."""
    for kind, value in body:
        if kind is sre.BRANCH:
            firsts = [used(part, flags, first=True) for part in parts(kind, value)]
            if any(a & b for at, a in enumerate(firsts) for b in firsts[at + 1 :]):
                yield "alternatives that begin alike are repeated"


def restarts(nodes: Nodes, flags: int) -> Iterator[str]:
    """Yield why a search may run far from many places, each time in vain."""
    if nodes and nodes[0][0] is sre.BRANCH:
        for part in parts(*nodes[0]):
            yield from restarts([*part, *nodes[1:]], flags)
        return
    beginning = used(nodes, flags, first=True)
    if nodes and nodes[0][0] is sre.AT and nodes[0][1] in (sre.AT_BEGINNING, sre.AT_BEGINNING_STRING):
        if not flags & re.MULTILINE or nodes[0][1] is sre.AT_BEGINNING_STRING:
            return
        beginning = frozenset("\n")
    if any(beginning & repeated for repeated in runs(nodes, flags)):
        yield "a search can begin where an earlier one has run on from and failed"


def runs(nodes: Nodes, flags: int, can_fail: bool = False) -> Iterator[frozenset[str]]:
    """Yield the characters of long repeats behind which something may not match."""
    for at, (kind, value) in enumerate(nodes):
        fails = can_fail or not can_be_empty(nodes[at + 1 :]) or any(k in (sre.AT, sre.ASSERT, sre.ASSERT_NOT) for k, _ in nodes[at + 1 :])  # fmt: skip
        for part in parts(kind, value):
            if is_long(kind, value) and fails:
                yield used(part, flags)
            yield from runs(part, flags, fails)


def problems(pattern: str | bytes, flags: int = 0, *, is_searched: bool = True) -> list[str]:
    """Return why a pattern may take long; empty: it does not."""
    text = pattern.decode("latin-1") if isinstance(pattern, bytes) else pattern
    parsed = sre_parser.parse(text, flags)
    flags, nodes = parsed.state.flags, plain(parsed)
    return sorted({*ways(nodes, flags), *(restarts(nodes, flags) if is_searched else ())})


# --- the patterns of the packages ------------------------------------------------------------------------------------


class Pattern:
    """A pattern in the source."""

    def __init__(self, path: str, name: str, text: str | bytes | None, flags: int, is_searched: bool) -> None:
        self.key, self.text, self.flags, self.is_searched = (path, name), text, flags, is_searched


def patterns(path: str, tree: ast.Module, trees: dict[str, ast.Module]) -> Iterator[Pattern]:
    """Yield what is given to functions of `re`."""
    nodes = list(ast.walk(tree))
    imports = [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {
        a.asname or a.name for node in imports if isinstance(node, ast.Import) for a in node.names if a.name == "re"
    }
    own = [node for node in imports if isinstance(node, ast.ImportFrom) and node.module == "re"]
    bare = {a.asname or a.name: a.name for node in own for a in node.names}
    targets = {id(node.value): node.targets[0] for node in nodes if isinstance(node, ast.Assign)}
    for call in nodes if names or bare else ():
        if not isinstance(call, ast.Call):
            continue
        match call.func:
            case ast.Attribute(value=ast.Name(id=module), attr=method) if module in names:
                pass
            case ast.Name(id=name):
                method = bare.get(name, "")
            case _:
                continue
        if method not in FUNCTIONS:
            continue
        given = next(iter([*call.args, *(word.value for word in call.keywords if word.arg == "pattern")]), None)
        if given is None:
            continue
        function, dot, method = ast.unparse(call.func).rpartition(".")
        method = method if function in names and dot else bare.get(ast.unparse(call.func), "")
        if method not in FUNCTIONS:
            continue
        target = targets.get(id(call))
        words = [node.id for node in ast.walk(given) if isinstance(node, ast.Name)]
        name = target.id if isinstance(target, ast.Name) else " ".join(words) or ast.unparse(given)
        methods = {method} if method != "compile" else uses(tree, target)
        text = text_of(given, tree, trees)
        flags = [ast.unparse(arg) for arg in (*call.args[1:], *(keyword.value for keyword in call.keywords))]
        found = 0
        for one in re.findall(r"\bre\.([A-Z]+)\b", " ".join(flags)):
            found |= getattr(re, one)
        yield Pattern(path, name, text, found, not methods or not methods <= AT_ONE_PLACE)


def uses(tree: ast.Module, target: ast.expr | None) -> set[str]:
    """The methods of a compiled pattern that its module uses; empty: not known."""
    if not isinstance(target, ast.Name):
        return set()
    attributes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    return {node.attr for node in attributes if isinstance(node.value, ast.Name) and node.value.id == target.id}


def text_of(node: ast.expr, tree: ast.Module, trees: dict[str, ast.Module]) -> str | bytes | None:
    """The value of an expression made of literals and constants of modules; None: it is not one."""
    match node:
        case ast.Constant(value=str() | bytes() as value):
            return value
        case ast.Constant(value=int() as value):
            return str(value)
        case ast.JoinedStr(values=values):
            texts = [text_of(one.value if isinstance(one, ast.FormattedValue) else one, tree, trees) for one in values]
            return None if any(not isinstance(text, str) for text in texts) else "".join(map(str, texts))
        case ast.Name(id=name):
            for one in tree.body:
                if isinstance(one, ast.Assign) and ast.unparse(one.targets[0]) == name:
                    return text_of(one.value, tree, trees)
                if isinstance(one, ast.ImportFrom) and any((a.asname or a.name) == name for a in one.names):
                    given = next(a.name for a in one.names if (a.asname or a.name) == name)
                    other = trees.get((one.module or "").replace(".", "/") + ".py")
                    return None if other is None else text_of(ast.Name(id=given), other, trees)
    return None


def test_patterns_take_linear_time() -> None:
    found = [one for path, tree in modules().items() for one in patterns(path, tree, modules())]
    assert len(found) > 40
    unread = {one.key for one in found if one.text is None}
    assert unread - set(UNREAD) == set(), "put together of what the check does not know"
    assert set(UNREAD) <= unread, "drop what is no longer there"
    slow = {
        one.key: problems(one.text, one.flags, is_searched=one.is_searched) for one in found if one.text is not None
    }
    assert {key: why for key, why in slow.items() if why and key not in ALLOWED} == {}
    assert set(ALLOWED) <= {key for key, why in slow.items() if why}, "drop what is no longer there"


# --- the check itself ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "pattern",
    [
        rb'"(?:[^"\\]++|\\.)*+"',  # once counted the brackets of bodies: hours for 2 MB
        r'"(?:[^"\\]|\\.)*"',
        r'"(?:[^"\\]|\\.)*?"',
        r"<tag>.*?</tag>",
        r"<tag>[\s\S]{0,100000}</tag>",
        r"\s+$",
        r"(\d+) ?bytes",
        r"[0-9.]+(ms|s)",
        r"(?:\w+,)*;",
        r"(?m)^[\s\S]*?x",
        r"(?>a+)b",
    ],
)
def test_a_search_that_runs_on_from_many_places_is_found(pattern) -> None:
    assert problems(pattern)


@pytest.mark.parametrize(
    "pattern",
    [
        r"(a+)+b",
        r"(a*)*b",
        r"(?:a|b*)*c",
        r"(a|a?b)*c",
        r'"(?:\\.|[^"])*"',
        r'(?:[^"\\]+|\\.)*"',
        r"\s*\s*x",
        r"a*.*b",
        r".*,.*;",
        r"(.*a){1,8}b",
        r"[a-z]+(?:-?[a-z]+)*;",
        r"(?i)a*A*b",
        r"(?:(?:a+)?){2}b",
    ],
)
def test_a_text_that_can_be_divided_in_many_ways_is_found(pattern) -> None:
    assert problems(pattern, is_searched=False)


@pytest.mark.parametrize(
    ("pattern", "is_searched"),
    [
        (r"[A-Za-z][\w.-]{0,95}", True),
        (r'"[^"]*"', True),
        (r"a+", True),
        (r"UUID: [^)\s]+", True),
        (r'["\\]', True),
        (r"^[ \t]*[A-Za-z][\w-]*[ \t]*::=", True),
        (r"(?m)^ *\d+: (\S+) \S+", True),
        (r"(?<!\r)\n|\n[ \t]", True),
        (r"(.+)\.weight", False),
        (r"(?:,\s*\w+)*;", False),
        (r"(?:a+b)*c", False),
        (r'"(?:[^"\\]++|\\.)*+"', False),
        (r"[^,]*,[^;]*;", False),
        (r"(?:[0-9]{1,9}(?:ms|s)){1,6}", True),
    ],
)
def test_what_takes_linear_time_is_not_found(pattern, is_searched) -> None:
    assert problems(pattern, is_searched=is_searched) == []


@pytest.mark.parametrize(
    "source",
    [
        "import re\nre.search('x+$', text)",
        "import re as r\nr.sub(pattern='x+$', repl='', string=text)",
        "from re import compile as made\nP = made('x+$')\nP.search(text)",
        "import re\nP = re.compile('x+$')\nQ = P",
        "import re\nEND = '$'\nP = re.compile(rf'x+{END}')\nP.findall(text)",
        "import re\nre.compile(b'x+$', flags=re.DOTALL)",
    ],
)
def test_patterns_are_found_in_sources(source) -> None:
    tree = ast.parse(source)
    (found,) = patterns("m.py", tree, {})
    assert found.text is not None
    assert problems(found.text, found.flags, is_searched=found.is_searched)


def test_what_is_only_matched_at_one_place_is_no_search() -> None:
    tree = ast.parse("import re\nP = re.compile('x+$')\nP.fullmatch(text)\nre.match('x+$', text)")
    assert [one.is_searched for one in patterns("m.py", tree, {})] == [False, False]
