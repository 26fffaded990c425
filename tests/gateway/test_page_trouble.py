"""The page in a real Chromium when things go wrong, before a gateway with a scripted LLM service."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from playwright.sync_api import Browser, Page, expect

from tests import pictures
from tests.gateway.browser import ask, browser, complete, drop, opened
from tests.gateway.scripted import Scripted, scripted
from tests.launch import gateway
from tests.unit.twinlens.conftest import serving
from tests.unit.twinlens.fakes import WORDS, FakeLlm, script
from tests.waiting import until
from twinlens import v1

PICTURE = pictures.encoded(pictures.noise(64, 48, 1))
BROKEN = v1.Status(
    code=3, message="the picture is damaged", reason="BAD_IMAGE", field="chat.messages[0].parts[0].media"
)


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser() as running:
        yield running


@pytest.fixture(scope="module")
def running(chromium: Browser) -> Iterator[Scripted]:
    with scripted() as door:
        yield door


@pytest.fixture
def door(running: Scripted) -> Iterator[Scripted]:
    llm = running.llm
    llm.requests.clear()
    llm.ended.clear()
    yield running
    llm.play, llm.refusal = script, None


@pytest.fixture
def page(chromium: Browser, door: Scripted) -> Iterator[Page]:
    with opened(chromium, door.gateway.address) as page:
        expect(page.get_by_role("combobox", name="Model")).to_have_value("demo")
        yield page


def test_a_refusal_says_what_to_do_and_can_be_tried_again(page: Page, door: Scripted) -> None:
    door.llm.play, door.llm.refusal = lambda _: iter(()), (grpc.StatusCode.INVALID_ARGUMENT, BROKEN)
    drop(page, PICTURE, "broken.png", "image/png")
    answer = ask(page, "What is it?")
    failure = answer.get_by_role("alert")
    expect(failure).to_contain_text("The picture is damaged. Try another file")
    expect(failure).to_contain_text("BAD_IMAGE · messages[0].content[0]")
    expect(answer.get_by_role("button", name="Copy")).to_be_hidden()
    door.llm.play, door.llm.refusal = script, None
    answer.get_by_role("button", name="Retry").click()
    expect(complete(answer)).to_contain_text("".join(WORDS))
    expect(failure).to_have_count(0)


def test_a_turn_that_failed_is_not_sent_again(page: Page, door: Scripted) -> None:
    door.llm.play, door.llm.refusal = lambda _: iter(()), (grpc.StatusCode.INVALID_ARGUMENT, BROKEN)
    drop(page, PICTURE, "broken.png", "image/png")
    ask(page, "What is it?").get_by_role("alert").wait_for()
    door.llm.play, door.llm.refusal = script, None
    complete(ask(page, "And now?"))
    complete(ask(page, "And then?"))
    messages = door.llm.requests[-1].chat.messages
    said = [(message.role, [part.text for part in message.parts]) for message in messages]
    assert said == [("user", ["And now?"]), ("assistant", ["".join(WORDS)]), ("user", ["And then?"])]


def test_what_is_sent_is_what_was_dropped_under_these_settings(page: Page, door: Scripted) -> None:
    page.get_by_role("button", name="Settings").click()
    for label, value in (("Temperature", "0.5"), ("Longest answer", "7"), ("System prompt", "Be brief.")):
        page.get_by_label(label).fill(value)
    page.get_by_role("button", name="Done").click()
    for name in ("one.png", "two.png"):
        drop(page, PICTURE + name.encode(), name, "image/png")
    page.get_by_role("button", name="Remove one.png").click()
    complete(ask(page, "What is it?"))
    complete(ask(page, "Again?"))
    first, second = door.llm.requests
    assert (first.sampling.temperature, first.sampling.max_tokens, first.model) == (0.5, 7, "demo")
    system, user = first.chat.messages
    assert (system.role, system.parts[0].text) == ("system", "Be brief.")
    media, text = user.parts
    assert media.media.data == PICTURE + b"two.png"
    assert text.text == "What is it?"
    assert first.session_id == second.session_id
    assert list(second.chat.messages)[:2] == [system, user]


def test_an_answer_is_stopped_and_what_was_said_stays(page: Page, door: Scripted) -> None:
    stopped = threading.Event()

    def endless(request: v1.GenerateRequest) -> Iterator[v1.GenerateResponse]:
        yield v1.GenerateResponse(started=v1.GenerateStarted(prompt_tokens=1))
        yield v1.GenerateResponse(delta=v1.GenerateDelta(text="word ", token_ids=[1]))
        stopped.wait(600)

    door.llm.play = endless
    answer = ask(page, "Talk")
    expect(answer).to_contain_text("word")
    expect(answer).to_have_attribute("aria-busy", "true")
    expect(page.get_by_role("button", name="Ask", exact=True)).to_be_disabled()
    page.keyboard.press("Escape")
    expect(answer).to_contain_text("Stopped.")
    until(door.llm.ended.is_set, "the LLM service has heard")
    stopped.set()
    door.llm.play = script
    complete(ask(page, "Go on"))
    assert [message.role for message in door.llm.requests[-1].chat.messages] == ["user", "assistant", "user"]
    page.get_by_role("button", name="New chat").click()
    expect(answer).to_have_count(0)


def test_an_answer_that_breaks_off_says_so(page: Page, door: Scripted) -> None:
    def broken(request: v1.GenerateRequest) -> Iterator[v1.GenerateResponse]:
        yield v1.GenerateResponse(started=v1.GenerateStarted(prompt_tokens=1))
        yield v1.GenerateResponse(delta=v1.GenerateDelta(text="half a ", token_ids=[1]))

    door.llm.play = broken
    door.llm.refusal = (grpc.StatusCode.INTERNAL, v1.Status(code=13, message="a worker has died", reason="ENGINE_DIED"))
    answer = ask(page, "Talk")
    expect(answer.get_by_role("alert")).to_contain_text("A worker has died.")
    expect(answer).to_contain_text("half a")


def test_a_gateway_that_is_away_is_named(page: Page, door: Scripted) -> None:
    page.context.set_offline(True)
    answer = ask(page, "Are you there?")
    expect(answer.get_by_role("alert")).to_contain_text("The gateway cannot be reached. Is the gateway running")
    page.context.set_offline(False)
    answer.get_by_role("button", name="Retry").click()
    expect(complete(answer)).to_contain_text("".join(WORDS))


def test_a_file_that_is_too_large_is_told_from_a_gateway_that_is_away(chromium: Browser) -> None:
    """It answers before it has all of the body, and the browser listens while it still sends."""
    with scripted(max_body_bytes="64KiB") as door, opened(chromium, door.gateway.address) as page:
        drop(page, bytes(1 << 20), "large.png", "image/png")
        failure = ask(page, "What is it?").get_by_role("alert")
        expect(failure).to_contain_text("Send less, or a smaller file.")
        expect(failure).to_contain_text("BODY_TOO_LARGE")


def test_a_file_of_another_kind_is_not_taken(page: Page) -> None:
    page.set_input_files("#files", {"name": "notes.txt", "mimeType": "text/plain", "buffer": b"words"})
    expect(page.get_by_role("status").first).to_have_text("notes.txt is neither a picture, a video nor a sound.")
    assert page.get_by_role("button", name="Remove notes.txt").count() == 0


def test_a_picture_is_pasted(page: Page, door: Scripted) -> None:
    page.evaluate(
        """(content) => {
          const clipboardData = new DataTransfer();
          clipboardData.items.add(new File([Uint8Array.from(content)], "image.png", { type: "image/png" }));
          document.activeElement.dispatchEvent(new ClipboardEvent("paste", { bubbles: true, clipboardData }));
        }""",
        list(PICTURE),
    )
    page.get_by_role("button", name="Remove image.png").wait_for()
    complete(ask(page, "What is it?"))
    (message,) = door.llm.requests[0].chat.messages
    assert message.parts[0].media.data == PICTURE


def test_a_picture_is_taken_by_the_camera(page: Page, door: Scripted) -> None:
    page.get_by_role("button", name="Camera").first.click()
    page.get_by_role("dialog", name="Camera").get_by_role("button", name="Take picture").click()
    page.get_by_role("button", name="Remove camera.jpg").wait_for()
    assert page.evaluate("document.getElementById('viewfinder').srcObject.active") is False
    complete(ask(page, "Who is it?"))
    (message,) = door.llm.requests[0].chat.messages
    assert message.parts[0].media.data.startswith(b"\xff\xd8\xff")


def test_a_sound_is_recorded_and_asked_about(page: Page, door: Scripted) -> None:
    recording = page.get_by_role("button", name="Stop recording")
    page.evaluate(
        """() => {
          const ask = navigator.mediaDevices.getUserMedia.bind(navigator.mediaDevices);
          window.asked = 0;
          navigator.mediaDevices.getUserMedia = (what) => (window.asked++, ask(what));
        }"""
    )
    presses = "buttons => buttons.forEach((button) => button.click())"
    page.get_by_role("button", name="Microphone").evaluate_all(presses)  # two, before it is known whether it may
    recording.first.wait_for()
    recording.first.click()
    page.get_by_role("button", name="Remove recording.webm").wait_for()
    assert page.evaluate("window.asked") == 1
    expect(recording).to_have_count(0)
    complete(ask(page, "What is said?"))
    (message,) = door.llm.requests[0].chat.messages
    media = message.parts[0].media
    assert (media.modality, media.data[:4]) == (v1.MODALITY_AUDIO, b"\x1aE\xdf\xa3")


@pytest.mark.parametrize(
    ("modalities", "title", "shown", "refused"),
    [
        ([v1.MODALITY_AUDIO], "Ask about a sound", ["Choose files", "Microphone"], "a.png is not a sound."),
        (
            [v1.MODALITY_IMAGE, v1.MODALITY_VIDEO],
            "Ask about a picture or a video",
            ["Choose files", "Camera", "Draw a sample"],
            "a.mp3 is neither a picture nor a video.",
        ),
        ([], "Ask something", [], "This model takes text alone."),
    ],
)
def test_the_page_offers_what_the_model_takes(
    chromium: Browser, modalities: list[v1.Modality], title: str, shown: list[str], refused: str
) -> None:
    with scripted() as door:
        door.llm.modalities = modalities
        until(lambda: models(door) == [MODALITIES[each] for each in modalities], "the gateway has heard")
        with opened(chromium, door.gateway.address) as page:
            expect(page.get_by_role("heading", name=title)).to_be_visible()
            buttons = page.locator("#welcome button:visible").all_inner_texts()
            assert buttons == shown
            name, kind = ("a.mp3", "audio/mpeg") if v1.MODALITY_IMAGE in modalities else ("a.png", "image/png")
            page.set_input_files("#files", {"name": name, "mimeType": kind, "buffer": b"file"})
            expect(page.get_by_role("status").first).to_have_text(refused)


MODALITIES = {v1.MODALITY_IMAGE: "image", v1.MODALITY_VIDEO: "video", v1.MODALITY_AUDIO: "audio"}


def models(door: Scripted) -> list[str]:
    """What the only model takes, as the gateway tells it."""
    found: list[str] = json.loads(door.get("/v1/models").body)["data"][0]["modalities"]
    return found


def test_an_answer_is_copied(page: Page) -> None:
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    answer = complete(ask(page, "Talk"))
    answer.get_by_role("button", name="Copy").click()
    expect(page.get_by_text("Copied")).to_be_attached()
    assert page.evaluate("navigator.clipboard.readText()") == "".join(WORDS)


def test_text_is_never_markup(page: Page, door: Scripted) -> None:
    def markup(request: v1.GenerateRequest) -> Iterator[v1.GenerateResponse]:
        yield v1.GenerateResponse(started=v1.GenerateStarted(prompt_tokens=1))
        text = "<img src=x onerror=alert(1)><b>bold</b>"
        yield v1.GenerateResponse(delta=v1.GenerateDelta(text=text, token_ids=[1]))
        yield v1.GenerateResponse(finished=v1.GenerateFinished(reason=v1.FINISH_REASON_STOP))

    door.llm.play = markup
    answer = ask(page, "<script>alert(1)</script>")
    expect(answer).to_contain_text("<img src=x onerror=alert(1)><b>bold</b>")
    expect(page.get_by_role("article", name="Question")).to_have_text("<script>alert(1)</script>")
    assert page.locator("#turns img, #turns b, #turns script").count() == 0


def test_thoughts_stand_apart(page: Page, door: Scripted) -> None:
    def thinks(request: v1.GenerateRequest) -> Iterator[v1.GenerateResponse]:
        yield v1.GenerateResponse(started=v1.GenerateStarted(prompt_tokens=1, thinking=True))
        yield v1.GenerateResponse(delta=v1.GenerateDelta(text="Hm.</think>Four.", token_ids=[1]))
        yield v1.GenerateResponse(finished=v1.GenerateFinished(reason=v1.FINISH_REASON_LENGTH))

    door.llm.play = thinks
    answer = ask(page, "Two and two?")
    expect(answer.get_by_text("Four.")).to_be_visible()
    expect(answer.get_by_text("It was cut at the longest length.")).to_be_visible()
    expect(answer.get_by_text("Hm.")).to_be_hidden()
    answer.get_by_text("Reasoning").click()
    expect(answer.get_by_text("Hm.")).to_be_visible()


def test_a_token_is_asked_for_and_kept_in_this_tab_alone(chromium: Browser, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("secret\n")
    with scripted(auth_token_file=tokens) as door, opened(chromium, door.gateway.address) as page:
        expect(page.get_by_role("dialog", name="Settings")).to_be_visible()
        expect(page.get_by_role("textbox", name="Token")).to_be_focused()
        page.keyboard.type("secret")
        page.keyboard.press("Enter")
        expect(page.get_by_role("combobox", name="Model")).to_have_value("demo")
        expect(complete(ask(page, "Hello"))).to_contain_text("".join(WORDS))
        assert page.evaluate("[Object.values(sessionStorage).includes('secret'), localStorage.length]") == [True, 0]
        page.reload()
        expect(page.get_by_role("combobox", name="Model")).to_have_value("demo")


class OtherLlm(FakeLlm):
    """One of another model."""

    def GetInfo(self, request, context):
        info = super().GetInfo(request, context)
        info.model = "other"
        return info


def test_the_model_that_is_chosen_is_asked(chromium: Browser) -> None:
    one, other = FakeLlm(), OtherLlm()
    with (
        serving(one) as first,
        serving(other) as second,
        gateway(first, second) as running,
        opened(chromium, running.address) as page,
    ):
        page.get_by_role("combobox", name="Model").select_option("other")
        complete(ask(page, "Hello"))
    assert (len(one.requests), [request.model for request in other.requests]) == (0, ["other"])


def test_a_page_without_a_service_waits_for_one(chromium: Browser, tmp_path: Path) -> None:
    services = tmp_path / "services"
    services.write_text("")
    with (
        serving(FakeLlm()) as address,
        gateway(f"file://{services}") as running,
        opened(chromium, running.address) as page,
    ):
        expect(page.get_by_role("status").first).to_contain_text("An LLM service has to be started")
        answer = ask(page, "Hello")
        expect(answer.get_by_role("alert")).to_contain_text("An LLM service has to be started")
        services.write_text(f"{address}\n")
        expect(page.get_by_role("combobox", name="Model")).to_have_value("demo")
        answer.get_by_role("button", name="Retry").click()
        expect(complete(answer)).to_contain_text("".join(WORDS))


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_from_its_ground(chromium: Browser, door: Scripted, scheme: str) -> None:
    with opened(chromium, door.gateway.address, color_scheme=scheme, reduced_motion="reduce") as page:
        drop(page, PICTURE, "noise.png", "image/png")
        door.llm.play, door.llm.refusal = lambda _: iter(()), (grpc.StatusCode.INVALID_ARGUMENT, BROKEN)
        ask(page, "What?").get_by_role("alert").wait_for()
        door.llm.play, door.llm.refusal = script, None
        complete(ask(page, "And now?"))
        page.get_by_role("button", name="Settings").click()
        assert page.evaluate(_FAINT) == []
        assert page.evaluate("getComputedStyle(document.body).colorScheme") == "light dark"
        dark = page.evaluate("matchMedia('(prefers-color-scheme: dark)').matches")
        assert dark == (scheme == "dark")


_FAINT = """() => {
  const numbers = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const linear = (value) => (value <= 0.03928 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4);
  const light = ([red, green, blue]) => {
    return 0.2126 * linear(red / 255) + 0.7152 * linear(green / 255) + 0.0722 * linear(blue / 255);
  };
  const ground = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const colour = numbers(getComputedStyle(at).backgroundColor);
      if (colour.length === 3 || colour[3] === 1) return colour;
    }
    return [255, 255, 255];
  };
  const faint = [];
  for (const element of document.querySelectorAll("body *")) {
    const own = [...element.childNodes].some((node) => node.nodeType === Node.TEXT_NODE && node.data.trim());
    if (!own || !element.checkVisibility() || element.matches(":disabled, noscript")) continue;
    const text = element instanceof SVGElement ? getComputedStyle(element).fill : getComputedStyle(element).color;
    const [one, other] = [light(numbers(text)), light(ground(element))].sort((a, b) => b - a);
    const contrast = (one + 0.05) / (other + 0.05);
    if (contrast < 4.5) faint.push(`${element.tagName} ${element.textContent.slice(0, 30)}: ${contrast.toFixed(2)}`);
  }
  return faint;
}"""
