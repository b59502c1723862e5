"""The chat page in a browser: it shows what the API answers, as it comes, and no more than a key may see."""

import asyncio
import functools
import json

import pytest

from apt_jax.text.chat import ChatTemplate
from serve.dashboard.page import FILES
from serve.security.api_keys import ApiKeys
from tests.support.browser import LAPTOP, PHONE, Page
from tests.support.chat_templates import CHATML
from tests.support.http_serving import bearer
from tests.support.http_serving import run as run_within
from tests.support.toy_serving import executor_of

KEY = "sk-0123456789abcdefghij"
run = functools.partial(run_within, limit_s=120)
SEND = """
const [question, values] = arguments;
for (const [id, value] of Object.entries(values)) document.getElementById(id).value = value;
document.querySelector('#question').value = question;
document.querySelector('#ask').requestSubmit();
"""
READY = "document.body.dataset.state === 'ready' && !document.querySelector('#send').disabled"
ANSWERS = "[...document.querySelectorAll('.turn.assistant')]"
OVER = f"{ANSWERS}.length && {ANSWERS}.every((n) => n.getAttribute('aria-busy') === 'false')"


def chat_template() -> ChatTemplate:
    return ChatTemplate(CHATML, where="chatml.jinja")


@pytest.mark.parametrize(("size", "theme"), [(LAPTOP, "light"), (PHONE, "dark")])
def test_a_question_is_answered_token_by_token_and_explained(browser, size, theme):
    async def scenario(served):
        page = Page(browser, served.server.port, "/chat")
        await page.open(size, theme)
        await page.until(READY)
        assert await page.js("return document.querySelector('#settings').hidden")
        assert await page.js("return [...document.querySelectorAll('#model option')].map((n) => n.value)") == ["toy"]
        assert await page.js("return document.documentElement.scrollWidth <= innerWidth")

        # The other request came first, so this one loses its cache when blocks run out.
        executor = executor_of(served.parts)
        executor.step_s = 0.01
        other = asyncio.create_task(served.ask("x" * 40, max_tokens=160))
        await served.until(lambda: served.parts.engine.stats().num_running == 1)
        settings = {
            "system": "Be brief.",
            "temperature": "0",
            "max-tokens": "40",
            "ttft": "60000",
            "tbt": "0.5",
            "e2e": "80000",
        }
        await page.js(SEND, "Who are you?", settings)
        await page.until("document.querySelectorAll('.token').length >= 2")
        assert await page.js("return document.querySelector('#stop').hidden") is False
        await page.until(OVER)
        await other
        wanted = await served.post(
            "/v1/chat/completions",
            {
                "model": "toy", "temperature": 0, "max_tokens": 40,
                "messages": [
                    {"role": "system", "content": "Be brief."},
                    {"role": "user", "content": "Who are you?"},
                ],
            },
        )  # fmt: skip
        text = wanted.json()["choices"][0]["message"]["content"]
        kept = json.loads(await page.js("return localStorage.getItem('apt-jax-chats')"))
        assert [turn["content"] for turn in kept[0]["turns"]] == ["Who are you?", text]
        tokens = wanted.json()["usage"]["completion_tokens"]
        verdict = await page.until("document.querySelector('.verdict').textContent")
        assert f"tokens {tokens}" in verdict
        assert "TTFT" in verdict
        assert "of 60 s met" in verdict
        assert "of 500 µs missed" in verdict
        assert "of 80 s met" in verdict
        assert "preempted 1×" in verdict
        marks = "[...document.querySelectorAll('.event title')].map((n) => n.textContent)"
        await page.until(f"{marks}.some((t) => t.startsWith('preempted after '))")
        assert await page.js("return document.querySelectorAll('.token.late').length") >= 10
        assert await page.js("return document.querySelector('.objective')") is None  # it lies far outside
        assert await page.js("return document.documentElement.scrollWidth <= innerWidth")

        # A new conversation, by the keyboard, is stopped.
        executor.step_s = 0.05
        await page.js("document.querySelector('#max-tokens').value = '80'; document.querySelector('#reset').click()")
        await page.keys("And then?", "\ue007")  # the question has the focus
        await page.until(f"{ANSWERS}.length === 1 && {ANSWERS}[0].querySelectorAll('.token').length >= 2")
        await page.js("document.querySelector('#stop').click()")
        await page.until(OVER)
        assert (await page.js(f"return {ANSWERS}[0].querySelector('.verdict').textContent")).endswith("stopped")
        await served.idle()
        assert await page.errors() == []

    run(scenario, num_blocks=84, max_num_seqs=2, chat_template=chat_template())


