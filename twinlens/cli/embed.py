"""`twinlens embed`: writes the embedding of a text, of pictures, videos and sounds, or of all together, as JSON."""

from __future__ import annotations

import argparse
import json
from typing import Any

from google.protobuf.json_format import MessageToDict

from twinlens.cli.connection import add_flags, bounded, endpoint
from twinlens.cli.given import add_media_flags, add_preprocessing_flags, conversation
from twinlens.client import STREAM_TIMEOUT, LlmClient
from twinlens.prompts import embed_request


def add_parser(commands: Any) -> None:
    """Adds the command."""
    parser = commands.add_parser("embed", help="embed texts, pictures, videos and sounds", description=__doc__)
    parser.set_defaults(run=run)
    parser.add_argument("text", nargs="?", help="follows the media; - reads it from standard input")
    add_media_flags(parser)
    parser.add_argument("--dimensions", type=int, metavar="N", help="keep only the leading numbers")
    parser.add_argument("--llm", dest="address", metavar="ADDR", default="127.0.0.1:7002", help="default: %(default)s")
    parser.add_argument(
        "--timeout",
        type=bounded(float, 0.001),
        default=STREAM_TIMEOUT,
        metavar="SECONDS",
        help="for all of it (default: %(default)g)",
    )
    add_preprocessing_flags(parser)
    add_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    """Sends the request, and prints the response with the contract's names."""
    if arguments.text is None and not arguments.media:
        raise ValueError("there is nothing to embed: give a text, or a picture, video or sound")
    request = embed_request(conversation(arguments.text, arguments), dimensions=arguments.dimensions)
    with LlmClient(endpoint(arguments.address, arguments)) as llm:
        found = llm.embed(request, timeout=arguments.timeout)
    print(json.dumps(MessageToDict(found, preserving_proto_field_name=True)))
    return 0
