"""`twinlens ask`: streams the answer to standard output, and reasoning to standard error."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from twinlens.answers import Answer
from twinlens.cli.connection import add_flags, endpoint
from twinlens.cli.given import add_media_flags, add_preprocessing_flags, conversation
from twinlens.cli.reasoning import THINK, ReasoningSplitter
from twinlens.cli.shown import add_output_flags, print_error, print_event, show_timings
from twinlens.cli.tables import table
from twinlens.client import LlmClient
from twinlens.errors import TwinlensError
from twinlens.prompts import generate_request
from twinlens.v1 import (
    GenerateRequest,
    GenerateResponse,
    SamplingParams,
    TokenLogprobs,
)

_SAMPLING = (
    "max_tokens",
    "thinking_token_budget",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "stop",
    "include_stop_str_in_output",
    "bad_words",
    "logprobs",
    "prompt_logprobs",
)

_ANY_OBJECT = '{"type": "object"}'

_PENALTIES = {
    "repetition": "above 1: earlier tokens, also the prompt's, become less likely",
    "presence": "above 0: tokens already in the answer become less likely",
    "frequency": "above 0: the same, in proportion to how often they occur",
}


def add_parser(commands: Any) -> None:
    """Adds the command."""
    parser = commands.add_parser("ask", help="ask about pictures, videos and sounds", description=__doc__)
    parser.set_defaults(run=run)
    parser.add_argument("question", help="the question; - reads it from standard input")
    add_media_flags(parser)
    parser.add_argument("--llm", dest="address", metavar="ADDR", default="127.0.0.1:7002", help="default: %(default)s")
    parser.add_argument(
        "--session", metavar="NAME", default="", help="keep its caches for the next question of that session"
    )
    parser.add_argument(
        "--thinking",
        action=argparse.BooleanOptionalAction,
        help="whether the model thinks first, if its chat template lets you choose",
    )
    parser.add_argument(
        "--reasoning-effort",
        metavar="WORD",
        default="",
        help="how much the model thinks, if its chat template lets you choose: none, minimal, low, medium, high, …",
    )
    parser.add_argument(
        "--template-variables", metavar="JSON", type=_object, help="more variables of the chat template, an object"
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json-object", action="store_true", help="the answer is any JSON object")
    form.add_argument("--json-schema", metavar="FILE", help="the answer is JSON that follows this schema")
    add_output_flags(parser)
    _add_sampling(parser.add_argument_group("sampling", "by default, the model's own settings"))
    add_preprocessing_flags(parser)
    add_flags(parser)


def _object(text: str) -> dict[str, Any]:
    try:
        return dict(json.loads(text).items())
    except (ValueError, RecursionError, AttributeError):
        raise argparse.ArgumentTypeError("expected a JSON object") from None


def _add_sampling(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--max-tokens", type=int, metavar="N", help="the most tokens to generate")
    group.add_argument("--thinking-token-budget", type=int, metavar="N", help="the most tokens of reasoning")
    group.add_argument("--temperature", type=float, metavar="T", help="0 is greedy")
    group.add_argument("--top-p", type=float, metavar="P", help="keep the likeliest tokens up to this mass")
    group.add_argument("--top-k", type=int, metavar="K", help="keep this many of the likeliest tokens")
    group.add_argument("--min-p", type=float, metavar="P", help="drop tokens below this share of the likeliest")
    for name, about in _PENALTIES.items():
        group.add_argument(f"--{name}-penalty", type=float, metavar="X", help=about)
    group.add_argument("--seed", type=int, metavar="N", help="makes sampling repeatable")
    group.add_argument("--stop", action="append", metavar="TEXT", help="ends the answer; repeatable")
    group.add_argument(
        "--include-stop-str-in-output", action="store_const", const=True, help="include the stop text in the answer"
    )
    group.add_argument(
        "--bad-words", action="append", metavar="TEXT", help="keep this text out of the answer; repeatable"
    )
    for name, whose in (("logprobs", "the answer's"), ("prompt-logprobs", "the prompt's")):
        shown = f"then print how likely {whose} tokens were, and N of the likeliest, to standard error"
        group.add_argument(f"--{name}", type=int, metavar="N", help=shown)


def run(arguments: argparse.Namespace) -> int:
    """Asks, and prints the answer while it comes."""
    request = _request(arguments)
    answer = Answer()
    shown = _Shown()
    with LlmClient(endpoint(arguments.address, arguments)) as llm:
        try:
            with llm.generate(request, timeout=arguments.timeout) as events:
                for event in events:
                    answer.add(event)
                    if arguments.json:
                        print_event(event)
                    else:
                        shown.add(event)
        except TwinlensError as error:
            if arguments.json:
                print_error(error)
            else:
                shown.end()
            raise
    if not arguments.json:
        shown.end(complete=True)
    if arguments.prompt_logprobs is not None and not arguments.json:
        _show_logprobs("prompt", 1, answer.prompt_token_ids, answer.prompt_logprobs)
    if arguments.logprobs is not None and not arguments.json:
        for choice in answer.choices:
            _show_logprobs("answer", 0, choice.token_ids, choice.logprobs)
    if arguments.timings:
        show_timings(answer)
    return 0


def _request(arguments: argparse.Namespace) -> GenerateRequest:
    return generate_request(
        conversation(arguments.question, arguments),
        _sampling(arguments),
        session_id=arguments.session,
        thinking=arguments.thinking,
        reasoning_effort=arguments.reasoning_effort,
        thinks_before_form=arguments.json_object or arguments.json_schema is not None,
        template_variables=arguments.template_variables,
    )


def _sampling(arguments: argparse.Namespace) -> SamplingParams:
    given = {name: getattr(arguments, name) for name in _SAMPLING}
    if arguments.json_object:
        given["json_schema"] = _ANY_OBJECT
    if arguments.json_schema is not None:
        given["json_schema"] = Path(arguments.json_schema).read_text("utf-8")
    return SamplingParams(**{name: value for name, value in given.items() if value is not None})


class _Shown:
    """Prints an answer as it arrives: reasoning goes to standard error, followed by a blank line."""

    def __init__(self) -> None:
        self._splitter = ReasoningSplitter(thinking=False)
        self._thinks = False
        self._answers = False

    def add(self, event: GenerateResponse) -> None:
        """Prints what this event completes."""
        match event.WhichOneof("event"):
            case "started":
                begun = event.started
                marks = (begun.reasoning_begin or THINK[0], begun.reasoning_end or THINK[1])
                known = None if begun.reasoning_unread else marks
                self._splitter = ReasoningSplitter(known, thinking=begun.thinking)
            case "delta":
                self._print(*self._splitter.feed(event.delta.text))
            case _:
                return

    def end(self, *, complete: bool = False) -> None:
        """Shows the rest, and ends the line; a `complete` answer has one though it says nothing."""
        self._print(*self._splitter.end())
        if self._thinks:
            print(file=sys.stderr)
        if self._answers or complete:
            print()

    def _print(self, thought: str, said: str) -> None:
        if thought:
            self._thinks = True
            print(thought, end="", file=sys.stderr, flush=True)
        if said:
            if self._thinks:
                self._thinks = False
                print("\n", file=sys.stderr, flush=True)
            self._answers = True
            print(said, end="", flush=True)


def _show_logprobs(what: str, first: int, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> None:
    """A line for each token: its place, itself, its text, the logarithm of its probability, and the likeliest tokens
    with theirs."""
    rows = [(what, "token", "text", "logprob", "likeliest")]
    for place, (token, said) in enumerate(zip(tokens, logprobs, strict=True), first):
        likeliest = ", ".join(f"{top.token_id} {_quoted(top.text)} {top.logprob:.3f}" for top in said.top)
        rows.append((str(place), str(token), _quoted(said.text), f"{said.logprob:.3f}", likeliest))
    print(table(rows), file=sys.stderr)


def _quoted(text: str) -> str:
    """A token's text on one line, its spaces and line feeds to be seen.

    >>> print(_quoted(" a\\n"))
    " a\\n"
    """
    return json.dumps(text, ensure_ascii=False)
