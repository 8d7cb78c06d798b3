"""The page at `/` in a real browser: asking, stopping, editing, thoughts, tools, and nothing from anywhere else."""

import json
import re
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright

from mference_core.server.safety import Policy
from mference_core.testing.serving import Running, serving_demo

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
FLAGS += ["--disable-component-update", "--disable-sync"]
SLOW_MS = 30_000
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine (Debian: apt install chromium)")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One browser for the module; it must be gone before others start event loops."""
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield launched
        launched.close()


@pytest.fixture(scope="module")
def served() -> Iterator[Running]:
    """Serve a demo that calls tools."""
    with serving_demo("gemma4") as server:
        yield server


@pytest.fixture
def context(browser: Browser) -> Iterator[BrowserContext]:
    """A browser that remembers nothing."""
    made = browser.new_context()
    yield made
    made.close()


@pytest.fixture
def page(context: BrowserContext, served: Running) -> Iterator[Page]:
    """The page, with its models known; whatever goes wrong in its console or leaves the server fails the test."""
    wrong: list[str] = []
    made = context.new_page()
    made.set_default_timeout(SLOW_MS)
    made.on("pageerror", lambda error: wrong.append(str(error)))
    made.on("console", lambda said: wrong.append(said.text) if said.type in ("error", "warning") else None)
    made.on("request", lambda asked: None if asked.url.startswith(served.url) else wrong.append(asked.url))
    opened(made, served)
    yield made
    made.close()
    assert wrong == []


def opened(page: Page, served: Running) -> None:
    page.goto(served.url)
    expect(page.get_by_label("Model").locator("option").first).to_have_text(re.compile("-demo$"))


def ask(page: Page, text: str) -> None:
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")


def answers(page: Page, count: int = 1) -> str:
    """Wait for so many whole answers; return the last one's text."""
    expect(page.locator(".told")).to_have_count(count, timeout=SLOW_MS)
    return page.locator(".message.assistant .body").last.inner_text()


def settings(page: Page, **values: str) -> None:
    """Set fields of the settings by their labels' first words."""
    page.keyboard.press("Control+,")
    dialog = page.get_by_role("dialog")
    for label, value in values.items():
        field = dialog.get_by_label(re.compile(label))
        if field.evaluate("node => node.tagName") == "SELECT":
            field.select_option(value)
        else:
            field.fill(value)
    dialog.get_by_role("button", name="Done").click()


def test_a_conversation_streams_and_stays_in_the_browser(page: Page) -> None:
    ask(page, "What is the capital of France?")
    assert "Paris" in answers(page)
    assert "prompt tokens" in page.locator(".told").inner_text()
    page.reload()
    page.get_by_role("navigation").get_by_role("button", name="What is the capital of France?", exact=True).click()
    expect(page.locator(".message.user .body")).to_have_text("What is the capital of France?")
    ask(page, "What is the capital of Italy?")
    assert "Rome" in answers(page, 2)


def test_escape_stops_an_answer_and_the_server_too(page: Page, served: Running) -> None:
    settings(page, **{"Most new tokens": "900", "Temperature": "1.5"})
    ask(page, "Tell me a long story about a fox and a bear")
    expect(page.locator(".message.assistant .body")).not_to_be_empty()
    page.keyboard.press("Escape")
    expect(page.get_by_text("Stopped.")).to_be_visible()
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    for _ in range(50):
        if served.state.active == 0:
            break
        page.wait_for_timeout(100)
    assert served.state.active == 0


def test_editing_and_retrying_take_back_what_followed(page: Page) -> None:
    ask(page, "What is the capital of France?")
    answers(page)
    page.get_by_label("Message", exact=True).press("ArrowUp")
    page.get_by_label("Edit your message").fill("What is the capital of Japan?")
    page.keyboard.press("Enter")
    expect(page.locator(".message.user")).to_have_count(1)
    expect(page.locator(".message.assistant .body")).to_have_text(re.compile("Tokyo"), timeout=SLOW_MS)
    page.get_by_role("button", name="Answer again").click()
    expect(page.locator(".message.assistant")).to_have_count(1)
    assert "Tokyo" in answers(page)


def test_thoughts_are_folded_away(browser: Browser) -> None:
    with serving_demo("qwen36") as server:
        page = browser.new_page()
        opened(page, server)
        settings(page, Reasoning="high")
        ask(page, "What is the capital of Spain?")
        assert "Madrid" in answers(page)
        thoughts = page.locator("details.thought")
        assert thoughts.get_attribute("open") is None
        thoughts.locator("summary").click()
        expect(thoughts.locator("div")).to_be_visible()
        page.close()


def test_a_tool_call_is_shown_and_its_result_answered(page: Page) -> None:
    settings(page, Tools=json.dumps([TOOL]))
    ask(page, "What is the weather in Paris?")
    expect(page.get_by_role("heading", name="Calls get_weather")).to_be_visible(timeout=SLOW_MS)
    assert json.loads(page.locator(".call pre").inner_text()) == {"city": "Paris"}
    page.get_by_label("Result of get_weather").fill('{"temperature": 21, "condition": "sunny"}')
    page.get_by_role("button", name="Give results").click()
    assert "sunny" in answers(page, 2)


def test_tools_that_are_no_json_list_are_refused_in_the_dialog(page: Page) -> None:
    settings(page, Tools="{")
    expect(page.get_by_role("dialog").get_by_role("alert")).to_be_visible()


