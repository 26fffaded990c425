"""One tiny checkpoint through both services, beside the library: ids and greedy tokens must be its own."""

from __future__ import annotations

import inspect
import warnings
import wave
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import wraps
from io import BytesIO
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from common.library import LibraryModel
from common.library_classes import class_of, config_of, library, speaking
from common.library_layouts import LAYOUTS, VoxtralLayout
from common.library_models import describe, own_adapters
from common.library_processors import SOUND_RATE, frame_of, processor_of
from encoder_service.media.audio import read_track
from encoder_service.media.limits import MediaLimits
from encoder_service.media.video import open_reader
from llm_service.layers.gdn.backend import CHUNK
from tools.demo_media import film
from tools.launcher import NotStartedError, Service
from twinlens import Answer, LlmClient, SamplingParams, TwinlensError, audio, image, user, video
from twinlens.prompts import generate_request

TOKENS = 32
_BLOCK = 16
_STATES = "linear_attention"
"""What a configuration calls layers with states, of which snapshots are kept as they are cut."""
_START_SECONDS = 200.0
_SECONDS = 120.0
_FLAGS = ("--listen", "127.0.0.1:0", "--threads", "1")
_ENCODER_FLAGS = ("--decode-processes", "1", "--store-bytes", "64MiB", "--staging-bytes", "256MiB")
_LLM_FLAGS = ("--kv-cache-bytes", "32MiB", "--row-cache-bytes", "64MiB")


@dataclass(frozen=True, slots=True)
class Film:
    """A video as a file, shown with its sound or without, and with so many frames of each second, or as the model has
    it."""

    file: bytes
    with_sound: bool = False
    fps: float | None = None

    def heard(self) -> np.ndarray:
        """Its sound, as `Tones.heard`."""
        found = read_track(self.file, MediaLimits().bounds)
        assert found is not None, "it has a track"
        return found[1]


@dataclass(frozen=True, slots=True)
class Tones:
    """A sound: samples [n] int16, `rate` of them a second."""

    samples: np.ndarray
    rate: int = SOUND_RATE

    def file(self) -> bytes:
        """As WAV."""
        out = BytesIO()
        with wave.open(out, "wb") as wav:
            wav.setnchannels(1)
            wav.setsampwidth(2)
            wav.setframerate(self.rate)
            wav.writeframes(self.samples.tobytes())
        return out.getvalue()

    def heard(self) -> np.ndarray:
        """What becomes of the file: float32, full scale is 1."""
        return self.samples.astype(np.float32) / 32768


Part = str | Image.Image | Film | Tones
Prompt = list[Part]


def picture(seed: int, width: int, height: int) -> Image.Image:
    """Coarse colours, so that two pictures differ in what can be seen of them."""
    coarse = np.random.default_rng(seed).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


