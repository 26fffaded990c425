from twinlens.v1 import media_pb2 as _media_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Transport(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TRANSPORT_UNSPECIFIED: _ClassVar[Transport]
    TRANSPORT_INLINE: _ClassVar[Transport]
    TRANSPORT_SHARED_MEMORY: _ClassVar[Transport]
    TRANSPORT_CUDA_IPC: _ClassVar[Transport]
    TRANSPORT_NIXL: _ClassVar[Transport]
TRANSPORT_UNSPECIFIED: Transport
TRANSPORT_INLINE: Transport
TRANSPORT_SHARED_MEMORY: Transport
TRANSPORT_CUDA_IPC: Transport
TRANSPORT_NIXL: Transport

class EncodeRequest(_message.Message):
    __slots__ = ("request_id", "items", "cache_salt", "accepts", "host", "header_only", "priority", "first_rows", "attempt", "digest", "end_rows")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    ACCEPTS_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    HEADER_ONLY_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    FIRST_ROWS_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    END_ROWS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    items: _containers.RepeatedCompositeFieldContainer[_media_pb2.Media]
    cache_salt: str
    accepts: _containers.RepeatedScalarFieldContainer[Transport]
    host: HostProof
    header_only: bool
    priority: int
    first_rows: _containers.RepeatedScalarFieldContainer[int]
    attempt: int
    digest: str
    end_rows: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, request_id: _Optional[str] = ..., items: _Optional[_Iterable[_Union[_media_pb2.Media, _Mapping]]] = ..., cache_salt: _Optional[str] = ..., accepts: _Optional[_Iterable[_Union[Transport, str]]] = ..., host: _Optional[_Union[HostProof, _Mapping]] = ..., header_only: bool = ..., priority: _Optional[int] = ..., first_rows: _Optional[_Iterable[int]] = ..., attempt: _Optional[int] = ..., digest: _Optional[str] = ..., end_rows: _Optional[_Iterable[int]] = ...) -> None: ...

class HostProof(_message.Message):
    __slots__ = ("boot_id", "namespace", "gpu_uuids", "grant", "nixl_agent")
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    GPU_UUIDS_FIELD_NUMBER: _ClassVar[int]
    GRANT_FIELD_NUMBER: _ClassVar[int]
    NIXL_AGENT_FIELD_NUMBER: _ClassVar[int]
    boot_id: str
    namespace: str
    gpu_uuids: _containers.RepeatedScalarFieldContainer[str]
    grant: bytes
    nixl_agent: str
    def __init__(self, boot_id: _Optional[str] = ..., namespace: _Optional[str] = ..., gpu_uuids: _Optional[_Iterable[str]] = ..., grant: _Optional[bytes] = ..., nixl_agent: _Optional[str] = ...) -> None: ...

class EncodeResponse(_message.Message):
    __slots__ = ("header", "rows", "done", "error", "progress")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    header: EncodeHeader
    rows: EncodeRows
    done: EncodeDone
    error: EncodeError
    progress: EncodeProgress
    def __init__(self, header: _Optional[_Union[EncodeHeader, _Mapping]] = ..., rows: _Optional[_Union[EncodeRows, _Mapping]] = ..., done: _Optional[_Union[EncodeDone, _Mapping]] = ..., error: _Optional[_Union[EncodeError, _Mapping]] = ..., progress: _Optional[_Union[EncodeProgress, _Mapping]] = ...) -> None: ...

