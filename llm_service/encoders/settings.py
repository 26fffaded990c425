"""How this service uses encoders, and what it states with each item."""

from __future__ import annotations

from dataclasses import dataclass, field

from common.rows.wire import RowLayout
from common.rpc.channel import ChannelSecurity
from llm_service.encoders.health import CHECK_SECONDS
from llm_service.encoders.transports.nixl_reader import NixlReader
from llm_service.engine_client.mirrors import Mirrors


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderSettings:
    """How this service uses encoders.

    `digest` is the required digest, `merge` the patches on a side of one row, `layout_from_encoder` says that headers
    state items' layouts; `timeout` bounds a stream and `silence` the time between its events, in seconds, and `hedge`
    is how long an item waits for a row before another encoder is asked as well, 0 for ever; `connections` is
    their number per encoder; `local_dir` is the folder of local sockets that are files. `mirrors` are the ranks'
    mirrors of the row arena, `nixl` reads encoders' memory by NIXL.

    The rest are not options. Addresses are resolved every `resolve_seconds`, and encoders checked every
    `check_seconds`; if none can be used, an item waits `pick_seconds` for one. A part of an item's rows has at least
    `part_bytes`: below that, opening one more stream takes longer than it can save.
    """

    digest: str
    layout: RowLayout
    merge: int
    layout_from_encoder: bool = False
    security: ChannelSecurity = field(default_factory=ChannelSecurity)
    timeout: float = 120.0
    silence: float = 2.5
    hedge: float = 10.0
    connections: int = 1
    shared_memory: bool = True
    local_dir: str = ""
    mirrors: Mirrors | None = None
    nixl: NixlReader | None = None
    resolve_seconds: float = 2.0
    check_seconds: float = CHECK_SECONDS
    pick_seconds: float = 0.8
    part_bytes: int = 8 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodeParams:
    """Parameters of an item's request: its owner, the first row wanted, the row before which to stop (0: none), and the
    number of earlier attempts. Some transports are left out after a stream of the item `broke`, or if we were `late` to
    read its rows again and again: see `Transport`."""

    request_id: str
    salt: str
    priority: int
    first: int = 0
    end: int = 0
    attempt: int = 0
    broke: bool = False
    late: bool = False
