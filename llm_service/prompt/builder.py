"""From a request's prompt to token ids with media spans."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from msgspec import structs

from common.checkpoints.checkpoint import Checkpoint
from common.errors import DataLoss, InvalidInput
from common.media import kept_rows
from common.media.item import Header, Modality
from llm_service.families.family import FAR, Rows, SpecialToken
from llm_service.model_config.served import ServedModel
from llm_service.prompt import structural_tag
from llm_service.prompt.chat_template import ChatTemplate
from llm_service.prompt.detokenizer import TokenTexts
from llm_service.prompt.mrope import MediaLayout, positions
from llm_service.prompt.output_marks import OutputMarks, ToolFormat
from llm_service.prompt.special_tokens import SpecialTokens
from llm_service.prompt.strict_calls import calls_or_form, strict_calls
from llm_service.prompt.tokenizers import PlainTokenizer, showing_marks
from llm_service.prompt.tokens import MediaTokens, named_tokens
from llm_service.request import (
    ChatPrompt,
    MediaRun,
    MediaSlot,
    Piece,
    PiecesPrompt,
    Prompt,
    PromptLayout,
    SoundLength,
    Span,
    Structure,
    TextPrompt,
    ThinkingBound,
    TokenPrompt,
    Trigger,
    Truncation,
)
from llm_service.token_ids import check_token_ids

_TAIL = 8
"""Tokens at the end of a prompt: enough for the end of reasoning and the newlines behind it."""
_WORDS = {Modality.IMAGE: "a picture", Modality.VIDEO: "a video", Modality.AUDIO: "a sound"}


class PromptBuilder:
    """Builds prompts for one checkpoint: its tokenizer, chat template (or `chat_template` instead, with
    `template_variables` as defaults) and media layout. It `refuses_strict` functions if it cannot hold calls to a
    schema. Its methods compute, so call them outside the event loop.

    A span's length is known only when its header has arrived, so there are two steps: `pieces`, then `layout`. Special
    tokens come from the template, or from a caller who lays the prompt out, and never from the text of a chat message.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        model: ServedModel | None = None,
        *,
        chat_template: str | None = None,
        template_variables: Mapping[str, Any] | None = None,
        output_marks: OutputMarks | None = None,
        refuses_strict: bool = True,
    ) -> None:
        settings = checkpoint.tokenizer_settings()
        model = model or ServedModel.of(checkpoint)
        self.vocab_size = model.vocab_size
        # The model knows no tokens beyond its vocabulary. Runs of spaces and lines are text like any other.
        marks = [each for each in settings.get("added_tokens", []) if each["id"] < self.vocab_size]
        blanks = [each for each in marks if not each["content"].strip()]
        marks = [each for each in marks if each["content"].strip()]
        self.tokenizer = showing_marks(settings)
        self.texts = TokenTexts(self.tokenizer)
        # Without its added tokens a tokenizer cannot turn any text into a special token.
        self._plain = PlainTokenizer({**settings, "added_tokens": blanks, "post_processor": None})
        self._added = {each["content"]: int(each["id"]) for each in marks}
        self._special = SpecialTokens(marks)
        self._plain_marks = {int(each["id"]): each["content"] for each in marks if not _is_no_text(each)}
        self._first, self._last = self._around()
        self._alone, self._frame = model.family.prompt.alone, model.family.prompt.frame
        self._length_mark, self._turns_at = model.family.prompt.duration_mark, model.family.prompt.long_rope_threshold
        self._number_mark, self._run = model.family.prompt.number_mark, model.family.prompt.placeholder_run
        self._seam = self._added.get(model.family.prompt.seam, -1)
        self._media = MediaTokens.of(checkpoint.config, model.family, named_tokens(checkpoint, self._added))
        self.template = ChatTemplate.of(
            checkpoint, self._plain_template(), source=chat_template, defaults=template_variables, marks=output_marks
        )
        self._refuses_strict = refuses_strict
        self._media_layout = MediaLayout.of(checkpoint.config, model.family)

        begin, self._reasoning_end = self.template.reasoning_marks
        openings = (begin, f"{begin}\n") if self.template.reads_reasoning else ()
        self._thinking = [self.encode(text, allow_special=True) for text in openings]

    def _plain_template(self) -> dict[str, str] | None:
        """The placeholder of an item by modality, for checkpoints that may lack a template."""
        if self._frame is None or not self._frame.lays_out:
            return None
        names = {token: name for name, token in self._added.items()}
        return {str(modality): names[token] for token, modality in self._media.placeholders.items()}

    def _around(self) -> tuple[list[int], list[int]]:
        """The tokens that the tokenizer puts before and behind a text."""
        made = self.tokenizer.encode("a")
        text = [at for at, is_mark in enumerate(made.special_tokens_mask) if not is_mark]
        return (made.ids[: text[0]], made.ids[text[-1] + 1 :]) if text else (made.ids, [])

    @property
    def modalities(self) -> frozenset[Modality]:
        """The modalities that its prompts can contain."""
        return frozenset(self._media.placeholders.values())

    def ends_in_thinking(self, ids: Sequence[int]) -> bool:
        """Whether a prompt ends inside reasoning, so that the output continues it."""
        return any(list(ids[-len(tail) :]) == tail for tail in self._thinking)

    def form_trigger(self, prompt: Prompt, ids: Sequence[int], structure: Structure) -> Trigger | None:
        """The text or token behind which the form of an answer to this prompt begins; None: it begins with the first
        token."""
        if (end := self._added.get(self._reasoning_end)) is None:  # no token of its own
            return None
        if self.ends_in_thinking(ids):
            return Trigger(end)
        if not isinstance(prompt, ChatPrompt) or not self._may_open_reasoning(prompt, ids, structure):
            return None
        openings = [tuple(self._thinking[0])]
        if self.template.reasons_on_new_line and not self.decode(ids[-1:]).endswith("\n"):
            openings.append((*self._plain.ids_behind("\n"), *openings[0]))
        return Trigger(end, openings=tuple(openings))

    def _may_open_reasoning(self, prompt: ChatPrompt, ids: Sequence[int], structure: Structure) -> bool:
        if not prompt.thinks_before_form or prompt.continues or prompt.opening or not self.template.may_think(prompt):
            return False
        if self._thinking[0][0] not in self._added.values():  # of a mark in pieces any text could be the beginning
            return False
        begin = self.template.reasoning_marks[0]
        has_own = structure.kind != "json_schema" and begin in structure.text
        return not has_own and not self.decode(ids[-_TAIL:]).rstrip().endswith(self._reasoning_end)

    def thinking_bound(self, tokens: int) -> ThinkingBound:
        """A bound of `tokens` tokens of reasoning. Raises InvalidInput if the end of reasoning is not a token that can
        be forced."""
        end = self._added.get(self._reasoning_end)
        if end is None:
            why = "the model has no token for the end of its reasoning"
            raise InvalidInput(why, reason="NO_THINKING", field="sampling.thinking_token_budget")
        return ThinkingBound(tokens, tuple(self._thinking[0]), end)

    def bad_word_ids(self, texts: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """The token runs of texts that follow other text, with a space before them and without. Raises InvalidInput if
        there are none."""
        runs: dict[tuple[int, ...], None] = {}
        for text in texts:
            word = text.lstrip(" ")
            found = [tuple(self._plain.ids_behind(each)) for each in ((word, f" {word}") if word else (text,))]
            found = [run for run in found if run and max(run) < self.vocab_size]
            if not found:
                why = "a bad word has no tokens"
                raise InvalidInput(why, reason="BAD_WORD", field="sampling.bad_words")
            runs.update(dict.fromkeys(found))
        return tuple(runs)

    def has_token(self, name: str) -> bool:
        """Whether a text of this name is one token."""
        return name in self._added

    def strict_calls(self, prompt: Prompt) -> tuple[Structure, Trigger] | None:
        """The grammar of calls that the model makes on its own, and the token behind which it begins. Raises
        InvalidInput."""
        if not isinstance(prompt, ChatPrompt):
            return None
        return strict_calls(prompt.tools, self.template, self._added, refuses=self._refuses_strict)

    def form(self, structure: Structure, prompt: Prompt) -> Structure:
        """The form of an answer, which may be calls instead. Raises InvalidInput."""
        if structure.kind == "structural_tag":
            structure = structural_tag.as_grammar(structure.text, self._guided)
        if not isinstance(prompt, ChatPrompt) or not (prompt.calls_or_form and prompt.tools):
            return structure
        if self.template.tool_format is ToolFormat.NONE:
            return structure
        return calls_or_form(structure, prompt.tools, self.template, self._added)

    def _guided(self, text: str) -> list[str | int]:
        """A text in pieces, cut at tokens that a grammar has by their numbers: to it others are text."""
        found: list[str | int] = []
        for piece in self._special.split(text):
            is_text = isinstance(piece, str) or piece in self._plain_marks
            said = (piece if isinstance(piece, str) else self._plain_marks[piece]) if is_text else piece
            if found and isinstance(said, str) and isinstance(found[-1], str):
                found[-1] += said
            else:
                found.append(said)
        return found

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, special tokens by their names."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False))

    def encode(self, text: str, *, allow_special: bool = False, whole: bool = False) -> list[int]:
        """The token ids of a text; a `whole` prompt gets what the tokenizer puts before one. Special tokens are
        recognised only if allowed."""
        if not whole:
            return self._ids(self._split(text)) if allow_special else self._tokenize(text)
        pieces: list[Piece] = self._split(text) if allow_special else [text] if text else []
        return self._ids(self._framed(self._begun(pieces, with_media=False)))

    def pieces(self, prompt: Prompt, modalities: Sequence[Modality], *, closed: bool = False) -> list[Piece]:
        """The prompt in pieces, with one slot for each item; if `closed`, with what the tokenizer puts behind a text,
        since nothing will follow. Raises InvalidInput if slots and items do not match."""
        pieces: list[Piece]
        if isinstance(prompt, PiecesPrompt):
            return list(prompt.pieces)
        if isinstance(prompt, ChatPrompt):
            pieces, field = self._chat(prompt), "chat.messages"
        elif isinstance(prompt, TextPrompt):
            pieces, field = self._laid_out(prompt.text), "text.prompt"
        else:
            pieces, field = self._split_ids(prompt.ids), "tokens.ids"
        if not pieces:
            raise InvalidInput("the prompt is empty", reason="EMPTY_PROMPT", field=field)
        bare = isinstance(prompt, TextPrompt) and prompt.bare
        if not (bare or isinstance(prompt, TokenPrompt)):
            pieces = self._begun(pieces, with_media=bool(modalities))
        pieces = self._with_lengths(self._with_slots(pieces, modalities, field), field)
        if isinstance(prompt, TokenPrompt):
            return pieces
        pieces = self._framed(pieces)
        return [*pieces, self._last] if closed and self._last and not bare else pieces

    def _begun(self, pieces: list[Piece], *, with_media: bool) -> list[Piece]:
        """Adds what the tokenizer puts before a text, if the prompt lacks it and no frame of the family decides how it
        begins."""
        framed = self._frame is not None and (with_media or self._frame.always)
        has_none = self._first and not framed and pieces[:1] != self._first[:1]
        return [self._first, *pieces] if has_none else pieces

    def _chat(self, prompt: ChatPrompt) -> list[Piece]:
        if not prompt.messages:
            raise InvalidInput("the conversation has no messages", reason="EMPTY_PROMPT", field="chat.messages")
        pieces: list[Piece] = []
        for text, from_caller in self.template.render(prompt):
            pieces.extend([text] if from_caller else self._laid_out(text))
        return [*pieces, *self._split(prompt.opening)]

    def layout(self, pieces: Sequence[Piece], headers: Sequence[Header]) -> PromptLayout:
        """The final prompt, when the header of every item is known (in item order)."""
        ids: list[int] = []
        spans: list[Span] = []
        text, first = "", True  # only the tokenizer's own tokens precede it
        for piece in self._joined(self._expanded(pieces, headers)):
            if isinstance(piece, str):
                text += piece  # texts that meet are tokenized as one, as the reference does
                continue
            ids.extend(self._tokenize(text, first=first) if text else ())
            first = first and not text and piece == self._first
            text = ""
            if isinstance(piece, int):
                ids.append(piece)
            elif isinstance(piece, list):
                ids.extend(piece)
            elif isinstance(piece, MediaSlot):
                self._place(piece, headers[piece.item], ids, spans)
        ids.extend(self._tokenize(text, first=first) if text else ())
        return self._placed(ids, spans)

    def truncated(self, layout: PromptLayout, truncation: Truncation) -> PromptLayout:
        """Truncates a prompt; what the tokenizer puts before and behind a text stays. Raises InvalidInput if an item
        would be cut."""
        ids, too_many = layout.ids, len(layout.ids) - truncation.tokens
        if too_many <= 0:
            return layout
        head, tail = len(self._first), len(self._last)
        head = head if ids[:head] == self._first and head < truncation.tokens else 0
        tail = tail if truncation.end and ids[len(ids) - tail :] == self._last and tail < truncation.tokens else 0
        begin = len(ids) - tail - too_many if truncation.end else head
        end = begin + too_many
        if any(span.end > begin if truncation.end else span.begin < end for span in layout.spans):
            why = "a prompt cannot be cut within or between its media"
            raise InvalidInput(why, reason="CUTS_MEDIA", field="truncate_prompt_tokens")
        spans = layout.spans
        if not truncation.end:
            spans = [
                replace(span, runs=tuple(structs.replace(run, begin=run.begin - too_many) for run in span.runs))
                for span in spans
            ]
        return self._placed([*ids[:begin], *ids[end:]], spans)

    def _placed(self, ids: list[int], spans: list[Span]) -> PromptLayout:
        where, mrope_delta = positions(ids, spans, self._media_layout)
        spans = [replace(span, runs=tuple(run for run in span.runs if run.count)) for span in spans]
        longest = 0
        if len(ids) + mrope_delta > self._turns_at > 0:  # one past its last place
            where, mrope_delta = where + np.int32(FAR), mrope_delta + FAR
        elif self._turns_at:  # one token more, not computed here, would require computing it all again
            longest = self._turns_at + 1 - mrope_delta
        return PromptLayout(ids, spans, where.tobytes(), mrope_delta, longest)

    def _place(self, slot: MediaSlot, header: Header, ids: list[int], spans: list[Span]) -> None:
        """Appends an item's next run of rows. Raises DataLoss if the encoder's rows stand for no token."""
        if not 0 <= slot.token < self.vocab_size:
            raise DataLoss("an encoder's rows stand for a token that does not exist")
        earlier = spans.pop().runs if spans and spans[-1].item == slot.item else ()
        first = earlier[-1].first_row + earlier[-1].count if earlier else 0
        run = MediaRun(len(ids), first, slot.rows, slot.grid_rows)
        spans.append(Span(slot.item, header, (*earlier, run)))
        ids.extend([slot.token] * slot.rows)

    def _expanded(self, pieces: Sequence[Piece], headers: Sequence[Header]) -> Iterator[Piece]:
        """Replaces each slot by what the family puts there."""
        seen = Counter[Modality]()
        for piece in pieces:
            if isinstance(piece, SoundLength):
                yield f"{headers[piece.item].seconds_per_grid:.2f}"
                continue
            if not isinstance(piece, MediaSlot):
                yield piece
                continue
            header, at = headers[piece.item], 0
            first, number = True, seen[piece.modality]
            seen[piece.modality] += 1
            kept = kept_rows.unpack(header.kept_rows, header.grid_rows) if header.grid_rows else None
            for part in self._media_layout.modalities[piece.modality].expand(header):
                match part:
                    case Rows(count, token):
                        own = self._media.marks[token] if isinstance(token, str) else token
                        run = replace(piece, rows=count, token=piece.token if own is None else own)
                        if kept is not None:
                            run = replace(run, rows=int(kept[at : at + count].sum()), grid_rows=count)
                        at += count
                        yield run
                    case SpecialToken(name):
                        yield self._media.marks[name]
                    case text:
                        yield from self._split(self._numbered(text, number) if first else text)
                first = False

    def _numbered(self, text: str, number: int) -> str:
        """The text of an item with this number in the prompt; encoders always number it 0."""
        mark = self._number_mark
        return text.replace(f"{mark}0", f"{mark}{number}", 1) if mark and text.startswith(f"{mark}0") else text

    def _joined(self, pieces: Iterator[Piece]) -> Iterator[Piece]:
        """With one mark of several at a seam of items, and a space between a mark and a word."""
        before: Piece = ""
        for piece in pieces:
            if before == self._seam and piece != "":
                if piece == self._seam:
                    continue
                if self._begins_with_word(piece):
                    yield " "
            before = piece
            yield piece

    def _begins_with_word(self, piece: Piece) -> bool:
        """Whether a text begins with a word, or a special token's name does, as transformers' processors tell one."""
        if isinstance(piece, int):
            piece = next((name for name, token in self._added.items() if token == piece), "")
        return isinstance(piece, str) and piece[:1] not in ("", "<") and not piece[0].isspace()

    def _framed(self, pieces: list[Piece]) -> list[Piece]:
        """Adds what transformers' processor puts into a prompt."""
        last = max((place for place, piece in enumerate(pieces) if isinstance(piece, MediaSlot)), default=None)
        if self._frame is None or (last is None and not self._frame.always):
            return pieces
        begin, behind, end = map(self._split, (self._frame.begin, self._frame.behind, self._frame.end))
        if pieces[: len(begin)] == begin and (self._frame.once or begin == self._first):  # the text has it
            begin = []
        if last is None:
            return [*begin, *pieces, *end]
        return [*begin, *pieces[: last + 1], *behind, *pieces[last + 1 :], *end]

    def _with_slots(self, pieces: list[Piece], modalities: Sequence[Modality], field: str) -> list[Piece]:
        out: list[Piece] = []
        found: list[Modality] = []
        for piece in self._one_for_each(pieces):
            if isinstance(piece, int) and (modality := self._media.placeholders.get(piece)) is not None:
                out.append(MediaSlot(len(found), modality, piece))
                found.append(modality)
            else:
                out.append(piece)
        if len(found) > 1 and (alone := next((kind for kind in found if kind in self._alone), None)) is not None:
            why = f"what this model makes of {_WORDS[alone]} depends on others: one in a prompt is served, alone"
            raise InvalidInput(why, reason="TOO_MANY_ITEMS", field=field)
        if found != list(modalities):
            raise InvalidInput(
                f"the prompt has {len(found)} media placeholders for {len(modalities)} items, or their kinds differ",
                reason="PLACEHOLDER_MISMATCH",
                field=field,
            )
        return out

    def _one_for_each(self, pieces: list[Piece]) -> Iterator[Piece]:
        """With one placeholder for each run of them that stands for an item."""
        at = 0
        while at < len(pieces):
            piece = pieces[at]
            yield piece
            is_run = self._run and isinstance(piece, int) and piece in self._media.placeholders
            is_run = is_run and pieces[at : at + self._run] == [piece] * self._run
            at += self._run if is_run else 1

    def _laid_out(self, text: str) -> list[Piece]:
        """Cuts a text that is not a caller's message at special tokens and at marks for the lengths of sounds."""
        if not self._length_mark:
            return self._split(text)
        first, *others = map(self._split, text.split(self._length_mark))
        return [*first, *(piece for other in others for piece in (SoundLength(), *other))]

    def _with_lengths(self, pieces: list[Piece], field: str) -> list[Piece]:
        """Fills in the lengths of the prompt's sounds, in order. Without a sound the mark is ordinary text."""
        sounds = [piece.item for piece in pieces if isinstance(piece, MediaSlot) and piece.modality is Modality.AUDIO]
        wanted = sum(isinstance(piece, SoundLength) for piece in pieces)
        if sounds and wanted > len(sounds):
            why = f"the prompt has places for the lengths of {wanted} sounds, and {len(sounds)} sounds"
            raise InvalidInput(why, reason="PLACEHOLDER_MISMATCH", field=field)
        lengths: Iterator[Piece] = iter(map(SoundLength, sounds) if sounds else [self._length_mark] * wanted)
        return [next(lengths) if isinstance(piece, SoundLength) else piece for piece in pieces]

    def _split(self, text: str) -> list[Piece]:
        """Cuts a text at its special tokens."""
        return list(self._special.split(text))

    def _split_ids(self, ids: Sequence[int]) -> list[Piece]:
        """Cuts ids at media placeholders."""
        check_token_ids(ids, self.vocab_size, "tokens.ids")
        out: list[Piece] = []
        for token in ids:
            if token in self._media.placeholders:
                out.append(token)
            elif out and isinstance(out[-1], list):
                out[-1].append(token)
            else:
                out.append([token])
        return out

    def _tokenize(self, text: str, *, first: bool = True) -> list[int]:
        return self._plain.ids(text, first=first)

    def _ids(self, pieces: Sequence[Piece]) -> list[int]:
        return self.layout(pieces, []).ids


def _is_no_text(mark: Mapping[str, Any]) -> bool:
    """Whether llguidance has no text made with an added token: a special one, or one in angle brackets."""
    return bool(mark.get("special")) or (mark["content"].startswith("<") and mark["content"].endswith(">"))