def test_an_error_is_said_in_the_servers_words(context: BrowserContext, served: Running) -> None:
    page = context.new_page()
    opened(page, served)
    settings(page, Tools=json.dumps([{"type": "custom"}]))
    ask(page, "Hello")
    expect(page.locator("#problem")).to_contain_text("tools")
    expect(page.get_by_role("button", name="Try again")).to_be_visible()


def test_everything_is_reachable_and_named(page: Page) -> None:
    """Each control has a name, and the keyboard alone gets from the first link to an answer."""
    unnamed: Any = page.evaluate(
        "() => [...document.querySelectorAll('button, select, textarea, input')]"
        ".filter(n => !(n.getAttribute('aria-label') || n.textContent.trim() || n.labels?.length)).map(n => n.outerHTML)"
    )
    assert unnamed == []
    page.get_by_role("link", name="Skip to the message box").focus()
    page.keyboard.press("Tab")
    expect(page.get_by_role("button", name="Conversations")).to_be_focused()
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("Enter")
    expect(page.get_by_label("Message", exact=True)).to_be_focused()
    page.keyboard.type("Hi")
    page.keyboard.press("Enter")
    answers(page)
    expect(page.get_by_role("status")).to_contain_text("Answered")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_follow_the_system_and_can_be_read(browser: Browser, served: Running, scheme: Any) -> None:
    """Text stands out from its ground by at least 7 to 1."""
    page = browser.new_page(color_scheme=scheme)
    opened(page, served)
    contrast: Any = page.evaluate(
        """() => {
            const light = (colour) => {
                const parts = colour.match(/[\\d.]+/g).slice(0, 3).map((v) => v / 255)
                    .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
                return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2];
            };
            const style = getComputedStyle(document.body);
            const [a, b] = [light(style.color), light(style.backgroundColor)];
            return { ratio: (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), dark: b < a };
        }"""
    )
    page.close()
    assert contrast["ratio"] >= 7
    assert contrast["dark"] == (scheme == "dark")


MARKUP = """# Title

A **bold** and *soft* `code <b>` word, [bad](javascript:alert(1)), [good](https://example.org/a?b=1).

<img src=x onerror="document.title='gone'"><script>document.title='gone'</script>

- one
  - inner
- two

| a | b |
| - | - |
| 1 | 2 |

```python
print("<i>")
```
"""


def test_what_a_model_writes_is_text(page: Page) -> None:
    """Markdown is shown as such; markup in it is text, and no link leads to a script."""
    chat = {"id": "1", "title": "Markup", "updated": 1, "messages": [{"role": "assistant", "content": MARKUP}]}
    page.evaluate("chat => localStorage.setItem('mference.chat.1', JSON.stringify(chat))", chat)
    page.reload()
    page.get_by_role("button", name="Markup", exact=True).click()
    body = page.locator(".message.assistant .body")
    expect(body.get_by_role("heading", name="Title")).to_be_visible()
    assert body.locator("strong").inner_text() == "bold"
    assert body.locator("p code").inner_text() == "code <b>"
    assert body.locator("li li").inner_text() == "inner"
    assert body.locator("td").all_inner_texts() == ["1", "2"]
    assert body.locator("pre code").inner_text() == 'print("<i>")'
    assert [link.get_attribute("href") for link in body.locator("a").all()] == ["https://example.org/a?b=1"]
    assert body.locator("img, script").count() == 0
    assert "<img src=x" in body.inner_text()
    assert page.title() == "mference"


def test_figures_are_live(page: Page) -> None:
    ask(page, "What is the capital of France?")
    answers(page)
    expect(page.locator("#figures")).to_contain_text("expert hits")
    expect(page.locator("#figures")).to_contain_text(re.compile(r"memory\s*[\d.]+ [KMG]iB"))


def test_conversations_can_be_deleted(page: Page) -> None:
    ask(page, "Hi")
    answers(page)
    page.on("dialog", lambda dialog: dialog.accept())
    page.get_by_role("button", name="Delete Hi").click()
    expect(page.locator(".message")).to_have_count(0)
    page.reload()
    expect(page.get_by_role("navigation").get_by_role("listitem")).to_have_count(0)


def test_a_server_with_a_token_is_asked_with_it(browser: Browser) -> None:
    with serving_demo("gemma4", policy=Policy.of("127.0.0.1", [], [], "let-me-in")) as server:
        page = browser.new_page()
        page.goto(server.url)
        expect(page.locator("#problem")).to_contain_text("access token")
        page.get_by_role("button", name="Enter the token").click()
        page.get_by_label("Access token").fill("let-me-in")
        page.get_by_role("button", name="Done").click()
        expect(page.get_by_label("Model").locator("option").first).to_have_text(re.compile("-demo$"))
        ask(page, "What is the capital of France?")
        assert "Paris" in answers(page)
        page.close()


def test_a_narrow_screen_still_chats(browser: Browser, served: Running) -> None:
    page = browser.new_page(viewport={"width": 380, "height": 700})
    opened(page, served)
    ask(page, "What is the capital of France?")
    assert "Paris" in answers(page)
    wide: Any = page.evaluate("() => document.documentElement.scrollWidth <= innerWidth")
    assert wide
    page.get_by_role("button", name="Conversations").click()
    expect(page.get_by_role("button", name="New conversation")).to_be_visible()
    page.close()