def test_the_page_asks_for_a_key_and_keeps_it_in_memory(browser):
    async def scenario(served):
        page = Page(browser, served.server.port, "/chat")
        await page.open(PHONE, "light")
        for number, key in enumerate(("wrong-0123456789abcdefghij", KEY)):
            await page.until(
                "document.querySelector('#key').open"
                " && document.querySelector('#key-note').textContent.startsWith(arguments[0])",
                ("It is kept", "That key is not")[number],
            )
            await page.js("document.querySelector('#key-input').focus()")
            await page.keys(key, "\ue007")
        await page.until(READY)
        await page.js(SEND, "<img src=x onerror=document.title='caught'>", {"max-tokens": "5"})
        await page.until(OVER)
        assert await page.js("return document.querySelector('.verdict').textContent.includes('tokens 5')")
        assert await page.js("return document.images.length") == 0
        assert KEY not in await page.js("return document.documentElement.outerHTML")
        kept = await page.js("return JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie])")
        assert KEY not in kept
        local, session, cookie = json.loads(kept)
        assert (list(local), session, cookie) == (["apt-jax-chats"], {}, "")
        await page.js("location.reload()")
        await page.until("document.querySelector('#key').open")
        assert all("401 (Unauthorized)" in error for error in await page.errors())

    run(scenario, app={"keys": ApiKeys([KEY])}, chat_template=chat_template())


def test_a_model_without_template_and_a_refused_question_get_a_line(browser):
    async def without(served):
        page = Page(browser, served.server.port, "/chat")
        await page.open(LAPTOP, "dark")
        await page.until("document.body.dataset.state === 'no-template'")
        line = await page.js("return document.querySelector('#banner').textContent")
        assert line.startswith("toy cannot chat: it has no chat template.")
        assert "apt-jax serve smollm2-135m" in line
        assert await page.js("return document.querySelector('#send').disabled")

    async def refused(served):
        page = Page(browser, served.server.port, "/chat")
        await page.open(LAPTOP, "light")
        await page.until(READY)
        await page.js(SEND, "x" * 500, {"max-tokens": "5"})
        await page.until(OVER)
        problem = await page.js("return document.querySelector('.problem').textContent")
        assert "messages" in problem or "prompt" in problem
        assert await page.js("return document.querySelector('#question').value") == "x" * 500
        await page.js(SEND, "short", {"max-tokens": "5"})  # without what was refused
        await page.until(f"{ANSWERS}.length === 1 && {ANSWERS}[0].querySelector('.timeline') && {OVER}")
        assert await page.js("return document.querySelector('.problem')") is None

    run(without)
    run(refused, chat_template=chat_template())


CLICK = """
const [where, label] = arguments;
[...document.querySelectorAll(where)].find((n) => n.textContent.startsWith(label)).click();
"""
CONTENTS = (
    "JSON.parse(localStorage.getItem('apt-jax-chats') ?? '[]').map((c) => c.turns.map((t) => [t.role, t.content]))"
)
TURNS = "[...document.querySelectorAll('.turn')].length"


