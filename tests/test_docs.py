"""What the pages say is so: options, defaults, limits, links, targets, metrics and examples."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import twinlens
from common.config import load
from encoder_service.config import EncoderConfig
from gateway.config import GatewayConfig
from llm_service.config import LlmConfig
from llm_service.grammar import compiler
from tests.launch import ROOT
from tests.unit.twinlens.conftest import serving
from tests.unit.twinlens.fakes import FakeLlm
from twinlens.cli import _parser

GLOBS = ("README.md", "CONTRIBUTING.md", "docs/**/*.md", "models/**/*.md")
PAGES = sorted(page for pattern in GLOBS for page in ROOT.glob(pattern))
SERVICES: dict[str, type[Any]] = {"encoder_service": EncoderConfig, "llm_service": LlmConfig, "gateway": GatewayConfig}
OPTIONS = {
    service: {f"--{field.name.replace('_', '-')}": field.default for field in dataclasses.fields(kind)}
    for service, kind in SERVICES.items()
}
OF_OTHERS = {
    "docker compose": "build build-arg network no-recreate remove-orphans scale",
    "kubectl": "from-file labels restart rm",
    "helm": "dry-run force-conflicts set wait",
    "pip": "no-build-isolation",
    "guidellm": "backend constraint data profile tokenizer",
    "aiperf": "url endpoint-type streaming ui concurrency request-count isl osl extra-inputs random-seed"
    " use-server-token-count image-width-mean image-height-mean image-format",
    "endpoint pickers": "config-file cache-info-metric kv-cache-usage-percentage-metric lora-info-metric"
    " model-server-metrics-port total-queued-requests-metric total-running-requests-metric",
    "all": "help",
}
"""Options of other programs that pages name."""
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z-]+")

HOMES = (ROOT, *(ROOT / service for service in SERVICES))
"""Where a module is looked for that a page names: a page may leave the service out."""

MAX_WORDS = {"ARCHITECTURE.md": 900, "PERFORMANCE.md": 1300}

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of a language, the one without a name included."""
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


def flags_of_the_client(parser: argparse.ArgumentParser | None = None) -> Iterator[str]:
    for action in (parser or _parser())._actions:
        yield from action.option_strings
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from flags_of_the_client(command)


def flags_of_programs() -> set[str]:
    """Those of the launchers, the benchmarks and the training, as their sources spell them."""
    sources = [path.read_text() for folder in ("tools", "benchmarks") for path in (ROOT / folder).rglob("*.py")]
    return {flag for source in sources for flag in re.findall(r'add_argument\(\s*"(--[a-z-]+)"', source)}


@each_page
def test_code_is_in_fenced_blocks_and_each_command_has_a_line(page: Path) -> None:
    """Whoever wraps the lines of a page spares fenced blocks alone."""
    outside = re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    assert re.findall(r"\n\n    .*", outside) == []
    for line in "".join(blocks(page, "")).splitlines():
        assert line.partition("#")[0].count("python -m ") <= 1, line


@each_page
def test_every_flag_is_one(page: Path) -> None:
    others = {f"--{name}" for names in OF_OTHERS.values() for name in names.split()}
    known = {*flags_of_the_client(), *flags_of_programs(), *others}.union(*OPTIONS.values())
    assert set(FLAG.findall(page.read_text())) - known == set()


@each_page
def test_flags_of_a_services_command_line_are_that_services(page: Path) -> None:
    for block in blocks(page, ""):
        for line in block.replace("\\\n", " ").splitlines():
            if command := re.search(r"python -m (encoder_service|llm_service|gateway)\b(.*)", line):
                assert set(FLAG.findall(command[2])) <= set(OPTIONS[command[1]]), line


@each_page
def test_a_number_in_brackets_behind_an_option_is_its_default(page: Path) -> None:
    for flag, said in re.findall(r"`(--[a-z-]+)` \((\d[\d.]*)\b", page.read_text()):
        assert float(said) in {options.get(flag) for options in OPTIONS.values()}, flag


@each_page
def test_a_value_that_is_named_with_an_option_is_one_that_it_takes(page: Path) -> None:
    for flag, value in re.findall(r"`(--[a-z-]+)[= ]([\w]+)`", page.read_text()):
        kinds = [kind for kind in SERVICES.values() if flag[2:].replace("-", "_") in kind.__dataclass_fields__]
        if kinds and value.islower():
            assert any(_takes(kind, flag, value) for kind in kinds), f"{flag} {value}"


