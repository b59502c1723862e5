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
        assert await page.js("return [...document.querySelectorAll('#model option')].map((n) => n.value)") == ["toy"]
        assert await page.js("return document.documentElement.scrollWidth <= innerWidth")

        # The other request came first, so this one loses its cache when blocks run out.
        executor = executor_of(served.parts)
        executor.step_s = 0.01
        other = asyncio.create_task(served.ask("x" * 40, max_tokens=160))
        await served.until(lambda: served.parts.engine.stats().num_running == 1)
        settings = {"system": "Be brief.", "temperature": "0", "max-tokens": "40", "ttft": "60000", "tbt": "0.5"}
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
        assert await page.js("return document.querySelector('.turn.assistant .text').textContent") == text
        tokens = wanted.json()["usage"]["completion_tokens"]
        verdict = await page.until("document.querySelector('.verdict').textContent")
        assert f"tokens {tokens}" in verdict
        assert "TTFT" in verdict
        assert "of 60 s met" in verdict
        assert "of 500 µs missed" in verdict
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
        assert json.loads(kept) == [{}, {}, ""]
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
        await page.until(f"{ANSWERS}.length === 2 && {OVER}")
        assert await page.js(f"return {ANSWERS}[1].querySelector('.problem')") is None

    run(without)
    run(refused, chat_template=chat_template())


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
