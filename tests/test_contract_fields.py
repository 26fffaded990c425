"""No field of the contract is decoration: a service reads each field of its requests, and sets each of its answers."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.descriptor import Descriptor

from tests.source_tree import Tree
from twinlens.v1 import encoder_pb2, llm_pb2

ROOT = Path(__file__).resolve().parent.parent
SERVICES = {"encoder_service": (encoder_pb2, "EncoderService"), "llm_service": (llm_pb2, "LlmService")}
NOTHING_TO_SAY = {"unimplemented", "unimplemented_sampling"}
"""Empty as long as everything is implemented, which tests/rpc/test_every_field.py finds out."""


def messages(service: str, *, answers: bool) -> dict[str, Descriptor]:
    """Every message that a service sends, or that it is sent, by its name."""
    module, name = SERVICES[service]
    found: dict[str, Descriptor] = {}

    def reach(message: Descriptor) -> None:
        if message.name not in found:
            found[message.name] = message
            for field in message.fields:
                if field.message_type is not None:
                    reach(field.message_type)

    for method in module.DESCRIPTOR.services_by_name[name].methods:
        reach(method.output_type if answers else method.input_type)
    return found


@cache
def words(package: str) -> set[str]:
    """Every name that the sources of a package use of something: attributes, keywords, and texts for `getattr`."""
    tree: Any = Tree.read(ROOT, (package,))
    found: set[str] = set()
    for module in tree.modules.values():
        for node in module.nodes:
            match node:
                case ast.Attribute(attr=name) | ast.keyword(arg=str(name)) | ast.Constant(value=str(name)):
                    found.add(name)
    return found


@pytest.mark.parametrize("service", SERVICES)
@pytest.mark.parametrize("answers", [False, True], ids=["requests", "answers"])
def test_every_field_is_used(service: str, answers: bool) -> None:
    used = words("common") | words(service) | NOTHING_TO_SAY
    unused = {
        f"{message.name}.{field.name}"
        for message in messages(service, answers=answers).values()
        for field in message.fields
        if field.name not in used
    }
    assert unused == set()
