from twinlens.v1 import media_pb2 as _media_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_STRUCTURE: _ClassVar[FinishReason]

class ToolFormat(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TOOL_FORMAT_UNSPECIFIED: _ClassVar[ToolFormat]
    TOOL_FORMAT_JSON: _ClassVar[ToolFormat]
    TOOL_FORMAT_XML: _ClassVar[ToolFormat]
    TOOL_FORMAT_GLM: _ClassVar[ToolFormat]
    TOOL_FORMAT_MISTRAL: _ClassVar[ToolFormat]
    TOOL_FORMAT_KIMI: _ClassVar[ToolFormat]
    TOOL_FORMAT_GEMMA: _ClassVar[ToolFormat]
    TOOL_FORMAT_LLAMA: _ClassVar[ToolFormat]
    TOOL_FORMAT_LFM: _ClassVar[ToolFormat]
    TOOL_FORMAT_MINIMAX: _ClassVar[ToolFormat]
    TOOL_FORMAT_GRANITE: _ClassVar[ToolFormat]
    TOOL_FORMAT_APERTUS: _ClassVar[ToolFormat]
    TOOL_FORMAT_DEEPSEEK: _ClassVar[ToolFormat]
    TOOL_FORMAT_HUNYUAN: _ClassVar[ToolFormat]
    TOOL_FORMAT_PHI: _ClassVar[ToolFormat]
    TOOL_FORMAT_INTERNLM: _ClassVar[ToolFormat]
    TOOL_FORMAT_NONE: _ClassVar[ToolFormat]

class Pooling(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    POOLING_UNSPECIFIED: _ClassVar[Pooling]
    POOLING_LAST: _ClassVar[Pooling]
    POOLING_MEAN: _ClassVar[Pooling]
    POOLING_CLS: _ClassVar[Pooling]
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_STRUCTURE: FinishReason
TOOL_FORMAT_UNSPECIFIED: ToolFormat
TOOL_FORMAT_JSON: ToolFormat
TOOL_FORMAT_XML: ToolFormat
TOOL_FORMAT_GLM: ToolFormat
TOOL_FORMAT_MISTRAL: ToolFormat
TOOL_FORMAT_KIMI: ToolFormat
TOOL_FORMAT_GEMMA: ToolFormat
TOOL_FORMAT_LLAMA: ToolFormat
TOOL_FORMAT_LFM: ToolFormat
TOOL_FORMAT_MINIMAX: ToolFormat
TOOL_FORMAT_GRANITE: ToolFormat
TOOL_FORMAT_APERTUS: ToolFormat
TOOL_FORMAT_DEEPSEEK: ToolFormat
TOOL_FORMAT_HUNYUAN: ToolFormat
TOOL_FORMAT_PHI: ToolFormat
TOOL_FORMAT_INTERNLM: ToolFormat
TOOL_FORMAT_NONE: ToolFormat
POOLING_UNSPECIFIED: Pooling
POOLING_LAST: Pooling
POOLING_MEAN: Pooling
POOLING_CLS: Pooling

class GenerateRequest(_message.Message):
    __slots__ = ("request_id", "model", "chat", "text", "tokens", "transcription", "sampling", "cache_salt", "priority", "session_id", "resume", "max_handovers", "return_prompt_token_ids", "truncate_prompt_tokens", "truncate_end")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    TRANSCRIPTION_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    RESUME_FIELD_NUMBER: _ClassVar[int]
    MAX_HANDOVERS_FIELD_NUMBER: _ClassVar[int]
    RETURN_PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TRUNCATE_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TRUNCATE_END_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    model: str
    chat: ChatInput
    text: TextInput
    tokens: TokensInput
    transcription: TranscriptionInput
    sampling: SamplingParams
    cache_salt: str
    priority: int
    session_id: str
    resume: _containers.RepeatedCompositeFieldContainer[ResumedChoice]
    max_handovers: int
    return_prompt_token_ids: bool
    truncate_prompt_tokens: int
    truncate_end: bool
    def __init__(self, request_id: _Optional[str] = ..., model: _Optional[str] = ..., chat: _Optional[_Union[ChatInput, _Mapping]] = ..., text: _Optional[_Union[TextInput, _Mapping]] = ..., tokens: _Optional[_Union[TokensInput, _Mapping]] = ..., transcription: _Optional[_Union[TranscriptionInput, _Mapping]] = ..., sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., cache_salt: _Optional[str] = ..., priority: _Optional[int] = ..., session_id: _Optional[str] = ..., resume: _Optional[_Iterable[_Union[ResumedChoice, _Mapping]]] = ..., max_handovers: _Optional[int] = ..., return_prompt_token_ids: bool = ..., truncate_prompt_tokens: _Optional[int] = ..., truncate_end: bool = ...) -> None: ...

class PrefillRequest(_message.Message):
    __slots__ = ("request_id", "model", "cache_salt", "priority", "pieces", "media", "kv_layout", "first_block")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    PIECES_FIELD_NUMBER: _ClassVar[int]
    MEDIA_FIELD_NUMBER: _ClassVar[int]
    KV_LAYOUT_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    model: str
    cache_salt: str
    priority: int
    pieces: _containers.RepeatedCompositeFieldContainer[PromptPiece]
    media: _containers.RepeatedCompositeFieldContainer[_media_pb2.Media]
    kv_layout: bytes
    first_block: int
    def __init__(self, request_id: _Optional[str] = ..., model: _Optional[str] = ..., cache_salt: _Optional[str] = ..., priority: _Optional[int] = ..., pieces: _Optional[_Iterable[_Union[PromptPiece, _Mapping]]] = ..., media: _Optional[_Iterable[_Union[_media_pb2.Media, _Mapping]]] = ..., kv_layout: _Optional[bytes] = ..., first_block: _Optional[int] = ...) -> None: ...

class PromptPiece(_message.Message):
    __slots__ = ("text", "token", "ids", "slot", "length_of")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    LENGTH_OF_FIELD_NUMBER: _ClassVar[int]
    text: str
    token: int
    ids: TokenIds
    slot: MediaSlot
    length_of: int
    def __init__(self, text: _Optional[str] = ..., token: _Optional[int] = ..., ids: _Optional[_Union[TokenIds, _Mapping]] = ..., slot: _Optional[_Union[MediaSlot, _Mapping]] = ..., length_of: _Optional[int] = ...) -> None: ...

class TokenIds(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class MediaSlot(_message.Message):
    __slots__ = ("token",)
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    token: int
    def __init__(self, token: _Optional[int] = ...) -> None: ...

class PrefillResponse(_message.Message):
    __slots__ = ("identity", "offset", "data", "crc32c")
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    CRC32C_FIELD_NUMBER: _ClassVar[int]
    identity: bytes
    offset: int
    data: bytes
    crc32c: int
    def __init__(self, identity: _Optional[bytes] = ..., offset: _Optional[int] = ..., data: _Optional[bytes] = ..., crc32c: _Optional[int] = ...) -> None: ...

class ResumedChoice(_message.Message):
    __slots__ = ("index", "token_ids", "finished")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    index: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    finished: bool
    def __init__(self, index: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., finished: bool = ...) -> None: ...

class ChatInput(_message.Message):
    __slots__ = ("messages", "tools", "thinking", "reasoning_effort", "continue_final_message", "calls_or_form", "template_variables", "thinks_before_form")
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    TOOLS_FIELD_NUMBER: _ClassVar[int]
    THINKING_FIELD_NUMBER: _ClassVar[int]
    REASONING_EFFORT_FIELD_NUMBER: _ClassVar[int]
    CONTINUE_FINAL_MESSAGE_FIELD_NUMBER: _ClassVar[int]
    CALLS_OR_FORM_FIELD_NUMBER: _ClassVar[int]
    TEMPLATE_VARIABLES_FIELD_NUMBER: _ClassVar[int]
    THINKS_BEFORE_FORM_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[ChatMessage]
    tools: _containers.RepeatedCompositeFieldContainer[ToolDefinition]
    thinking: bool
    reasoning_effort: str
    continue_final_message: bool
    calls_or_form: bool
    template_variables: str
    thinks_before_form: bool
    def __init__(self, messages: _Optional[_Iterable[_Union[ChatMessage, _Mapping]]] = ..., tools: _Optional[_Iterable[_Union[ToolDefinition, _Mapping]]] = ..., thinking: bool = ..., reasoning_effort: _Optional[str] = ..., continue_final_message: bool = ..., calls_or_form: bool = ..., template_variables: _Optional[str] = ..., thinks_before_form: bool = ...) -> None: ...

class ToolDefinition(_message.Message):
    __slots__ = ("name", "description", "parameters", "strict")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    STRICT_FIELD_NUMBER: _ClassVar[int]
    name: str
    description: str
    parameters: str
    strict: bool
    def __init__(self, name: _Optional[str] = ..., description: _Optional[str] = ..., parameters: _Optional[str] = ..., strict: bool = ...) -> None: ...

class ToolCall(_message.Message):
    __slots__ = ("id", "name", "arguments")
    ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    id: str
    name: str
    arguments: str
    def __init__(self, id: _Optional[str] = ..., name: _Optional[str] = ..., arguments: _Optional[str] = ...) -> None: ...

class ChatMessage(_message.Message):
    __slots__ = ("role", "parts", "tool_calls", "tool_call_id", "reasoning")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALLS_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALL_ID_FIELD_NUMBER: _ClassVar[int]
    REASONING_FIELD_NUMBER: _ClassVar[int]
    role: str
    parts: _containers.RepeatedCompositeFieldContainer[ChatPart]
    tool_calls: _containers.RepeatedCompositeFieldContainer[ToolCall]
    tool_call_id: str
    reasoning: str
    def __init__(self, role: _Optional[str] = ..., parts: _Optional[_Iterable[_Union[ChatPart, _Mapping]]] = ..., tool_calls: _Optional[_Iterable[_Union[ToolCall, _Mapping]]] = ..., tool_call_id: _Optional[str] = ..., reasoning: _Optional[str] = ...) -> None: ...

class ChatPart(_message.Message):
    __slots__ = ("text", "media")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    MEDIA_FIELD_NUMBER: _ClassVar[int]
    text: str
    media: _media_pb2.Media
    def __init__(self, text: _Optional[str] = ..., media: _Optional[_Union[_media_pb2.Media, _Mapping]] = ...) -> None: ...

class TextInput(_message.Message):
    __slots__ = ("prompt", "media", "bare")
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    MEDIA_FIELD_NUMBER: _ClassVar[int]
    BARE_FIELD_NUMBER: _ClassVar[int]
    prompt: str
    media: _containers.RepeatedCompositeFieldContainer[_media_pb2.Media]
    bare: bool
    def __init__(self, prompt: _Optional[str] = ..., media: _Optional[_Iterable[_Union[_media_pb2.Media, _Mapping]]] = ..., bare: bool = ...) -> None: ...

class TokensInput(_message.Message):
    __slots__ = ("ids", "media")
    IDS_FIELD_NUMBER: _ClassVar[int]
    MEDIA_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    media: _containers.RepeatedCompositeFieldContainer[_media_pb2.Media]
    def __init__(self, ids: _Optional[_Iterable[int]] = ..., media: _Optional[_Iterable[_Union[_media_pb2.Media, _Mapping]]] = ...) -> None: ...

class TranscriptionInput(_message.Message):
    __slots__ = ("audio", "language", "prompt", "turns")
    AUDIO_FIELD_NUMBER: _ClassVar[int]
    LANGUAGE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    TURNS_FIELD_NUMBER: _ClassVar[int]
    audio: _media_pb2.Media
    language: str
    prompt: str
    turns: bool
    def __init__(self, audio: _Optional[_Union[_media_pb2.Media, _Mapping]] = ..., language: _Optional[str] = ..., prompt: _Optional[str] = ..., turns: bool = ...) -> None: ...

class SamplingParams(_message.Message):
    __slots__ = ("max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed", "stop", "stop_token_ids", "ignore_eos", "logit_bias", "n", "logprobs", "prompt_logprobs", "json_schema", "regex", "grammar", "choice", "structural_tag", "thinking_token_budget", "include_stop_str_in_output", "bad_words", "skip_special_tokens", "allowed_token_ids")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    JSON_SCHEMA_FIELD_NUMBER: _ClassVar[int]
    REGEX_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    STRUCTURAL_TAG_FIELD_NUMBER: _ClassVar[int]
    THINKING_TOKEN_BUDGET_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_STOP_STR_IN_OUTPUT_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_FIELD_NUMBER: _ClassVar[int]
    SKIP_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    max_tokens: int
    min_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int
    stop: _containers.RepeatedScalarFieldContainer[str]
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    logit_bias: _containers.ScalarMap[int, float]
    n: int
    logprobs: int
    prompt_logprobs: int
    json_schema: str
    regex: str
    grammar: str
    choice: Choice
    structural_tag: str
    thinking_token_budget: int
    include_stop_str_in_output: bool
    bad_words: _containers.RepeatedScalarFieldContainer[str]
    skip_special_tokens: bool
    allowed_token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., seed: _Optional[int] = ..., stop: _Optional[_Iterable[str]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: bool = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., n: _Optional[int] = ..., logprobs: _Optional[int] = ..., prompt_logprobs: _Optional[int] = ..., json_schema: _Optional[str] = ..., regex: _Optional[str] = ..., grammar: _Optional[str] = ..., choice: _Optional[_Union[Choice, _Mapping]] = ..., structural_tag: _Optional[str] = ..., thinking_token_budget: _Optional[int] = ..., include_stop_str_in_output: bool = ..., bad_words: _Optional[_Iterable[str]] = ..., skip_special_tokens: bool = ..., allowed_token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Choice(_message.Message):
    __slots__ = ("options",)
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    options: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, options: _Optional[_Iterable[str]] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("started", "delta", "finished")
    STARTED_FIELD_NUMBER: _ClassVar[int]
    DELTA_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    started: GenerateStarted
    delta: GenerateDelta
    finished: GenerateFinished
    def __init__(self, started: _Optional[_Union[GenerateStarted, _Mapping]] = ..., delta: _Optional[_Union[GenerateDelta, _Mapping]] = ..., finished: _Optional[_Union[GenerateFinished, _Mapping]] = ...) -> None: ...

class GenerateStarted(_message.Message):
    __slots__ = ("prompt_tokens", "cached_tokens", "spans", "request_id", "thinking", "resumed_choices", "reasoning_begin", "reasoning_end", "prompt_token_ids", "reasoning_unread")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    THINKING_FIELD_NUMBER: _ClassVar[int]
    RESUMED_CHOICES_FIELD_NUMBER: _ClassVar[int]
    REASONING_BEGIN_FIELD_NUMBER: _ClassVar[int]
    REASONING_END_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    REASONING_UNREAD_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    cached_tokens: int
    spans: _containers.RepeatedCompositeFieldContainer[MediaSpan]
    request_id: str
    thinking: bool
    resumed_choices: int
    reasoning_begin: str
    reasoning_end: str
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    reasoning_unread: bool
    def __init__(self, prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., spans: _Optional[_Iterable[_Union[MediaSpan, _Mapping]]] = ..., request_id: _Optional[str] = ..., thinking: bool = ..., resumed_choices: _Optional[int] = ..., reasoning_begin: _Optional[str] = ..., reasoning_end: _Optional[str] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., reasoning_unread: bool = ...) -> None: ...

class MediaSpan(_message.Message):
    __slots__ = ("item", "start", "length", "rows", "key", "cached")
    ITEM_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    CACHED_FIELD_NUMBER: _ClassVar[int]
    item: int
    start: int
    length: int
    rows: int
    key: bytes
    cached: bool
    def __init__(self, item: _Optional[int] = ..., start: _Optional[int] = ..., length: _Optional[int] = ..., rows: _Optional[int] = ..., key: _Optional[bytes] = ..., cached: bool = ...) -> None: ...

class GenerateDelta(_message.Message):
    __slots__ = ("index", "text", "token_ids", "logprobs", "prompt", "turns")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    TURNS_FIELD_NUMBER: _ClassVar[int]
    index: int
    text: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    prompt: PromptLogprobs
    turns: _containers.RepeatedCompositeFieldContainer[TranscriptTurn]
    def __init__(self, index: _Optional[int] = ..., text: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ..., prompt: _Optional[_Union[PromptLogprobs, _Mapping]] = ..., turns: _Optional[_Iterable[_Union[TranscriptTurn, _Mapping]]] = ...) -> None: ...

class TranscriptTurn(_message.Message):
    __slots__ = ("start_seconds", "end_seconds", "speaker", "text")
    START_SECONDS_FIELD_NUMBER: _ClassVar[int]
    END_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SPEAKER_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    start_seconds: float
    end_seconds: float
    speaker: str
    text: str
    def __init__(self, start_seconds: _Optional[float] = ..., end_seconds: _Optional[float] = ..., speaker: _Optional[str] = ..., text: _Optional[str] = ...) -> None: ...

class PromptLogprobs(_message.Message):
    __slots__ = ("first", "token_ids", "logprobs")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    first: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    def __init__(self, first: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ...) -> None: ...

class TokenLogprobs(_message.Message):
    __slots__ = ("logprob", "top", "text", "text_bytes")
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TEXT_BYTES_FIELD_NUMBER: _ClassVar[int]
    logprob: float
    top: _containers.RepeatedCompositeFieldContainer[TopLogprob]
    text: str
    text_bytes: bytes
    def __init__(self, logprob: _Optional[float] = ..., top: _Optional[_Iterable[_Union[TopLogprob, _Mapping]]] = ..., text: _Optional[str] = ..., text_bytes: _Optional[bytes] = ...) -> None: ...

class TopLogprob(_message.Message):
    __slots__ = ("token_id", "logprob", "text", "text_bytes")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TEXT_BYTES_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprob: float
    text: str
    text_bytes: bytes
    def __init__(self, token_id: _Optional[int] = ..., logprob: _Optional[float] = ..., text: _Optional[str] = ..., text_bytes: _Optional[bytes] = ...) -> None: ...

class GenerateFinished(_message.Message):
    __slots__ = ("index", "reason", "usage", "timings", "stop_text", "stop_token_id")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    STOP_TEXT_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    index: int
    reason: FinishReason
    usage: Usage
    timings: _containers.RepeatedCompositeFieldContainer[_media_pb2.StageTiming]
    stop_text: str
    stop_token_id: int
    def __init__(self, index: _Optional[int] = ..., reason: _Optional[_Union[FinishReason, str]] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., timings: _Optional[_Iterable[_Union[_media_pb2.StageTiming, _Mapping]]] = ..., stop_text: _Optional[str] = ..., stop_token_id: _Optional[int] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("prompt_tokens", "cached_tokens", "completion_tokens", "reasoning_tokens", "draft_tokens", "accepted_draft_tokens")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REASONING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    reasoning_tokens: int
    draft_tokens: int
    accepted_draft_tokens: int
    def __init__(self, prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., reasoning_tokens: _Optional[int] = ..., draft_tokens: _Optional[int] = ..., accepted_draft_tokens: _Optional[int] = ...) -> None: ...

class EmbedRequest(_message.Message):
    __slots__ = ("request_id", "model", "chat", "text", "tokens", "dimensions", "cache_salt", "priority", "max_handovers", "truncate_prompt_tokens", "truncate_end")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    DIMENSIONS_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    MAX_HANDOVERS_FIELD_NUMBER: _ClassVar[int]
    TRUNCATE_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TRUNCATE_END_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    model: str
    chat: ChatInput
    text: TextInput
    tokens: TokensInput
    dimensions: int
    cache_salt: str
    priority: int
    max_handovers: int
    truncate_prompt_tokens: int
    truncate_end: bool
    def __init__(self, request_id: _Optional[str] = ..., model: _Optional[str] = ..., chat: _Optional[_Union[ChatInput, _Mapping]] = ..., text: _Optional[_Union[TextInput, _Mapping]] = ..., tokens: _Optional[_Union[TokensInput, _Mapping]] = ..., dimensions: _Optional[int] = ..., cache_salt: _Optional[str] = ..., priority: _Optional[int] = ..., max_handovers: _Optional[int] = ..., truncate_prompt_tokens: _Optional[int] = ..., truncate_end: bool = ...) -> None: ...

class EmbedResponse(_message.Message):
    __slots__ = ("values", "usage", "timings", "request_id")
    VALUES_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    values: _containers.RepeatedScalarFieldContainer[float]
    usage: Usage
    timings: _containers.RepeatedCompositeFieldContainer[_media_pb2.StageTiming]
    request_id: str
    def __init__(self, values: _Optional[_Iterable[float]] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., timings: _Optional[_Iterable[_Union[_media_pb2.StageTiming, _Mapping]]] = ..., request_id: _Optional[str] = ...) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("request_ids", "cache_salt")
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    request_ids: _containers.RepeatedScalarFieldContainer[str]
    cache_salt: str
    def __init__(self, request_ids: _Optional[_Iterable[str]] = ..., cache_salt: _Optional[str] = ...) -> None: ...

class AbortResponse(_message.Message):
    __slots__ = ("aborted",)
    ABORTED_FIELD_NUMBER: _ClassVar[int]
    aborted: int
    def __init__(self, aborted: _Optional[int] = ...) -> None: ...

class TokenizeRequest(_message.Message):
    __slots__ = ("text", "chat", "allow_special", "add_special_tokens", "messages_alone", "with_texts")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    ALLOW_SPECIAL_FIELD_NUMBER: _ClassVar[int]
    ADD_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_ALONE_FIELD_NUMBER: _ClassVar[int]
    WITH_TEXTS_FIELD_NUMBER: _ClassVar[int]
    text: str
    chat: ChatInput
    allow_special: bool
    add_special_tokens: bool
    messages_alone: bool
    with_texts: bool
    def __init__(self, text: _Optional[str] = ..., chat: _Optional[_Union[ChatInput, _Mapping]] = ..., allow_special: bool = ..., add_special_tokens: bool = ..., messages_alone: bool = ..., with_texts: bool = ...) -> None: ...

class TokenizeResponse(_message.Message):
    __slots__ = ("ids", "texts")
    IDS_FIELD_NUMBER: _ClassVar[int]
    TEXTS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    texts: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, ids: _Optional[_Iterable[int]] = ..., texts: _Optional[_Iterable[str]] = ...) -> None: ...

class DetokenizeRequest(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class DetokenizeResponse(_message.Message):
    __slots__ = ("text",)
    TEXT_FIELD_NUMBER: _ClassVar[int]
    text: str
    def __init__(self, text: _Optional[str] = ...) -> None: ...

class Embeddings(_message.Message):
    __slots__ = ("dimensions", "pooling", "normalized")
    DIMENSIONS_FIELD_NUMBER: _ClassVar[int]
    POOLING_FIELD_NUMBER: _ClassVar[int]
    NORMALIZED_FIELD_NUMBER: _ClassVar[int]
    dimensions: int
    pooling: Pooling
    normalized: bool
    def __init__(self, dimensions: _Optional[int] = ..., pooling: _Optional[_Union[Pooling, str]] = ..., normalized: bool = ...) -> None: ...

class LlmServiceGetInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LlmServiceGetInfoResponse(_message.Message):
    __slots__ = ("version", "model", "architecture", "encoder_digest", "context_tokens", "vocab_size", "tensor_parallel", "unimplemented", "devices", "unimplemented_sampling", "modalities", "tool_format", "weights", "adapters", "instance", "embeddings", "reranker", "aliases")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ARCHITECTURE_FIELD_NUMBER: _ClassVar[int]
    ENCODER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    TENSOR_PARALLEL_FIELD_NUMBER: _ClassVar[int]
    UNIMPLEMENTED_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    UNIMPLEMENTED_SAMPLING_FIELD_NUMBER: _ClassVar[int]
    MODALITIES_FIELD_NUMBER: _ClassVar[int]
    TOOL_FORMAT_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    EMBEDDINGS_FIELD_NUMBER: _ClassVar[int]
    RERANKER_FIELD_NUMBER: _ClassVar[int]
    ALIASES_FIELD_NUMBER: _ClassVar[int]
    version: str
    model: str
    architecture: str
    encoder_digest: str
    context_tokens: int
    vocab_size: int
    tensor_parallel: int
    unimplemented: _containers.RepeatedScalarFieldContainer[str]
    devices: _containers.RepeatedScalarFieldContainer[str]
    unimplemented_sampling: _containers.RepeatedScalarFieldContainer[str]
    modalities: _containers.RepeatedScalarFieldContainer[_media_pb2.Modality]
    tool_format: ToolFormat
    weights: Weights
    adapters: _containers.RepeatedCompositeFieldContainer[Adapter]
    instance: int
    embeddings: Embeddings
    reranker: Reranker
    aliases: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, version: _Optional[str] = ..., model: _Optional[str] = ..., architecture: _Optional[str] = ..., encoder_digest: _Optional[str] = ..., context_tokens: _Optional[int] = ..., vocab_size: _Optional[int] = ..., tensor_parallel: _Optional[int] = ..., unimplemented: _Optional[_Iterable[str]] = ..., devices: _Optional[_Iterable[str]] = ..., unimplemented_sampling: _Optional[_Iterable[str]] = ..., modalities: _Optional[_Iterable[_Union[_media_pb2.Modality, str]]] = ..., tool_format: _Optional[_Union[ToolFormat, str]] = ..., weights: _Optional[_Union[Weights, _Mapping]] = ..., adapters: _Optional[_Iterable[_Union[Adapter, _Mapping]]] = ..., instance: _Optional[int] = ..., embeddings: _Optional[_Union[Embeddings, _Mapping]] = ..., reranker: _Optional[_Union[Reranker, _Mapping]] = ..., aliases: _Optional[_Iterable[str]] = ...) -> None: ...

class Reranker(_message.Message):
    __slots__ = ("true_token_id", "false_token_id")
    TRUE_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    FALSE_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    true_token_id: int
    false_token_id: int
    def __init__(self, true_token_id: _Optional[int] = ..., false_token_id: _Optional[int] = ...) -> None: ...

class Adapter(_message.Message):
    __slots__ = ("name", "rank", "in_flight")
    NAME_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    name: str
    rank: int
    in_flight: int
    def __init__(self, name: _Optional[str] = ..., rank: _Optional[int] = ..., in_flight: _Optional[int] = ...) -> None: ...

class Weights(_message.Message):
    __slots__ = ("quantization", "number", "bits", "widened_in", "bytes", "inputs")
    QUANTIZATION_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    BITS_FIELD_NUMBER: _ClassVar[int]
    WIDENED_IN_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    INPUTS_FIELD_NUMBER: _ClassVar[int]
    quantization: str
    number: str
    bits: int
    widened_in: str
    bytes: int
    inputs: str
    def __init__(self, quantization: _Optional[str] = ..., number: _Optional[str] = ..., bits: _Optional[int] = ..., widened_in: _Optional[str] = ..., bytes: _Optional[int] = ..., inputs: _Optional[str] = ...) -> None: ...

class LlmServiceGetLoadRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LlmServiceGetLoadResponse(_message.Message):
    __slots__ = ("waiting", "running", "kv_blocks_used", "kv_blocks_total", "prefix_hit_tokens", "prompt_tokens", "generated_tokens", "preemptions", "rows_received", "steps", "row_bytes", "row_capacity_bytes", "row_hits", "finished_requests", "failed_requests", "cancelled_requests", "encoders", "stage_totals", "rows_shared", "encode_attempts", "encode_retries", "items_covered", "headers_known", "waiting_tokens", "refused_requests", "kv_blocks_cached", "prefix_query_tokens", "graph_steps", "sessions", "rows_mirrored", "state_slots", "state_slots_used", "state_snapshots", "draft_tokens", "accepted_draft_tokens", "adapter_fills", "rows_nixl", "kv_host_blocks_total", "kv_host_blocks_used", "kv_blocks_offloaded", "kv_blocks_loaded", "prefills_elsewhere", "prefills_failed", "kv_blocks_received", "kv_blocks_lent")
    WAITING_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_USED_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    ROWS_RECEIVED_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    ROW_BYTES_FIELD_NUMBER: _ClassVar[int]
    ROW_CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    ROW_HITS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    FAILED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    CANCELLED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    ENCODERS_FIELD_NUMBER: _ClassVar[int]
    STAGE_TOTALS_FIELD_NUMBER: _ClassVar[int]
    ROWS_SHARED_FIELD_NUMBER: _ClassVar[int]
    ENCODE_ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    ENCODE_RETRIES_FIELD_NUMBER: _ClassVar[int]
    ITEMS_COVERED_FIELD_NUMBER: _ClassVar[int]
    HEADERS_KNOWN_FIELD_NUMBER: _ClassVar[int]
    WAITING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REFUSED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_CACHED_FIELD_NUMBER: _ClassVar[int]
    PREFIX_QUERY_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GRAPH_STEPS_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    ROWS_MIRRORED_FIELD_NUMBER: _ClassVar[int]
    STATE_SLOTS_FIELD_NUMBER: _ClassVar[int]
    STATE_SLOTS_USED_FIELD_NUMBER: _ClassVar[int]
    STATE_SNAPSHOTS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FILLS_FIELD_NUMBER: _ClassVar[int]
    ROWS_NIXL_FIELD_NUMBER: _ClassVar[int]
    KV_HOST_BLOCKS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    KV_HOST_BLOCKS_USED_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_OFFLOADED_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_LOADED_FIELD_NUMBER: _ClassVar[int]
    PREFILLS_ELSEWHERE_FIELD_NUMBER: _ClassVar[int]
    PREFILLS_FAILED_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_RECEIVED_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_LENT_FIELD_NUMBER: _ClassVar[int]
    waiting: int
    running: int
    kv_blocks_used: int
    kv_blocks_total: int
    prefix_hit_tokens: int
    prompt_tokens: int
    generated_tokens: int
    preemptions: int
    rows_received: int
    steps: int
    row_bytes: int
    row_capacity_bytes: int
    row_hits: int
    finished_requests: int
    failed_requests: int
    cancelled_requests: int
    encoders: _containers.RepeatedCompositeFieldContainer[EncoderStatus]
    stage_totals: _containers.RepeatedCompositeFieldContainer[_media_pb2.StageTiming]
    rows_shared: int
    encode_attempts: int
    encode_retries: int
    items_covered: int
    headers_known: int
    waiting_tokens: int
    refused_requests: int
    kv_blocks_cached: int
    prefix_query_tokens: int
    graph_steps: int
    sessions: int
    rows_mirrored: int
    state_slots: int
    state_slots_used: int
    state_snapshots: int
    draft_tokens: int
    accepted_draft_tokens: int
    adapter_fills: int
    rows_nixl: int
    kv_host_blocks_total: int
    kv_host_blocks_used: int
    kv_blocks_offloaded: int
    kv_blocks_loaded: int
    prefills_elsewhere: int
    prefills_failed: int
    kv_blocks_received: int
    kv_blocks_lent: int
    def __init__(self, waiting: _Optional[int] = ..., running: _Optional[int] = ..., kv_blocks_used: _Optional[int] = ..., kv_blocks_total: _Optional[int] = ..., prefix_hit_tokens: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., generated_tokens: _Optional[int] = ..., preemptions: _Optional[int] = ..., rows_received: _Optional[int] = ..., steps: _Optional[int] = ..., row_bytes: _Optional[int] = ..., row_capacity_bytes: _Optional[int] = ..., row_hits: _Optional[int] = ..., finished_requests: _Optional[int] = ..., failed_requests: _Optional[int] = ..., cancelled_requests: _Optional[int] = ..., encoders: _Optional[_Iterable[_Union[EncoderStatus, _Mapping]]] = ..., stage_totals: _Optional[_Iterable[_Union[_media_pb2.StageTiming, _Mapping]]] = ..., rows_shared: _Optional[int] = ..., encode_attempts: _Optional[int] = ..., encode_retries: _Optional[int] = ..., items_covered: _Optional[int] = ..., headers_known: _Optional[int] = ..., waiting_tokens: _Optional[int] = ..., refused_requests: _Optional[int] = ..., kv_blocks_cached: _Optional[int] = ..., prefix_query_tokens: _Optional[int] = ..., graph_steps: _Optional[int] = ..., sessions: _Optional[int] = ..., rows_mirrored: _Optional[int] = ..., state_slots: _Optional[int] = ..., state_slots_used: _Optional[int] = ..., state_snapshots: _Optional[int] = ..., draft_tokens: _Optional[int] = ..., accepted_draft_tokens: _Optional[int] = ..., adapter_fills: _Optional[int] = ..., rows_nixl: _Optional[int] = ..., kv_host_blocks_total: _Optional[int] = ..., kv_host_blocks_used: _Optional[int] = ..., kv_blocks_offloaded: _Optional[int] = ..., kv_blocks_loaded: _Optional[int] = ..., prefills_elsewhere: _Optional[int] = ..., prefills_failed: _Optional[int] = ..., kv_blocks_received: _Optional[int] = ..., kv_blocks_lent: _Optional[int] = ...) -> None: ...

class EncoderStatus(_message.Message):
    __slots__ = ("address", "usable", "in_flight", "shared_memory", "failures", "cuda_ipc", "queued_items", "running_items", "vit_calls", "store_hits", "store_misses", "store_bytes", "store_capacity_bytes", "nixl")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    USABLE_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    SHARED_MEMORY_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    CUDA_IPC_FIELD_NUMBER: _ClassVar[int]
    QUEUED_ITEMS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_ITEMS_FIELD_NUMBER: _ClassVar[int]
    VIT_CALLS_FIELD_NUMBER: _ClassVar[int]
    STORE_HITS_FIELD_NUMBER: _ClassVar[int]
    STORE_MISSES_FIELD_NUMBER: _ClassVar[int]
    STORE_BYTES_FIELD_NUMBER: _ClassVar[int]
    STORE_CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    NIXL_FIELD_NUMBER: _ClassVar[int]
    address: str
    usable: bool
    in_flight: int
    shared_memory: bool
    failures: int
    cuda_ipc: bool
    queued_items: int
    running_items: int
    vit_calls: int
    store_hits: int
    store_misses: int
    store_bytes: int
    store_capacity_bytes: int
    nixl: bool
    def __init__(self, address: _Optional[str] = ..., usable: bool = ..., in_flight: _Optional[int] = ..., shared_memory: bool = ..., failures: _Optional[int] = ..., cuda_ipc: bool = ..., queued_items: _Optional[int] = ..., running_items: _Optional[int] = ..., vit_calls: _Optional[int] = ..., store_hits: _Optional[int] = ..., store_misses: _Optional[int] = ..., store_bytes: _Optional[int] = ..., store_capacity_bytes: _Optional[int] = ..., nixl: bool = ...) -> None: ...

class LlmServiceFlushCacheRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LlmServiceFlushCacheResponse(_message.Message):
    __slots__ = ("kv_blocks", "row_bytes")
    KV_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    ROW_BYTES_FIELD_NUMBER: _ClassVar[int]
    kv_blocks: int
    row_bytes: int
    def __init__(self, kv_blocks: _Optional[int] = ..., row_bytes: _Optional[int] = ...) -> None: ...

class LoadAdapterRequest(_message.Message):
    __slots__ = ("name", "path")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    name: str
    path: str
    def __init__(self, name: _Optional[str] = ..., path: _Optional[str] = ...) -> None: ...

class LoadAdapterResponse(_message.Message):
    __slots__ = ("adapter",)
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    adapter: Adapter
    def __init__(self, adapter: _Optional[_Union[Adapter, _Mapping]] = ...) -> None: ...

class UnloadAdapterRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class UnloadAdapterResponse(_message.Message):
    __slots__ = ("adapter",)
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    adapter: Adapter
    def __init__(self, adapter: _Optional[_Union[Adapter, _Mapping]] = ...) -> None: ...
