"""Device workers that stand still: noticed by the pace of the batches before, long before any batch's last second."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from tests import pictures
from tests.launch import encoder_server, stop
from tests.rpc.encoder_client import Client, image
from tests.scrape import scrape
from tests.waiting import until

WORKER = "encoder_service.worker"
DEATHS = "twinlens_encoder_worker_deaths_total"
ALIVE = "twinlens_encoder_workers_alive"
_seed = itertools.count(31_000)


def new_picture() -> bytes:
    return pictures.encoded(pictures.noise(96, 96, next(_seed)))


def test_a_worker_that_stands_still_is_replaced_and_its_items_go_to_another(checkpoints):
    """Far from the 300 seconds that a batch may take: the client here gives up after 180."""
    flags = {"workers": 2, "threads": 1, "worker_patience_seconds": 4, "metrics_listen": "127.0.0.1:0"}
    with encoder_server(checkpoints("qwen3_vl"), **flags) as service, Client(service) as client:
        for _ in range(8):
            client.one(image(new_picture()))
        stuck = service.children(WORKER)[0]
        stop(stuck)
        wanted = [new_picture() for _ in range(4)]
        with ThreadPoolExecutor(4) as threads:
            found = list(threads.map(lambda data: client.one(image(data), timeout=180), wanted))
        assert not [each.error for each in found if each.error]
        assert scrape(service.metrics)[DEATHS] >= 1
        until(lambda: scrape(service.metrics)[ALIVE] == 2, "another worker has taken its place")
        assert stuck not in service.children(WORKER)
        for data, each in zip(wanted, found, strict=True):
            again = client.one(image(data))
            np.testing.assert_allclose(again.rows, each.rows, rtol=1e-4, atol=1e-4)