def _takes(kind: type[Any], flag: str, value: str) -> bool:
    try:
        needed = ["--model=m"] if "model" in kind.__dataclass_fields__ else []
        load(kind, "TEST", "", [*needed, f"{flag}={value}"], {})
    except SystemExit:
        return False
    return True


def test_every_variable_is_one() -> None:
    known = {"TWINLENS_TOKEN", "TWINLENS_LLM_SERVICE_HOST"}  # the client's; one that Kubernetes makes up
    prefixes = {"TWINLENS_ENCODER": EncoderConfig, "TWINLENS_LLM": LlmConfig, "TWINLENS_GATEWAY": GatewayConfig}
    for prefix, kind in prefixes.items():
        known |= {f"{prefix}_{field.name.upper()}" for field in dataclasses.fields(kind)}
    for page in PAGES:
        assert set(re.findall(r"\bTWINLENS_[A-Z_]+[A-Z]\b", page.read_text())) <= known, page.name


def test_the_configuration_page_lists_options_under_the_service_that_has_them() -> None:
    text = (ROOT / "docs/CONFIGURATION.md").read_text()
    for service, title in (("encoder_service", "## The encoder service"), ("llm_service", "## The LLM service")):
        table = text.partition(title)[2].partition("\n## ")[0]
        assert set(FLAG.findall("".join(re.findall(r"^\| .*? \|", table, re.MULTILINE)))) <= set(OPTIONS[service])


@each_page
def test_every_link_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path) if path else page
        assert there.exists(), target
        if anchor:
            assert anchor in {_anchor(title) for title in re.findall(r"^#+ (.+)$", there.read_text(), re.MULTILINE)}


def _anchor(title: str) -> str:
    """As GitHub makes it.

    >>> _anchor("The client: `pip install .`")
    'the-client-pip-install-'
    """
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


@each_page
def test_every_target_of_make_is_one(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = re.findall(r"(?:^|`)make ((?:[a-z-]+\b(?![=/]) ?)+)", page.read_text(), re.MULTILINE)
    assert {word for words in named for word in words.split()} <= targets


@each_page
def test_every_module_that_is_run_is_one(page: Path) -> None:
    for name in re.findall(r"python -m ([\w.]+)", page.read_text()):
        path = ROOT / name.replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), name


@each_page
def test_every_path_of_a_module_is_one(page: Path) -> None:
    made = {"build", "dist"}  # by commands that a page tells of, and so not always there
    rooms = {path.name for home in HOMES for path in home.iterdir() if path.is_dir()} - made
    named = set(re.findall(r"`([a-z_]\w*(?:/\w+)+/?(?:\.\w+)?)`", page.read_text()))
    paths = {name for name in named if name.partition("/")[0] in rooms}
    assert {name for name in paths if not any(_exists(home / name) for home in HOMES)} == set()


def _exists(path: Path) -> bool:
    return path.exists() or path.with_name(f"{path.name}.py").exists()


@pytest.mark.parametrize("name", MAX_WORDS)
def test_a_page_that_everybody_reads_is_short(name: str) -> None:
    """Drawings aside; the bars of a table are no words."""
    text = re.sub(r"^```.*?^```", "", (ROOT / "docs" / name).read_text(), flags=re.MULTILINE | re.DOTALL)
    assert len(text.replace("|", " ").split()) <= MAX_WORDS[name]


@each_page
def test_python_examples_are_python_and_import_what_is_there(page: Path) -> None:
    for block in blocks(page, "python"):
        code = compile(block, page.name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT | ast.PyCF_ONLY_AST)
        for node in ast.walk(code):
            if isinstance(node, ast.ImportFrom):
                assert node.module == "twinlens"
                assert {alias.name for alias in node.names} <= set(twinlens.__all__)


def test_the_readmes_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("drawing.png", "a.png", "b.png"):
        (tmp_path / name).write_bytes(b"png")
    llm = FakeLlm()
    (example,) = blocks(ROOT / "README.md", "python")
    with serving(llm=llm) as address:
        exec(example.replace("127.0.0.1:7002", address), {})
    assert capsys.readouterr().out.splitlines()[-1] == "A red circle."
    assert [len(request.chat.messages[0].parts) for request in llm.requests] == [2, 3]


