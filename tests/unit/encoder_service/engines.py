"""An encoder engine over fake decoders and workers, and the items that tests send through it."""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import replace

from common.media.item import Modality
from common.process.children import Child
from common.rows.wire import DType, RowLayout
from common.shm.arena import SharedBuffer
from encoder_service.engine.admission import Admission
from encoder_service.engine.content import Contents
from encoder_service.engine.dispatch import Dispatcher
from encoder_service.engine.embedding_store import EmbeddingStore
from encoder_service.engine.encode import EncoderEngine
from encoder_service.engine.item_plans import FamilyPlans
from encoder_service.engine.media_loader import MediaLoader
from encoder_service.engine.pipeline import Pipeline
from encoder_service.engine.shared_store import SharedStore
from encoder_service.engine.shared_store_client import SharedStoreClient
from encoder_service.engine.staging import Staging
from encoder_service.families.family import ModelConfig
from encoder_service.families.pixel_settings import PixelSettings
from encoder_service.families.qwen2_vl import QWEN2_VL, VIDEO_RULE
from encoder_service.families.qwen_processors import ImageProcessor, VideoProcessor
from encoder_service.item import Inspection, Item
from encoder_service.media.fetch import FetchConfig, Fetcher
from encoder_service.media.limits import MediaLimits
from encoder_service.worker.messages import WorkerSettings
from tests import pictures
from tests.unit.encoder_service.fakes import DONE, LIMITS, TIMES, FakeChild, FakeDecoders

LAYOUT = RowLayout(1, 16, DType.FLOAT32)
PIXELS = PixelSettings(
    min_pixels=28 * 28,
    max_pixels=28 * 28 * 16,
    patch=14,
    temporal=2,
    merge=2,
    mean=(0.5,) * 3,
    std=(0.5,) * 3,
    rescale=1 / 255,
)
IMAGES = ImageProcessor(PIXELS)
VIDEOS = VideoProcessor(PIXELS, VIDEO_RULE, 2.0, 4, 768, False, 1000)
CONFIG = ModelConfig(
    architecture="Fake",
    family=QWEN2_VL,
    tower={},
    processors={Modality.IMAGE: IMAGES, Modality.VIDEO: VIDEOS},
    width=16,
    levels=1,
)
PICTURES = [pictures.encoded(pictures.noise(56, 56, seed)) for seed in range(8)]
SEEN = Inspection(56, 56)


@asynccontextmanager
async def encoder(
    monkeypatch,
    *,
    answers=lambda _: DONE,
    decoders=None,
    fetcher=None,
    shared=None,
    items=64,
    size=1 << 20,
    store_bytes=8192,
    staging=1 << 16,
    max_units=64,
    **options,
):
    """An encoder with these `options` over one fake worker that gives `answers` (None: none), and that worker."""
    children: list[FakeChild] = []

    async def child(*_, **__) -> FakeChild:
        children.append(FakeChild(answers))
        return children[-1]

    monkeypatch.setattr(Child, "start", child)
    settings = WorkerSettings(folder="", device="cpu", dtype="float32", threads=1, staging_bytes=0, store_bytes=0)
    dispatcher = Dispatcher([settings], (0, 0), replace(LIMITS, budget=4096, max_units=max_units), TIMES)
    await dispatcher.start()
    arenas = [SharedBuffer.create("test", staging), SharedBuffer.create("test", store_bytes)]
    store, shared_store = EmbeddingStore(arenas[1], LAYOUT.row_bytes), None
    if shared:
        shared_store = SharedStore(SharedStoreClient(shared, seconds=5.0), store, LAYOUT, ttl=60, wait=5.0)
        shared_store.start()
    decoding = decoders or FakeDecoders(SEEN)
    plans = FamilyPlans(CONFIG, LAYOUT, MediaLimits(), max_patches=4096)
    media = MediaLoader(plans, Staging(arenas[0]), store, decoding)
    admission = Admission(items, size)
    contents = Contents(fetcher or Fetcher(FetchConfig()), MediaLimits(), "digest", admission)
    pipeline = Pipeline(media, store, dispatcher, contents, LAYOUT, shared_store)
    made = EncoderEngine(pipeline, "digest", admission, **options)
    try:
        yield made, children[0]
    finally:
        await dispatcher.stop()
        await made.stop()
        if shared_store:
            await shared_store.stop()
            shared_store.check_idle()
        made.check_idle()
        for arena in arenas:
            arena.close()


def item(number: int = 0, **fields) -> Item:
    return Item(Modality.IMAGE, fields.pop("source", PICTURES[number]), field="items[0]", **fields)


async def rows(made: EncoderEngine, wanted: Item) -> bool:
    """Waits for an item's rows; true where they had been there."""
    async with made.ticket(wanted, rows=True) as ticket:
        header = await made.resolve(ticket)
        await ticket.ready()
        with made.pipeline.store.pinned(ticket.allocation) as data:
            assert len(data) == header.tokens * LAYOUT.row_bytes
        return ticket.cached
