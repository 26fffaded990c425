"""Mistral's own tokenizer format, `tekken.json`, which may come without any other and without a chat template:
converted for the tokenizers library, and what it states about chats and sounds."""

from __future__ import annotations

import base64
import math
import re
from collections.abc import Mapping
from typing import Any, Final

FILE: Final = "tekken.json"
BOS, EOS = "<s>", "</s>"
BEGIN_AUDIO, AUDIO = "[BEGIN_AUDIO]", "[AUDIO]"
_FILLER = "<SPECIAL_{id}>"
"""The name of a special token that the file counts but does not name."""
_OLDEST_CHAT = 7
"""The first version of chats whose system prompt has its own marks."""
_CHUNK_SECONDS, _ROWS_PER_SECOND, _RATE = 30.0, 12.5, 16_000

TEMPLATE: Final = """\
{{- '<s>' }}
{%- for message in messages %}
{%- set content = [message.content] if message.content is string else message.content %}
{%- if message.role == 'system' %}{{ '[SYSTEM_PROMPT]' }}
{%- elif message.role == 'user' %}{{ '[INST]' }}
{%- elif message.role != 'assistant' %}{{ raise_exception('') }}
{%- endif %}
{%- for part in content %}
{%- if part is string %}{{ part }}
{%- elif part.type == 'text' %}{{ part.text }}
{%- elif part.type == 'audio' and message.role == 'user' %}{{ '[AUDIO]' }}
{%- else %}{{ raise_exception('') }}
{%- endif %}
{%- endfor %}
{%- if message.role == 'system' %}{{ '[/SYSTEM_PROMPT]' }}
{%- elif message.role == 'user' %}{{ '[/INST]' }}
{%- else %}{{ '</s>' }}
{%- endif %}
{%- endfor %}"""
"""A conversation without tools, in the form of version 7 and later."""


def chat_template(tekken: Mapping[str, Any]) -> str | None:
    """The chat template of a checkpoint that has none beside this file; None if its version of chats differs, or the
    file is missing."""
    version = re.fullmatch(r"v(\d+)", str(tekken.get("config", {}).get("version")))
    return TEMPLATE if version and int(version[1]) >= _OLDEST_CHAT else None


def sound_rows(tekken: Mapping[str, Any], samples: int) -> int:
    """Rows of a sound of so many samples: it is filled up to whole chunks, each with as many rows.

    >>> sound_rows({}, 480_001)
    750
    """
    audio = tekken.get("audio") or {}
    seconds = float(audio.get("chunk_length_s") or _CHUNK_SECONDS)
    chunks = math.ceil(samples / (seconds * float(audio.get("sampling_rate", _RATE))))
    return chunks * round(seconds * float(audio.get("frame_rate", _ROWS_PER_SECOND)))


def tokenizer_settings(tekken: Mapping[str, Any]) -> dict[str, Any]:
    """The content of tokenizer.json: special tokens have the first ids, and a text begins with `BOS`. Raises
    ValueError, KeyError or TypeError if the file is invalid."""
    config = tekken["config"]
    named = {int(each["rank"]): str(each["token_str"]) for each in tekken["special_tokens"]}
    special = int(config.get("default_num_special_tokens", len(named)))
    marks = [named.get(rank, _FILLER.format(id=rank)) for rank in range(special)]
    size = int(config.get("default_vocab_size", special + len(tekken["vocab"])))
    tokens = [base64.b64decode(each["token_bytes"]) for each in tekken["vocab"][: size - special]]
    added = [
        {"id": rank, "content": mark, "special": True, **dict.fromkeys(_PLAIN_MARK, False)}
        for rank, mark in enumerate(marks)
    ]
    text = {"Sequence": {"id": "A", "type_id": 0}}
    single = [{"SpecialToken": {"id": BOS, "type_id": 0}}, text]
    begun: dict[str, Any] = {"type": "TemplateProcessing", "single": single, "pair": [text, text]}
    begun["special_tokens"] = {BOS: {"id": BOS, "ids": [marks.index(BOS)], "tokens": [BOS]}}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": config["pattern"]}, "behavior": "Isolated", "invert": False},
                {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
            ],
        },
        "post_processor": begun,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "ignore_merges": True, "byte_fallback": False, **_ranks(marks, tokens)},
    }


_PLAIN_MARK = "single_word", "lstrip", "rstrip", "normalized"


def _ranks(marks: list[str], tokens: list[bytes]) -> dict[str, Any]:
    """The ids of all tokens, and the merges in order: a token's id is the rank of its merge."""
    sign = _signs()
    known = set(tokens)
    written = {token: "".join(map(sign.__getitem__, token)) for token in tokens}
    turns = {token: turn for turn, token in enumerate(tokens)}
    merges: list[list[str]] = []
    for token in tokens:
        cuts = [(token[:at], token[at:]) for at in range(1, len(token))]
        pairs = [pair for pair in cuts if pair[0] in known and pair[1] in known]
        merges += [[written[one], written[other]] for one, other in sorted(pairs, key=lambda pair: _turns(turns, pair))]
    ids = {mark: rank for rank, mark in enumerate(marks)}
    return {"vocab": {**ids, **{written[token]: len(marks) + turns[token] for token in tokens}}, "merges": merges}


def _turns(turns: Mapping[bytes, int], pair: tuple[bytes, bytes]) -> tuple[int, int]:
    return turns[pair[0]], turns[pair[1]]


def _signs() -> list[str]:
    """The character for each byte in a byte-level vocabulary (Radford et al. 2019): the byte's own if it is printable,
    else the next one from 256 on."""
    seen = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in seen else chr(next(others)) for byte in range(0x100)]