def test_a_conversation_is_kept_edited_regenerated_and_deleted(browser):
    async def scenario(served):
        page = Page(browser, served.server.port, "/chat")
        await page.open(LAPTOP, "light")
        await page.until(READY)
        await page.js("document.querySelector('#max-tokens').value = '6'")
        await page.js("document.querySelector('.examples button').click()")
        await page.until(f"{TURNS} === 2 && {OVER}")
        await page.js(SEND, "second", {})
        await page.until(f"{TURNS} === 4 && {OVER}")
        ((first, a1, second, a2),) = await page.js(f"return {CONTENTS}")
        assert first[1].startswith("Explain in three sentences")
        assert second == ["user", "second"]
        assert a1[0] == a2[0] == "assistant"
        text = await page.js("return document.querySelector('.timeline summary').textContent")
        assert text.startswith("first token after ")
        assert text.endswith(", 6 tokens")

        # Another answer to the first question takes the place of all that followed it.
        await page.js("document.querySelector('#temperature').value = '0'")
        await page.js(CLICK, ".turn.assistant .actions button", "Regenerate")
        await page.until(f"{TURNS} === 2 && {OVER}")
        assert [turn[0] for turn in (await page.js(f"return {CONTENTS}"))[0]] == ["user", "assistant"]
        await page.js(CLICK, ".turn.user .actions button", "Edit")
        await page.js(
            "document.querySelector('.edit textarea').value = 'edited'; document.querySelector('.edit').requestSubmit()"
        )
        await page.until(f"{CONTENTS}[0][0][1] === 'edited' && {OVER}")
        assert await page.js(f"return {TURNS}") == 2

        # A question that is refused leaves what was there.
        await page.js("document.querySelector('#max-tokens').value = '6'")
        await page.js(CLICK, ".turn.user .actions button", "Edit")
        await page.js(
            "document.querySelector('.edit textarea').value = 'x'.repeat(2000); document.querySelector('.edit').requestSubmit()"
        )
        await page.until("document.querySelector('.problem')")
        assert (await page.js(f"return {CONTENTS}"))[0][0] == ["user", "edited"]
        assert await page.js("return document.querySelector('.turn.user .text').textContent") == "edited"

        # Two conversations, which survive a reload and are deleted one by one or all.
        await page.js("document.querySelector('#reset').click()")
        await page.js(SEND, "<b>other</b>", {"max-tokens": "3"})
        await page.until(f"{CONTENTS}.length === 2 && {OVER}")
        await page.js("location.reload()")
        await page.until(READY)
        assert await page.js(f"return {TURNS}") == 0
        assert await page.js("return document.querySelector('#history').textContent") == "Chats (2)"
        titles = "[...document.querySelectorAll('#chats .title')].map((n) => n.textContent)"
        assert await page.js(f"return {titles}") == ["<b>other</b>", "edited"]
        await page.js("document.querySelector('#history').click()")
        await page.js(CLICK, "#chats .title", "edited")
        await page.until(f"{TURNS} === 2")
        assert await page.js("return document.querySelector('.turn.user .text').textContent") == "edited"
        await page.js("document.querySelectorAll('#chats .remove')[0].click()")
        assert await page.js(f"return {titles}") == ["edited"]
        await page.js("document.querySelector('#clear').click()")
        assert await page.js("return localStorage.length") == 0
        assert await page.js("return document.querySelector('.hello') !== null")
        errors = await page.errors()
        assert all("400 (Bad Request)" in error for error in errors), errors

    run(scenario, chat_template=chat_template(), max_model_len=1024)


@pytest.mark.parametrize(
    "kept",
    [
        "{",
        "[1, null, {}]",
        '[{"id": "a", "title": "b", "turns": [{"role": "system", "content": "x"}]}]',
        '{"a": 1}',
        '"x"',
    ],
)
def test_kept_conversations_that_cannot_be_read_are_left_out(browser, kept):
    async def scenario(served):
        page = Page(browser, served.server.port, "/chat")
        await page.open(LAPTOP, "light")
        await page.js("localStorage.setItem('apt-jax-chats', arguments[0]); location.reload()", kept)
        await page.until(READY)
        assert await page.js("return document.querySelector('#history').textContent") == "Chats"
        assert await page.errors() == []

    run(scenario, chat_template=chat_template())


RENDER = """
const [texts, done] = arguments;
import('/chat/markdown.js').then(({ MarkdownView }) => {
  const node = document.createElement('div');
  document.querySelector('#log').replaceChildren(node);
  const view = new MarkdownView(node);
  for (const text of texts) view.set(text);
  done([node.innerHTML, node.textContent]);
}, (error) => done([String(error), '']));
"""


async def rendered(page: Page, *texts: str) -> tuple[str, str]:
    found = await page.do(lambda: page.driver.execute_async_script(RENDER, list(texts)))
    return found[0], found[1]


