"""The tokenizer: byte-level BPE trained on the sentences of this small world, with Qwen's special tokens.

All 256 bytes are tokens, so nothing is unknown. Words split so that a single capital or digit stays one token (printed
text is read character by character), and a role name keeps its line end.
"""

from random import Random

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from tools.demo_model import talk
from tools.demo_model.ask import ask
from tools.demo_model.ask_many import ask_many, differing
from tools.demo_model.film import ask_film, random_film
from tools.demo_model.scene import FULL, random_scene
from tools.demo_model.words import BACKGROUNDS, COLOURS, SHAPES, plural

SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
SPLIT = r"\p{N}| ?\p{Lu}?\p{Ll}+\n?| ?[^\s\p{L}\p{N}]+|\p{L}|\s*[\r\n]+|\s+(?!\S)|\s+"
VOCABULARY = 768


def sentences(seed: int, number: int) -> list[str]:
    """Questions and answers of every kind."""
    rng = Random(seed)
    lines = ["user\n", "assistant\n", "system\n", "<0.5 seconds>", "<1.5 seconds>"]
    lines += [f" {word}" for word in (*SHAPES, *map(plural, SHAPES), *COLOURS, *BACKGROUNDS)] * 20
    lines += list(talk.RULES) * 5
    for _ in range(number):
        scene = random_scene(rng, FULL, 160, 160)
        pair, differs = differing(rng, FULL, 128, 128)
        film = ask_film(rng, random_film(rng, FULL, 96, 96, 4))
        for turn in (ask(rng, scene), ask(rng, scene), ask_many(rng, pair), differs, film, talk.small_talk(rng)):
            lines += [turn.question, turn.answer]
    return lines


def build(seed: int = 1, number: int = 3000) -> Tokenizer:
    """Train the tokenizer on `number` scenes' sentences: the same seed gives the same file."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sentences(seed, number), trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    return tokenizer
