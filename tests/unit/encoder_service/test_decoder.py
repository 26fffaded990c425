"""The decode processes themselves: bounded memory, bounded time, and nothing left behind."""

from __future__ import annotations

import asyncio
import os
import resource
import select
import signal
import time
from contextlib import asynccontextmanager
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from common.errors import InvalidInput, Unavailable
from common.media.item import Modality, Options
from common.process.children import Child
from common.shm.arena import Range, SharedBuffer
from encoder_service.item import Inspection
from encoder_service.media.decoder import DecoderPool
from encoder_service.media.limits import MediaLimits, fitted
from encoder_service.media.messages import Inspect
from encoder_service.worker.patches import resize
from tests import bad_files, pictures
from tests.launch import command_line, descendants
from tests.unit.encoder_service.engines import IMAGES, VIDEOS
from tests.unit.encoder_service.fakes import turns

pytestmark = pytest.mark.usefixtures("forked_children")

IMAGE, VIDEO = Modality.IMAGE, Modality.VIDEO
STAGING = 96 << 20
PIXELS_AT = 32 << 20
NOBODY = "", ""


@asynccontextmanager
async def pool(*, memory_bytes: int = 2 << 30, seconds: float = 30.0, processes: int = 1):
    """A running pool, its staging arena, and a function that stages bytes."""
    staging = SharedBuffer.create("test", STAGING)
    before = set(descendants(os.getpid()))
    made = DecoderPool(
        staging,
        processes=processes,
        threads=2,
        seconds=seconds,
        start_seconds=600.0,
        memory_bytes=memory_bytes,
        bounds=MediaLimits().bounds,
    )
    await made.processes.start()

    def stage(data: bytes) -> Range:
        staging.view[: len(data)] = data
        return Range(0, len(data))

    try:
        yield made, staging, stage
    finally:
        started = set(descendants(os.getpid())) - before
        await made.processes.stop()
        assert not [line for pid in started if (line := command_line(pid))]
        staging.close()


def processes() -> list[int]:
    """This process's own decode processes, not those of a service that another test keeps running."""
    children = [int(pid) for task in Path("/proc/self/task").glob("*/children") for pid in task.read_text().split()]
    return [pid for pid in children if "encoder_service.media" in command_line(pid)]


async def test_pictures_and_videos_are_decoded_into_the_arena():
    frames = pictures.frames(12)
    async with pool() as (decoders, staging, stage):
        data = stage(pictures.encoded(pictures.noise(50, 40)))
        assert await decoders.inspect(data, key=b"x", modality=IMAGE, field="x") == Inspection(50, 40)
        plan = IMAGES.plan(Inspection(50, 40), Options())
        await decoders.decode(data, Range(PIXELS_AT, plan.pixel_bytes), plan, key=b"x", modality=IMAGE, field="x")
        shown = np.frombuffer(staging.view, np.uint8, plan.pixel_bytes, PIXELS_AT).reshape(40, 50, 3)
        assert np.array_equal(shown, np.asarray(pictures.noise(50, 40)))
        del shown

        data = stage(pictures.video(frames, fps=5))
        seen = await decoders.inspect(data, key=b"x", modality=VIDEO, field="x")
        assert seen == Inspection(128, 96, 12, 5.0)
        plan = VIDEOS.plan(seen, Options())
        await decoders.decode(data, Range(PIXELS_AT, plan.pixel_bytes), plan, key=b"x", modality=VIDEO, field="x")
        shown = np.frombuffer(staging.view, np.uint8, plan.pixel_bytes, PIXELS_AT).reshape(-1, 96, 128, 3)
        apart = np.abs(shown[:, None].astype(np.int16) - frames[None]).mean((2, 3, 4))
        assert apart.argmin(1).tolist() == list(plan.frames)
        del shown


