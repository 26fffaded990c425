"""Two ways to ask the model a held-out question: the reference implementation, or the running services."""

import io
from fractions import Fraction
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from PIL import Image

from common.hf.classes import declare_operators
from tools.demo_model.cases import Case
from tools.demo_model.sizes import FRAMES_PER_SECOND

MOST_TOKENS = 64


class Through(Protocol):
    """Something that answers a case in plain text, `at_once` cases at a time."""

    at_once: int

    def answer(self, case: Case) -> str: ...


def pictures(case: Case) -> list[Image.Image]:
    """The files of a case, decoded."""
    return [Image.open(io.BytesIO(file)).convert("RGB") for file in case.files]


class Transformers:
    """The reference: its processor and its model in float32, one question at a time, greedy."""

    at_once = 1

    def __init__(self, model: Path) -> None:
        declare_operators()
        import transformers

        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        self.processor = transformers.AutoProcessor.from_pretrained(model)
        self.model = transformers.AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32).eval()

    @torch.no_grad()
    def answer(self, case: Case) -> str:
        images = pictures(case)
        film = case.kind == "video"
        parts = [{"type": "video"}] if film else [{"type": "image"}] * len(images)
        messages = [{"role": "user", "content": [*parts, {"type": "text", "text": case.question}]}]
        text = self.processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        if film:
            frames = np.stack([np.asarray(image) for image in images])
            metadata = {
                "total_num_frames": len(frames), "fps": float(FRAMES_PER_SECOND), "width": frames.shape[2],
                "height": frames.shape[1], "duration": len(frames) / FRAMES_PER_SECOND,
            }  # fmt: skip
            media = {"videos": [frames], "video_metadata": [metadata], "do_sample_frames": True}
            inputs = self.processor(text=[text], return_tensors="pt", fps=FRAMES_PER_SECOND, **media)
        else:
            inputs = self.processor(text=[text], images=images, return_tensors="pt")
        out = self.model.generate(**inputs, max_new_tokens=MOST_TOKENS, do_sample=False)
        new = out[0, inputs["input_ids"].shape[1] :]
        return str(self.processor.tokenizer.decode(new, skip_special_tokens=True)).strip()


def movie(case: Case) -> bytes:
    """The frames of a film as a file: lossless, two frames a second."""
    import av

    images, file = pictures(case), io.BytesIO()
    with av.open(file, "w", format="matroska") as container:
        stream = container.add_stream("ffv1", rate=Fraction(FRAMES_PER_SECOND))
        stream.width, stream.height = images[0].size
        stream.pix_fmt = "bgr0"
        for image in images:
            container.mux(stream.encode(av.VideoFrame.from_image(image)))
        container.mux(stream.encode())
    return file.getvalue()


class Services:
    """The LLM service at an address, which asks its encoders: what users see."""

    at_once = 8

    def __init__(self, address: str) -> None:
        from twinlens import LlmClient, SamplingParams

        self.client = LlmClient(address)
        self.sampling = SamplingParams(temperature=0, max_tokens=MOST_TOKENS)

    def answer(self, case: Case) -> str:
        from twinlens import image, video

        media = [video(movie(case))] if case.kind == "video" else [image(file) for file in case.files]
        return self.client.ask(case.question, *media, sampling=self.sampling).text.strip()


class Both:
    """Asks both and keeps count of the answers that are not the same."""

    at_once = 1

    def __init__(self, reference: Through, services: Through) -> None:
        self.reference, self.services = reference, services
        self.unequal: list[tuple[Case, str, str]] = []

    def answer(self, case: Case) -> str:
        expected, given = self.reference.answer(case), self.services.answer(case)
        if expected != given:
            self.unequal.append((case, expected, given))
        return given
