"""The engine's side of structures: compiled once, kept within a bound, and a state of its own for each answer."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from common.checkpoints.checkpoint import Checkpoint
from common.errors import InvalidInput
from common.process.malloc import bytes_in_use
from llm_service.engine.matchers import Form, Matcher, Matchers
from llm_service.engine.structure import Structures
from llm_service.grammar.gbnf import as_lark
from llm_service.prompt.builder import PromptBuilder
from llm_service.request import Structure, ThinkingBound, Trigger
from llm_service.token_masks import all_but, both, mask_bytes, mask_of
from testkit.checkpoints import VOCABULARY
from tests.waiting import until


@pytest.fixture
def structures(checkpoints: Callable[..., Path]) -> Structures:
    return Structures(Checkpoint(checkpoints("qwen3_vl")), VOCABULARY, [0])


def test_what_a_structure_leaves_no_choice_about_is_neither_cut_nor_filled_up_as_for_batches(
    checkpoint: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(checkpoint, tmp_path / "own")
    settings = json.loads((folder / "tokenizer.json").read_text())
    settings["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    filled = {"pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0, "pad_token": "!"}
    settings["padding"] = {"strategy": {"Fixed": 64}, "direction": "Right", **filled}
    (folder / "tokenizer.json").write_text(json.dumps(settings))
    forced = []
    for each in (checkpoint, folder):
        _, matcher = Structures(Checkpoint(each), VOCABULARY, [0]).compile(Structure("regex", "Hello there, you"))
        forced.append(matcher.compute_ff_tokens())
    assert forced[0] == forced[1]
    assert len(forced[0]) > 3


@pytest.mark.parametrize("in_words", [False, True])
def test_tokens_beyond_the_model_s_vocabulary_are_none_that_a_structure_knows(
    checkpoint: Path, tmp_path: Path, in_words: bool
) -> None:
    """As Gemma 3 of one size has one for pictures, which that size does not see."""
    folder = shutil.copytree(checkpoint, tmp_path / "own")
    settings = json.loads((folder / "tokenizer.json").read_text())
    beyond = settings["added_tokens"][-1] | {"id": VOCABULARY, "content": "<|beyond|>"}
    settings["added_tokens"].append(beyond)
    if in_words:
        settings["model"]["vocab"]["<|beyond|>"] = VOCABULARY
    (folder / "tokenizer.json").write_text(json.dumps(settings))
    masks = []
    for each in (checkpoint, folder):
        _, matcher = Structures(Checkpoint(each), VOCABULARY, [0]).compile(Structure("regex", "[a-z]+"))
        masks.append(matcher.compute_bitmask())
    assert masks[0] == masks[1]


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize(
    ("kind", "text", "said"),
    [
        ("regex", "<think>é[0-9]</think> b", "<think>é5</think> b"),
        ("json_schema", '{"const": "a </think> b"}', '"a </think> b"'),
        ("grammar", 'start: <[600]> "<think>" "x"', "<think><think>x"),
    ],
)
def test_a_text_that_alone_may_come_may_have_a_token_s_name_in_it(
    checkpoint: Path, tmp_path: Path, special: bool, kind: Any, text: str, said: str
) -> None:
    folder = shutil.copytree(checkpoint, tmp_path / "own")
    settings = json.loads((folder / "tokenizer.json").read_text())
    like = settings["added_tokens"][-1] | {"special": special}
    for number, mark in enumerate(("<think>", "</think>"), VOCABULARY):
        settings["added_tokens"].append({**like, "id": number, "content": mark})
    (folder / "tokenizer.json").write_text(json.dumps(settings))
    structures = Structures(Checkpoint(folder), VOCABULARY + 2, [0])
    matcher = structures.matcher(held(structures, Structure(kind, text)))
    tokenizer, told = Tokenizer.from_file(str(folder / "tokenizer.json")), list[int]()
    five = tokenizer.encode("5").ids[0]
    while not matcher.is_stopped():
        mask = matcher.compute_bitmask()
        found = [token for token in range(VOCABULARY + 2) if mask[token // 8] >> token % 8 & 1]
        told.append(five if five in found else found[-1])
        assert matcher.consume_token(told[-1]), (tokenizer.decode(told), matcher.is_error())
        if told[-1] == 0:
            break
    assert tokenizer.decode([token for token in told if token], skip_special_tokens=False) == said


OBJECT: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


@pytest.mark.parametrize(
    ("schema", "most"),
    [
        (OBJECT, 32),
        ({**OBJECT, "x-guidance": {"whitespace_flexible": False}}, 0),
        ({**OBJECT, "x-guidance": {"whitespace_pattern": "[ ]{1,7}"}}, 7),
    ],
    ids=["any", "compact", "by its own pattern"],
)
def test_json_has_no_more_white_space_between_words_than_a_writer_would_put(
    structures: Structures, builder: PromptBuilder, schema: dict[str, Any], most: int
) -> None:
    (blank,) = builder.encode(" ")
    _, matcher = structures.compile(Structure("json_schema", json.dumps(schema)))
    assert all(map(matcher.consume_token, builder.encode("{")))
    found = 0
    while found < 100 and matcher.consume_token(blank):
        found += 1
    assert found == most


def test_a_schema_that_allows_everything_is_one(structures: Structures, builder: PromptBuilder) -> None:
    _, matcher = structures.compile(Structure("json_schema", " true"))
    assert all(map(matcher.consume_token, builder.encode(json.dumps({"a": [1, {"b": None}]}, indent=4))))
    assert matcher.is_accepting()


def test_rules_of_a_grammar_in_llama_cpp_s_form_may_have_any_names(
    structures: Structures, builder: PromptBuilder
) -> None:
    rules = {"start": "a", "my-rule": "b", "my_rule": "c", "Rule": "d", "rule": "e", "fooBar": "f", "foo-bar": "g"}
    rules |= {"r1": "h", "R1": "i"}
    grammar = f'root ::= {" ".join(rules)} "start [rule" [r1]  # my-rule\n'
    grammar += "".join(f'{name} ::= "{said}"{{1,2}} | my-rule\n' for name, said in rules.items() if name != "my-rule")
    grammar += 'my-rule ::= "b"\n'
    for text, fits in (
        ("abcdefghistart [ruler", True),
        ("aabbbbbbbstart [rule1", False),
        ("aabccddeeffgghhiistart [rule1", True),
        ("bbbbbbbbbstart [ruler", True),
        ("abcdefgihstart [ruler", False),
    ):
        _, matcher = structures.compile(Structure("grammar", as_lark(grammar)))
        followed = all(map(matcher.consume_token, builder.encode(text)))
        assert (followed and matcher.is_accepting()) is fits, text


ARITHMETIC = """
root  ::= (expr "=" ws term "\\n")+
expr  ::= term ([-+*/] term)*
term  ::= ident | num | "(" ws expr ")" ws
ident ::= [a-z] [a-z0-9_]* ws  # "
num   ::= [0-9]+ ws
ws    ::= [ \\t\\n]*
"""
SENTENCE = """
root ::= (word " "){1,3} end mark?
word ::= [^ \\x2e\\u0021]+
end  ::= "end" | "ending" | "endless"
mark ::= [.!]
"""


@pytest.mark.parametrize(
    "grammar",
    [
        'root ::= "a"  # one\n  # or\n\n  | list\n  | "#"\nlist ::= "[" [-a\\-c ]\n  "]"\n',
        'root ::= list |\r\n  "a" | "#"\r\nlist ::=\n  ("[" [ \\-ac]\n\n"]")',
        'root ::= ( "a"\n | list\n) | "#"\n\n\nlist ::= "[" [\\-\\x61\\x63 ] "\\]"',
    ],
)
def test_a_rule_of_a_grammar_in_llama_cpp_s_form_may_have_several_lines(
    grammar: str, structures: Structures, builder: PromptBuilder
) -> None:
    """As xgrammar reads them, to which vLLM and SGLang give such grammars."""
    for text in ("a", "#", "[-]", "[c]", "[ ]", "[b]", "[]", "a#"):
        _, matcher = structures.compile(Structure("grammar", as_lark(grammar)))
        followed = all(map(matcher.consume_token, builder.encode(text)))
        assert (followed and matcher.is_accepting()) is (text not in ("[b]", "[]", "a#")), text


@pytest.mark.parametrize(
    ("grammar", "fitting", "others"),
    [
        pytest.param(
            ARITHMETIC, ["1+2=3\n", "x = 4\ny*(2-z)= 9\n\n", "(1)=a\n"], ["1=2", "=1\n"], id="llama.cpp's own"
        ),
        pytest.param('root ::= word "x"\nword ::= [a-z]+', ["abx", "xx"], ["ab", "x"], id="the last of a run"),
        pytest.param(
            'root ::= one two\none ::= "a" | "abd"\ntwo ::= "bc"', ["abc", "abdbc"], ["abd"], id="a beginning"
        ),
        pytest.param('root ::= [a-z]* "then"', ["then", "thxthen"], ["the", "thex"], id="a text in a run"),
        pytest.param('root ::= "<" any ">"\nany ::= .{2}', ["<ab>", "<\n\n>"], ["<a>"], id="any sign"),
        pytest.param('root ::= "\\[" a "\\u005d"\na ::= [\\[\\-]', ["[[]", "[-]"], ["[]]", "[a]"], id="brackets"),
        pytest.param('root ::= ([a-z]+)? "1"', ["1", "ab1"], ["a", "11"], id="a run or none"),
        pytest.param(SENTENCE, ["an end", "a b c ending!", "endless end."], ["end", "a b endles"], id="words"),
        pytest.param('root ::= a{2} "-"\na ::= "x" | "xx"?', ["-", "xxx-", "xx-"], ["xxxxx-"], id="a repetition"),
    ],
)
def test_what_a_grammar_in_llama_cpp_s_form_allows_does_not_end_with_the_longest_of_a_rule(
    grammar: str, fitting: list[str], others: list[str], structures: Structures, builder: PromptBuilder
) -> None:
    for text in (*fitting, *others):
        _, matcher = structures.compile(Structure("grammar", as_lark(grammar)))
        followed = all(map(matcher.consume_token, builder.encode(text)))
        assert (followed and matcher.is_accepting()) is (text in fitting), text


def test_a_rule_that_leaves_what_stands_behind_it_is_a_lexeme() -> None:
    """Signs of a text one by one are too many for a parser where the vocabulary is large."""
    grammar = 'root ::= "[\\n" ws (text ("," ws text)*)? "]" | "[" ws num "\\n"\n'
    rules = 'text ::= "\\"" ([^"\\\\] | "\\\\" [bfnrt])* "\\"" ws\nnum ::= [0-9]+ ws\nws ::= [ \\t]*\n'
    made = as_lark(grammar + rules)
    assert [line[0] for line in made.splitlines()[2:]] == ["s", "R", "R", "R"]
    assert as_lark((grammar + rules).replace("[ \\t]", "[ \\n]")).count("\nR") == 0


def test_without_a_tokenizer_that_structures_know_none_is_taken(checkpoint: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(checkpoint, tmp_path / "own")
    settings = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(settings | {"decoder": {"type": "Fuse"}}))
    structures = Structures(Checkpoint(folder), VOCABULARY, [0])
    with pytest.raises(InvalidInput, match="answers cannot be held to a structure") as refused:
        structures.compile(Structure("regex", "a"))
    assert refused.value.field == "sampling.regex"
    bound = structures.matcher(Form("", thinking_bound=ThinkingBound(0, (5,), 7, opened=True)))
    assert allowed(bound.compute_bitmask()) == {7}, "what needs no grammar goes on"


def allowed(mask: bytes) -> set[int]:
    return {token for token in range(VOCABULARY) if mask[token // 8] >> token % 8 & 1}


_OTHERS = 1 << 20
"""Bytes that the process may take meanwhile for something else."""


def held(structures: Structures, structure: Structure, salt: str = "") -> Form:
    """A structure's form, its bytes measured as the process that compiles measures them."""
    before = bytes_in_use()
    grammar, matcher = structures.compile(structure)
    form = Form(grammar, bytes_in_use() - before, salt)
    del matcher
    return form


