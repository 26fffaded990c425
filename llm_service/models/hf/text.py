"""The text of a whole model of transformers."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from common.hf.classes import decoder_of, head_of, keep_only, mark_tables_of, towers_within, transformers


def text_alone(model: Any) -> None:
    """Takes away all that is not the decoder, its embeddings, other tables of tokens or the head of logits."""
    decoder = decoder_of(model)
    wanted = [decoder, head_of(model), model.get_input_embeddings(), *mark_tables_of(model).values()]
    puts_rows_in = list[str]()
    if decoder is model.base_model:
        towers = {id(part) for part in towers_within(decoder)}
        wanted[:1] = [part for part in decoder.children() if id(part) not in towers]
        whole = transformers().PreTrainedModel
        named = decoder.named_children()
        puts_rows_in += [name for name, part in named if id(part) in towers and not isinstance(part, whole)]
    keep_only(model, [part for part in wanted if part is not None])
    for name in puts_rows_in:
        setattr(decoder, name, _NoRows())


class _NoRows(nn.Module):
    """Takes the place of a part that puts rows among a prompt's embeddings, where there are none."""

    def forward(self, _: Tensor, embeddings: Tensor, **__: Any) -> Tensor:
        return embeddings
