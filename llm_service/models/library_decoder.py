"""A decoder that is the library's own text model. Its attention is ours, over the paged cache; so it needs no cache of
its own, any number of sequences go in one batch, and a prompt in any number of chunks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from common import log
from common.checkpoint import CheckpointError
from common.library_classes import (
    decoder_of,
    head_of,
    keep_only,
    layers_of_levels,
    library,
    mark_tables_of,
    towers_within,
)
from llm_service.families.family import OF_PROMPTS, SpanRule
from llm_service.layers.attention.backend import AttentionBackend, AttentionKind, CacheShape
from llm_service.layers.attention.choose import choose
from llm_service.layers.attention.general_backend import AttentionRule, GeneralBackend, GeneralBatch
from llm_service.layers.cache_spec import CacheSpec, IndexedKV, PagedKV, SequenceState, SharedKV
from llm_service.layers.group import ALONE, TensorGroup
from llm_service.layers.index_keys import Chosen, IndexQuery
from llm_service.models.decoder import Deepstack, kernels_of
from llm_service.models.layer_rules import take_tempering
from llm_service.models.library_attention import (
    NAME,
    LibraryMixer,
    attend_as_ours,
    beyond_kernels,
    kind_of,
    layer_of,
)
from llm_service.models.library_index import take_indexers
from llm_service.models.library_latents import rank_of, sources_of, take_latents
from llm_service.models.library_linear import Fill, TextLinear
from llm_service.models.library_rotary import turn_by_sequence
from llm_service.models.library_shares import share_out
from llm_service.models.library_states import Held, take_states
from llm_service.models.library_step import LibraryStep, computing

GENERAL = "general"
"""Names attention by torch, which knows every rule."""

MakesBackend = Callable[[CacheShape], AttentionBackend]

_log = log.get("library_decoder")


class LibraryDecoder:
    """See `Decoder`, whose place it takes: embeddings in, hidden states out; logits on demand."""

    def __init__(
        self,
        model: Any,
        dtype: torch.dtype,
        device: torch.device,
        *,
        axes: int = 1,
        spans: SpanRule = SpanRule.NOWHERE,
        together: Sequence[int] = (),
        adds_rows: bool = False,
        group: TensorGroup = ALONE,
        fill: Fill | None = None,
        attention: str | MakesBackend = GENERAL,
    ) -> None:
        """`model` is the library's, of which there need be no more than its text; of it this rank's share is kept, on
        the device. Places are counted on `axes` axes. `spans`: which tokens see those behind them; where all of media
        do, these are `together`. `adds_rows`: to what the table has for their places. `fill` reads what linear layers
        of ours are still without. `attention`: a back end's name, or what makes one; `auto` is on GPUs that of our
        decoder where it knows how the layers attend. Raises CheckpointError where the model cannot be served so."""
        self.dtype, self.device, self.spans, self.group, self._axes = dtype, device, spans, group, axes
        self.kv_dtype, self.adds_rows = dtype, adds_rows
        self.together = tuple(together)
        share_out(model, group)
        model.to(device)
        if fill is not None:
            fill(model)
        self._text = decoder_of(model)
        turn_by_sequence(self._text)
        self._embeddings: nn.Module = model.get_input_embeddings()
        self._tables, self._layers_of_levels = [*mark_tables_of(model).values()], layers_of_levels(model.config)
        # The head may do more than multiply, and all of it is the library's: it is given hidden states as if its model
        # had made them.
        below = _below_head(model)
        setattr(*below, _Given(getattr(*below), self._text))
        self._head = model
        self._tempering = dict(take_tempering(self._text))
        take_latents(self._text)
        self._for_index, self._chunks = take_indexers(self._text), take_states(self._text)
        self._takes = inspect.signature(self._text.forward).parameters.keys()
        self._pad = getattr(self._text.config, "pad_token_id", None) or 0
        self._media, self._marks = _tokens(model.config, _MEDIA, device), _tokens(model.config, _MARKS, device)
        library().AttentionInterface.register(NAME, attend_as_ours)
        for part in self._text.modules():
            if isinstance(part, library().PreTrainedModel):
                part.config._attn_implementation_internal = NAME
        self._rules: dict[int, AttentionRule] = {}
        self._specs = self._find_specs()
        self._attention = attention
        self._why_general = self._find_why_general()
        if not self._why_general:
            kinds = {layer: kind_of(rule, spans) for layer, rule in self._rules.items()}
            self._specs = {layer: replace(spec, kind=kinds[layer]) for layer, spec in self._specs.items()}

    @property
    def position_rows(self) -> int:
        """See `Decoder.position_rows`; it counts a token's own number by itself."""
        return 3

    @property
    def forgets_answers(self) -> bool:
        """A token of an answer sees other tokens than it would in a prompt."""
        return any(rule.answer_window is not None for rule in self._rules.values())

    @property
    def text(self) -> nn.Module:
        """Its layers, and what is around them."""
        text: nn.Module = self._text
        return text

    def weights(self) -> nn.Module:
        """All that has any."""
        return nn.ModuleList((self._text, self._embeddings, *self._tables, self._head))

    def embed_tokens(self, token_ids: Tensor) -> Tensor:
        """int [n] → [n, hidden]."""
        out: Tensor = self._embeddings(token_ids)
        for table in self._tables:
            there = (token_ids >= table.vocab_offset) & (token_ids < table.vocab_offset + table.vocab_size)
            if there.any():
                out[there] = table(input_ids=token_ids[there]).to(out)
        return out

    def __call__(
        self,
        hidden: Tensor,
        positions: Tensor,
        caches: Sequence[Any],
        batches: Sequence[Any],
        deepstack: Deepstack | None,
        places: Tensor | None = None,
        *,
        token_ids: Tensor,
    ) -> Tensor:
        """As `Decoder.forward`; `token_ids` int [n] are for what a model looks up beside its embeddings."""
        places_of = self._places
        paged: GeneralBatch = batches[places_of[next(iter(self._specs))]]
        more = self._by_ids(token_ids, paged)
        if deepstack is not None:
            here = torch.zeros(1, len(hidden), dtype=torch.bool, device=self.device)
            here[0, deepstack.index] = True
            if self._layers_of_levels:
                levels = hidden[here[0]], *deepstack.values
                hidden = hidden.masked_fill(here[0].unsqueeze(-1), 0.0)
                more["vision_mask"] = here.unsqueeze(-1)
                more["deepstack_features"] = dict(zip(self._layers_of_levels, levels, strict=True))
            else:
                more["visual_pos_masks"], more["deepstack_visual_embeds"] = here, list(deepstack.values)

        def attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule) -> Tensor:
            at, tempering = places_of[layer_of(module)], self._tempering.get(layer_of(module))
            batch, cache = batches[at], caches[at].kv if layer_of(module) in self._index_dims else caches[at]
            if tempering is not None:
                query = (query * tempering.factors(positions[0]).view(-1, 1, 1)).to(query.dtype)
            if not self._why_general:
                if rule != self._rules[layer_of(module)]:
                    raise CheckpointError(f"{type(module).__name__} attends by another rule in each step")
                given = (each.contiguous() for each in (query, key, value))
                seen: Tensor = batch.attend(*given, cache)
                return seen.view(*query.shape[:2], -1)
            out: Tensor = batch.attend(query, key, value, cache, rule)
            return out.view(*query.shape[:2], -1)

        def choose(layer: int, asked: IndexQuery) -> tuple[Chosen, ...]:
            at = places_of[layer]
            chosen: tuple[Chosen, ...] = batches[at].choose(asked, caches[at].index)
            return chosen

        def carry(layer: int, compute: Callable[[Tensor, Any], Tensor], tokens: Tensor) -> Tensor:
            at = places_of[layer]
            made: Tensor = batches[at].carry(compute, tokens, caches[at])
            return made

        if self._axes > len(positions):  # the first is a token's own number in its sequence
            numbers = [
                torch.arange(len(part.slots) - (part.end - part.begin), len(part.slots)) for part in paged.segments
            ]
            positions = torch.cat([torch.cat(numbers).to(positions).unsqueeze(0), positions])
        out = self._run(hidden, positions, LibraryStep(attend, choose, carry), **more)
        return out if places is None else out[places]

    def _by_ids(self, token_ids: Tensor, batch: GeneralBatch | None = None) -> dict[str, Any]:
        """What the library's text model takes that follows from ids."""
        more: dict[str, Any] = {}
        if getattr(self._text, "hidden_size_per_layer_input", 0):
            more["per_layer_inputs"] = self._inputs_of_layers(token_ids)
        if _ROUTED in self._takes:
            kinds = torch.isin(token_ids, torch.cat([self._media, self._marks])).long()
            for part in () if batch is None else batch.segments:
                if part.end == part.begin + 1:  # one that was sampled is text, whichever it is
                    kinds[part.begin] = 0
            more[_ROUTED] = kinds.unsqueeze(0)
        return more

    def _inputs_of_layers(self, token_ids: Tensor) -> Tensor:
        """[1, n, layers, width]; what stands for a token of media here the model says, or it is the padding's."""
        look_up = self._text.get_per_layer_inputs
        if len(inspect.signature(look_up).parameters) > 1:
            ids = token_ids.masked_fill(torch.isin(token_ids, self._media), self._pad)
            found: Tensor = look_up(ids.unsqueeze(0), None)
        else:
            found = look_up(token_ids.unsqueeze(0))
        return found

    def _run(self, hidden: Tensor, positions: Tensor, step: LibraryStep, **more: Any) -> Tensor:
        places = positions.long().unsqueeze(1) if self._axes > 1 else positions[:1].long()
        given = {"inputs_embeds": hidden.unsqueeze(0), "position_ids": places, "use_cache": False}
        with computing(step):
            made = self._text(**given, **self._for_index, **more)
        out: Tensor = made.last_hidden_state[0]
        return out

    def _find_specs(self) -> dict[int, PagedKV]:
        """What each layer keeps, found out by one token."""
        found: dict[int, PagedKV] = {}
        self._narrower, self._index_dims, self._states = False, dict[int, int](), dict[int, SequenceState]()
        seeing = AttentionKind(spans=self.spans is not SpanRule.NOWHERE)

        def attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule) -> Tensor:
            width, rank = max(key.shape[-1], value.shape[-1]), rank_of(module)
            self._rules[layer_of(module)] = rule
            self._narrower |= key.shape[-1] != value.shape[-1] and not rank
            spec = PagedKV(query.shape[1], key.shape[1], width, seeing, rank)
            if found.setdefault(layer_of(module), spec) != spec:
                raise CheckpointError(f"{type(module).__name__} attends twice in one layer")
            return query.new_zeros(*query.shape[:2], value.shape[-1])

        def choose(layer: int, asked: IndexQuery) -> tuple[Chosen, ...]:
            self._index_dims[layer] = asked.key.shape[-1]
            return ()

        def carry(layer: int, compute: Callable[[Tensor, Any], Tensor], tokens: Tensor) -> Tensor:
            made = compute(tokens, held := Held())
            self._states[layer] = held.spec(self._chunks[layer])
            return made

        try:
            with torch.inference_mode():
                ids = torch.zeros(1, dtype=torch.int64, device=self.device)
                places = ids.expand(max(3, self._axes), 1)
                self._run(self.embed_tokens(ids), places, LibraryStep(attend, choose, carry), **self._by_ids(ids))
        except AttributeError as error:
            kind, of_ours = type(self._text).__name__, f"'{TextLinear.__name__}' object" in str(error)
            what = "asks a linear layer in 8 or 4 bits" if of_ours else "cannot compute a token"
            raise CheckpointError(f"{kind} {what}: {error}") from error
        except RuntimeError as error:
            if self.group.size == 1:
                raise
            kind = type(self._text).__name__
            raise CheckpointError(f"{kind}'s heads cannot be split over {self.group.size} ranks") from error
        if not found:
            raise CheckpointError(f"{type(self._text).__name__} does not let others compute its attention")
        layers = self._text.config.num_hidden_layers
        if (count := len(found) + len(self._states)) < layers:  # another sequence's, or none, would be read there
            kind = type(self._text).__name__
            raise CheckpointError(f"{layers - count} of {kind}'s {layers} layers keep states, and no keys and values")
        return dict(sorted(found.items()))

    def mixers(self) -> list[LibraryMixer]:
        """Each layer's, in order."""
        sources, places = sources_of(self._text), self._places
        made = list[CacheSpec]()
        for layer in places:
            if (state := self._states.get(layer)) is not None:
                made.append(state)
                continue
            kv = SharedKV(places[sources[layer]]) if layer in sources else self._specs[layer]
            made.append(IndexedKV(kv, self._index_dims[layer]) if layer in self._index_dims else kv)
        return [LibraryMixer(spec) for spec in made]

    @property
    def _places(self) -> dict[int, int]:
        """Where a layer is among those that keep something, by its number."""
        return {layer: at for at, layer in enumerate(sorted((*self._specs, *self._states)))}

    def backend(self, shape: CacheShape) -> AttentionBackend | GeneralBackend:
        """What makes its batches."""
        if self._why_general:
            return GeneralBackend(shape, self.device, self.spans)
        if isinstance(self._attention, str):
            return choose(self._attention, shape, self.dtype, self.device)
        return self._attention(shape)

    def _find_why_general(self) -> str:
        """Why `GeneralBackend` computes attention; empty where a back end of our decoder does. Raises CheckpointError
        where one was asked for that cannot."""
        if self._attention in (GENERAL, "torch") or (self._attention == "auto" and self.device.type == "cpu"):
            return "torch computes its attention"
        why = next((why for rule in self._rules.values() if (why := beyond_kernels(rule))), "")
        if self._narrower:
            why = "keys are wider than values"
        elif self.spans in OF_PROMPTS:
            why = "all tokens of a prompt, or of its media, see each other"
        elif _ROUTED in self._takes or self._axes > _MOST_AXES:
            why = "what it is told of tokens depends on where they stand in a step"
        if why and self._attention != "auto":
            raise CheckpointError(
                f"--attention {self._attention} is not for this model, which the library computes: {why}"
            )
        if why:
            _log.info("torch computes attention", why=why)
        return why

    def kernels(self) -> set[str]:
        """Those of weights in 8 or 4 bits."""
        return kernels_of(self.weights())

    def not_capturable(self) -> str:
        """Why there are no graphs, as far as it is known before a step was tried."""
        return self._why_general

    @property
    def hidden_size(self) -> int:
        """Of what is between layers."""
        return int(self._text.config.hidden_size)

    def logits(self, hidden: Tensor) -> Tensor:
        """[m, hidden] → float32 [m, vocabulary]."""
        out: Tensor = self._head(inputs_embeds=hidden.unsqueeze(0), use_cache=False).logits[0]
        return out.float()

    def likeliest(self, hidden: Tensor) -> Tensor:
        """[m, hidden] → int64 [m], of the tokens with the highest logits the first."""
        return self.logits(hidden).argmax(-1)


