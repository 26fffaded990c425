"""Text weights out of checkpoints in every layout that they come in."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from common.checkpoints.checkpoint import Checkpoint, CheckpointError
from common.cpu.linear import Linear
from llm_service.layers.linear.parallel import PackedLinear
from llm_service.layers.moe.experts import Experts
from llm_service.layers.tensor_parallel import TensorGroup
from llm_service.model_config.text import TextConfig
from llm_service.models import filling, loader
from llm_service.models.loader import load_decoder
from llm_service.models.quantized import load_weights
from llm_service.worker.weights import describe
from testkit.checkpoints import FAMILIES, Family, Layout

CPU = torch.device("cpu")


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """All of them as they were read, not as they are laid out."""
    with pytest.MonkeyPatch.context() as patch:
        leave_plain(patch)
        return load_decoder(Checkpoint(folder), torch.float32, CPU).state_dict()


def leave_plain(patch: pytest.MonkeyPatch) -> None:
    for kind in (Linear, PackedLinear, Experts):
        patch.setattr(kind, "finalize", lambda self, **_: None)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("settings", [{"layout": "saved"}, {"sharded": True}, {"layout": "saved", "sharded": True}])
def test_every_layout_of_a_checkpoint_gives_the_same_decoder(
    checkpoints: Callable[..., Path], family: Family, settings: dict[str, Any]
) -> None:
    ours, theirs = weights(checkpoints(family)), weights(checkpoints(family, **settings))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoints_shape_is_read_alike_from_every_layout(checkpoints: Callable[..., Path], family: Family) -> None:
    hub, saved = (TextConfig.of(Checkpoint(checkpoints(family, layout=layout)).config) for layout in ("hub", "saved"))
    assert hub == saved


@pytest.mark.parametrize("tied", [True, False])
def test_a_head_is_the_embeddings_where_it_is_tied_and_its_own_where_it_is_not(
    checkpoints: Callable[..., Path], tied: bool
) -> None:
    decoder = load_decoder(Checkpoint(checkpoints("qwen3_vl", tied=tied)), torch.float32, CPU)
    hidden = torch.randn(2, decoder.config.hidden_size, generator=torch.Generator().manual_seed(1))
    by_embeddings = hidden @ decoder.embed_tokens.weight.T
    with torch.inference_mode():
        assert torch.allclose(decoder.logits(hidden), by_embeddings, atol=1e-5) is tied


@pytest.fixture
def copied(checkpoints: Callable[..., Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoints("qwen3_vl"), tmp_path / "copy"))


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, {"format": "pt"})


@pytest.mark.parametrize("same", [True, False])
def test_a_stored_head_that_is_not_the_table_of_tokens_counts_though_they_are_said_to_be_tied(
    checkpoints: Callable[..., Path], tmp_path: Path, same: bool
) -> None:
    """As transformers has it."""
    folder = Path(shutil.copytree(checkpoints("qwen3_vl", tied=True), tmp_path / "copy"))

    def store(tensors: dict[str, torch.Tensor]) -> None:
        table = next(each for name, each in tensors.items() if name.endswith("embed_tokens.weight"))
        tensors["lm_head.weight"] = table.clone() if same else table.flip(0).contiguous()

    rewrite(folder, store)
    decoder = load_decoder(Checkpoint(folder), torch.float32, CPU)
    assert decoder.config.tied is same
    hidden = torch.randn(2, decoder.config.hidden_size, generator=torch.Generator().manual_seed(1))
    table = decoder.embed_tokens.weight
    with torch.inference_mode():
        torch.testing.assert_close(decoder.logits(hidden), hidden @ (table if same else table.flip(0)).T)


def test_a_missing_weight_is_named(copied: Path) -> None:
    rewrite(copied, lambda tensors: tensors.pop(next(name for name in tensors if "layers.1.mlp.up_proj" in name)))
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.up_proj"):
        load_decoder(Checkpoint(copied), torch.float32, CPU)


@pytest.mark.parametrize(
    "part", ["layers.0.self_attn.q_proj.weight", "embed_tokens.weight", "layers.0.input_layernorm"]
)
def test_a_weight_of_another_shape_is_named(copied: Path, part: str) -> None:
    def cut(tensors: dict[str, torch.Tensor]) -> None:
        name = next(name for name in tensors if part in name and "visual" not in name)
        tensors[name] = tensors[name][:-1].clone()

    rewrite(copied, cut)
    with pytest.raises(CheckpointError, match=part.replace(".", r"\.")):
        load_decoder(Checkpoint(copied), torch.float32, CPU)


def test_weights_of_the_vision_side_are_not_needed(copied: Path) -> None:
    def drop(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if "visual" in name]:
            del tensors[name]

    before = weights(copied)
    rewrite(copied, drop)
    after = weights(copied)
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"rope_scaling": {"type": "longrope", "mrope_section": [6, 5, 5]}}, "longrope"),
        ({"rope_scaling": {"type": "yarn", "mrope_section": [6, 5, 5]}}, "original_max_position_embeddings"),
        ({"rope_scaling": {"rope_type": "default", "mrope_section": [6, 5, 6]}}, "mrope_section"),
        ({"use_sliding_window": True, "sliding_window": 100}, "sliding-window attention .* longer than 100 tokens"),
        ({"hidden_act": "relu"}, "relu"),
        ({"layer_types": ["full_attention"] * 3 + ["sliding_attention"]}, "type sliding_attention are"),
        ({"layer_types": ["full_attention"]}, "names 1 layers of 4"),
        ({"num_hidden_layers": None}, ""),
    ],
)
def test_a_shape_that_cannot_be_served_is_refused_by_name(copied: Path, change: dict[str, Any], said: str) -> None:
    config = json.loads((copied / "config.json").read_text())
    config["text_config"].update(change)
    if None in change.values():
        del config["text_config"]["num_hidden_layers"]
        said = "num_hidden_layers"
    with pytest.raises(CheckpointError, match=said):
        TextConfig.of(config)


class Counted:
    """A stored tensor that adds up how many numbers are read of it."""

    def __init__(self, stored: Any, read: list[int]) -> None:
        self._stored, self._read = stored, read

    def get_shape(self) -> list[int]:
        shape: list[int] = self._stored.get_shape()
        return shape

    def __getitem__(self, index: Any) -> torch.Tensor:
        part: torch.Tensor = self._stored[index]
        self._read.append(part.numel())
        return part


@pytest.mark.parametrize("layout", ["hub", "saved"])
@pytest.mark.parametrize("family", [*FAMILIES, "qwen3_vl_moe"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_reads_what_it_holds_and_nothing_else(
    checkpoints: Callable[..., Path], family: Family, layout: str, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []

    def counted(*given: Any) -> Any:
        return ((name, Counted(stored, read)) for name, stored in load_weights(*given))

    monkeypatch.setattr(loader, "load_weights", counted)
    leave_plain(monkeypatch)
    whole = 0
    for rank in range(ranks):
        read.clear()
        decoder = load_decoder(
            Checkpoint(checkpoints(family, layout=layout)), torch.float32, CPU, TensorGroup(rank, ranks)
        )
        held = sum(parameter.numel() for parameter in decoder.parameters())  # a shared one counts once
        assert sum(read) == held
        whole = whole or sum(parameter.numel() for parameter in load_decoder_alone(checkpoints, family, layout))
        assert held < 0.8 * whole


def load_decoder_alone(checkpoints: Callable[..., Path], family: Family, layout: str) -> list[torch.Tensor]:
    return list(load_decoder(Checkpoint(checkpoints(family, layout=layout)), torch.float32, CPU).parameters())


@pytest.mark.parametrize("family", [*FAMILIES, "qwen3_vl_moe"])
def test_ranks_hold_the_whole_between_them(
    checkpoints: Callable[..., Path], family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their partial sums are the one rank's products."""
    monkeypatch.setattr(TensorGroup, "sum", lambda self, x: x)
    checkpoint = Checkpoint(checkpoints(family))
    whole = load_decoder(checkpoint, torch.float32, CPU)
    parts = [load_decoder(checkpoint, torch.float32, CPU, TensorGroup(rank, 2)) for rank in range(2)]
    x = torch.randn(5, whole.config.hidden_size, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        for index in range(whole.config.layers):
            expected = whole.layers[index].mlp(x)
            torch.testing.assert_close(sum(part.layers[index].mlp(x) for part in parts), expected, rtol=1e-4, atol=1e-4)
        expected = whole.logits(x)
        both = torch.cat([part.lm_head(x) for part in parts], dim=1)
        torch.testing.assert_close(both[:, : expected.shape[1]], expected, rtol=1e-4, atol=1e-4)


def test_a_kind_of_model_that_is_not_known_is_refused_with_those_that_are(copied: Path) -> None:
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps({**config, "model_type": "no_such_model"}))
    with pytest.raises(CheckpointError, match=r"no_such_model is not supported.*qwen3_vl"):
        load_decoder(Checkpoint(copied), torch.float32, CPU)


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl_moe"])
@pytest.mark.parametrize("weight_dtype", ["", "int8"])
def test_a_weight_is_laid_out_as_soon_as_it_has_been_read(
    checkpoints: Callable[..., Path], family: Family, weight_dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that a checkpoint which fits when it is loaded fits while it is loaded."""
    place, plain, seen = filling._place, [], []

    def watched(module: Any, *given: Any, **options: Any) -> None:
        place(module, *given, **options)
        seen.append(module)
        matrices = [module.weight for module in seen if isinstance(module, PackedLinear) and module.whole()]
        matrices += [module.gate_up_proj for module in seen if isinstance(module, Experts) and module.whole()]
        plain.append(sum(matrix.numel() for matrix in matrices))

    monkeypatch.setattr(filling, "_place", watched)
    load_decoder(Checkpoint(checkpoints(family)), torch.float32, CPU, weight_dtype=weight_dtype)
    assert plain
    assert not any(plain)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_embeddings_stay_in_16_bits_and_are_computed_with_in_32(
    checkpoints: Callable[..., Path], dtype: torch.dtype
) -> None:
    folder = checkpoints("qwen3_vl", dtype=dtype)
    words = load_decoder(Checkpoint(folder), torch.float32, CPU).embed_tokens
    stored = next(tensor for name, tensor in load_file(folder / "model.safetensors").items() if "embed_tokens" in name)
    assert torch.equal(words.weight, stored)
    given = words(torch.tensor([3, 0, 3]))
    assert given.dtype == torch.float32
    assert torch.equal(given, stored[[3, 0, 3]].float())


@pytest.mark.parametrize(
    ("family", "ranks", "said"),
    [
        ("qwen3_vl", 2, "--enable-expert-parallel is for models with experts, and this one has none"),
        ("qwen3_vl_moe", 4, "6 experts cannot be given whole to 4 ranks"),
    ],
)
def test_experts_that_ranks_cannot_have_whole_are_refused(
    family: Family, ranks: int, said: str, checkpoints: Callable[..., Path]
) -> None:
    with pytest.raises(CheckpointError, match=said):
        load_decoder(Checkpoint(checkpoints(family)), torch.float32, CPU, TensorGroup(0, ranks, expert_parallel=True))


@pytest.mark.parametrize("layout", ["hub", "saved"])
def test_ranks_with_whole_experts_hold_no_more_than_with_parts_of_each(
    checkpoints: Callable[..., Path], layout: Layout
) -> None:
    """The router besides, which every rank has."""
    checkpoint = Checkpoint(checkpoints("qwen3_vl_moe", layout=layout))
    groups = TensorGroup(1, 2), TensorGroup(1, 2, expert_parallel=True)
    parts, whole = (describe(load_decoder(checkpoint, torch.float32, CPU, group), "").bytes for group in groups)
    assert whole == parts
