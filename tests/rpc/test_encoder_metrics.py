"""What Prometheus reads of a real encoder, against what the encoder did."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from functools import partial

import pytest

from tests import pictures
from tests.launch import Service, encoder_server
from tests.rpc.encoder_client import DECODER, Client, image, new_picture
from tests.scrape import scrape
from tests.waiting import until

PICTURE = pictures.encoded(pictures.noise(120, 90, 71))
PREFIX = "twinlens_encoder_"


@pytest.fixture(scope="module")
def service(checkpoints) -> Iterator[Service]:
    with encoder_server(checkpoints("qwen3_vl"), metrics_listen="127.0.0.1:0") as running:
        yield running


@pytest.fixture
def client(service) -> Iterator[Client]:
    with Client(service) as calls:
        yield calls


def change(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """What grew, without the prefix."""
    grown = {name: value - before.get(name, 0) for name, value in after.items() if name.startswith(PREFIX)}
    return {name.removeprefix(PREFIX): value for name, value in grown.items()}


def test_a_scrape_says_what_runs(service, client):
    info = client.info()
    (line,) = [name for name in scrape(service.metrics) if name.startswith(f"{PREFIX}info")]
    for label, value in (("version", info.version), ("model", info.model), ("digest", info.digest), ("device", "cpu")):
        assert f'{label}="{value}"' in line


def test_the_log_says_how_much_there_is_room_for(service):
    (said,) = [json.loads(line) for line in service.log.read_text().splitlines() if "room for rows" in line]
    assert said["store_bytes"] == scrape(service.metrics)[f"{PREFIX}store_capacity_bytes"]
    assert said["store_rows"] == said["store_bytes"] // said["row_bytes"]
    assert said["workers"] == 1


def test_a_new_picture_and_a_repeat_are_counted_where_they_were_served(service, client):
    before = scrape(service.metrics)
    first, again = client.one(image(PICTURE)), client.one(image(PICTURE))
    grown = change(before, scrape(service.metrics))
    size = first.rows.size * 4
    assert grown["store_misses_total"] == 1
    assert grown["store_hits_total"] == 1
    assert grown['items_total{outcome="encoded"}'] == 1
    assert grown['vit_calls_total{mode="eager"}'] == 1
    assert grown['vit_calls_total{mode="graph"}'] == 0
    assert grown["vit_patches_total"] == first.header.grid.h * first.header.grid.w
    assert grown["vit_seconds_count"] == grown["batch_fill_count"] == 1
    for seconds in ("vit_seconds_sum", "worker_busy_seconds_total"):  # each by a clock of its own process
        assert 0 < grown[seconds] < 60
    assert grown["store_entries"] == 1
    assert grown["store_bytes"] >= size
    assert grown['bytes_out_total{transport="inline"}'] == 2 * size
    assert grown['rows_out_total{transport="inline"}'] == 2 * len(again.rows)
    assert grown['stage_seconds_count{stage="decode"}'] == 1, "a repeat is not decoded"
    assert grown['stage_seconds_count{stage="transfer"}'] == 2


def test_errors_are_counted_by_their_reason(service, client):
    before = scrape(service.metrics)
    bad = client.one(image(b"no picture"))
    grown = change(before, scrape(service.metrics))
    assert grown[f'errors_total{{reason="{bad.error.reason}"}}'] == 1
    assert grown['items_total{outcome="encoded"}'] == 0


def test_load_and_metrics_agree_and_the_estimate_follows_the_first_batch(checkpoints):
    with (
        encoder_server(checkpoints("qwen2_vl"), metrics_listen="127.0.0.1:0") as service,
        Client(service) as client,
    ):
        assert not client.load().HasField("estimated_milliseconds"), "nothing was computed yet"
        assert PREFIX + "estimated_seconds" not in scrape(service.metrics)
        client.one(image(PICTURE))
        until(lambda: not client.load().running_items, "idle")
        load, samples = client.load(), scrape(service.metrics)
        assert load.HasField("estimated_milliseconds")
        assert load.estimated_milliseconds == 0
        assert samples[PREFIX + "estimated_seconds"] == 0
        assert samples[PREFIX + "store_bytes"] == load.store_bytes
        assert samples[PREFIX + "store_capacity_bytes"] == load.store_capacity_bytes
        assert samples[PREFIX + "vit_patches_total"] == load.vit_patches
        assert samples[PREFIX + "workers_alive"] == 1


def test_nothing_listens_unless_it_is_asked_for(checkpoints):
    with encoder_server(checkpoints("qwen3_vl")) as service:
        assert service.metrics == ""


def test_a_dead_worker_shows(service, client):
    died = PREFIX + "worker_deaths_total"
    before = scrape(service.metrics)[died]
    os.kill(service.children("encoder_service.worker")[0], signal.SIGKILL)
    until(lambda: scrape(service.metrics)[died] == before + 1, "the death is counted")
    until(partial(_alive, service), "another worker is there")


def test_a_dead_decode_process_shows(service, client):
    replaced = PREFIX + "decode_process_restarts_total"
    before = scrape(service.metrics)[replaced]
    os.kill(service.children(DECODER)[0], signal.SIGKILL)

    def counted() -> bool:  # it is missed when somebody wants it
        client.one(image(new_picture()))
        return scrape(service.metrics)[replaced] == before + 1

    until(counted, "it is counted")


def _alive(service: Service) -> bool:
    return scrape(service.metrics)[PREFIX + "workers_alive"] == 1