_MOST_AXES = 3
"""Of positions, as a plan has them."""

_ROUTED = "moe_mm_token_type_ids"
"""Names an argument: 0 where experts of text compute a token, else those of media."""

_MEDIA = "image_token_id", "video_token_id", "audio_token_id"
_MARKS = "image_start_token_id", "image_end_token_id", "video_start_token_id", "video_end_token_id"


def media_tokens(config: Any, names: Sequence[str] = (*_MEDIA, *_MARKS)) -> list[int]:
    """Those of the tokens of media, and of marks around them, that a configuration states."""
    found = [getattr(config, name, None) for name in names]
    return [each for each in found if each is not None]


def _tokens(config: Any, names: Sequence[str], device: torch.device) -> Tensor:
    return torch.tensor(media_tokens(config, names), dtype=torch.int64, device=device)


def _below_head(model: Any) -> tuple[nn.Module, str]:
    """Where a model keeps what it makes hidden states with, and what it calls that: all below its head of logits, or,
    where that is not one module, its text layers. Raises CheckpointError where it keeps neither apart."""
    if model.base_model is not model:
        return model, model.base_model_prefix
    text = decoder_of(model)
    for part in model.modules():
        for name, child in part.named_children():
            if child is text:
                return part, name
    raise CheckpointError(f"{type(model).__name__} does not keep its text layers apart")


