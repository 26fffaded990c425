"""What users of Twinlens import: the clients, their errors, and builders of prompts.

    from twinlens import LlmClient, image

    with LlmClient("127.0.0.1:7002") as llm:
        print(llm.ask("What is in the picture?", image("cat.png")).text)

The messages, enums and stubs themselves are in `twinlens.v1`.
"""

from twinlens._version import __version__
from twinlens.aio import AsyncEncoderClient, AsyncLlmClient
from twinlens.answers import Answer, Completion
from twinlens.channel import Endpoint, Tls
from twinlens.client import EncoderClient, LlmClient
from twinlens.errors import InterruptedStreamError, NotReachableError, TwinlensError
from twinlens.prompts import (
    Prompt,
    assistant,
    audio,
    embed_request,
    generate_request,
    image,
    message,
    system,
    tool,
    tool_result,
    transcription,
    user,
    video,
)
from twinlens.streams import AsyncStream, Stream
from twinlens.v1 import SamplingParams

__all__ = [
    "Answer",
    "AsyncEncoderClient",
    "AsyncLlmClient",
    "AsyncStream",
    "Completion",
    "EncoderClient",
    "Endpoint",
    "InterruptedStreamError",
    "LlmClient",
    "NotReachableError",
    "Prompt",
    "SamplingParams",
    "Stream",
    "Tls",
    "TwinlensError",
    "__version__",
    "assistant",
    "audio",
    "embed_request",
    "generate_request",
    "image",
    "message",
    "system",
    "tool",
    "tool_result",
    "transcription",
    "user",
    "video",
]
