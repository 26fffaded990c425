"""Training sequences, and the training forward against the reference implementation."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tokenizers import Tokenizer

from testkit import reference
from tools.demo_model.batches import Batch, Maker
from tools.demo_model.export import write_checkpoint
from tools.demo_model.net import Net, allowed, initialise
from tools.demo_model.pack import IGNORED, Packer, patches
from tools.demo_model.shape import ModelShape
from tools.demo_model.sizes import IMAGE_LIMITS, fit, pool
from tools.demo_model.turn import Turn

DEMO = Path(__file__).parents[3] / "models" / "demo"
CHAT = [Turn("a", "Is there a ring?", "Yes, there is a ring."), Turn("b", "Where is it?", "It is in the middle.")]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(DEMO / "tokenizer.json"))


@pytest.fixture(scope="module")
def batch() -> Batch:
    return Maker(DEMO / "tokenizer.json", seed=5, size=2)[2000]


def test_a_batch_is_a_function_of_seed_step_and_rank(batch: Batch) -> None:
    again, other = (Maker(DEMO / "tokenizer.json", 5, 2, rank)[2000] for rank in (0, 1))
    assert torch.equal(again.ids, batch.ids)
    assert again.patches is not None
    assert batch.patches is not None
    assert torch.equal(again.patches, batch.patches)
    assert (other.height, other.width) == (batch.height, batch.width)
    assert not torch.equal(other.ids, batch.ids)


def test_only_answers_are_learned(tokenizer: Tokenizer) -> None:
    packer = Packer(tokenizer)
    row = packer.begin(96, (2, 3), 1, None, None, None)
    assert packer.add(row, CHAT)
    assert packer.add(row, CHAT[:1])
    done = packer.finish(row)
    learned = [done["labels"][k] for k in range(96) if done["labels"][k] != IGNORED]
    text = tokenizer.decode(learned, skip_special_tokens=False)
    assert text == "".join(turn.answer + "<|im_end|>" for turn in (*CHAT, CHAT[0]))
    for kind, start, end in row.answers:
        answer = next(turn.answer for turn in CHAT if turn.kind == kind)
        assert tokenizer.decode(done["ids"][start:end].tolist()) == answer


def test_positions_stand_still_in_time_over_a_picture_and_each_branch_starts_behind_the_prefix(
    tokenizer: Tokenizer,
) -> None:
    packer = Packer(tokenizer)
    row = packer.begin(96, (2, 3), 1, None, None, None)
    packer.add(row, CHAT)
    packer.add(row, CHAT)
    done = packer.finish(row)
    start = int(done["slots"][0])
    assert done["places"][:, start : start + 6].tolist() == [
        [start] * 6,
        [start] * 3 + [start + 1] * 3,
        [start, start + 1, start + 2] * 2,
    ]
    after = start + 6
    assert done["places"][:, after].tolist() == [start + 3] * 3
    begins = [int(np.flatnonzero(done["branch"] == k)[0]) for k in (1, 2)]
    assert done["places"][:, begins[0]].tolist() == done["places"][:, begins[1]].tolist()


def test_a_branch_sees_the_prefix_and_itself_only() -> None:
    seen = allowed(torch.tensor([[0, 0, 1, 2, 2, -1]]))[0, 0] == 0
    assert seen.int().tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [1, 1, 0, 1, 0, 0],
        [1, 1, 0, 1, 1, 0],
        [1, 1, 0, 0, 0, 1],
    ]


def test_patches_and_sizes_are_those_of_the_reference_processor() -> None:
    rng = np.random.default_rng(1)
    for target, sizes in pool(1).items():
        assert all(fit(*size, *IMAGE_LIMITS) == target for size in sizes[:5])
    picture = Image.fromarray(rng.integers(0, 256, (128, 160, 3), dtype=np.uint8))
    expected, grid = reference.images_inputs(DEMO, [picture])
    assert grid.tolist() == [[1, 8, 10]]
    ours = torch.from_numpy(patches([picture, picture], 128, 160)[0]).float() / 127.5 - 1
    assert torch.allclose(ours, expected, atol=1e-6)


def random_net() -> Net:
    """Weights large enough that the pictures matter, rounded as they are stored."""
    net = Net(ModelShape())
    initialise(net, 1)
    with torch.no_grad():
        for parameter in net.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, parameter[0].numel() ** -0.5)
            parameter.copy_(parameter.half().float())
    return net


@pytest.mark.parametrize("kind", ["<|image_pad|>", "<|video_pad|>"])
def test_the_training_forward_is_that_of_the_reference(kind: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    net, pad, maker = random_net(), tokenizer.token_to_id(kind), Maker(DEMO / "tokenizer.json", seed=6, size=1)
    write_checkpoint(net.state_dict(), DEMO / "tokenizer.json", tmp_path)
    batch = next(batch for step in range(1000, 1100) if (pad in (batch := maker[step]).ids))
    assert batch.patches is not None
    pixels, (height, width) = batch.patches.float() / 127.5 - 1, (batch.height // 16, batch.width // 16)
    number = int(((batch.branch[0] == 0) | (batch.branch[0] == 1)).sum())
    ids, segments = batch.ids[:, :number], len(pixels)
    with torch.no_grad():
        rows, _ = net.see(pixels, height, width)
        mask = allowed(batch.branch)
        ours, _ = net.answer(batch.ids, batch.places, mask, batch.slots, rows, torch.arange(number))
        model = reference.model(tmp_path)
        if kind == "<|image_pad|>":
            grid, types = torch.tensor([[1, height, width]] * segments), (ids == pad).int()
            media = {"pixel_values": pixels.flatten(0, 1), "image_grid_thw": grid}
        else:
            grid, types = torch.tensor([[segments, height, width]]), 2 * (ids == pad).int()
            media = {"pixel_values_videos": pixels.flatten(0, 1), "video_grid_thw": grid}
        theirs = model(input_ids=ids, mm_token_type_ids=types, **media).logits[0]
    assert torch.allclose(ours, theirs, atol=1e-4)