def multiple(number: int) -> Structure:
    return Structure("json_schema", json.dumps({"type": "integer", "multipleOf": number}))


def test_no_more_bytes_of_compiled_grammars_are_kept_than_the_bound_and_the_longest_unused_go(
    checkpoints: Callable[..., Path],
) -> None:
    bound = 12 << 20
    structures = Structures(Checkpoint(checkpoints("qwen3_vl")), VOCABULARY, [0], cache_bytes=bound)
    forms = [held(structures, multiple(number)) for number in range(9001, 9021, 2)]
    assert sum(form.bytes for form in forms) > 2 * bound
    before = bytes_in_use()
    for form in forms:
        structures.matcher(form)
        assert structures.kept_bytes <= bound
        assert bytes_in_use() - before <= bound + _OTHERS
    last = list(structures._kept)
    assert [name[1] for name in last] == [form.grammar for form in forms[-len(last) :]]
    structures.matcher(forms[-len(last)])
    structures.matcher(forms[0])
    assert forms[-len(last)].grammar in {name[1] for name in structures._kept}, "it was used again meanwhile"


def test_what_grows_while_it_is_used_counts_and_is_made_anew(
    checkpoints: Callable[..., Path], builder: PromptBuilder
) -> None:
    """All matchers of a form share what is made on the way: for a text with a `maxLength`, some KB each token."""
    bound = 32 << 20
    structures = Structures(Checkpoint(checkpoints("qwen3_vl")), VOCABULARY, [0], cache_bytes=bound)
    form = held(structures, Structure("json_schema", '{"type": "string", "maxLength": 1000000}'))
    word = builder.encode("quick thing ") * 300
    before = bytes_in_use()
    for _ in range(8):
        matcher = structures.matcher(form)
        for token in builder.encode('"') + word:
            matcher.compute_bitmask()
            assert matcher.consume_token(token)
        del matcher
        assert bytes_in_use() - before <= max(structures.kept_bytes, 1 << 20)
    assert structures.kept_bytes <= bound


