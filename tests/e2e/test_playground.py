"""The playground in a real browser: needs Chromium on the machine and the extra `browser`."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest

from m3stack.local_ports import free_port
from tests.e2e.conftest import Server, Stack, wait_for
from tests.e2e.media import clip, picture
from tests.e2e.scripted_worker import scripted_worker
from tests.e2e.test_messages import CALL

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.soak

ENDED = "article.assistant .facts:has-text('ended by')"
TOOLS = '[{"name": "weather", "parameters": {"type": "object"}}]'


@pytest.fixture
def page() -> Iterator[Page]:
    """A page whose scripts may not fail; nothing outside the gateway is asked for."""
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium")
    assert chromium, "these tests need a program named chromium"
    complaints: list[str] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1000, "height": 760})
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on(
            "console",
            lambda message: complaints.append(message.text) if message.type == "error" else None,
        )
        yield page
        browser.close()
    assert not complaints


def visit(page: Page, server: Server) -> None:
    page.goto(server.url)
    page.wait_for_selector("#state.ready")


def say(page: Page, text: str) -> None:
    page.fill("#text", text)
    page.press("#text", "Enter")


@pytest.fixture
def scripted(gateway: Server, worker: Server, stack: Stack, request: pytest.FixtureRequest):
    """A gateway whose worker says the text that the test names."""
    tokens = httpx.post(
        f"{gateway.url}/tokenize", json={"prompt": request.param}, timeout=60
    ).json()["tokens"]
    with scripted_worker(worker, tokens) as url:
        server = stack.start("gateway", f"127.0.0.1:{free_port()}", "", "--workers", url)
        wait_for(server, "/ready")
        yield server
        server.stop()


def test_pictures_and_clips_are_answered_and_counted(
    page: Page, gateway: Server, tmp_path: Path
) -> None:
    visit(page, gateway)
    page.click("#settings summary")
    page.fill("#max-tokens", "16")
    picture(tmp_path)
    clip(tmp_path, seconds=2)
    page.set_input_files("#file", [str(tmp_path / "card.jpg"), str(tmp_path / "card.mp4")])
    page.wait_for_selector("#attached video")
    say(page, "What is this?")
    facts = page.wait_for_selector(ENDED).inner_text()
    for word in ("first token", "prompt", "pictures", "clips", "reply", "server queue"):
        assert word in facts, facts
    assert page.locator("article.user img").count() == 1
    assert page.locator("#attached figure").count() == 0


@pytest.mark.parametrize("scripted", [f"Let me see.</mm:think>I look.{CALL}"], indirect=True)
def test_thinking_is_folded_and_calls_are_answered(page: Page, scripted: Server) -> None:
    visit(page, scripted)
    page.click("#settings summary")
    page.select_option("#thinking", "enabled")
    page.fill("#tools", TOOLS)
    page.click("#settings summary")
    say(page, "How is the weather in Köln?")
    page.wait_for_selector(ENDED)
    assert not page.locator("details.thinking").evaluate("details => details.open")
    assert page.locator("details.thinking .words").text_content() == "Let me see."
    assert page.locator(".turn > .words").last.inner_text() == "I look."
    assert '"city": "Köln"' in page.locator(".call pre").inner_text()
    say(page, "Never mind.")
    page.wait_for_selector("p.error:has-text('waits for the results')")
    page.fill(".call textarea", "sunny <b>all day</b>")
    with page.expect_request("**/v1/chat/completions") as sent:
        page.click("button.results")
    messages = sent.value.post_data_json["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant", "tool"]
    assert messages[1]["reasoning_content"] == "Let me see."
    assert messages[2]["tool_call_id"] == messages[1]["tool_calls"][0]["id"]
    page.wait_for_function("document.querySelectorAll('.call').length == 2")
    assert page.locator("p.error:has-text('400')").count() == 0


def test_a_message_waits_for_the_files_that_were_chosen_for_it(
    page: Page, gateway: Server, tmp_path: Path
) -> None:
    visit(page, gateway)
    page.click("#settings summary")
    page.fill("#max-tokens", "4")
    picture(tmp_path)
    clip(tmp_path, seconds=2)
    page.set_input_files("#file", [str(tmp_path / "card.jpg"), str(tmp_path / "card.mp4")])
    with page.expect_request("**/v1/chat/completions") as sent:
        say(page, "What is this?")
    content = sent.value.post_data_json["messages"][0]["content"]
    assert [part["type"] for part in content] == ["image_url", "video_url", "text"]
    page.wait_for_selector(ENDED)


@pytest.mark.parametrize("scripted", ["on and on " * 20_000], indirect=True)
def test_a_reply_can_be_stopped_and_the_chat_goes_on(page: Page, scripted: Server) -> None:
    visit(page, scripted)
    page.click("#settings summary")
    page.select_option("#thinking", "disabled")
    say(page, "Go on.")
    page.wait_for_selector(".turn.assistant .words")
    page.press("body", "Escape")
    assert "ended by you" in page.wait_for_selector(ENDED).inner_text()
    with page.expect_request("**/v1/chat/completions") as sent:
        say(page, "And now?")
    messages = sent.value.post_data_json["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant", "user"]
    page.click("#clear")
    assert page.locator(".turn").count() == 0


def test_words_of_the_model_are_never_markup_and_errors_give_the_message_back(
    page: Page, gateway: Server
) -> None:
    visit(page, gateway)
    page.click("#settings summary")
    page.fill("#tools", "[{]")
    say(page, "<img src=x>")
    page.wait_for_selector("p.error:has-text('not valid JSON')")
    assert page.input_value("#text") == "<img src=x>"
    assert page.locator("article.user img").count() == 0


def test_the_document_is_shown(page: Page, gateway: Server) -> None:
    page.goto(f"{gateway.url}/docs")
    page.click("#createChatCompletion summary")
    table = page.locator("#createChatCompletion table", has_text="messages *")
    assert "at least 1" in table.inner_text()
    assert page.locator(".operation").count() > 30
