"""Write a trained state as a checkpoint in the ordinary Qwen3-VL format: `python -m tools.demo_model.export`."""

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

from tools.demo_model.places import TARGET, cache, saved
from tools.demo_model.shape import ModelShape, qwen_config
from tools.demo_model.sizes import (
    FRAMES_PER_SECOND,
    IMAGE_LIMITS,
    MAX_FRAMES,
    MIN_FRAMES,
    VIDEO_LIMITS,
)
from tools.demo_model.tokens import SPECIAL

TEMPLATE = Path(__file__).with_name("chat_template.jinja")


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a configuration file."""
    path.write_text(json.dumps(content, indent=2) + "\n")


def processor(kind: str, limits: tuple[int, int], **more: Any) -> dict[str, Any]:
    """A preprocessor configuration: `limits` are the least and most pixels."""
    return {
        f"{kind}_processor_type": {"image": "Qwen2VLImageProcessor", "video": "Qwen3VLVideoProcessor"}[kind],
        "processor_class": "Qwen3VLProcessor",
        "size": {"shortest_edge": limits[0], "longest_edge": limits[1]},
        "patch_size": 16,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "do_convert_rgb": True,
        "do_resize": True,
        "resample": 3,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        **more,
    }


def write_processors(target: Path) -> None:
    """Write the picture and the video preprocessor configurations."""
    image = {"image_processor_type": "Qwen2VLImageProcessorFast"}
    write_json(target / "preprocessor_config.json", processor("image", IMAGE_LIMITS) | image)
    video = processor(
        "video",
        VIDEO_LIMITS,
        do_sample_frames=True,
        fps=FRAMES_PER_SECOND,
        min_frames=MIN_FRAMES,
        max_frames=MAX_FRAMES,
        cap_pixels_per_frame=True,
    )
    write_json(target / "video_preprocessor_config.json", video)


def write_tokenizer(source: Path, target: Path) -> dict[str, int]:
    """Copy the tokenizer, write its configuration; the ids of the special tokens."""
    shutil.copyfile(source, target / "tokenizer.json")
    tokenizer = Tokenizer.from_file(str(source))
    ids = {token: tokenizer.encode(token).ids[0] for token in SPECIAL}
    added = {
        str(number): {
            "content": token, "lstrip": False, "normalized": False, "rstrip": False, "single_word": False,
            "special": True,
        }
        for token, number in ids.items()
    }  # fmt: skip
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "processor_class": "Qwen3VLProcessor",
        "added_tokens_decoder": added,
        "additional_special_tokens": list(SPECIAL[1:]),
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "bos_token": None,
        "unk_token": None,
        "clean_up_tokenization_spaces": False,
        "model_max_length": ModelShape().text.positions,
    }
    write_json(target / "tokenizer_config.json", config)
    shutil.copyfile(TEMPLATE, target / "chat_template.jinja")
    return ids


def write_checkpoint(weights: dict[str, Tensor], tokenizer: Path, target: Path) -> None:
    """`weights` are those of the training net; they are stored as float16 under the reference's names."""
    target.mkdir(parents=True, exist_ok=True)
    ids = write_tokenizer(tokenizer, target)
    write_json(target / "config.json", qwen_config(ModelShape(), ids))
    generation = {
        "bos_token_id": ids["<|endoftext|>"],
        "eos_token_id": [ids["<|im_end|>"], ids["<|endoftext|>"]],
        "pad_token_id": ids["<|endoftext|>"],
        "do_sample": False,
        "max_new_tokens": 64,
    }
    write_json(target / "generation_config.json", generation)
    write_processors(target)
    named = {f"model.{name}": weight.detach().to(torch.float16).contiguous() for name, weight in weights.items()}
    save_file(named, target / "model.safetensors", metadata={"format": "pt"})
    (target / "model.safetensors").chmod(0o644)


def main() -> None:
    """Export the saved state."""
    parser = argparse.ArgumentParser(prog="python -m tools.demo_model.export", description=__doc__)
    parser.add_argument("--to", type=Path, default=TARGET, help="folder of the checkpoint (default: models/demo)")
    parser.add_argument("--cache", type=Path, default=cache(), help="folder of the training state")
    args = parser.parse_args()
    state = saved(args.cache)
    write_checkpoint(state["average"], args.cache / "tokenizer.json", args.to)
    print(f"{args.to}: the state after step {state['step']}")


if __name__ == "__main__":
    main()