def test_tenants_share_no_compiled_form(checkpoints: Callable[..., Path]) -> None:
    structures = Structures(Checkpoint(checkpoints("qwen3_vl")), VOCABULARY, [0], cache_bytes=1 << 20)
    grammar = structures.grammar(Structure("regex", "a+"))
    for salt in ("", "one", "", "other"):
        structures.matcher(Form(grammar, 1 << 15, salt))
    assert list(structures._kept) == [("one", grammar), ("", grammar), ("other", grammar)]


def made_in_order(structures: Structures, monkeypatch: pytest.MonkeyPatch, sizes: list[int]) -> list[int]:
    """In which order forms of so many MiB are made that are asked for in this one; the fourth is given up meanwhile."""
    go_on, order = threading.Event(), []

    def noted(form: Form) -> Matcher:
        go_on.wait()
        order.append(form.bytes >> 20)
        return made

    made = structures.matcher(Form(structures.grammar(Structure("regex", "a+"))))
    monkeypatch.setattr(structures, "matcher", noted)
    matchers = Matchers(structures.matcher, lambda: None)
    futures = [matchers(Form("", size << 20)) for size in sizes]
    assert futures[3].cancel()
    go_on.set()
    wait(futures)
    return order


def test_small_forms_are_made_before_large_ones(structures: Structures, monkeypatch: pytest.MonkeyPatch) -> None:
    order = made_in_order(structures, monkeypatch, [5, 9, 3, 7, 3])
    assert order[1:] == [3, 3, 9] if order[0] == 5 else order == [3, 3, 5, 9]


