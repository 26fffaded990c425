"""Reads a service's metrics as Prometheus would."""

from __future__ import annotations

import urllib.request

from prometheus_client.parser import text_string_to_metric_families


def scrape(address: str) -> dict[str, float]:
    """Every sample by its name and labels, written `name` or `name{label="value"}`."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=30) as answer:
        text = str(answer.read(), "utf-8")
    return {_name(each): each.value for family in text_string_to_metric_families(text) for each in family.samples}


def _name(sample) -> str:
    labels = ",".join(f'{label}="{value}"' for label, value in sorted(sample.labels.items()))
    return f"{sample.name}{{{labels}}}" if labels else sample.name
