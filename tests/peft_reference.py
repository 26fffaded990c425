"""LoRA adapters as peft makes, saves and computes them, for parity tests. peft is imported by those that run: every
process of a suite imports this module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from testkit import reference


class PeftReference:
    """transformers' model of a checkpoint with random adapters, numbered from 1; 0 is none. `folders` are those that
    peft saved. The file of an adapter with a `dtype` has that type."""

    def __init__(self, directory: Path, folder: Path, adapters: Sequence[Mapping[str, Any]]) -> None:
        from peft import get_peft_model

        self._directory = directory
        self._names = [f"adapter{number}" for number, _ in enumerate(adapters, 1)]  # a bare number is a layer's to peft
        self.folders = [folder / name for name in self._names]
        configs = [_config(given) for given in adapters]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self._model: Any = get_peft_model(reference.new_model(directory), configs[0], adapter_name=self._names[0])
            for name, config in zip(self._names[1:], configs[1:], strict=True):
                self._model.add_adapter(name, config)
        for name, given in zip(self._names, adapters, strict=True):
            own = [weight for key, weight in self._model.named_parameters() if key.endswith(f".{name}.weight")]
            for weight in own:
                weight.data = weight.data.to(given.get("dtype", torch.float32))
            self._model.save_pretrained(str(folder), selected_adapters=[name])
            for weight in own:
                weight.data = weight.data.float()  # as peft loads them

    def generate(self, number: int, inputs: dict[str, torch.Tensor], tokens: int) -> list[int]:
        """Greedy token ids with an adapter, or with none."""
        own = self._model.get_base_model()
        if not number:
            with self._model.disable_adapter():
                return reference.reference_generate(self._directory, inputs, tokens, by=own)
        self._model.set_adapter(self._names[number - 1])
        return reference.reference_generate(self._directory, inputs, tokens, by=own)


def fits_for_peft(pattern: str, name: str) -> bool:
    """Whether peft applies an entry of `rank_pattern` or `alpha_pattern` to a module."""
    from peft.utils.other import get_pattern_key

    return get_pattern_key([pattern], name) == pattern != name


def _config(given: Mapping[str, Any]) -> Any:
    """Neither matrix is initialised with zeros."""
    from peft import LoraConfig

    return LoraConfig(**{field: value for field, value in given.items() if field != "dtype"}, init_lora_weights=False)
