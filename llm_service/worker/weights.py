"""A rank's weights and their bytes, for operators."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from torch import nn

from common.cpu.linear import LaidOut, Linear
from llm_service.layers.linear.quantized_weight import Number, QuantizedWeight, StackedWeight
from llm_service.layers.moe.experts import Experts, GroupedProduct
from llm_service.model_config.served import Weights

Weighty = LaidOut | GroupedProduct


def describe(model: nn.Module, quantization: str) -> Weights:
    """Describes a model whose weights are final; `quantization` names what has quantised them, if anything."""
    plain = {parameter.data_ptr(): parameter.nbytes for parameter in model.parameters() if parameter.numel()}
    numbers: Counter[Number] = Counter()
    memory = short = total = 0
    for weight in _laid_out(model):
        total += weight.nbytes
        number = getattr(weight, "number", None)
        if isinstance(number, Number):
            numbers[number] += weight.nbytes
            memory += weight.nbytes if isinstance(weight, QuantizedWeight) else 0
            short += weight.nbytes if getattr(weight, "rounded_inputs", None) else 0
    if not numbers:
        return Weights(bytes=total + sum(plain.values()))
    number = max(numbers, key=lambda each: numbers[each])
    every = total + sum(plain.values())
    if 2 * short > numbers.total():
        return Weights(quantization, number.value, number.bits, bytes=every, inputs=number.value)
    where = "memory" if 2 * memory > numbers.total() else "registers"
    return Weights(quantization, number.value, number.bits, where, every)


def _laid_out(model: nn.Module) -> Iterator[Weighty]:
    """Every weight that has a form of its own."""
    for module in model.modules():
        found: list[Weighty] = []
        if isinstance(module, Linear) and module.laid_out is not None:
            found.append(module.laid_out)
        elif isinstance(module, Experts):
            found += [each for pair in module.laid_out for each in pair]
            found += module.grouped or ()
        for each in found:
            if isinstance(each, StackedWeight):
                yield from each.parts
            else:
                yield each