MARKDOWN = [
    ("**bold** and *slanted* `code`", "<p><strong>bold</strong> and <em>slanted</em> <code>code</code></p>"),
    ("# Title", "<h3>Title</h3>"),
    ("1. a\n2. b\n\n3. c", '<ol><li>a</li><li>b</li></ol></div><div class="block"><ol start="3"><li>c</li></ol>'),
    ("- a\n  - b", "<ul><li>a<ul><li>b</li></ul></li></ul>"),
    ("> said", "<blockquote><p>said</p></blockquote>"),
    ("a &amp; b &lt; c", "<p>a &amp; b &lt; c</p>"),
    (
        "[x](https://example.org/)",
        'href="https://example.org/" target="_blank" rel="noopener noreferrer nofollow">x</a>',
    ),
    ("|a|b|\n|-|-:|\n|1|2|", '<tr><td>1</td><td class="right">2</td></tr>'),
    ("```py\nprint(1 < 2)\n```\nafter", "<span>py</span>"),
    ("```py\nprint(1 < 2)\n```\nafter", "<code>print(1 &lt; 2)</code>"),
    ("text\n~~~\n**raw**\n~~~", "<code>**raw**</code>"),
    ("a ~~b~~\nc", "<p>a <del>b</del>\nc</p>"),
]


def test_markdown_becomes_elements(browser):
    async def scenario(served):
        page = Page(browser, served.server.port, "/chat")
        await page.open(LAPTOP, "light")
        for text, wanted in MARKDOWN:
            made, _ = await rendered(page, text)
            assert wanted in made, (text, made)
            grown, _ = await rendered(page, *(text[:end] for end in range(1, len(text) + 1)))
            assert grown == made, text
        assert await page.errors() == []

    run(scenario, chat_template=chat_template())


HOSTILE = [
    "<script>document.title = 'caught'</script>",
    "text <script src=https://evil.example/x.js></script> text",
    "<img src=x onerror=\"document.title='caught'\">",
    "<svg onload=alert(1)><iframe src=javascript:alert(1)></iframe></svg>",
    "<style>* { display: none }</style><link rel=stylesheet href=https://evil.example/>",
    "<form action=https://evil.example><input name=a></form><a href=javascript:alert(1)>x</a>",
    "<details open ontoggle=alert(1)><div style='position:fixed;inset:0'>x</div></details>",
    "[x](javascript:alert(1)) [y](  JaVaScRiPt:alert(1)) [z](java\nscript:alert(1))",
    "[x](data:text/html,<script>alert(1)</script>) [y](vbscript:x) [z](file:///etc/passwd) [w](blob:x) [r](/v1/models)",
    "[x](&#106;avascript:alert(1)) <javascript:alert(1)> [y][1]\n\n[1]: javascript:alert(1)",
    "![tracks](https://evil.example/x.png) ![](javascript:alert(1)) [![a](https://evil.example/y.png)](javascript:b)",
    "```<script>alert(1)</script>\n<img src=x onerror=alert(1)>",
    '```"><img src=x onerror=alert(1)>\ncode\n```',
    "`<img src=x onerror=alert(1)>` **<b onclick=alert(1)>**",
    "| <script>alert(1)</script> | b |\n|-|-|\n| <img src=x onerror=alert(1)> | [a](javascript:x) |",
    "# <img src=x onerror=alert(1)>\n> <script>alert(1)</script>\n- <iframe>",
    'https://example.org/<script>alert(1)</script> http://a.b/?x="onmouseover=alert(1)',
    "<!--><img src=x onerror=alert(1)>--> <![CDATA[<img src=x>]]> <?php x ?> </div></article></main>",
    "&lt;img src=x onerror=alert(1)&gt; &#60;script&#62;alert(1)&#60;/script&#62;",
    "\u0000<\u0000script>\u202ealert(1)\u2028</script>",
]
FOUND = """
const log = document.querySelector('#log');
return [...log.querySelectorAll('*')].flatMap((n) => [
  ...(/^(script|img|svg|iframe|style|link|form|object|embed|video|audio|base|meta|math)$/i.test(n.localName) ? [n.localName] : []),
  ...[...n.attributes].filter((a) => a.name.startsWith('on') || a.name === 'style' || a.name === 'src').map((a) => a.name),
  ...(n.localName === 'a' && !/^(https?|mailto):/.test(n.href) ? [n.href] : []),
]);
"""


