from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Modality(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MODALITY_UNSPECIFIED: _ClassVar[Modality]
    MODALITY_IMAGE: _ClassVar[Modality]
    MODALITY_VIDEO: _ClassVar[Modality]
    MODALITY_AUDIO: _ClassVar[Modality]

class DataType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DATA_TYPE_UNSPECIFIED: _ClassVar[DataType]
    DATA_TYPE_FLOAT32: _ClassVar[DataType]
    DATA_TYPE_BFLOAT16: _ClassVar[DataType]
    DATA_TYPE_FLOAT16: _ClassVar[DataType]
MODALITY_UNSPECIFIED: Modality
MODALITY_IMAGE: Modality
MODALITY_VIDEO: Modality
MODALITY_AUDIO: Modality
DATA_TYPE_UNSPECIFIED: DataType
DATA_TYPE_FLOAT32: DataType
DATA_TYPE_BFLOAT16: DataType
DATA_TYPE_FLOAT16: DataType

class Media(_message.Message):
    __slots__ = ("modality", "data", "url", "key", "pixels", "embedding", "options", "mime_type", "known_key")
    MODALITY_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    URL_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    PIXELS_FIELD_NUMBER: _ClassVar[int]
    EMBEDDING_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    MIME_TYPE_FIELD_NUMBER: _ClassVar[int]
    KNOWN_KEY_FIELD_NUMBER: _ClassVar[int]
    modality: Modality
    data: bytes
    url: str
    key: bytes
    pixels: PixelBlock
    embedding: EmbeddingBlock
    options: MediaOptions
    mime_type: str
    known_key: bytes
    def __init__(self, modality: _Optional[_Union[Modality, str]] = ..., data: _Optional[bytes] = ..., url: _Optional[str] = ..., key: _Optional[bytes] = ..., pixels: _Optional[_Union[PixelBlock, _Mapping]] = ..., embedding: _Optional[_Union[EmbeddingBlock, _Mapping]] = ..., options: _Optional[_Union[MediaOptions, _Mapping]] = ..., mime_type: _Optional[str] = ..., known_key: _Optional[bytes] = ...) -> None: ...

class MediaOptions(_message.Message):
    __slots__ = ("min_pixels", "max_pixels", "fps", "max_frames", "video_pruning_rate", "kept_rows", "with_sound", "clamp_max_pixels")
    MIN_PIXELS_FIELD_NUMBER: _ClassVar[int]
    MAX_PIXELS_FIELD_NUMBER: _ClassVar[int]
    FPS_FIELD_NUMBER: _ClassVar[int]
    MAX_FRAMES_FIELD_NUMBER: _ClassVar[int]
    VIDEO_PRUNING_RATE_FIELD_NUMBER: _ClassVar[int]
    KEPT_ROWS_FIELD_NUMBER: _ClassVar[int]
    WITH_SOUND_FIELD_NUMBER: _ClassVar[int]
    CLAMP_MAX_PIXELS_FIELD_NUMBER: _ClassVar[int]
    min_pixels: int
    max_pixels: int
    fps: float
    max_frames: int
    video_pruning_rate: float
    kept_rows: bytes
    with_sound: bool
    clamp_max_pixels: bool
    def __init__(self, min_pixels: _Optional[int] = ..., max_pixels: _Optional[int] = ..., fps: _Optional[float] = ..., max_frames: _Optional[int] = ..., video_pruning_rate: _Optional[float] = ..., kept_rows: _Optional[bytes] = ..., with_sound: bool = ..., clamp_max_pixels: bool = ...) -> None: ...

class PixelBlock(_message.Message):
    __slots__ = ("data", "frames", "height", "width", "timestamps")
    DATA_FIELD_NUMBER: _ClassVar[int]
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    HEIGHT_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    TIMESTAMPS_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    frames: int
    height: int
    width: int
    timestamps: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, data: _Optional[bytes] = ..., frames: _Optional[int] = ..., height: _Optional[int] = ..., width: _Optional[int] = ..., timestamps: _Optional[_Iterable[float]] = ...) -> None: ...

class EmbeddingBlock(_message.Message):
    __slots__ = ("data", "dtype", "count", "levels", "width", "grid", "timestamps", "seconds_per_grid", "kept_rows")
    DATA_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    LEVELS_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    GRID_FIELD_NUMBER: _ClassVar[int]
    TIMESTAMPS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_PER_GRID_FIELD_NUMBER: _ClassVar[int]
    KEPT_ROWS_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    dtype: DataType
    count: int
    levels: int
    width: int
    grid: Grid
    timestamps: _containers.RepeatedScalarFieldContainer[float]
    seconds_per_grid: float
    kept_rows: bytes
    def __init__(self, data: _Optional[bytes] = ..., dtype: _Optional[_Union[DataType, str]] = ..., count: _Optional[int] = ..., levels: _Optional[int] = ..., width: _Optional[int] = ..., grid: _Optional[_Union[Grid, _Mapping]] = ..., timestamps: _Optional[_Iterable[float]] = ..., seconds_per_grid: _Optional[float] = ..., kept_rows: _Optional[bytes] = ...) -> None: ...

class Grid(_message.Message):
    __slots__ = ("t", "h", "w")
    T_FIELD_NUMBER: _ClassVar[int]
    H_FIELD_NUMBER: _ClassVar[int]
    W_FIELD_NUMBER: _ClassVar[int]
    t: int
    h: int
    w: int
    def __init__(self, t: _Optional[int] = ..., h: _Optional[int] = ..., w: _Optional[int] = ...) -> None: ...

class Status(_message.Message):
    __slots__ = ("code", "message", "reason", "field", "retry_after_ms")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    FIELD_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    code: int
    message: str
    reason: str
    field: str
    retry_after_ms: int
    def __init__(self, code: _Optional[int] = ..., message: _Optional[str] = ..., reason: _Optional[str] = ..., field: _Optional[str] = ..., retry_after_ms: _Optional[int] = ...) -> None: ...

class StageTiming(_message.Message):
    __slots__ = ("stage", "seconds", "start_seconds", "end_seconds")
    STAGE_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    START_SECONDS_FIELD_NUMBER: _ClassVar[int]
    END_SECONDS_FIELD_NUMBER: _ClassVar[int]
    stage: str
    seconds: float
    start_seconds: float
    end_seconds: float
    def __init__(self, stage: _Optional[str] = ..., seconds: _Optional[float] = ..., start_seconds: _Optional[float] = ..., end_seconds: _Optional[float] = ...) -> None: ...
