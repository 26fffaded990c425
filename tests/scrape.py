"""Reads a service's metrics as Prometheus would."""

from __future__ import annotations

import urllib.request

from prometheus_client.parser import text_string_to_metric_families


def scrape(address: str) -> dict[str, float]:
    """Every sample by its name and labels, written `name` or `name{label="value"}`."""
    return {
        _name(each): each.value for family in text_string_to_metric_families(_text(address)) for each in family.samples
    }


def families(address: str) -> set[str]:
    """The names of all metrics, of those without a sample as well; a counter's without `_total`."""
    return {family.name for family in text_string_to_metric_families(_text(address))}


def _text(address: str) -> str:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=30) as answer:
        return str(answer.read(), "utf-8")


def _name(sample) -> str:
    labels = ",".join(f'{label}="{value}"' for label, value in sorted(sample.labels.items()))
    return f"{sample.name}{{{labels}}}" if labels else sample.name
