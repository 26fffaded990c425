"""The choices of a request, from tokens to text and to their ends. A resumed choice continues from its earlier
output."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from tokenizers import Tokenizer

from common.errors import InvalidInput
from llm_service.engine.messages import Complete, Pooled, Prefilled, PromptLogprobs, Resumed, Started, Token
from llm_service.engine_client.engine_request import Event
from llm_service.generation.events import Delta
from llm_service.prompt.detokenizer import Detokenizer
from llm_service.prompt.reasoning import ReasoningCounter
from llm_service.prompt.transcript import TranscriptReader, transcript_reader
from llm_service.request import ChatPrompt, Request

_MOST = 64
"""Most tokens of one delta: with twenty likely tokens beside each it stays far below gRPC's limit, and takes a few
milliseconds to build."""


@dataclass(slots=True)
class Choice:
    """An unfinished choice: its text, its number of tokens, those that it was resumed with, and its verified and
    accepted drafts. `reasoning` counts reasoning tokens if the answer may begin with reasoning; `words` reads a
    transcript. With `shows_stop`, the text includes that of the token that ends it, which is `stop_token` if it is one
    of `stop_token_ids`."""

    index: int
    text: Detokenizer
    shows_stop: bool = False
    stop_token_ids: frozenset[int] = frozenset()
    stop_token: int | None = None
    tokens: int = 0
    resumed: tuple[int, ...] = ()
    reasoning: ReasoningCounter | None = None
    drafts: int = 0
    accepted: int = 0
    words: TranscriptReader = field(default_factory=TranscriptReader)

    def resume(self, token_ids: tuple[int, ...]) -> None:
        """Takes the tokens that it is resumed with, whose text was sent before. Raises InvalidInput if they go on
        behind a stop text."""
        for token in token_ids:
            if self.text.stopped is not None:
                raise InvalidInput("an answer cannot continue after its end", reason="BAD_RESUME", field="resume")
            self.words.push(self.text.push(token))
        self.words.take_turns()
        self.tokens, self.resumed = len(token_ids), token_ids

    def count_reasoning(self, counter: ReasoningCounter) -> None:
        """Counts its reasoning tokens, from the first token on."""
        self.reasoning = counter
        for token in self.resumed:
            counter.push(token)

    def add(self, tokens: Sequence[Token]) -> tuple[Delta, str]:
        """Takes new tokens, at least one, up to the one that ends the choice. Returns the delta for the caller and why
        the choice ends; empty if it goes on."""
        delta, ended = Delta(self.index), ""
        for token in tokens:
            self.tokens += 1
            self.drafts += token.drafts
            self.accepted += token.accepted
            if self.reasoning is not None:
                self.reasoning.push(token.token)
            ended = token.ended
            text = "" if ended == "stop" and not self.shows_stop else self.text.push(token.token)
            if ended:
                text += self.text.finish()
            over = bool(ended) or self.text.stopped is not None
            said = self.words.push(text) + (self.words.finish() if over else "")
            delta.add(said, token.token, token.logprobs)
            if self.text.stopped is not None:
                ended = "stop"
                break
            if ended == "stop":
                self._ends_with(token.token)
        delta.turns = self.words.take_turns()
        return delta, ended

    def complete(self, ended: str) -> tuple[Delta, str]:
        """The rest of the text, and why the choice ends, if the engine reports that its earlier output `ended` it. A
        caller who resumed it has the text; one whose request was handed over to an engine with less room has not."""
        delta, text = Delta(self.index), self.text.finish()
        if self.tokens > len(self.resumed):
            delta.text = self.words.push(text) + self.words.finish()
            delta.turns = self.words.take_turns()
        if self.text.stopped is not None:
            return delta, "stop"
        if ended == "stop" and self.resumed:
            self._ends_with(self.resumed[-1])
        return delta, ended

    def _ends_with(self, token: int) -> None:
        self.stop_token = token if token in self.stop_token_ids else None


def merge_tokens(
    events: Iterable[Event], most: int = _MOST
) -> Iterator[Started | Prefilled | PromptLogprobs | Pooled | Complete | list[Token]]:
    """Merges events: the tokens of each choice become lists of at most `most`, so one message has all tokens since the
    caller's last read. Prompt logprobs are merged within the same bound. Events other than tokens come first: they
    precede the tokens, or belong to another choice."""
    waiting: dict[int, list[Token]] = {}
    for event in events:
        if isinstance(event, PromptLogprobs):
            for begin in range(0, len(event.logprobs), most):
                yield PromptLogprobs(event.id, event.first + begin, event.logprobs[begin : begin + most])
            continue
        if not isinstance(event, Token):
            if isinstance(event, Complete) and (before := waiting.pop(event.choice, None)):
                yield before
            yield event
            continue
        tokens = waiting.setdefault(event.choice, [])
        tokens.append(event)
        if len(tokens) == most:
            yield waiting.pop(event.choice)
    yield from waiting.values()


def open_choices(request: Request, tokenizer: Tokenizer) -> dict[int, Choice]:
    """The choices of a request that are not finished. Not for the event loop if thousands of tokens are resumed. Raises
    InvalidInput if the model cannot have generated them."""
    resumed = {each.index: each for each in request.resume}
    choices: dict[int, Choice] = {}
    for index in range(request.sampling.n):
        given = resumed.get(index)
        if given is not None and given.finished:
            continue
        shows = request.include_stop_str_in_output
        how = {"shows_stop": shows, "skip_special": request.skip_special_tokens}
        text = Detokenizer(tokenizer, request.stop, request.sampling.min_tokens, **how)
        choice = Choice(index, text, shows, frozenset(request.sampling.stop_token_ids))
        if request.transcription is not None:
            opened = isinstance(request.prompt, ChatPrompt) and bool(request.prompt.opening)
            choice.words = transcript_reader(request.transcription, opened=opened)
        choice.resume(() if given is None else given.token_ids)
        choices[index] = choice
    return choices


def resumed_for_engine(request: Request, choices: dict[int, Choice]) -> list[Resumed]:
    """The resumed choices for the engine, which generates nothing for those that are finished or have met their stop
    text."""
    return [
        Resumed(
            each.index,
            array("i", each.token_ids).tobytes(),
            finished=each.index not in choices or choices[each.index].text.stopped is not None,
        )
        for each in request.resume
    ]
