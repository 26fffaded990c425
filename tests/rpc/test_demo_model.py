"""The embedded model behind both services: what an answer says depends on the picture that it is about."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
from PIL import Image, ImageDraw, ImageFont

from tests import pictures
from tests.rpc.pairs import Pair, answer, asked, pair
from tools.demo_model.cases import Case
from tools.demo_model.places import TARGET
from tools.demo_model.through import movie
from tools.demo_model.words import COLOURS
from twinlens import assistant, image, user, v1, video

GROUND = (205, 205, 205)
SHADES = ("red", "green", "blue", "yellow", "purple", "orange", "black", "white")
SAMPLING = v1.SamplingParams(max_tokens=24, temperature=0.0)


@pytest.fixture(scope="module")
def demo() -> Iterator[Pair]:
    with pair(TARGET, light=False, fork=False) as both:
        yield both


Spot = tuple[float, float]
MIDDLE: Spot = (0.5, 0.5)
CORNERS: tuple[Spot, ...] = ((0.25, 0.25), (0.75, 0.25), (0.25, 0.75), (0.75, 0.75))


def picture(*things: tuple[str, str, Spot], radius: float = 0.13, text: str = "", size: int = 192) -> bytes:
    """Things (shape, colour, where) on a light grey picture, with smooth edges; `text` stands in the middle."""
    canvas = Image.new("RGB", (4 * size, 4 * size), GROUND)
    pen, r = ImageDraw.Draw(canvas), 4 * size * radius
    for shape, colour, (across, down) in things:
        x, y = 4 * size * across, 4 * size * down
        box = (x - r, y - r, x + r, y + r)
        if shape == "circle":
            pen.ellipse(box, fill=COLOURS[colour])
        elif shape == "ring":
            pen.ellipse(box, outline=COLOURS[colour], width=round(0.35 * r))
        elif shape == "square":
            pen.rectangle(box, fill=COLOURS[colour])
        else:
            pen.polygon([(x, y - r), (x + r, y + r), (x - r, y + r)], fill=COLOURS[colour])
    if text:
        face = ImageFont.load_default(round(4 * size * 0.25))
        pen.text((2 * size, 2 * size), text, fill=COLOURS["black"], font=face, anchor="mm")
    return pictures.encoded(canvas.resize((size, size), Image.Resampling.LANCZOS))


def drawing(shape: str, colour: str) -> bytes:
    """One thing in the middle."""
    return picture((shape, colour, MIDDLE), radius=0.21)


def scattered(*things: tuple[str, str]) -> bytes:
    """Up to four things, one in each quarter of a picture."""
    return picture(*((*thing, where) for thing, where in zip(things, CORNERS, strict=False)), size=256)


def said(demo: Pair, question: str, *media: bytes) -> str:
    """The whole answer in plain text."""
    return demo.text.ask(question, *map(image, media), sampling=SAMPLING, timeout=180).text


@pytest.mark.parametrize("shape", ["circle", "ring", "square", "triangle"])
def test_it_names_a_shape(demo: Pair, shape: str) -> None:
    assert said(demo, "What shape is the blue object?", drawing(shape, "blue")) == f"It is a {shape}."


@pytest.mark.parametrize("colour", SHADES)
def test_it_names_a_colour(demo: Pair, colour: str) -> None:
    assert said(demo, "What colour is the circle?", drawing("circle", colour)) == f"The circle is {colour}."


def test_answers_to_many_at_once_are_each_about_their_own_picture(demo: Pair) -> None:
    things = [(shape, colour) for colour in SHADES for shape in ("circle", "square")] * 2
    questions = [f"What colour is the {shape}?" for shape, _ in things]
    with ThreadPoolExecutor(len(things)) as together:
        answers = list(together.map(partial(said, demo), questions, [drawing(*each) for each in things]))
    assert answers == [f"The {shape} is {colour}." for shape, colour in things]


def test_a_follow_up_turn_is_about_the_same_picture(demo: Pair) -> None:
    talk = [
        user(image(drawing("square", "green")), "Is there a square?"),
        assistant("Yes, there is a square."),
        user("What colour is it?"),
    ]
    assert answer(demo.text, asked(talk, SAMPLING)).text == "The square is green."


@pytest.mark.parametrize(("number", "answer"), [(1, "There is one"), (2, "There are two"), (3, "There are three")])
def test_it_counts(demo: Pair, number: int, answer: str) -> None:
    drawn = scattered(*[("circle", "red")] * number, ("square", "blue"))
    assert answer in said(demo, "How many red circles are there?", drawn)


def test_of_two_pictures_it_names_the_one_that_has_it(demo: Pair) -> None:
    ring, square = drawing("ring", "blue"), drawing("square", "red")
    answers = [said(demo, "Which picture has the ring?", *both) for both in ((ring, square), (square, ring))]
    assert ["first" in answers[0], "second" in answers[1]] == [True, True]


@pytest.mark.parametrize(
    ("side", "other"), [("left of", (0.2, 0.5)), ("right of", (0.8, 0.5)), ("above", (0.5, 0.2)), ("below", (0.5, 0.8))]
)
def test_it_tells_what_stands_on_a_side(demo: Pair, side: str, other: Spot) -> None:
    drawn = picture(("circle", "red", other), ("square", "blue", MIDDLE))
    assert said(demo, f"What is {side} the blue square?", drawn) == "It is a red circle."
    assert said(demo, f"What is {side} the red circle?", drawn) == "There is nothing."
    assert said(demo, f"Is the red circle {side} the blue square?", drawn) == "Yes, it is."
    assert said(demo, f"Is the blue square {side} the red circle?", drawn) == "No, it is not."


@pytest.mark.parametrize(
    ("spot", "place"),
    [
        (MIDDLE, "in the middle"),
        ((0.17, 0.17), "at the top left"),
        ((0.83, 0.5), "on the right"),
        ((0.5, 0.83), "at the bottom"),
    ],
)
def test_it_tells_where_a_thing_is(demo: Pair, spot: Spot, place: str) -> None:
    assert said(demo, "Where is the ring?", picture(("ring", "green", spot))) == f"It is {place}."


def test_it_tells_what_differs(demo: Pair) -> None:
    before = scattered(("circle", "red"), ("square", "blue"))
    after = scattered(("circle", "green"), ("square", "blue"))
    question = "What differs?"
    assert said(demo, question, before, after) == "The red circle is green in the second picture."
    assert said(demo, question, before, before) == "They are the same."
    assert said(demo, question, before, scattered(("circle", "red"))) == "The second picture has no blue square."


@pytest.mark.parametrize("text", ["7", "42", "CAT", "SHOP"])
def test_it_reads(demo: Pair, text: str) -> None:
    assert said(demo, "Read the text.", picture(text=text)) == f'It says "{text}".'


@pytest.mark.parametrize(
    ("way", "start", "end"),
    [("left", (0.8, 0.5), (0.2, 0.5)), ("right", (0.2, 0.5), (0.8, 0.5)), ("up", (0.5, 0.8), (0.5, 0.2))],
)
def test_it_tells_what_happens_in_a_film(demo: Pair, way: str, start: Spot, end: Spot) -> None:
    def at(share: float) -> Spot:
        return start[0] + share * (end[0] - start[0]), start[1] + share * (end[1] - start[1])

    frames = tuple(picture(("circle", "red", at(k / 5)), size=96) for k in range(6))
    film = movie(Case("video", frames, "", ""))
    given = demo.text.ask("What happens?", video(film), sampling=SAMPLING, timeout=180).text
    assert given == f"The red circle moves {way}."