def test_the_limits_are_the_defaults() -> None:
    encoder, llm, on_cpu = EncoderConfig(), LlmConfig(), LlmConfig(device="cpu")
    area, frames = (f"{pixels / 1e6:g} MP" for pixels in (encoder.max_image_area, encoder.max_video_area))
    sides = f"{encoder.min_side} … {encoder.max_side:,} px".replace(",", " ")
    scanned = f"{encoder.max_scanned_frames:,}".replace(",", " ")
    tokens = f"{llm.max_waiting_tokens:,}".replace(",", " ")
    chunks = f"{encoder.max_image_chunks:,}".replace(",", " ")
    expected = [
        f"{encoder.max_image_bytes >> 20} MiB; {area}; {sides}; {encoder.max_ratio:g}",
        f"{encoder.max_video_bytes >> 20} MiB; {encoder.max_frames}; {scanned}; {frames}",
        f"{chunks}; {encoder.max_image_scans}; {encoder.max_packed_bmp_bytes >> 20} MiB",
        f"{encoder.max_video_chunks:,}".replace(",", " "),
        f"{encoder.decode_seconds:g} s",
        f"{encoder.max_images}, {encoder.max_videos}",
        f"{llm.max_images}, {llm.max_videos}",
        f"{llm.max_prompt_bytes >> 20} MiB",
        f"{llm.max_parts}; {llm.max_parts}",
        f"{llm.max_choices}; {llm.max_logprobs}",
        f"{llm.max_token_ids}; {llm.max_token_ids}",
        f"{llm.max_stop_texts}, {llm.max_stop_bytes} bytes",
        f"{llm.max_bad_words}, {llm.max_bad_word_bytes} bytes",
        f"{llm.max_structure_bytes >> 10} KiB; {llm.max_schema_depth}; 1 s; {compiler._WAITING}",
        f"{llm.max_structure_depth}; {llm.max_schema_multiple:,}; {llm.max_structure_repeats:,}".replace(",", " "),
        f"{llm.max_compiled_bytes >> 20} MiB; {llm.structure_cache_bytes >> 20} MiB",
        f"{llm.max_message_bytes >> 20} MiB",
        f"{on_cpu.request_limit()}; {llm.max_waiting}, {llm.max_waiting_media}, {tokens}; {llm.max_concurrent_calls}",
        f"{llm.max_sessions}; {llm.max_tenant_sessions}; {llm.session_seconds:g} s; {llm.session_share:g}",
    ]
    table = (ROOT / "docs/SECURITY.md").read_text().partition("| what | default |")[2].partition("\n\n")[0]
    said = {line.split(" | ")[1].removesuffix(" |") for line in table.splitlines()[2:]}
    assert set(expected) <= said


def test_the_readme_names_the_models_whose_text_transformers_computes() -> None:
    row = re.search(
        r"^- \*\*Entirely in transformers.*?^- ", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL
    )
    table = (ROOT / "docs/MODELS.md").read_text()
    assert row is not None
    assert sorted(re.findall(r"`(\w+)`", row[0])) == sorted(
        re.findall(r"^\| (\w+) \| transformers \| transformers \|", table, re.MULTILINE)
    )


def test_the_page_of_metrics_names_every_metric_of_the_encoder_and_no_other() -> None:
    source = ast.parse((ROOT / "encoder_service/meters.py").read_text())
    calls = [node for node in ast.walk(source) if isinstance(node, ast.Call) and node.args]
    makers = [call for call in calls if ast.unparse(call.func).rpartition(".")[2] in MAKERS]
    made = {call.args[0].value for call in makers if isinstance(call.args[0], ast.Constant)}
    table = (
        (ROOT / "docs/operations/monitoring.md")
        .read_text()
        .partition("| `twinlens_encoder_…` | |")[2]
        .partition("\n\n")[0]
    )
    cells = [line.split("|")[1] for line in table.splitlines()[2:]]
    named = {name.removesuffix("_total") for cell in cells for name in re.findall(r"`(\w+)(?:\{\w+\})?`", cell)}
    assert named == made


MAKERS = {"gauge", "total", "counter", "histogram"}
