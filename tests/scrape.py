"""Reads a service's metrics as Prometheus would."""

from __future__ import annotations

import urllib.request

import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.launch import ROOT


def scrape(address: str) -> dict[str, float]:
    """Every sample by its name and labels, written `name` or `name{label="value"}`."""
    return {
        _name(each): each.value for family in text_string_to_metric_families(_text(address)) for each in family.samples
    }


def families(address: str) -> set[str]:
    """The names of all metrics, of those without a sample as well; a counter's without `_total`."""
    return {family.name for family in text_string_to_metric_families(_text(address))}


def labelled(address: str) -> dict[str, list[tuple[dict[str, str], float]]]:
    """Labels and value of every sample, by its name."""
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(_text(address)):
        for each in family.samples:
            found.setdefault(each.name, []).append((dict(each.labels), each.value))
    return found


def picker_specs(engine: str = "twinlens") -> dict[str, str]:
    """Names of metrics by what an endpoint picker takes them for, as the chart's file tells one."""
    config = yaml.safe_load((ROOT / "deploy/helm/twinlens/files/endpoint-picker.yaml").read_text())
    (extractor,) = (each for each in config["plugins"] if each["type"] == "core-metrics-extractor")
    (names,) = (each for each in extractor["parameters"]["engineConfigs"] if each["name"] == engine)
    return {key: name for key, name in names.items() if key.endswith("Spec")}


def _text(address: str) -> str:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=180) as answer:
        return str(answer.read(), "utf-8")


def _name(sample) -> str:
    labels = ",".join(f'{label}="{value}"' for label, value in sorted(sample.labels.items()))
    return f"{sample.name}{{{labels}}}" if labels else sample.name
