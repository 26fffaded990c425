"""`twinlens transcribe`: writes the words of a sound, or of a video's own track, to standard output as they come."""

from __future__ import annotations

import argparse
from typing import Any

from twinlens.answers import Answer
from twinlens.cli.connection import add_flags, endpoint
from twinlens.cli.shown import add_output_flags, print_error, print_event, show_timings
from twinlens.client import LlmClient
from twinlens.errors import TwinlensError
from twinlens.prompts import audio, generate_request, transcription
from twinlens.v1 import GenerateRequest, GenerateResponse, SamplingParams


def add_parser(commands: Any) -> None:
    """Adds the command."""
    parser = commands.add_parser("transcribe", help="transcribe a sound", description=__doc__)
    parser.set_defaults(run=run)
    parser.add_argument("sound", metavar="F", help="a sound or video: a file, or an http(s) address")
    parser.add_argument(
        "--language", metavar="L", default="", help="what is spoken: fr, or French; by default detected"
    )
    parser.add_argument("--prompt", metavar="TEXT", default="", help="names and words to expect")
    parser.add_argument("--turns", action="store_true", help="a line for each turn: its seconds, who speaks, the words")
    parser.add_argument("--llm", dest="address", metavar="ADDR", default="127.0.0.1:7002", help="default: %(default)s")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="the most tokens to generate")
    parser.add_argument("--temperature", type=float, metavar="T", default=0.0, help="default: 0, the likeliest words")
    add_output_flags(parser)
    add_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    """Asks, and prints the words while they come."""
    request, answer = _request(arguments), Answer()
    with LlmClient(endpoint(arguments.address, arguments)) as llm:
        try:
            with llm.generate(request, timeout=arguments.timeout) as events:
                for event in events:
                    answer.add(event)
                    if arguments.json:
                        print_event(event)
                    else:
                        _show(event, turns=arguments.turns)
        except TwinlensError as error:
            if arguments.json:
                print_error(error)
            elif answer.text and not arguments.turns:
                print()
            raise
    if not arguments.json and not (arguments.turns and answer.turns):
        print(answer.text if arguments.turns else "")  # of a model that told no turns this time, the words
    if arguments.timings:
        show_timings(answer)
    return 0


def _request(arguments: argparse.Namespace) -> GenerateRequest:
    sound = audio(arguments.sound)
    asked = transcription(sound, language=arguments.language, prompt=arguments.prompt, turns=arguments.turns)
    return generate_request(asked, SamplingParams(temperature=arguments.temperature, max_tokens=arguments.max_tokens))


def _show(event: GenerateResponse, *, turns: bool) -> None:
    if not turns:
        print(event.delta.text, end="", flush=True)
        return
    for turn in event.delta.turns:
        print(f"{turn.start_seconds:.2f}-{turn.end_seconds:.2f} {turn.speaker}: {turn.text}", flush=True)