def test_a_large_form_is_not_overtaken_for_ever(structures: Structures, monkeypatch: pytest.MonkeyPatch) -> None:
    order = made_in_order(structures, monkeypatch, [1, 4, *[0] * 200])
    assert 50 < order.index(4) < 100


def test_a_form_that_cannot_be_made_is_told_to_whoever_waits(structures: Structures) -> None:
    with pytest.raises(TypeError):
        Matchers(structures.matcher, lambda: None)(Form(None)).result()  # type: ignore[arg-type]


def test_a_matcher_stands_behind_the_output_so_far(structures: Structures, builder: PromptBuilder) -> None:
    form, make = held(structures, Structure("regex", "(ab)+")), Matchers(structures.matcher, lambda: None)
    said = builder.encode("abab")
    behind = make(form, said).result()
    beside = make(form).result()
    for token in said:
        assert beside.consume_token(token)
    assert behind.compute_bitmask() == beside.compute_bitmask()
    assert not behind.is_stopped()
    end = 0
    assert end in allowed(behind.compute_bitmask())
    assert make(form, [*said, end]).result().is_stopped()


@pytest.mark.parametrize("said", ["ba", "abb"])
def test_no_matcher_stands_behind_what_its_grammar_forbids(
    structures: Structures, builder: PromptBuilder, said: str
) -> None:
    form = held(structures, Structure("regex", "(ab)+"))
    with pytest.raises(InvalidInput) as error:
        Matchers(structures.matcher, lambda: None)(form, builder.encode(said)).result()
    assert (error.value.reason, error.value.field) == ("BAD_RESUME", "resume")