async def test_frames_that_are_too_large_together_are_resized_as_they_are_decoded_to_what_torch_makes_of_them():
    data, limits = pictures.video(pictures.frames(20, 320, 240), fps=10), MediaLimits(max_video_area=500_000)
    options, shape = Options(fps=10.0, max_pixels=20 * 64 * 96), (-1, 240, 320, 3)
    async with pool() as (decoders, staging, stage):
        there = stage(data)
        seen = await decoders.inspect(there, key=b"x", modality=VIDEO, field="x")
        as_they_are = VIDEOS.plan(seen, options)
        plan = fitted(as_they_are, limits)
        assert plan.whole == (240, 320)
        assert plan.resized == (plan.height, plan.width) == as_they_are.resized
        assert plan.pixels <= limits.max_video_area < as_they_are.pixels
        found = []
        for each in (as_they_are, plan):
            place = Range(PIXELS_AT, each.pixel_bytes)
            counts: list[int] = []
            about = {"key": b"x", "modality": VIDEO, "field": "x", "on_frames": counts.append}
            await decoders.decode(there, place, each, **about)
            assert counts == [8, 16, 20]
            found.append(np.frombuffer(staging.view, np.uint8, place.size, PIXELS_AT).copy())
    whole = torch.from_numpy(found[0].reshape(shape)).permute(0, 3, 1, 2)
    expected = resize(whole.contiguous(), plan.resized).permute(0, 2, 3, 1)
    apart = (torch.from_numpy(found[1]).view(expected.shape).int() - expected.int()).abs()
    assert apart.max() <= 1
    assert apart.float().mean() < 0.01


@pytest.mark.parametrize("count", [1, 8])
async def test_a_short_transport_stream_is_read_in_a_process_that_can_open_nothing(count):
    frames = pictures.frames(count)
    async with pool() as (decoders, staging, stage):
        data = stage(bad_files.broadcast(frames))
        seen = await decoders.inspect(data, key=b"x", modality=VIDEO, field="x")
        assert seen == Inspection(128, 96, count, 10.0)
        plan = VIDEOS.plan(seen, Options(fps=10.0))
        await decoders.decode(data, Range(PIXELS_AT, plan.pixel_bytes), plan, key=b"x", modality=VIDEO, field="x")
        shown = np.frombuffer(staging.view, np.uint8, plan.pixel_bytes, PIXELS_AT).reshape(-1, 96, 128, 3)
        apart = np.abs(shown[:, None].astype(np.int16) - frames[None]).mean((2, 3, 4))
        assert apart.argmin(1).tolist() == list(plan.frames)
        del shown


async def test_a_file_that_needs_more_memory_than_there_is_is_unreadable():
    plan = IMAGES.plan(Inspection(3000, 3000), Options())
    async with pool() as (decoders, _, stage):
        data = stage(pictures.encoded(pictures.noise(3000, 3000), compress_level=0))
        _limit(processes()[0], 20 << 20)
        with pytest.raises(InvalidInput) as refused:
            await decoders.decode(data, Range(PIXELS_AT, plan.pixel_bytes), plan, key=b"x", modality=IMAGE, field="x")
        assert refused.value.reason == "MEDIA_UNREADABLE"
        data = stage(pictures.encoded(pictures.noise(50, 40)))
        assert await decoders.inspect(data, key=b"x", modality=IMAGE, field="x") == Inspection(50, 40)


async def test_a_process_can_open_neither_file_nor_socket():
    """A description of streams to be received, which begins as MPEG-TS does, is not followed."""
    streams = b"\nv=0\no=- 0 0 IN IP4 127.0.0.1\ns=t\nc=IN IP4 127.0.0.1\nt=0 0\nm=video 15004 RTP/AVP 96\n"
    disguised = b"G".join([b"", streams.ljust(187, b"#"), 187 * b"#", 187 * b"#"])
    async with pool(seconds=2.0) as (decoders, _, stage):
        assert resource.prlimit(processes()[0], resource.RLIMIT_NOFILE) == (3, 3)
        open_before = _descriptors(processes()[0])
        inspected = asyncio.create_task(decoders.inspect(stage(disguised), key=b"x", modality=VIDEO, field="x"))
        pid, seen = processes()[0], set()
        while not inspected.done():
            seen |= _descriptors(pid)
            await asyncio.sleep(0.01)
        with pytest.raises(InvalidInput):
            await inspected
        assert seen <= open_before


def _descriptors(pid: int) -> set[str]:
    """What a process has open; nothing where it is gone."""
    try:
        return {str(each.readlink()) for each in Path(f"/proc/{pid}/fd").iterdir()}
    except FileNotFoundError:
        return set()


