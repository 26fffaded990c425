"""Metrics: what a scrape shows, on which thread it is read, and that the port is gone afterwards."""

from __future__ import annotations

import asyncio
import itertools
import socket
import threading
import urllib.error
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from common.telemetry.metrics import SECONDS, Metrics, gauge, total


async def scrape(address: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Every sample by its name and labels, as Prometheus would read them."""

    def get() -> str:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=180) as answer:
            assert answer.headers["Content-Type"].startswith("text/plain")
            return str(answer.read(), "utf-8")

    text = await asyncio.to_thread(get)
    families = text_string_to_metric_families(text)
    return {
        (each.name, tuple(sorted(each.labels.items()))): each.value for family in families for each in family.samples
    }


async def test_a_scrape_shows_events_and_state_under_the_service_s_name() -> None:
    metrics = Metrics("twinlens_test")
    errors = metrics.counter("errors", "what failed", ["reason"])
    seconds = metrics.histogram("pass_seconds", "how long")
    waiting = [1, 2, 3]
    metrics.read(lambda: [gauge("waiting", "who waits", len(waiting))])
    metrics.read(lambda: [total("bytes", "by tier", {("memory",): 10.0, ("redis",): 4.0}, ["tier"])])
    async with metrics.serve("127.0.0.1:0") as address:
        errors.labels("TOO_LARGE").inc()
        seconds.observe(0.2)
        first = await scrape(address)
        waiting.clear()
        errors.labels("TOO_LARGE").inc()
        second = await scrape(address)
    assert first["twinlens_test_waiting", ()] == 3
    assert second["twinlens_test_waiting", ()] == 0
    assert first["twinlens_test_errors_total", (("reason", "TOO_LARGE"),)] == 1
    assert second["twinlens_test_errors_total", (("reason", "TOO_LARGE"),)] == 2
    assert first["twinlens_test_bytes_total", (("tier", "redis"),)] == 4
    assert first["twinlens_test_pass_seconds_bucket", (("le", "0.1"),)] == 0
    assert first["twinlens_test_pass_seconds_bucket", (("le", "0.25"),)] == 1
    assert first["process_resident_memory_bytes", ()] > 0


async def test_scrapes_for_which_no_thread_could_be_had_keep_no_later_one_away(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    async with Metrics("twinlens_test").serve("127.0.0.1:0") as address:
        with monkeypatch.context() as patched:
            patched.setattr(threading, "_start_new_thread", refuse)
            for _ in range(20):
                reader, writer = await asyncio.open_connection(*address.split(":"))
                assert await reader.read() == b""
                writer.close()
        assert await scrape(address)


async def test_state_is_read_on_the_event_loop() -> None:
    metrics, seen = Metrics("twinlens_test"), []

    def reader() -> list:
        seen.append((threading.current_thread(), asyncio.current_task() is not None))
        return []

    metrics.read(reader)
    async with metrics.serve("127.0.0.1:0") as address:
        assert not seen, "nothing is read before somebody asks"
        await scrape(address)
    assert seen == [(threading.current_thread(), True)]


async def test_two_services_in_one_process_share_nothing() -> None:
    one, two = Metrics("twinlens_one"), Metrics("twinlens_two")
    one.counter("calls", "calls").inc()
    two.counter("calls", "calls")
    async with one.serve("127.0.0.1:0") as first, two.serve("127.0.0.1:0") as second:
        samples = await asyncio.gather(scrape(first), scrape(second))
    assert samples[0]["twinlens_one_calls_total", ()] == 1
    assert samples[1]["twinlens_two_calls_total", ()] == 0
    assert ("twinlens_one_calls_total", ()) not in samples[1]


async def test_nothing_is_served_unless_asked_for() -> None:
    async with Metrics("twinlens_test").serve("") as address:
        assert address == ""
        assert "metrics" not in {thread.name for thread in threading.enumerate()}


async def test_the_port_and_its_thread_are_gone_at_the_end() -> None:
    async with Metrics("twinlens_test").serve("127.0.0.1:0") as address:
        assert "metrics" in {thread.name for thread in threading.enumerate()}
    assert "metrics" not in {thread.name for thread in threading.enumerate()}
    with pytest.raises(urllib.error.URLError):
        await scrape(address)
    async with Metrics("twinlens_test").serve(address) as again:  # nothing holds the port
        assert again == address


async def test_a_port_that_is_taken_is_an_error() -> None:
    async with Metrics("twinlens_test").serve("127.0.0.1:0") as address:
        with pytest.raises(OSError, match="in use"):
            async with Metrics("twinlens_test").serve(address):
                pass


async def test_silent_connections_are_bounded_and_do_not_delay_the_end() -> None:
    async with Metrics("twinlens_test").serve("127.0.0.1:0") as address:
        host, port = address.split(":")
        silent = [socket.create_connection((host, int(port))) for _ in range(9)]
        silent[8].settimeout(180)
        assert await asyncio.to_thread(silent[8].recv, 1) == b"", "the ninth is closed at once"
    for each in silent:
        each.close()


def test_latency_buckets_reach_from_a_millisecond_to_ten_minutes_in_even_steps() -> None:
    ratios = [after / before for before, after in itertools.pairwise(SECONDS)]
    assert SECONDS[0] == 0.001
    assert SECONDS[-1] == 600
    assert 1.9 <= min(ratios) <= max(ratios) <= 3