def test_two_answers_of_one_grammar_do_not_move_each_other(structures: Structures, builder: PromptBuilder) -> None:
    grammar = Form(structures.grammar(Structure("regex", "xy")))
    one, other = structures.matcher(grammar), structures.matcher(grammar)
    x, y = builder.encode("x")[0], builder.encode("y")[0]
    assert one.consume_token(x)
    assert y in allowed(one.compute_bitmask())
    assert y not in allowed(other.compute_bitmask())
    assert x in allowed(other.compute_bitmask())


def test_a_matcher_is_made_beside_whoever_asks_and_that_is_told(structures: Structures) -> None:
    made: list[bool] = []
    future = Matchers(structures.matcher, lambda: made.append(True))(
        held(structures, Structure("choice", '["yes", "no"]'))
    )
    until(lambda: bool(made), "it is told")
    assert future.done()
    assert not future.result().is_stopped()


def walk(matcher: Matcher, word: int, most: int) -> int:
    """How often a word can follow itself before the matcher turns to error, or `most`."""
    for count in range(most):
        matcher.compute_bitmask()
        if matcher.is_error() or not matcher.consume_token(word):
            return count
    return most


@pytest.mark.soak
def test_a_grammar_with_countless_readings_of_a_text_ends_and_holds_nobody_up(
    structures: Structures, builder: PromptBuilder
) -> None:
    """The more there are, the longer a mask takes, and all requests wait for it."""
    (word,) = builder.encode("a")
    countless = structures.matcher(held(structures, Structure("grammar", 'start: a\na: a a | "a" | "b" | ""')))
    assert 100 < walk(countless, word, 1000) < 500
    assert countless.is_error()
    plain = structures.matcher(held(structures, Structure("grammar", "start: /a*/")))
    assert walk(plain, word, 1000) == 1000


def test_large_structures_are_no_countless_ones(structures: Structures, builder: PromptBuilder) -> None:
    words = [f"w{number:04}" for number in range(3000)]
    choice = structures.matcher(held(structures, Structure("choice", json.dumps(words))))
    for token in builder.encode("w2999"):
        assert token in allowed(choice.compute_bitmask())
        choice.consume_token(token)
    assert choice.is_stopped()
    assert not choice.is_error()
    wide = json.dumps({"type": "object", "properties": {word: {"type": "string"} for word in words[:190]}})
    schema = structures.matcher(held(structures, Structure("json_schema", wide)))
    for token in builder.encode('{"w0'):
        assert token in allowed(schema.compute_bitmask())
        schema.consume_token(token)
    assert not schema.is_error()