class EncodeHeader(_message.Message):
    __slots__ = ("item", "key", "modality", "grid", "tokens", "width", "levels", "dtype", "timestamps", "cached", "seconds_per_grid", "crc32c", "grid_rows", "kept_rows", "replacement")
    ITEM_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    MODALITY_FIELD_NUMBER: _ClassVar[int]
    GRID_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    LEVELS_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    TIMESTAMPS_FIELD_NUMBER: _ClassVar[int]
    CACHED_FIELD_NUMBER: _ClassVar[int]
    SECONDS_PER_GRID_FIELD_NUMBER: _ClassVar[int]
    CRC32C_FIELD_NUMBER: _ClassVar[int]
    GRID_ROWS_FIELD_NUMBER: _ClassVar[int]
    KEPT_ROWS_FIELD_NUMBER: _ClassVar[int]
    REPLACEMENT_FIELD_NUMBER: _ClassVar[int]
    item: int
    key: bytes
    modality: _media_pb2.Modality
    grid: _media_pb2.Grid
    tokens: int
    width: int
    levels: int
    dtype: _media_pb2.DataType
    timestamps: _containers.RepeatedScalarFieldContainer[float]
    cached: bool
    seconds_per_grid: float
    crc32c: int
    grid_rows: int
    kept_rows: bytes
    replacement: _containers.RepeatedCompositeFieldContainer[PromptPart]
    def __init__(self, item: _Optional[int] = ..., key: _Optional[bytes] = ..., modality: _Optional[_Union[_media_pb2.Modality, str]] = ..., grid: _Optional[_Union[_media_pb2.Grid, _Mapping]] = ..., tokens: _Optional[int] = ..., width: _Optional[int] = ..., levels: _Optional[int] = ..., dtype: _Optional[_Union[_media_pb2.DataType, str]] = ..., timestamps: _Optional[_Iterable[float]] = ..., cached: bool = ..., seconds_per_grid: _Optional[float] = ..., crc32c: _Optional[int] = ..., grid_rows: _Optional[int] = ..., kept_rows: _Optional[bytes] = ..., replacement: _Optional[_Iterable[_Union[PromptPart, _Mapping]]] = ...) -> None: ...

class PromptPart(_message.Message):
    __slots__ = ("text", "rows", "token", "positions", "advance", "from_origin")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    ADVANCE_FIELD_NUMBER: _ClassVar[int]
    FROM_ORIGIN_FIELD_NUMBER: _ClassVar[int]
    text: str
    rows: int
    token: int
    positions: bytes
    advance: int
    from_origin: bool
    def __init__(self, text: _Optional[str] = ..., rows: _Optional[int] = ..., token: _Optional[int] = ..., positions: _Optional[bytes] = ..., advance: _Optional[int] = ..., from_origin: bool = ...) -> None: ...

class EncodeRows(_message.Message):
    __slots__ = ("item", "first_row", "count", "data", "handle", "crc32c")
    ITEM_FIELD_NUMBER: _ClassVar[int]
    FIRST_ROW_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    CRC32C_FIELD_NUMBER: _ClassVar[int]
    item: int
    first_row: int
    count: int
    data: bytes
    handle: RowsHandle
    crc32c: int
    def __init__(self, item: _Optional[int] = ..., first_row: _Optional[int] = ..., count: _Optional[int] = ..., data: _Optional[bytes] = ..., handle: _Optional[_Union[RowsHandle, _Mapping]] = ..., crc32c: _Optional[int] = ...) -> None: ...

class RowsHandle(_message.Message):
    __slots__ = ("transport", "region", "offset", "length", "lease", "expires_ms", "ipc_handle", "slot", "number", "row_sum", "part_bytes", "part_crc32c")
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    REGION_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_MS_FIELD_NUMBER: _ClassVar[int]
    IPC_HANDLE_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    ROW_SUM_FIELD_NUMBER: _ClassVar[int]
    PART_BYTES_FIELD_NUMBER: _ClassVar[int]
    PART_CRC32C_FIELD_NUMBER: _ClassVar[int]
    transport: Transport
    region: str
    offset: int
    length: int
    lease: str
    expires_ms: int
    ipc_handle: bytes
    slot: int
    number: int
    row_sum: int
    part_bytes: int
    part_crc32c: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, transport: _Optional[_Union[Transport, str]] = ..., region: _Optional[str] = ..., offset: _Optional[int] = ..., length: _Optional[int] = ..., lease: _Optional[str] = ..., expires_ms: _Optional[int] = ..., ipc_handle: _Optional[bytes] = ..., slot: _Optional[int] = ..., number: _Optional[int] = ..., row_sum: _Optional[int] = ..., part_bytes: _Optional[int] = ..., part_crc32c: _Optional[_Iterable[int]] = ...) -> None: ...

