"""The page in a real Chromium, before real services with the demo model: pictures and videos in, right words out."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from tests.gateway.browser import ask, browser, complete, drop, opened, question, shoot
from tests.gateway.trio import Trio, fronted
from tests.rpc.pairs import pair
from tests.waiting import until
from tools import demo_media
from tools.demo_model.places import TARGET


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser() as running:
        yield running


@pytest.fixture(scope="module")
def door(chromium: Browser) -> Iterator[Trio]:
    with pair(TARGET, light=False) as services, fronted(services) as three:
        yield three


@pytest.fixture
def page(chromium: Browser, door: Trio) -> Iterator[Page]:
    with opened(chromium, door.gateway.address) as page:
        expect(page.get_by_role("combobox", name="Model")).to_have_value(door.model)
        yield page


def words(answer: Locator) -> str:
    """What it says."""
    return complete(answer).locator(".words").last.inner_text()


def extent(answer: Locator, stage: str) -> tuple[float, float]:
    """Where a stage's bar begins and ends, in pixels."""
    box = answer.get_by_role("row", name=stage).locator("rect").bounding_box()
    assert box is not None
    return box["x"], box["x"] + box["width"]


def test_a_drawing_that_is_dropped_is_named_and_its_timeline_drawn(page: Page, door: Trio) -> None:
    passes = door.services.media.get_load().vit_calls
    drop(page, demo_media.drawing(), "drawing.png", "image/png")
    answer = ask(page, "What is in the picture?")
    assert words(answer) == "There is a red circle and a blue square."
    assert door.services.media.get_load().vit_calls == passes + 1

    expect(answer.locator(".timeline summary")).to_contain_text("the encoder ran")
    rows = answer.get_by_role("table").get_by_role("rowheader").all_inner_texts()
    assert {"Header LLM", "Decode file Encoder", "ViT Encoder", "Landing LLM", "Prefill LLM", "Decode LLM"} <= set(rows)
    stages = ("Decode file Encoder", "ViT Encoder", "Landing LLM", "Decode LLM")
    file, vit, landing, decode = (extent(answer, stage) for stage in stages)
    assert file[0] < vit[0] < vit[1] < landing[1] < decode[0] < decode[1], "they lie where they happened"
    times = answer.get_by_role("table").get_by_role("cell").all_inner_texts()
    assert any(re.fullmatch(r"\d+(\.\d+)? ms", time) for time in times)
    shoot(page, "page")


def test_a_repeated_question_runs_no_encoder_and_turns_are_remembered(page: Page, door: Trio) -> None:
    drop(page, demo_media.drawing(), "drawing.png", "image/png")
    first = complete(ask(page, "What is in the picture?"))
    passes = door.services.media.get_load().vit_calls
    first.get_by_role("button", name="Retry").click()
    facts = complete(first).locator(".timeline summary")
    expect(facts).to_contain_text("the encoder did not run")
    cached, asked = map(int, re.findall(r"(\d+) of (\d+) prompt tokens", facts.inner_text())[0])
    assert 0 < cached < asked

    second = ask(page, "What colour is the circle?")
    assert "red" in words(second).lower()
    assert door.services.media.get_load().vit_calls == passes, "its picture was sent again, and was known"
    expect(first.get_by_role("button", name="Retry")).to_be_hidden()
    expect(page.get_by_role("img", name="Picture drawing.png")).to_have_count(1)


def test_a_video_that_is_chosen_is_understood(page: Page) -> None:
    with page.expect_file_chooser() as chooser:
        page.get_by_role("button", name="Choose files").click()
    chooser.value.set_files({"name": "film.mp4", "mimeType": "video/mp4", "buffer": demo_media.film()})
    page.get_by_role("button", name="Remove film.mp4").wait_for()
    assert "right" in words(ask(page, "Which way does it move?"))


