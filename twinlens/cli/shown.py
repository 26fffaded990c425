"""Prints generations: events as JSON lines, tokens and times; and the flags for that."""

from __future__ import annotations

import argparse
import json
import sys

from google.protobuf.json_format import MessageToDict

from twinlens.answers import Answer
from twinlens.cli.connection import bounded
from twinlens.cli.tables import milliseconds
from twinlens.client import STREAM_TIMEOUT
from twinlens.errors import InterruptedStreamError, TwinlensError
from twinlens.v1 import FinishReason, GenerateResponse


def add_output_flags(parser: argparse.ArgumentParser) -> None:
    """Adds flags for what is printed of a generation, and its time limit."""
    parser.add_argument("--json", action="store_true", help="print each event as one line of JSON")
    parser.add_argument("--timings", action="store_true", help="then print tokens and stage times to standard error")
    parser.add_argument(
        "--timeout",
        type=bounded(float, 0.001),
        default=STREAM_TIMEOUT,
        metavar="SECONDS",
        help="for the whole answer (default: %(default)g)",
    )


def print_event(event: GenerateResponse) -> None:
    """An event, by the contract's names."""
    print(json.dumps(MessageToDict(event, preserving_proto_field_name=True)), flush=True)


def print_error(error: TwinlensError) -> None:
    """Prints the error that ends a generation."""
    print(json.dumps({"error": _fields(error)}), flush=True)


def show_timings(answer: Answer) -> None:
    """Tokens and stage times, on standard error."""
    usage = answer.usage
    reason = FinishReason.Name(answer.choices[0].reason) if answer.choices else "no choice"
    thought = f" ({usage.reasoning_tokens} of reasoning)" if usage.reasoning_tokens else ""
    print(
        f"{usage.prompt_tokens} prompt tokens ({usage.cached_tokens} cached), "
        f"{usage.completion_tokens} generated{thought}, {reason}",
        file=sys.stderr,
    )
    for stage, seconds in answer.timings.items():
        print(f"  {stage:<16} {milliseconds(seconds):>12}", file=sys.stderr)


def _fields(error: TwinlensError) -> dict[str, object]:
    told: dict[str, object] = {
        "code": error.code.name,
        "reason": error.reason,
        "message": error.message,
        "field": error.field,
        "retry_after": error.retry_after,
    }
    if isinstance(error, InterruptedStreamError):
        told["events"] = error.events
    return told