class EncodeDone(_message.Message):
    __slots__ = ("item", "timings")
    ITEM_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    item: int
    timings: _containers.RepeatedCompositeFieldContainer[_media_pb2.StageTiming]
    def __init__(self, item: _Optional[int] = ..., timings: _Optional[_Iterable[_Union[_media_pb2.StageTiming, _Mapping]]] = ...) -> None: ...

class EncodeError(_message.Message):
    __slots__ = ("item", "status")
    ITEM_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    item: int
    status: _media_pb2.Status
    def __init__(self, item: _Optional[int] = ..., status: _Optional[_Union[_media_pb2.Status, _Mapping]] = ...) -> None: ...

class EncodeProgress(_message.Message):
    __slots__ = ("item", "stage")
    ITEM_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    item: int
    stage: str
    def __init__(self, item: _Optional[int] = ..., stage: _Optional[str] = ...) -> None: ...

class ProbeRequest(_message.Message):
    __slots__ = ("keys", "cache_salt")
    KEYS_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    cache_salt: str
    def __init__(self, keys: _Optional[_Iterable[bytes]] = ..., cache_salt: _Optional[str] = ...) -> None: ...

class ProbeResponse(_message.Message):
    __slots__ = ("present",)
    PRESENT_FIELD_NUMBER: _ClassVar[int]
    present: _containers.RepeatedScalarFieldContainer[bool]
    def __init__(self, present: _Optional[_Iterable[bool]] = ...) -> None: ...

class PrefetchRequest(_message.Message):
    __slots__ = ("request_id", "items", "cache_salt", "priority")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    items: _containers.RepeatedCompositeFieldContainer[_media_pb2.Media]
    cache_salt: str
    priority: int
    def __init__(self, request_id: _Optional[str] = ..., items: _Optional[_Iterable[_Union[_media_pb2.Media, _Mapping]]] = ..., cache_salt: _Optional[str] = ..., priority: _Optional[int] = ...) -> None: ...

class PrefetchResponse(_message.Message):
    __slots__ = ("headers", "errors")
    HEADERS_FIELD_NUMBER: _ClassVar[int]
    ERRORS_FIELD_NUMBER: _ClassVar[int]
    headers: _containers.RepeatedCompositeFieldContainer[EncodeHeader]
    errors: _containers.RepeatedCompositeFieldContainer[EncodeError]
    def __init__(self, headers: _Optional[_Iterable[_Union[EncodeHeader, _Mapping]]] = ..., errors: _Optional[_Iterable[_Union[EncodeError, _Mapping]]] = ...) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("leases",)
    LEASES_FIELD_NUMBER: _ClassVar[int]
    leases: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, leases: _Optional[_Iterable[str]] = ...) -> None: ...

class ReleaseResponse(_message.Message):
    __slots__ = ("released",)
    RELEASED_FIELD_NUMBER: _ClassVar[int]
    released: int
    def __init__(self, released: _Optional[int] = ...) -> None: ...

class EncoderServiceGetInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class EncoderServiceGetInfoResponse(_message.Message):
    __slots__ = ("version", "model", "architecture", "digest", "width", "levels", "dtype", "modalities", "transports", "unimplemented", "devices", "max_image_bytes", "max_video_bytes", "local_socket", "device_pools", "nixl_agent")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ARCHITECTURE_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    LEVELS_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    MODALITIES_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    UNIMPLEMENTED_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    MAX_IMAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_VIDEO_BYTES_FIELD_NUMBER: _ClassVar[int]
    LOCAL_SOCKET_FIELD_NUMBER: _ClassVar[int]
    DEVICE_POOLS_FIELD_NUMBER: _ClassVar[int]
    NIXL_AGENT_FIELD_NUMBER: _ClassVar[int]
    version: str
    model: str
    architecture: str
    digest: str
    width: int
    levels: int
    dtype: _media_pb2.DataType
    modalities: _containers.RepeatedScalarFieldContainer[_media_pb2.Modality]
    transports: _containers.RepeatedScalarFieldContainer[Transport]
    unimplemented: _containers.RepeatedScalarFieldContainer[str]
    devices: _containers.RepeatedScalarFieldContainer[str]
    max_image_bytes: int
    max_video_bytes: int
    local_socket: LocalSocket
    device_pools: _containers.RepeatedCompositeFieldContainer[DevicePool]
    nixl_agent: NixlAgent
    def __init__(self, version: _Optional[str] = ..., model: _Optional[str] = ..., architecture: _Optional[str] = ..., digest: _Optional[str] = ..., width: _Optional[int] = ..., levels: _Optional[int] = ..., dtype: _Optional[_Union[_media_pb2.DataType, str]] = ..., modalities: _Optional[_Iterable[_Union[_media_pb2.Modality, str]]] = ..., transports: _Optional[_Iterable[_Union[Transport, str]]] = ..., unimplemented: _Optional[_Iterable[str]] = ..., devices: _Optional[_Iterable[str]] = ..., max_image_bytes: _Optional[int] = ..., max_video_bytes: _Optional[int] = ..., local_socket: _Optional[_Union[LocalSocket, _Mapping]] = ..., device_pools: _Optional[_Iterable[_Union[DevicePool, _Mapping]]] = ..., nixl_agent: _Optional[_Union[NixlAgent, _Mapping]] = ...) -> None: ...