@pytest.mark.parametrize("vocab_size", [VOCABULARY, 608, 640, 641])
def test_masks_have_one_length_whoever_makes_them(checkpoint: Path, vocab_size: int) -> None:
    """As 151,936 words of a model have, which are whole words of 32 bits: the library's own are longer then."""
    structures = Structures(Checkpoint(checkpoint), vocab_size, [0])
    form = held(structures, Structure("regex", "[a-d]+"))
    bound = ThinkingBound(0, (4,), 5, opened=True)
    forms = [
        form,
        form._replace(trigger=Trigger(5)),
        form._replace(trigger=Trigger(5, openings=((4,),))),
        form._replace(thinking_bound=bound),
        Form("", thinking_bound=bound),
    ]
    masks = [structures.matcher(each).compute_bitmask() for each in forms]
    masks += [structures.matcher(each).deep_copy().compute_bitmask() for each in forms]
    masks += [mask_of(range(9), vocab_size), all_but([9], vocab_size)]
    assert {len(mask) for mask in masks} == {mask_bytes(vocab_size)}
    assert both(masks[0], mask_of(range(vocab_size), vocab_size)) == masks[0]


def test_behind_the_end_of_reasoning_the_form_begins_and_before_it_nothing_ends(structures: Structures) -> None:
    form = held(structures, Structure("choice", '["yes"]'))._replace(trigger=Trigger(5))
    matcher, plain = structures.matcher(form), structures.matcher(form._replace(trigger=None))
    assert allowed(matcher.compute_bitmask()) == set(range(VOCABULARY)) - {0}
    assert len(matcher.compute_bitmask()) == len(plain.compute_bitmask())
    assert all(map(matcher.consume_token, (7, 8, 5)))
    assert matcher.compute_bitmask() == plain.compute_bitmask()
    assert not matcher.is_stopped()


ANY = set(range(VOCABULARY)) - {0}
"""All tokens but the end's."""


def opened(structures: Structures, *openings: tuple[int, ...], kind: Any = "choice", text: str = '["yes"]') -> Matcher:
    form = held(structures, Structure(kind, text))
    return structures.matcher(form._replace(trigger=Trigger(5, openings=openings)))


def test_an_answer_begins_its_form_or_opens_reasoning_behind_which_it_begins(
    structures: Structures, builder: PromptBuilder
) -> None:
    first, *rest = builder.encode("yes")
    for openings in ([(4,)], [(4, 9)]):
        form, thought = opened(structures, *openings), opened(structures, *openings)
        assert allowed(form.compute_bitmask()) == {first, 4}
        assert all(map(form.consume_token, (first, *rest)))
        assert form.is_stopped()
        for token in openings[0]:
            assert token in allowed(thought.compute_bitmask())
            assert thought.consume_token(token)
            assert not thought.is_stopped()
        for token in (7, 4, first, 8):
            assert allowed(thought.compute_bitmask()) == ANY
            assert thought.consume_token(token)
        assert thought.consume_token(5)
        assert allowed(thought.compute_bitmask()) == {first}
        assert all(map(thought.consume_token, (first, *rest)))
        assert thought.is_stopped()
        assert not thought.is_error()


def test_behind_the_first_token_of_an_opening_comes_the_next_alone(structures: Structures) -> None:
    matcher = opened(structures, (4, 9), (7, 4, 9))
    for token, following in ((7, {4}), (4, {9}), (9, ANY)):
        assert not matcher.consume_token(3), "what is neither's leaves it where it is"
        assert matcher.consume_token(token)
        assert allowed(matcher.compute_bitmask()) == following