def test_everything_is_done_by_keyboard_alone(page: Page) -> None:
    page.evaluate("document.activeElement.blur()")

    def tab_to(target: Locator) -> None:
        for _ in range(30):
            if target.evaluate("(element) => element === document.activeElement"):
                return
            page.keyboard.press("Tab")
        raise AssertionError("it is not reached")

    page.keyboard.press("Tab")
    page.keyboard.press("Enter")  # the way to the question that is first of all
    tab_to(page.get_by_role("tab", name="Chat"))
    page.keyboard.press("ArrowRight")
    expect(page.get_by_role("tabpanel", name="Services")).to_be_visible()
    page.keyboard.press("Home")
    expect(page.get_by_role("tabpanel", name="Chat")).to_be_visible()

    tab_to(page.get_by_role("button", name="Settings"))
    page.keyboard.press("Enter")
    page.keyboard.type("0")
    expect(page.get_by_label("Temperature")).to_have_value("0")
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_be_hidden()

    tab_to(page.get_by_role("button", name="Draw a sample"))
    page.keyboard.press("Enter")
    expect(question(page)).to_be_focused()
    page.keyboard.type("What is")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("in the picture?")
    page.keyboard.press("Enter")
    answer = complete(page.get_by_role("article", name="Answer"))
    assert re.search(r"\b(circle|square|triangle)\b", words(answer))
    assert page.get_by_role("article", name="Question").inner_text() == "What is\nin the picture?"
    tab_to(answer.get_by_role("button", name="Retry"))
    page.keyboard.press("Enter")
    complete(answer)
    tab_to(page.get_by_role("button", name="New chat"))
    page.keyboard.press("Enter")
    expect(question(page)).to_be_focused()
    expect(answer).to_have_count(0)


def test_both_services_are_shown_live_while_somebody_looks(page: Page, door: Trio) -> None:
    asked: list[str] = []
    page.clock.install()
    page.on("request", lambda request: asked.append(request.url) if "/load" in request.url else None)
    drop(page, demo_media.drawing(), "drawing.png", "image/png")
    complete(ask(page, "What is in the picture?"))
    assert asked == []
    page.get_by_role("tab", name="Services").click()
    llm = page.get_by_role("article", name=door.services.llm.address)
    encoder = page.get_by_role("article", name=door.services.encoder.address)
    for card in (llm, encoder):
        expect(card).to_contain_text("usable")

    def figure(card: Locator, label: str) -> Locator:
        return card.locator("div", has=page.get_by_text(label, exact=True)).locator("dd")

    load = door.services.media.get_load()
    expect(figure(encoder, "ViT passes")).to_have_text(str(load.vit_calls))
    expect(figure(encoder, "Store hits")).to_contain_text(f"of {load.store_hits + load.store_misses} items")
    before = door.services.text.get_load().finished_requests
    for finished in range(before, before + 4):
        expect(figure(llm, "Requests")).to_contain_text(f"{finished} finished")
        door.chat(max_tokens=16)
    page.set_viewport_size({"width": 1080, "height": 720})
    shoot(page, "services")
    page.get_by_role("tab", name="Chat").click()
    count = len(asked)
    assert count >= 2
    page.clock.fast_forward(10_000)
    complete(ask(page, "What colour is the circle?"))
    assert len(asked) == count


def test_a_narrow_dark_screen_has_room_for_everything(chromium: Browser, door: Trio) -> None:
    phone = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "color_scheme": "dark"}
    with opened(chromium, door.gateway.address, **phone) as page:
        expect(page.get_by_role("combobox", name="Model")).to_have_value(door.model)
        drop(page, demo_media.drawing(), "drawing.png", "image/png")
        complete(ask(page, "What is in the picture?"))
        shoot(page, "phone")
        for tab in ("Chat", "Services"):
            page.get_by_role("tab", name=tab).click()
            expect(page.get_by_role("tabpanel", name=tab)).to_be_visible()
            assert page.evaluate("document.documentElement.scrollWidth") == 390, tab
            for button in page.get_by_role("button").all():
                if button.is_visible():
                    box = button.bounding_box()
                    assert box is not None
                    assert min(box["width"], box["height"]) >= 24, button.inner_text()
                    assert box["x"] >= 0
                    assert box["x"] + box["width"] <= 390
    until(door.idle, "nothing is held")
