"""A decoder that is transformers' own text model. Its attention is ours, over the paged cache; so it needs no cache of
its own, any number of sequences go in one batch, and a prompt in any number of chunks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from common.checkpoints.checkpoint import CheckpointError
from common.hf.classes import decoder_of, layers_of_levels, mark_tables_of, transformers
from common.telemetry import log
from llm_service.families.chunk_rule import ChunkRule
from llm_service.families.sight import OF_PROMPTS, Sight, SpanRule
from llm_service.layers.attention.backend import AttentionBackend, AttentionKind, CacheShape, MakesBackend
from llm_service.layers.attention.choose import choose
from llm_service.layers.attention.general_backend import GeneralBackend, GeneralBatch
from llm_service.layers.tensor_parallel import ALONE, TensorGroup
from llm_service.models.decoder import kernels_of
from llm_service.models.hf.attention import NAME, HfMixer, attend_as_ours, beyond_kernels
from llm_service.models.hf.cached_step import CachedStep
from llm_service.models.hf.head import take_layers
from llm_service.models.hf.index import take_indexers
from llm_service.models.hf.inputs import InputsByIds
from llm_service.models.hf.kept import find_kept
from llm_service.models.hf.latents import sources_of, take_latents
from llm_service.models.hf.linear import Fill
from llm_service.models.hf.partition import partition_model
from llm_service.models.hf.rotary import turn_by_sequence
from llm_service.models.hf.states import take_states
from llm_service.models.hf.step import HfStep, computing
from llm_service.models.layer_rules import take_tempering
from llm_service.models.model import Deepstack

GENERAL = "general"
"""The name of attention by torch, which supports every rule."""

_log = log.get("hf_decoder")


class HfDecoder:
    """Used in place of `Decoder`: embeddings in, hidden states out, and logits on demand. The host looks at prompts."""

    adds_first_level = shares_keys = keeps_small_cache = False
    decodes_alone = may_wait = True
    vocabulary = None

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
        """`model` is transformers'; only its text is needed, and this rank's partition of that is kept, on the device.
        Positions have `axes` axes. `spans` says which tokens see later ones; if all media tokens of a prompt do, these
        are `together`. `adds_rows`: rows are added to the token embeddings at their positions. `fill` reads what linear
        layers of ours still lack. `attention` is a back end's name or factory; `auto` is, on GPUs, our decoder's if it
        supports the layers' rules. Raises CheckpointError if the model cannot be served like this."""
        self.dtype, self.device, self.spans, self.group, self._axes = dtype, device, spans, group, axes
        self.kv_dtype, self.adds_rows = dtype, adds_rows
        self.together = tuple(together)
        partition_model(model, group)
        model.to(device)
        if fill is not None:
            fill(model)
        self._text = decoder_of(model)
        turn_by_sequence(self._text)
        self._embeddings: nn.Module = model.get_input_embeddings()
        self._tables, self._layers_of_levels = [*mark_tables_of(model).values()], layers_of_levels(model.config)
        take_layers(model, self._text)
        self._head = model
        self._tempering = dict(take_tempering(self._text))
        take_latents(self._text)
        self._for_index, chunks = take_indexers(self._text), take_states(self._text)
        self._by_ids = InputsByIds(model.config, self._text, device)
        transformers().AttentionInterface.register(NAME, attend_as_ours)
        for part in self._text.modules():
            if isinstance(part, transformers().PreTrainedModel):
                part.config._attn_implementation_internal = NAME
        seeing = AttentionKind(Sight(spans=spans))
        self._kept = find_kept(self._text, seeing, chunks, group.size, self._compute_one)
        self._attention = attention
        self._why_general = self._find_why_general()
        if not self._why_general:
            self._kept.attend_by_kinds(spans)

    def use_spans(self, spans: SpanRule) -> None:
        """Changes which tokens see later ones, for a trial; torch computes its attention."""
        self.spans = spans
        self._kept.use_spans(spans)

    @property
    def position_rows(self) -> int:
        """See `Decoder.position_rows`; it counts a token's own number by itself."""
        return 3

    @property
    def chunk_rule(self) -> ChunkRule:
        """Where a prompt may be cut, given what its tokens see."""
        return ChunkRule.of(self.spans, self.together)

    @property
    def forgets_answers(self) -> bool:
        """A token of an answer sees other tokens than it would in a prompt."""
        return any(rule.kind.sight.answer_window > 0 for rule in self._kept.rules.values())

    @property
    def text(self) -> nn.Module:
        """The layers, and what is around them."""
        text: nn.Module = self._text
        return text

    @property
    def layers(self) -> nn.ModuleList:
        """See `Model`: none of them is ours."""
        return nn.ModuleList()

    def compile_layers(self) -> None:
        """See `Model`."""

    def attention(self, _: str, /) -> MakesBackend:
        """See `Model`: it knows what is configured, and what its layers need."""
        return self.backend

    def join(self, embeddings: Tensor, _: Tensor, /) -> Tensor:
        """See `Model`: no draft head is transformers'."""
        return embeddings

    def ids_of_layers(self, token_ids: Tensor, _: Iterable[tuple[int, int]], /) -> Tensor:
        """See `Model`: it tells rows by their tokens."""
        return token_ids

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
        token_ids: Tensor | None = None,
        at_places: Sequence[Any] | None = None,  # noqa: ARG002 - no layers share keys, as far as is known
    ) -> Tensor:
        """As `Decoder.forward`; `token_ids` int [n] are for what a model looks up besides embeddings."""
        assert token_ids is not None, "`ids_of_layers` gives them"
        places_of = self._kept.places
        paged: GeneralBatch = batches[places_of[min(self._kept.keys)]]
        more = self._by_ids.of(token_ids, paged)
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
        if self._axes > len(positions):  # the first is a token's own number in its sequence
            numbers = [
                torch.arange(len(part.slots) - (part.end - part.begin), len(part.slots)) for part in paged.segments
            ]
            positions = torch.cat([torch.cat(numbers).to(positions).unsqueeze(0), positions])
        by_rule = bool(self._why_general)
        step = CachedStep(self._kept, places_of, caches, batches, positions, self._tempering, by_rule)
        out = self._run(hidden, positions, step, **more)
        return out if places is None else out[places]

    def _run(self, hidden: Tensor, positions: Tensor, step: HfStep, **more: Any) -> Tensor:
        places = positions.long().unsqueeze(1) if self._axes > 1 else positions[:1].long()
        given = {"inputs_embeds": hidden.unsqueeze(0), "position_ids": places, "use_cache": False}
        with computing(step):
            made = self._text(**given, **self._for_index, **more)
        out: Tensor = made.last_hidden_state[0]
        return out

    def _compute_one(self, step: HfStep) -> None:
        ids = torch.zeros(1, dtype=torch.int64, device=self.device)
        places = ids.expand(max(3, self._axes), 1)
        self._run(self.embed_tokens(ids), places, step, **self._by_ids.of(ids))

    def mixers(self) -> list[HfMixer]:
        """Each layer's, in order."""
        return [HfMixer(spec) for spec in self._kept.specs(sources_of(self._text))]

    def backend(self, shape: CacheShape) -> AttentionBackend | GeneralBackend:
        """The back end for this shape."""
        if self._why_general:
            return GeneralBackend(shape, self.device, self.spans)
        return choose(self._attention, shape, self.dtype, self.device)

    def _find_why_general(self) -> str:
        """Why `GeneralBackend` computes attention; empty if a back end of our decoder does. Raises CheckpointError if
        the configured one cannot."""
        if self._attention in (GENERAL, "torch") or (self._attention == "auto" and self.device.type == "cpu"):
            return "torch computes its attention"
        why = next((why for rule in self._kept.rules.values() if (why := beyond_kernels(rule))), "")
        if self._kept.narrower:
            why = "keys are wider than values"
        elif self.spans in OF_PROMPTS:
            why = "all tokens of a prompt, or of its media, see each other"
        elif self._by_ids.routes or self._axes > _MOST_AXES:
            why = "what it is told of tokens depends on where they stand in a step"
        if why and self._attention != "auto":
            raise CheckpointError(
                f"--attention {self._attention} is not for this model, which transformers computes: {why}"
            )
        if why:
            _log.info("torch computes attention", cause=why)
        return why

    def kernels(self) -> set[str]:
        """The kernels for weights in 8 or 4 bits."""
        return kernels_of(self.weights())

    def not_capturable(self) -> str:
        """Why there are no graphs, as far as it is known before a step was tried."""
        return self._why_general

    @property
    def hidden_size(self) -> int:
        """Width of hidden states between layers."""
        return int(self._text.config.hidden_size)

    @property
    def entry_size(self) -> int:
        """See `Decoder.entry_size`."""
        return self.hidden_size

    @property
    def exit_size(self) -> int:
        """See `Decoder.exit_size`."""
        return self.hidden_size

    def logits(self, hidden: Tensor) -> Tensor:
        """[m, hidden] → float32 [m, vocabulary]."""
        out: Tensor = self._head(inputs_embeds=hidden.unsqueeze(0), use_cache=False).logits[0]
        return out.float()

    def likeliest(self, hidden: Tensor) -> Tensor:
        """[m, hidden] → int64 [m], of the tokens with the highest logits the first."""
        return self.logits(hidden).argmax(-1)


_MOST_AXES = 3
"""Of positions, as a plan has them."""