class NixlAgent(_message.Message):
    __slots__ = ("name", "backend", "metadata", "base", "bytes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    backend: str
    metadata: bytes
    base: int
    bytes: int
    def __init__(self, name: _Optional[str] = ..., backend: _Optional[str] = ..., metadata: _Optional[bytes] = ..., base: _Optional[int] = ..., bytes: _Optional[int] = ...) -> None: ...

class DevicePool(_message.Message):
    __slots__ = ("region", "gpu_uuid", "bytes")
    REGION_FIELD_NUMBER: _ClassVar[int]
    GPU_UUID_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    region: str
    gpu_uuid: str
    bytes: int
    def __init__(self, region: _Optional[str] = ..., gpu_uuid: _Optional[str] = ..., bytes: _Optional[int] = ...) -> None: ...

class LocalSocket(_message.Message):
    __slots__ = ("name", "secret")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    name: str
    secret: bytes
    def __init__(self, name: _Optional[str] = ..., secret: _Optional[bytes] = ...) -> None: ...

class EncoderServiceGetLoadRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class EncoderServiceGetLoadResponse(_message.Message):
    __slots__ = ("queued_items", "running_items", "queued_patches", "vit_calls", "vit_patches", "store_hits", "store_misses", "store_bytes", "store_capacity_bytes", "encoded_items", "failed_items", "open_streams", "running_patches", "store_entries", "stage_totals", "leases", "rows_sent", "estimated_milliseconds", "shared", "device_pool_bytes", "device_pool_capacity_bytes")
    QUEUED_ITEMS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_ITEMS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_PATCHES_FIELD_NUMBER: _ClassVar[int]
    VIT_CALLS_FIELD_NUMBER: _ClassVar[int]
    VIT_PATCHES_FIELD_NUMBER: _ClassVar[int]
    STORE_HITS_FIELD_NUMBER: _ClassVar[int]
    STORE_MISSES_FIELD_NUMBER: _ClassVar[int]
    STORE_BYTES_FIELD_NUMBER: _ClassVar[int]
    STORE_CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    ENCODED_ITEMS_FIELD_NUMBER: _ClassVar[int]
    FAILED_ITEMS_FIELD_NUMBER: _ClassVar[int]
    OPEN_STREAMS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_PATCHES_FIELD_NUMBER: _ClassVar[int]
    STORE_ENTRIES_FIELD_NUMBER: _ClassVar[int]
    STAGE_TOTALS_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    ROWS_SENT_FIELD_NUMBER: _ClassVar[int]
    ESTIMATED_MILLISECONDS_FIELD_NUMBER: _ClassVar[int]
    SHARED_FIELD_NUMBER: _ClassVar[int]
    DEVICE_POOL_BYTES_FIELD_NUMBER: _ClassVar[int]
    DEVICE_POOL_CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    queued_items: int
    running_items: int
    queued_patches: int
    vit_calls: int
    vit_patches: int
    store_hits: int
    store_misses: int
    store_bytes: int
    store_capacity_bytes: int
    encoded_items: int
    failed_items: int
    open_streams: int
    running_patches: int
    store_entries: int
    stage_totals: _containers.RepeatedCompositeFieldContainer[_media_pb2.StageTiming]
    leases: int
    rows_sent: _containers.RepeatedCompositeFieldContainer[RowsSent]
    estimated_milliseconds: int
    shared: SharedStoreLoad
    device_pool_bytes: int
    device_pool_capacity_bytes: int
    def __init__(self, queued_items: _Optional[int] = ..., running_items: _Optional[int] = ..., queued_patches: _Optional[int] = ..., vit_calls: _Optional[int] = ..., vit_patches: _Optional[int] = ..., store_hits: _Optional[int] = ..., store_misses: _Optional[int] = ..., store_bytes: _Optional[int] = ..., store_capacity_bytes: _Optional[int] = ..., encoded_items: _Optional[int] = ..., failed_items: _Optional[int] = ..., open_streams: _Optional[int] = ..., running_patches: _Optional[int] = ..., store_entries: _Optional[int] = ..., stage_totals: _Optional[_Iterable[_Union[_media_pb2.StageTiming, _Mapping]]] = ..., leases: _Optional[int] = ..., rows_sent: _Optional[_Iterable[_Union[RowsSent, _Mapping]]] = ..., estimated_milliseconds: _Optional[int] = ..., shared: _Optional[_Union[SharedStoreLoad, _Mapping]] = ..., device_pool_bytes: _Optional[int] = ..., device_pool_capacity_bytes: _Optional[int] = ...) -> None: ...

class RowsSent(_message.Message):
    __slots__ = ("transport", "rows", "bytes")
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    transport: Transport
    rows: int
    bytes: int
    def __init__(self, transport: _Optional[_Union[Transport, str]] = ..., rows: _Optional[int] = ..., bytes: _Optional[int] = ...) -> None: ...

class SharedStoreLoad(_message.Message):
    __slots__ = ("hits", "errors", "garbage", "written", "dropped", "waits_in_vain")
    HITS_FIELD_NUMBER: _ClassVar[int]
    ERRORS_FIELD_NUMBER: _ClassVar[int]
    GARBAGE_FIELD_NUMBER: _ClassVar[int]
    WRITTEN_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    WAITS_IN_VAIN_FIELD_NUMBER: _ClassVar[int]
    hits: int
    errors: int
    garbage: int
    written: int
    dropped: int
    waits_in_vain: int
    def __init__(self, hits: _Optional[int] = ..., errors: _Optional[int] = ..., garbage: _Optional[int] = ..., written: _Optional[int] = ..., dropped: _Optional[int] = ..., waits_in_vain: _Optional[int] = ...) -> None: ...

class EncoderServiceFlushCacheRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class EncoderServiceFlushCacheResponse(_message.Message):
    __slots__ = ("entries", "bytes")
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    entries: int
    bytes: int
    def __init__(self, entries: _Optional[int] = ..., bytes: _Optional[int] = ...) -> None: ...