class _Given(nn.Module):
    """Stands for a model that has made these hidden states, and for its text layers, where a head asks these; it has
    what else the head looks at."""

    def __init__(self, model: nn.Module, text: nn.Module) -> None:
        super().__init__()
        self._of = model, text  # none of its parts

    def __getattr__(self, name: str) -> Any:
        model, text = self.__dict__["_of"]
        found = getattr(model, name)
        return self if found is text else found

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> _Output:
        return _Output(inputs_embeds)


class _Output:
    """As much of the library's outputs as its heads look at."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: int) -> Tensor:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, _: str) -> None:
        return None


def text_alone(model: Any) -> None:
    """Takes away all that is not the decoder, its embeddings, other tables of tokens or the head of logits."""
    decoder = decoder_of(model)
    wanted = [decoder, head_of(model), model.get_input_embeddings(), *mark_tables_of(model).values()]
    puts_rows_in = list[str]()
    if decoder is model.base_model:
        towers = {id(part) for part in towers_within(decoder)}
        wanted[:1] = [part for part in decoder.children() if id(part) not in towers]
        whole = library().PreTrainedModel
        named = decoder.named_children()
        puts_rows_in += [name for name, part in named if id(part) in towers and not isinstance(part, whole)]
    keep_only(model, [part for part in wanted if part is not None])
    for name in puts_rows_in:
        setattr(decoder, name, _NoRows())


class _NoRows(nn.Module):
    """Stands for a part that puts rows among a prompt's embeddings, where there are none."""

    def forward(self, _: Tensor, embeddings: Tensor, **__: Any) -> Tensor:
        return embeddings