def test_what_a_form_and_an_opening_both_begin_with_leaves_both_possible(
    structures: Structures, builder: PromptBuilder
) -> None:
    y, n = builder.encode("y")[0], builder.encode("n")[0]
    for then, following in ((4, ANY), (n, {0})):
        matcher = opened(structures, (y, 4), kind="regex", text="yn?")
        assert all(map(matcher.consume_token, (y, then)))
        assert allowed(matcher.compute_bitmask()) == following
    matcher = opened(structures, (y,), kind="regex", text="yn?")
    assert matcher.consume_token(y)
    assert allowed(matcher.compute_bitmask()) == {n, 0}, "it is the form's"


def test_reasoning_that_is_opened_within_a_bound_is_ended_and_the_form_follows(
    structures: Structures, builder: PromptBuilder
) -> None:
    form = held(structures, Structure("choice", '["yes"]'))._replace(trigger=Trigger(5, openings=((4,),)))
    first, *_ = builder.encode("yes")
    for tokens in (0, 2):
        matcher = structures.matcher(form._replace(thinking_bound=ThinkingBound(tokens, (4,), 5)))
        assert allowed(matcher.compute_bitmask()) == {first, 4}
        assert all(map(matcher.consume_token, (4, *[7] * tokens)))
        assert allowed(matcher.compute_bitmask()) == {5}
        assert matcher.consume_token(5)
        assert allowed(matcher.compute_bitmask()) == {first}


def test_a_form_that_recurs_leaves_what_is_around_it_free(structures: Structures, builder: PromptBuilder) -> None:
    form = held(structures, Structure("grammar", 'start: "y" <[6]>'))._replace(trigger=Trigger(5, recurs=True))
    matcher = structures.matcher(form)
    letter = builder.encode("y")[0]
    for _ in range(2):
        assert matcher.compute_bitmask() == b""
        assert all(map(matcher.consume_token, (7, 5)))
        assert allowed(matcher.compute_bitmask()) == {letter}
        assert matcher.consume_token(letter)
        assert allowed(matcher.compute_bitmask()) == {6}
        assert matcher.consume_token(6)
        assert not matcher.is_stopped()
    matcher.consume_token(5)
    matcher.consume_token(7)
    assert matcher.is_error()


@pytest.mark.parametrize(
    "trigger",
    [None, Trigger(5), Trigger(5, recurs=True), Trigger(5, openings=((4,),))],
    ids=["", "behind a token", "again", "opened"],
)
def test_a_copy_looks_ahead_and_the_matcher_stays_where_it_is(
    structures: Structures, builder: PromptBuilder, trigger: Trigger | None
) -> None:
    form = held(structures, Structure("regex", "abc[de]f"))._replace(trigger=trigger)
    matcher = structures.matcher(form)
    begin = [] if trigger is None else [*(token for run in trigger.openings for token in run), trigger.token]
    before, ahead = matcher.compute_bitmask(), matcher.deep_copy()
    assert list(ahead.compute_ff_tokens()) == ([] if begin else builder.encode("abc"))
    for token in (*begin, *builder.encode("ab")):
        assert ahead.consume_token(token)
    assert list(ahead.compute_ff_tokens()) == builder.encode("c")
    assert matcher.compute_bitmask() == before
    walked = structures.matcher(form)
    for token in (*begin, *builder.encode("ab")):
        walked.consume_token(token)
    assert ahead.compute_bitmask() == walked.compute_bitmask() != before


def test_reasoning_that_has_had_its_tokens_leaves_one_token_alone(structures: Structures) -> None:
    matcher = structures.matcher(Form("", thinking_bound=ThinkingBound(2, (4, 5), 3)))
    for token in (9, 4, 9, 5, 4, 5, 7):  # it begins behind 4 and 5 alone
        assert (matcher.compute_bitmask(), list(matcher.compute_ff_tokens())) == (b"", [])
        assert matcher.consume_token(token)
    ahead = matcher.deep_copy()
    assert ahead.consume_token(8)
    assert (allowed(ahead.compute_bitmask()), list(ahead.compute_ff_tokens())) == ({3}, [3])
    assert ahead.consume_token(3)
    assert (ahead.compute_bitmask(), matcher.compute_bitmask()) == (b"", b"")
    assert not ahead.is_stopped()
