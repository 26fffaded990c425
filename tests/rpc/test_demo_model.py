"""The embedded model behind both services: what an answer says depends on the picture that it is about."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from io import BytesIO

import pytest
from PIL import Image, ImageDraw

from tests import pictures
from tests.rpc.pairs import Pair, answer, asked, pair
from tools.demo_model.places import TARGET
from tools.demo_model.words import COLOURS
from twinlens import assistant, image, user, v1

GROUND = (205, 205, 205)
SHADES = ("red", "green", "blue", "yellow", "purple", "orange", "black", "white")
SAMPLING = v1.SamplingParams(max_tokens=24, temperature=0.0)


@pytest.fixture(scope="module")
def demo() -> Iterator[Pair]:
    with pair(TARGET) as both:
        yield both


def drawing(shape: str, colour: str, size: int = 192) -> bytes:
    """One thing in the middle of a light grey picture, with smooth edges."""
    canvas = Image.new("RGB", (4 * size, 4 * size), GROUND)
    pen, low, high = ImageDraw.Draw(canvas), 1.15 * size, 2.85 * size
    if shape == "circle":
        pen.ellipse((low, low, high, high), fill=COLOURS[colour])
    elif shape == "ring":
        pen.ellipse((low, low, high, high), outline=COLOURS[colour], width=round(0.3 * size))
    elif shape == "square":
        pen.rectangle((low, low, high, high), fill=COLOURS[colour])
    else:
        pen.polygon([(2 * size, low), (high, high), (low, high)], fill=COLOURS[colour])
    return pictures.encoded(canvas.resize((size, size), Image.Resampling.LANCZOS))


def scattered(*things: tuple[str, str]) -> bytes:
    """Up to four drawings beside and below each other, as one picture."""
    canvas = Image.new("RGB", (256, 256), GROUND)
    for index, (shape, colour) in enumerate(things):
        part = Image.open(BytesIO(drawing(shape, colour, 128))).convert("RGB")
        canvas.paste(part, (index % 2 * 128, index // 2 * 128))
    return pictures.encoded(canvas)


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


@pytest.mark.parametrize(("number", "answer"), [(1, "There is one"), (2, "There are two")])
def test_it_counts(demo: Pair, number: int, answer: str) -> None:
    picture = scattered(*[("circle", "red")] * number, ("square", "blue"))
    assert answer in said(demo, "How many red circles are there?", picture)


def test_of_two_pictures_it_names_the_one_that_has_it(demo: Pair) -> None:
    ring, square = drawing("ring", "blue"), drawing("square", "red")
    answers = [said(demo, "Which picture has the ring?", *both) for both in ((ring, square), (square, ring))]
    assert ["first" in answers[0], "second" in answers[1]] == [True, True]