def tones(seed: int, seconds: float) -> Tones:
    """A note a quarter of a second, each with overtones of its own, so that two sounds differ in what can be heard."""
    draw = np.random.default_rng(seed)
    at = np.arange(round(seconds * SOUND_RATE)) / SOUND_RATE
    pitch = draw.uniform(120, 900, (len(at) // 4000 + 1, 3))[np.arange(len(at)) // 4000]
    samples = np.sin(2 * np.pi * pitch * at[:, None]).mean(1) + draw.normal(0, 0.02, len(at))
    return Tones((12_000 * samples).astype(np.int16))


VIDEO = "a video"
SOUND = "a sound"
TWO_SOUNDS = "two sounds"
TWO = "two of different sizes"
RANKS = "two ranks"
OURS = "our decoder"
_COMPANY: dict[str, Prompt] = {
    "a map": ["Who was the first to draw a map of the moon, and with what?"],
    "a clock": ["How does a clock know how long a second is?"],
}
"""Asked besides, so that each prompt is beside three others at least."""
_TOGETHER = 4
PROMPTS: dict[str, Prompt] = {
    "text": ["Tell me about two red circles."],
    "one picture": [picture(1, 120, 90), "What is in the picture?"],
    TWO: ["Left: ", picture(2, 64, 150), " and right: ", picture(3, 200, 60), "\n\nWhich is red?"],
}


def film_prompt() -> Prompt:
    """A question about a video."""
    return ["First this: ", Film(film()), " What moves?"]


def sound_prompts() -> dict[str, Prompt]:
    """Questions about one sound, and about two of different length."""
    return {
        SOUND: [tones(1, 1.3), "What is said?"],
        TWO_SOUNDS: ["First: ", tones(2, 0.9), " then: ", tones(3, 2.2), " Which is higher?"],
    }


FILM_WITH_SOUND = "a video with its sound"


def sounding_film(seed: int, seconds: float, heard: float, rate: int = 8, fps: float | None = None) -> Film:
    """A video of so many seconds, with a sound of its own of `heard` seconds, and so many `fps` to be shown."""
    return Film(film(seconds, rate, tones(seed, heard).samples), with_sound=True, fps=fps)


def sounding_prompts() -> dict[str, Prompt]:
    """Questions about videos with their sound: alone, with texts around, beside a picture and another sound, and where
    there is more, or less, to be heard than seen."""
    return {
        FILM_WITH_SOUND: [sounding_film(4, 0.5, 0.6), "Tell me what you hear, and who says it."],
        "a video with more sound": ["See ", sounding_film(5, 0.25, 4.7), " and say: what moves?"],
        "two frames a second, and less sound": [
            "See ",
            sounding_film(6, 2.0, 0.8, fps=2.0),
            " and say: what is heard?",
        ],
        "a video with its sound in company": [
            *("First ", tones(7, 0.8), " then ", picture(7, 90, 60), " and "),
            *(sounding_film(8, 0.25, 2.1), " and again ", sounding_film(9, 0.5, 1.0, rate=4), "\n\nWhich is louder?"),
        ],
    }


class Differs(Exception):
    """What the services say is not what the library says."""


class Reference:
    """The library itself over a checkpoint, on the CPU in float32."""

    def __init__(self, folder: Path) -> None:
        config = config_of(folder)
        self._lays_out_chats = LAYOUTS.get(config.model_type) is VoxtralLayout
        chats = library().AutoProcessor
        self.processor = chats.from_pretrained(folder) if self._lays_out_chats else processor_of(folder)
        template = folder / "chat_template.jinja"
        self._template = self.processor.chat_template
        if self._template is None and template.exists():  # some processors do not read it
            self._template = template.read_text("utf-8")
        frame = None if self._lays_out_chats else frame_of(self.processor)
        self._frames_texts = frame is not None and frame.always
        given: dict[str, Any] = {"config": config, "dtype": torch.float32, "local_files_only": True}
        self.model = class_of(config).from_pretrained(folder, **given).eval()
        self._adapters = own_adapters(self.model.config, folder)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Already found a `peft_config`")  # there may be several
            for modality, path in self._adapters.items():
                if path != ".":  # which the library has loaded
                    self.model.load_adapter(str(folder), modality, adapter_kwargs={"subfolder": path})
        if config.model_type in _VIDEOS_WHOLE:
            self.model.get_video_features = _in_parts(self.model.get_video_features)
        for model in (self.model, speaking(self.model)):
            model.generation_config.eos_token_id = None

    def inputs(self, parts: Sequence[Part]) -> dict[str, Any]:
        """What its processor makes of one user message."""
        if self._lays_out_chats:
            chat = [{"role": "user", "content": list(map(_in_chat, parts))}]
            return dict(self.processor.apply_chat_template(chat, tokenize=True, return_dict=True))
        content = [{"type": "text", "text": part} if isinstance(part, str) else {"type": _kind(part)} for part in parts]
        chat = [{"role": "user", "content": content}]
        told: dict[str, Any] = {"chat_template": self._template, "add_generation_prompt": True}
        text = self.processor.apply_chat_template(chat, tokenize=False, **told)
        options: dict[str, Any] = {"text": [text], "return_tensors": "pt"}
        options["add_special_tokens"] = not text.startswith("<s>")
        media = self._media(parts)
        if not media and not self._frames_texts:  # some processors want a picture in every text
            made = dict(self.processor.tokenizer(**options))
            if "token_type_ids" in self.processor.model_input_names:
                made["token_type_ids"] = torch.zeros_like(made["input_ids"])
            return made
        if "mm_token_type_ids" in inspect.signature(self.model.forward).parameters:
            options["return_mm_token_type_ids"] = True
        made = self.processor(**options, **media)
        return dict(made.to(self.model.dtype))  # some make pixels of 16 bits

    @torch.no_grad()
    def rows(self, modality: str, inputs: Mapping[str, Any]) -> Tensor:
        """What its tower makes of the only item of such inputs, [n, width]."""
        compute = getattr(self.model.base_model, f"get_{modality}_features")
        taken = inspect.signature(compute).parameters
        made = compute(**{name: value for name, value in inputs.items() if name in taken}, return_dict=True)
        rows: Tensor = made.pooler_output
        return rows

    def _media(self, parts: Sequence[Part]) -> dict[str, Any]:
        stills = [part for part in parts if isinstance(part, Image.Image)]
        films = [open_reader(part.file) for part in parts if isinstance(part, Film)]
        media: dict[str, Any] = {"images": stills} if stills else {}
        if heard := [part for part in parts if isinstance(part, Tones) or (isinstance(part, Film) and part.with_sound)]:
            media["audio"] = [part.heard() for part in heard]
        if any(isinstance(part, Film) for part in heard):
            shown = [part for part in parts if isinstance(part, Film)]
            media["audio_from_video_indices"] = [
                next(at for at, each in enumerate(shown) if each is part) if isinstance(part, Film) else None
                for part in heard
            ]
            media["load_audio_from_video"] = True
        if films:
            media["videos"] = [each.get_batch(range(len(each))).asnumpy() for each in films]
            media["video_metadata"] = [_about(each) for each in films]
            if rates := {part.fps for part in parts if isinstance(part, Film) and part.fps is not None}:
                (media["fps"],) = rates  # one for all
                media["do_sample_frames"] = True
            elif not self.processor.video_processor.do_sample_frames:
                for about in media["video_metadata"]:
                    about["frames_indices"] = list(range(about["total_num_frames"]))
        return media

    @torch.no_grad()
    def tokens(self, inputs: Mapping[str, Any]) -> list[int]:
        """Greedy ones, whatever ends an answer; where there are items with the adapter that the checkpoint has for
        them, if it has one."""
        if self._adapters:
            self._choose_adapter({kind for kind, name in _TOLD_BY if name in inputs})
        more = {"use_audio_in_video": True} if self._has_sound_in_video(inputs) else {}
        if "sample" in inspect.signature(self.model.forward).parameters:  # draws noise for sounds
            more["sample"] = False
        model = self.model if "pixel_values" in inputs else speaking(self.model)
        out = model.generate(**inputs, **more, max_new_tokens=TOKENS, do_sample=False)
        return [int(token) for token in out[0, inputs["input_ids"].shape[1] :]]

    def _choose_adapter(self, kinds: set[str]) -> None:
        """That of the first of a prompt's modalities that has one."""
        chosen = next((kind for kind in self._adapters if kind in kinds), None)
        if chosen is None:
            self.model.disable_adapters()
            return
        self.model.enable_adapters()
        if self._adapters[chosen] != ".":
            self.model.set_adapter(chosen)

    def _has_sound_in_video(self, inputs: Mapping[str, Any]) -> bool:
        """A video begins with its sound's mark, by which the model's own rule of places tells it as well."""
        starts = [getattr(self.model.config, f"{kind}_start_token_id", None) for kind in ("vision", "audio")]
        ids = inputs["input_ids"][0].tolist()
        return None not in starts and starts in [ids[at : at + 2] for at in range(len(ids))]


_TOLD_BY = ("image", "image_pixel_values"), ("audio", "input_features"), ("audio", "audio_input_features")
"""By which of its tensors a prompt is known to have items of a modality, in models with adapters for some."""


_VIDEOS_WHOLE = ("nemotron_h_omni",)
"""Kinds whose forward fails on a video in this release, as it joins what its tower gives as one: it gets that in
parts."""


def _in_parts(compute: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(compute)  # the library asks for its arguments
    def parts(*given: Any, **named: Any) -> Any:
        made = compute(*given, **named)
        made.pooler_output = tuple(made.pooler_output)
        return made

    return parts


def _kind(part: Part) -> str:
    return "video" if isinstance(part, Film) else "audio" if isinstance(part, Tones) else "image"


def _in_chat(part: Part) -> dict[str, str]:
    """As conversations have it whose processor takes media among them."""
    if isinstance(part, Tones):
        return {"type": "audio", "base64": b64encode(part.file()).decode()}
    assert isinstance(part, str), "sounds alone are taken so"
    return {"type": "text", "text": part}


def _about(reader: Any) -> dict[str, Any]:
    total, fps = len(reader), float(reader.get_avg_fps())
    height, width = reader[0].shape[:2]
    return {"total_num_frames": total, "fps": fps, "duration": total / fps, "height": height, "width": width}


def prompts_for(found: LibraryModel, reference: Reference) -> dict[str, Prompt]:
    """Those that a model is compared by: with a video where it takes one, and the library itself gets through it."""
    asked = {name: parts for name, parts in PROMPTS.items() if all(_known(part, found) for part in parts)}
    if "audio" in found.placeholders:
        asked |= {name: _at_rate(parts, found.sound_rate) for name, parts in sound_prompts().items()}
    asked |= sounding_prompts() if found.video_sound else {}
    asked = {name: parts for name, parts in asked.items() if not _depends_on_others(parts, found)}
    if "video" in found.placeholders and _gets_through(film_prompt(), reference):
        asked[VIDEO] = film_prompt()
    for name, parts in _COMPANY.items():
        if len(asked) < _TOGETHER:
            asked[name] = parts
    return asked


def _at_rate(parts: Prompt, rate: int) -> Prompt:
    """With sounds of so many samples a second, none of which is made up then."""
    return [replace(part, rate=rate) if isinstance(part, Tones) else part for part in parts]


def _depends_on_others(parts: Prompt, found: LibraryModel) -> bool:
    kinds = [_kind(part) for part in parts if not isinstance(part, str)]
    return len(kinds) > 1 and not {*found.alone}.isdisjoint(kinds)


def _gets_through(parts: Prompt, reference: Reference) -> bool:
    try:
        reference.tokens(reference.inputs(parts))
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError):
        return False
    return True


def _known(part: Part, found: LibraryModel) -> bool:
    return isinstance(part, str) or _kind(part) in found.placeholders


def through_services(folder: Path, step_tokens: int = 16) -> set[str]:
    """Has both services answer prompts: in short steps each alone, and all beside each other, twice, when their prompts
    are cached; and the same at once, on two ranks where the library has a plan for them. Returns the prompts' names,
    `RANKS` where there were two, and `OURS` where our decoder computed. Raises Differs where an answer is not the
    library's, and NotStartedError, with the last that was said, where a service does not start."""
    found = describe(folder)
    reference = Reference(folder)
    prompts = prompts_for(found, reference)
    inputs = {name: reference.inputs(parts) for name, parts in prompts.items()}
    expected = {name: reference.tokens(given) for name, given in inputs.items()}
    if len(set(map(tuple, expected.values()))) < len(expected):
        raise Differs("the library answers two prompts alike, which proves nothing")
    counts = {name: given["input_ids"].shape[1] for name, given in inputs.items()}
    names = list(prompts)
    with services(folder, step_tokens) as (short, whole, ranks), ThreadPoolExecutor(len(names)) as pool:
        for client, steps in ((short, "short steps"), (whole, f"at once on {ranks} ranks")):
            for name in names:
                _check(f"{name}, {steps}, alone", _asked(client, prompts[name]), expected[name], counts[name])
            for how in ("beside others", "cached"):
                answers = list(pool.map(lambda name, client=client: _asked(client, prompts[name]), names))
                for name, answer in zip(names, answers, strict=True):
                    what = f"{name}, {steps}, {how}"
                    _check(what, answer, expected[name], counts[name])
                    if answer.started.cached_tokens < kept_of(found, counts[name]):
                        raise Differs(f"{what}: {answer.started.cached_tokens} of {counts[name]} tokens were cached")
    logs = [(folder / f"{name}.log").read_text("utf-8") for name in ("llm", "ranks" if ranks > 1 else "whole")]
    if len({_OURS in text for text in logs}) > 1:
        raise Differs("our decoder computes on one rank, and the library on two")
    return {*prompts, *([RANKS] if ranks > 1 else []), *([OURS] if _OURS in logs[0] else [])}


def kept_of(found: LibraryModel, count: int) -> int:
    """How much of a prompt of so many tokens the prefix cache has of it, where it has all that it may."""
    types = found.text.get("layer_types") or found.text.get("layers_block_type") or ()
    each = CHUNK if _STATES in types else _BLOCK
    return (count - 1) // each * each


_OURS = "our decoder computes the text"
"""What the LLM service's log says."""


def _check(what: str, answer: Answer, expected: Sequence[int], count: int) -> None:
    if answer.started.prompt_tokens != count:
        raise Differs(f"{what}: {answer.started.prompt_tokens} prompt tokens, the library has {count}")
    if (said := answer.choices[0].token_ids) != expected:
        at = next(at for at, (one, other) in enumerate(zip(said, expected, strict=True)) if one != other)
        raise Differs(f"{what}: token {at} is another one")


def _asked(client: LlmClient, parts: Sequence[Part]) -> Answer:
    out, sampling = Answer(), SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
    try:
        with client.generate(generate_request(user(*map(_sent, parts)), sampling), timeout=_SECONDS) as events:
            for event in events:
                out.add(event)
    except TwinlensError as error:
        raise Differs(str(error)) from error
    return out


def _sent(part: Part) -> Any:
    if isinstance(part, str):
        return part
    if isinstance(part, Film):
        return video(part.file, with_sound=part.with_sound, fps=part.fps)
    if isinstance(part, Tones):
        return audio(part.file())
    file = BytesIO()
    part.save(file, "PNG")
    return image(file.getvalue())


@contextmanager
def services(folder: Path, step_tokens: int) -> Iterator[tuple[LlmClient, LlmClient, int]]:
    """An encoder service and two LLM services over a checkpoint for the length of the block, and clients of these: one
    computes in steps of so many tokens beside three answers, the other a prompt at once, on so many ranks as are
    returned: two, or one where the library has no plan for more."""
    with ExitStack() as running:
        flags = ["--model", str(folder), *_FLAGS, *_ENCODER_FLAGS]
        with _told(folder, "encoder") as errors:
            encoder = running.enter_context(Service("the encoder service", "encoder_service", flags, errors=errors))
            address = encoder.wait_ready(_START_SECONDS)
        steps = "--max-step-tokens", str(step_tokens + _TOGETHER - 1), "--max-running", str(_TOGETHER)
        llm = ["--model", str(folder), *_FLAGS, *_LLM_FLAGS, "--encoders", address]
        with _told(folder, "llm") as errors, _told(folder, "ranks") as others:
            one = running.enter_context(Service("the LLM service", "llm_service", [*llm, *steps], errors=errors))
            two = running.enter_context(Service("the LLM service", "llm_service", [*llm, "--tp", "2"], errors=others))
            short = running.enter_context(LlmClient(one.wait_ready(_START_SECONDS)))
            ranks = 2 if _serves(two) else 1
        if ranks == 1:
            if not any(why in _last(folder, "ranks") for why in _NO_RANKS):
                raise Differs(_last(folder, "ranks"))
            with _told(folder, "whole") as errors:
                two = running.enter_context(Service("the LLM service", "llm_service", llm, errors=errors))
                two.wait_ready(_START_SECONDS)
        yield short, running.enter_context(LlmClient(two.address)), ranks


_NO_RANKS = "the library has no plan", "cannot be split", "over 2 ranks"
"""Of why two ranks are refused; the last is of a trial that finds the library's plan to compute something else."""


def _serves(service: Service) -> bool:
    try:
        service.wait_ready(_START_SECONDS)
    except NotStartedError:
        return False
    return True


@contextmanager
def _told(folder: Path, name: str) -> Iterator[IO[str]]:
    """Where a service writes; the last that one that did not start has said is in the error."""
    try:
        with (folder / f"{name}.log").open("w", encoding="utf-8") as errors:
            yield errors
    except NotStartedError as error:
        raise NotStartedError(f"{error}: {_last(folder, name)}") from None


def _last(folder: Path, name: str) -> str:
    return ((folder / f"{name}.log").read_text(encoding="utf-8").splitlines() or [""])[-1]
