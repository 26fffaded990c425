"""The parts of an LLM service."""

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
    """What the servicer serves. `kv_layout` must be equal for services to exchange KV blocks, and is empty if they
    exchange none. `max_context` is the context's length until the engine reports how much memory there is."""

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