def _limit(pid: int, more: int) -> None:
    """Lets a process map this much more than it has now, and no more."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + more
    resource.prlimit(pid, resource.RLIMIT_AS, (limit, limit))


def struck(monkeypatch, number):
    """From now on a process that is to inspect something gets this signal in place of the job."""
    send = Child.send

    def strike(child: Child, message: object) -> None:
        if isinstance(message, Inspect):
            os.kill(child.process.pid, number)
        else:
            send(child, message)

    monkeypatch.setattr(Child, "send", strike)


async def test_a_process_that_dies_costs_one_more_try_and_a_second_one_the_file(monkeypatch):
    async with pool(processes=3) as (decoders, _, stage):
        data = stage(pictures.encoded(pictures.noise(50, 40)))
        with monkeypatch.context() as patched:
            struck(patched, signal.SIGSEGV)
            with pytest.raises(InvalidInput) as refused:
                await decoders.inspect(data, key=b"x", modality=IMAGE, field="x")
        assert refused.value.reason == "MEDIA_UNREADABLE"
        assert decoders.processes.restarts == 2
        assert await decoders.inspect(data, key=b"x", modality=IMAGE, field="x") == Inspection(50, 40)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_no_file_is_to_blame_for_processes_that_others_have_killed_or_stopped(monkeypatch, number):
    async with pool(processes=2, seconds=0.2) as (decoders, _, stage):
        data = stage(pictures.encoded(pictures.noise(50, 40)))
        with monkeypatch.context() as patched:
            struck(patched, number)
            with pytest.raises(Unavailable) as told:
                await decoders.inspect(data, key=b"x", modality=IMAGE, field="x")
        assert (told.value.reason, bool(told.value.retry_after)) == ("NO_DECODER", True)
        assert decoders.processes.restarts == 2
        assert await decoders.inspect(data, key=b"x", modality=IMAGE, field="x") == Inspection(50, 40)


async def test_a_file_has_spent_nothing_where_its_process_was_killed_while_the_service_stood_still(monkeypatch):
    """Nor is it known any more how much of that time its process has had."""

    def kill(child: Child, _: object) -> None:
        os.kill(child.process.pid, signal.SIGKILL)
        time.sleep(0.3)

    async with pool(processes=2, seconds=0.2) as (decoders, _, stage):
        data = stage(pictures.encoded(pictures.noise(50, 40)))
        with monkeypatch.context() as patched:
            patched.setattr(Child, "send", lambda child, job: asyncio.get_running_loop().call_soon(kill, child, job))
            with pytest.raises(Unavailable) as told:
                await decoders.inspect(data, key=b"x", modality=IMAGE, field="x")
        assert told.value.reason == "NO_DECODER"


async def test_where_one_process_was_stopped_another_does_its_job():
    async with pool(processes=2, seconds=0.2) as (decoders, _, stage):
        data = stage(pictures.encoded(pictures.noise(50, 40)))
        os.kill(processes()[0], signal.SIGSTOP)
        for _ in range(3):
            assert await decoders.inspect(data, key=b"x", modality=IMAGE, field="x") == Inspection(50, 40)
        assert decoders.processes.restarts == 1


async def test_no_file_is_to_blame_for_processes_that_died_without_a_job():
    async with pool(processes=3) as (decoders, _, stage):
        data = stage(pictures.encoded(pictures.noise(50, 40)))
        for pid in processes():
            os.kill(pid, signal.SIGKILL)
        await asyncio.gather(*(child.process.wait() for child in decoders.processes.children))
        async with asyncio.timeout(180):
            while not all(child.has_ended for child in decoders.processes.children):
                await turns(1)
            assert await decoders.inspect(data, key=b"x", modality=IMAGE, field="x") == Inspection(50, 40)
        assert decoders.processes.restarts == 3


async def test_a_job_that_takes_long_does_not_hold_up_the_next_one_where_there_are_two_processes():
    async with pool(processes=2) as (decoders, _, stage):
        data = stage(pictures.encoded(pictures.noise(50, 40)))
        first, _ = processes()
        os.kill(first, signal.SIGSTOP)
        jobs = [asyncio.create_task(decoders.inspect(data, key=b"x", modality=IMAGE, field="x")) for _ in range(2)]
        done, held = await asyncio.wait(jobs, return_when=asyncio.FIRST_COMPLETED)
        assert [await each for each in done] == [Inspection(50, 40)]
        assert len(held) == 1
        os.kill(first, signal.SIGCONT)
        assert [await each for each in held] == [Inspection(50, 40)]


async def test_a_caller_who_leaves_does_not_leave_a_process_writing():
    async with pool() as (decoders, _, stage):
        data = stage(pictures.encoded(pictures.noise(50, 40)))
        (pid,) = processes()
        os.kill(pid, signal.SIGSTOP)
        job = asyncio.create_task(decoders.inspect(data, key=b"x", modality=IMAGE, field="x"))
        await asyncio.sleep(0)
        job.cancel()
        await asyncio.gather(job, return_exceptions=True)
        assert not command_line(pid), "it is gone before the caller's memory is"
        assert await decoders.inspect(data, key=b"x", modality=IMAGE, field="x") == Inspection(50, 40)


@pytest.mark.parametrize(("count", "at_once"), [(1, 1), (2, 1), (4, 3)])
async def test_videos_leave_a_process_for_everything_else_where_there_are_several(count, at_once):
    staging = SharedBuffer.create("test", 4096)
    made = DecoderPool(
        staging, processes=count, threads=1, seconds=1.0, start_seconds=1.0, memory_bytes=1, bounds=MediaLimits().bounds
    )
    held = [await made.turn(VIDEO, 1 << 20, NOBODY) for _ in range(at_once)]
    late = asyncio.create_task(made.turn(VIDEO, 1 << 20, NOBODY))
    await turns()
    assert not late.done()
    for _ in range(count):
        await made.turn(IMAGE, 1 << 20, NOBODY)
    with held[0]:
        held[0].close()  # which is all that the end of the block would do
    later = asyncio.create_task(made.turn(VIDEO, 1 << 20, NOBODY))
    await turns()
    assert (late.done(), later.done()) == (True, False)
    later.cancel()
    staging.close()


async def test_callers_take_turns_with_what_videos_may_have_and_one_alone_has_all_of_it():
    staging = SharedBuffer.create("test", 4096)
    made = DecoderPool(
        staging, processes=3, threads=1, seconds=1.0, start_seconds=1.0, memory_bytes=1, bounds=MediaLimits().bounds
    )
    order: list[str] = []

    async def decodes(name: str) -> None:
        with await made.turn(VIDEO, 1000, (name, "")):
            order.append(name)
            await turns()

    many = [asyncio.create_task(decodes("many")) for _ in range(6)]
    await turns(2)
    assert order == ["many", "many"]
    few = [asyncio.create_task(decodes(name)) for name in ("few", "one", "few")]
    await asyncio.gather(*many, *few)
    assert order == ["many", "many", "few", "one", "many", "few", "many", "many", "many"]
    staging.close()


async def test_sounds_are_decoded_beside_each_other_and_beside_videos_but_for_long_ones():
    """Else models that hear would decode one at a time; ten minutes of sound take seconds."""
    staging = SharedBuffer.create("test", 4096)
    made = DecoderPool(
        staging, processes=2, threads=1, seconds=1.0, start_seconds=1.0, memory_bytes=1, bounds=MediaLimits().bounds
    )
    with await made.turn(VIDEO, 1000, NOBODY):
        for size in (1, 1000, (1 << 20) - 1):
            await made.turn(Modality.AUDIO, size, NOBODY)
        late = asyncio.create_task(made.turn(Modality.AUDIO, 1 << 20, NOBODY))
        await turns()
        assert not late.done()
    await late
    staging.close()


async def test_a_job_that_uses_up_its_time_is_the_media_s_fault():
    """It takes several tenths of a second of a processor."""
    side = 4000
    with BytesIO() as file:
        Image.linear_gradient("L").resize((side, side)).convert("RGB").save(file, "JPEG", progressive=True)
        encoded = file.getvalue()
    async with pool(seconds=0.02) as (decoders, _, stage):
        plan = IMAGES.plan(Inspection(side, side), Options())
        (pid,) = processes()
        with pytest.raises(InvalidInput) as refused:
            await decoders.decode(
                stage(encoded), Range(PIXELS_AT, plan.pixel_bytes), plan, key=b"x", modality=IMAGE, field="x"
            )
        assert refused.value.reason == "MEDIA_TOO_SLOW"
        assert decoders.processes.restarts == 1
        assert not command_line(pid)


async def test_a_file_over_which_processes_wait_for_ever_is_refused(monkeypatch):
    """As where threads of a decoder wait for each other: nobody has stopped them."""
    send = Child.send
    monkeypatch.setattr(Child, "send", lambda child, job: None if isinstance(job, Inspect) else send(child, job))
    async with pool(seconds=0.2) as (decoders, _, stage):
        data = stage(pictures.encoded(pictures.noise(50, 40)))
        with pytest.raises(InvalidInput) as refused:
            await decoders.inspect(data, key=b"x", modality=IMAGE, field="x")
        assert refused.value.reason == "MEDIA_TOO_SLOW"
        assert decoders.processes.restarts == 2


async def test_an_answer_that_came_while_the_service_stood_still_is_in_time():
    async with pool(seconds=0.2) as (decoders, _, stage):
        data = stage(pictures.encoded(pictures.noise(50, 40)))
        (child,) = decoders.processes.children
        os.kill(child.process.pid, signal.SIGSTOP)  # or the answer might be here, and read, before we stand still
        job = asyncio.create_task(decoders.inspect(data, key=b"x", modality=IMAGE, field="x"))
        await turns()
        os.kill(child.process.pid, signal.SIGCONT)
        select.select([child._writer.get_extra_info("socket").fileno()], [], [])  # the event loop sees nothing of it
        time.sleep(0.3)  # noqa: ASYNC251
        assert await job == Inspection(50, 40)


async def test_a_video_that_was_looked_at_is_still_open_when_it_is_decoded():
    """The bytes are spoilt in between, so that a second opening would fail."""
    frames = pictures.frames(12)
    async with pool(processes=3) as (decoders, staging, stage):
        data = stage(pictures.video(frames, fps=5))
        seen = await decoders.inspect(data, key=b"film", modality=VIDEO, field="x")
        plan = VIDEOS.plan(seen, Options())
        pixels = Range(PIXELS_AT, plan.pixel_bytes)
        good = bytes(staging.slice(data))
        staging.slice(data)[:] = bytes(data.size)
        await decoders.decode(data, pixels, plan, key=b"film", modality=VIDEO, field="x")
        first = bytes(staging.slice(pixels))
        with pytest.raises(InvalidInput):
            await decoders.decode(data, pixels, plan, key=b"film", modality=VIDEO, field="x")
        staging.slice(data)[:] = good
        await decoders.decode(data, pixels, plan, key=b"film", modality=VIDEO, field="x")
        assert bytes(staging.slice(pixels)) == first


async def test_a_video_that_was_looked_at_is_opened_again_where_its_process_has_gone():
    async with pool() as (decoders, _, stage):
        data = stage(pictures.video(pictures.frames(12), fps=5))
        seen = await decoders.inspect(data, key=b"film", modality=VIDEO, field="x")
        plan = VIDEOS.plan(seen, Options())
        (pid,) = processes()
        os.kill(pid, signal.SIGKILL)
        await decoders.decode(data, Range(PIXELS_AT, plan.pixel_bytes), plan, key=b"film", modality=VIDEO, field="x")
        assert decoders.processes.restarts == 1


async def test_a_process_that_was_too_slow_is_replaced_though_its_caller_leaves_meanwhile(monkeypatch):
    async with pool(seconds=0.2) as (decoders, _, stage):
        data = stage(pictures.encoded(pictures.noise(50, 40)))
        (child,) = decoders.processes.children
        ending, go_on, stop = asyncio.Event(), asyncio.Event(), child.stop

        async def slow_stop(grace: float) -> None:
            ending.set()
            await go_on.wait()
            await stop(grace)

        monkeypatch.setattr(child, "stop", slow_stop)
        os.kill(child.process.pid, signal.SIGSTOP)
        job = asyncio.create_task(decoders.inspect(data, key=b"x", modality=IMAGE, field="x"))
        await ending.wait()
        for _ in range(2):
            job.cancel()
            await turns()
            assert not job.done(), "the process may still be writing to the caller's memory"
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await job
        async with asyncio.timeout(180):
            await decoders.processes.take(b"x")


async def test_the_time_of_an_item_is_that_of_all_its_jobs():
    plan = IMAGES.plan(Inspection(2000, 2000), Options())
    async with pool() as (decoders, _, stage):
        data, pixels = stage(pictures.encoded(pictures.noise(2000, 2000))), Range(PIXELS_AT, plan.pixel_bytes)
        time_budget = decoders.time_budget()
        given = time_budget.left
        for _ in range(2):
            before = time_budget.left
            await decoders.decode(data, pixels, plan, key=b"x", modality=IMAGE, field="x", time_budget=time_budget)
            assert time_budget.left < before
        time_budget.left -= given
        with pytest.raises(InvalidInput) as refused:
            await decoders.decode(data, pixels, plan, key=b"x", modality=IMAGE, field="x", time_budget=time_budget)
        assert refused.value.reason == "MEDIA_TOO_SLOW"
        assert not decoders.processes.restarts


async def test_a_file_of_too_many_parts_is_refused_by_name_and_a_good_one_is_read_next():
    async with pool() as (decoders, _, stage):
        crowded = bad_files.png(64, 64, extra=bad_files.chunk(b"prVt", b"") * 40_000)
        with pytest.raises(InvalidInput) as refused:
            await decoders.inspect(stage(crowded), key=b"x", modality=IMAGE, field="x")
        assert (refused.value.reason, refused.value.field) == ("MEDIA_TOO_COMPLEX", "x")
        good = stage(pictures.encoded(pictures.noise(50, 40)))
        assert await decoders.inspect(good, key=b"x", modality=IMAGE, field="x") == Inspection(50, 40)
