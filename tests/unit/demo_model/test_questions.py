"""Questions and answers agree with the scene that they are taken from, worked out here a second time."""

from __future__ import annotations

import re
from random import Random

from tools.demo_model import ask, ask_many, ask_place, film
from tools.demo_model.cases import KINDS, cases
from tools.demo_model.scene import FULL, Scene, random_scene
from tools.demo_model.words import COLOURS, NUMBERS, SHAPES

ONE_OF = "|".join(SHAPES)


def many(seed: int, number: int) -> list[tuple[Random, Scene]]:
    rng = Random(seed)
    return [(rng, random_scene(rng, FULL, 192, 144)) for _ in range(number)]


def test_counts_are_those_of_the_scene() -> None:
    checked = 0
    for rng, scene in many(1, 300):
        turn = ask.count(rng, scene)
        noun = re.sub(r"^There (is|are) \w+ ", "", turn.answer).rstrip(".")
        number = NUMBERS.index(turn.answer.split()[2])
        words = {noun, noun.removesuffix("s"), noun.removesuffix("es")}
        if words & {"shape", "object"}:
            assert number == len(scene.things)
        elif any(word.split()[-1] in ("shape", "object") for word in words):
            assert number == sum(thing.colour == noun.split()[0] for thing in scene.things)
        else:
            assert number == sum(bool(words & {thing.shape, thing.name}) for thing in scene.things)
            checked += 1
    assert checked > 100


def test_the_colour_asked_for_belongs_to_the_only_thing_of_its_shape() -> None:
    for rng, scene in many(2, 200):
        turn = ask.colour(rng, scene)
        if turn is None:
            continue
        found = re.fullmatch(rf"The ({ONE_OF}) is (\w+)\.", turn.answer)
        assert found
        assert [thing.colour for thing in scene.things if thing.shape == found[1]] == [found[2]]


def test_beside_names_all_that_is_on_that_side_and_nothing_else() -> None:
    for _, scene in many(3, 200):
        for thing in scene.things:
            found = ask_place.beside(scene, thing, "left")
            if found is not None:
                assert {id(other) for other in found} == {id(o) for o in scene.things if o.x < thing.x}
                assert [other.x for other in found] == sorted(other.x for other in found)


def test_places_are_ninths_and_nothing_near_a_border_has_one() -> None:
    scene = random_scene(Random(4), FULL, 300, 300)
    assert ask_place.place(scene, 20, 20) == "at the top left"
    assert ask_place.place(scene, 150, 150) == "in the middle"
    assert ask_place.place(scene, 280, 150) == "on the right"
    assert ask_place.place(scene, 150, 290) == "at the bottom"
    assert ask_place.place(scene, 102, 150) is None


def test_what_lists_everything_from_left_to_right() -> None:
    for rng, scene in many(5, 150):
        turn = ask.what(rng, scene)
        if turn is None:
            continue
        listed = re.findall(rf"({'|'.join(COLOURS)}) ({ONE_OF})", turn.answer)
        assert [" ".join(pair) for pair in listed] == [t.name for t in sorted(scene.things, key=lambda t: t.x)]
        assert ("text" in turn.answer) == (scene.print is not None)


def test_reading_gives_the_printed_text() -> None:
    for rng, scene in many(6, 100):
        turn = ask.read(rng, scene)
        if scene.print is not None:
            assert turn is not None
            assert turn.answer == f'It says "{scene.print.text}".'


def test_two_pictures_differ_in_just_what_the_answer_tells() -> None:
    rng = Random(7)
    for _ in range(100):
        (first, second), turn = ask_many.differing(rng, FULL, 160, 160)
        before, after = [t.name for t in first.things], [t.name for t in second.things]
        if turn.answer == "They are the same.":
            assert first.things == second.things
        elif "also has" in turn.answer:
            assert len(after) == len(before) + 1
            assert after[-1] in turn.answer
        elif "has no" in turn.answer:
            assert len(after) == len(before) - 1
        else:
            assert len(after) == len(before)
            assert first.things != second.things
            assert sum(a != b for a, b in zip(first.things, second.things, strict=True)) == 1


def test_which_picture_tells_every_holder() -> None:
    rng = Random(8)
    assert ask_many.holders([0]) == "It is in the first picture."
    assert ask_many.holders([0, 2]) == "It is in the first and third picture."
    assert ask_many.holders([]) == "It is in no picture."
    pictures = [random_scene(rng, FULL, 128, 128) for _ in range(2)]
    turn = ask_many.which(rng, pictures)
    noun = re.search(rf"((?:{'|'.join(COLOURS)}) )?({ONE_OF})", turn.question)
    assert noun
    holds = [any(noun[0] in (t.shape, t.name) for t in scene.things) for scene in pictures]
    assert ("first" in turn.answer, "second" in turn.answer) == tuple(holds)


def test_every_question_ends_and_every_answer_is_one_sentence() -> None:
    rng = Random(9)
    for _ in range(100):
        scene, shot = random_scene(rng, FULL, 160, 160), film.random_film(rng, FULL, 96, 96, 4)
        for turn in (ask.ask(rng, scene), film.ask_film(rng, shot)):
            assert turn.answer.endswith(".")
            assert turn.answer[0].isupper()
            assert len(turn.question) > 5


def test_held_out_cases_are_the_same_for_the_same_seed() -> None:
    for kind in KINDS:
        one, two = list(cases(kind, 2, seed=5)), list(cases(kind, 2, seed=5))
        assert one == two
        assert one != list(cases(kind, 2, seed=6))
        assert all(case.kind == kind for case in one)
