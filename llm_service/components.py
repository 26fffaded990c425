"""What an LLM service is made of."""

from __future__ import annotations

from dataclasses import dataclass

from llm_service.config import LlmConfig
from llm_service.convert.requests import RequestReader
from llm_service.embedder import Embedder
from llm_service.encoders.encoder_cache import EncoderCache
from llm_service.encoders.pool import EncoderPool
from llm_service.encoders.receiver import RowReceiver
from llm_service.engine_client.client import EngineClient
from llm_service.generation.adapters import Adapters
from llm_service.generation.generator import Generator
from llm_service.prompt.builder import PromptBuilder
from llm_service.reranker import Reranker


@dataclass(frozen=True, slots=True)
class Components:
    """What the servicer speaks for. `kv_layout` is what other services' KV blocks must be like to be exchanged, empty
    where none are. `max_context` are the tokens of a context, as long as the engine has not said how many
    there is memory for."""

    config: LlmConfig
    names: tuple[str, ...]
    architecture: str
    digest: str
    kv_layout: bytes
    max_context: int
    requests: RequestReader
    prompts: PromptBuilder
    embedder: Embedder
    reranker: Reranker | None
    generator: Generator
    adapters: Adapters
    engine: EngineClient
    encoder_cache: EncoderCache
    receiver: RowReceiver
    pool: EncoderPool