def test_a_model_that_writes_html_writes_text(browser):
    async def scenario(served):
        page = Page(browser, served.server.port, "/chat")
        await page.open(LAPTOP, "light")
        await page.until(READY)
        title = await page.js("return document.title")
        resources = (
            "return performance.getEntriesByType('resource').map((e) => e.name).filter((n) => n.includes('evil'))"
        )
        for text in HOSTILE:
            for texts in ((text,), tuple(text[:end] for end in range(1, len(text) + 1))):
                _, shown = await rendered(page, *texts)
                assert await page.js(FOUND) == [], text
                for word in ("alert(1)", "caught", "onerror", "tracks"):
                    assert word not in text or word in shown or "javascript" in text or "data:" in text, (text, shown)
        await page.js("for (const n of document.querySelectorAll('#log *')) n.click?.()")
        assert await page.js("return document.title") == title
        assert await page.js(resources) == []
        assert await page.errors() == []

    run(scenario, chat_template=chat_template())


MILLION = 1_000_000
LONG = {
    "one line": "x" * MILLION,
    "words": "word " * (MILLION // 5),
    "lines": "word\n" * (MILLION // 5),
    "paragraphs": "word\n\n" * (MILLION // 6),
    "fence": "```\n" + "code\n" * (MILLION // 5),
    "fences": "```\n" * (MILLION // 4),
    "table": "|a|b|\n|-|-|\n" + "|1|2|\n" * (MILLION // 6),
    "wide table": "|a" * 20_000 + "|\n" + "|-" * 20_000 + "|\n" + "|1" * 20_000 + "|\n",
    "quotes": ">" * MILLION,
    "list": "- a\n" * (MILLION // 4),
    "deep list": "".join(" " * (2 * (n % 500)) + "- a\n" for n in range(2000)),
    "brackets": "[" * MILLION,
    "images": "![" * (MILLION // 2),
    "stars": "*a **b " * (MILLION // 7),
    "underscores": "_a" * (MILLION // 2),
    "ticks": "`a" * (MILLION // 2),
    "tags": "<a " * (MILLION // 3),
    "comments": "<!--\n" * (MILLION // 5),
    "spaces": " " * MILLION,
    "empty lines": "\n" * MILLION,
    "definitions": "[a]: b\n" * (MILLION // 7),
    "headings": "# a\n" * (MILLION // 4),
    "slow blocks": ("_a" * 7000 + "\n\n") * 70,
}
GROW = """
const [text, done] = arguments;
import('/chat/markdown.js').then(({ MarkdownView }) => {
  const node = document.createElement('div');
  document.querySelector('#log').replaceChildren(node);
  const view = new MarkdownView(node);
  for (let end = 4096; end < text.length + 4096; end += 4096) view.set(text.slice(0, end));
  done(node.textContent.replace(/[^a-z0-9]/g, '').length);
}, (error) => done(String(error)));
"""


def test_a_megabyte_of_text_is_shown_while_it_grows(browser):
    """Each takes about a second; where work is quadratic, minutes."""

    async def scenario(served):
        page = Page(browser, served.server.port, "/chat")
        await page.open(PHONE, "light")
        await page.until(READY)
        for shape, text in LONG.items():
            length = await page.do(lambda text=text: page.driver.execute_async_script(GROW, text))
            wanted = sum(c.isalnum() for c in text)
            # What defines links is not shown; every block of code has a button with a label.
            assert length >= (0.6 if shape == "definitions" else 1) * wanted, shape
            assert await page.js("return document.documentElement.scrollWidth <= innerWidth"), shape
        await page.js(SEND, "hello", {"max-tokens": "3"})
        await page.until(OVER)
        assert await page.errors() == []

    run(scenario, chat_template=chat_template())


def test_other_hosts_and_no_dashboard():
    async def scenario(served):
        for path in (path for path in FILES if path.startswith("/chat")):
            response = await served.http.get(path, headers={"host": "evil.example"})
            assert response.status_code == 421
            assert (await served.http.get(path, headers=bearer(KEY))).status_code == 200

    async def without(served):
        assert (await served.http.get("/chat")).status_code == 404

    from serve.http_api.browsers import browser_rules

    run(scenario, app={"browsers": browser_rules("127.0.0.1", (), ())})
    run(without, app={"dashboard": False})
