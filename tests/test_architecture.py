"""The rules of the house: each a function from a tree of sources to its offences, tried on made-up trees."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.source_tree import Module, Tree, fits

ROOT = Path(__file__).resolve().parent.parent
SERVICES = ("encoder_service", "llm_service")
GATEWAY = "gateway"
HEAVY = {"torch", "transformers", "triton"}

# What computes, and what starts it; everything else of a service is control plane.
COMPUTES = ("*.worker.*", "*.models.*", "*.layers.*", "*.__main__")
TORCH_FREE_EVEN_THERE = ("*.worker.messages",)

# Where message classes may be seen.
WIRE = (
    "common.rpc.*",
    "common.media.convert",
    *(f"{service}.{module}" for service in SERVICES for module in ("server", "servicer", "convert")),
    "encoder_service.delivery",
    "encoder_service.transports.*",
    "llm_service.convert.*",
    "llm_service.encoders.*",
    "llm_service.prefill.services",
)
PROTOBUF = ("twinlens.v1.*", "google.protobuf.*", "google.rpc.*")

# Rooms from the ground up; a room may use itself and what is listed.
ROOMS: dict[str, tuple[str, ...]] = {
    "nouns": (),
    "messages": ("nouns",),
    "layers": ("nouns",),
    "models": ("nouns", "layers"),
    "worker": ("nouns", "messages", "layers", "models"),
    "media": ("nouns", "messages"),
    "engine": ("nouns", "messages", "media"),
    "front": ("nouns", "messages", "media", "engine"),
}

NOUNS = {"item", "request", "plan", "settings", "prompt.tokens", "prompt_length", "token_ids", "token_masks"}
"""Modules of a service that are nouns, beside families and models' shapes."""

# What the client and the LLM service, which is a client of encoders, have in common.
LINKING = ("twinlens.credentials.*", "twinlens.obstacles.*")

OWNED = {"Flight": "encoder_service.engine.flight", "Sequence": "llm_service.engine.sequence"}
"""Nouns that change by their own methods alone, and the module of each."""

LONG_HEADS = {
    "common.errors",
    "twinlens.errors",  # a tree
    "common.telemetry.metrics",
    "twinlens",  # an example
    "llm_service.engine.block_manager",  # what a block is, and how long it stays
    "llm_service.layers.gdn.backend",
    "llm_service.layers.gdn.fla_rule",
    "llm_service.layers.gpu.gdn_kernels",  # formulas
    "llm_service.layers.kda.backend",
    "llm_service.layers.mamba2.backend",
}
"""Modules whose docstrings have more than four lines."""

ROLES = {
    "FeedForward",
    "Merger",  # of towers, one in each file that has its own
    "NumbaBackend",
    "TorchBackend",
    "TorchBatch",
    "TritonBackend",
    "TritonBatch",  # of attention, and of gated delta nets
    "AllowedTools",
    "Function",
    "ImagePart",
    "NamedFunction",
    "RefusalPart",
    "TextPart",  # of OpenAI's two APIs
    "Ready",  # a child process's first word
}
"""Classes of one name that are the same thing in another place."""

UNSAFE_MODULES = {
    "pickle",
    "cPickle",
    "dill",
    "cloudpickle",
    "marshal",
    "shelve",
    "joblib",
    "multiprocessing",
}
UNSAFE_CALLS = {"eval", "exec", "torch.load", "yaml.load", "yaml.unsafe_load", "numpy.load", "np.load"}
UNSAFE_ENDINGS = ("_object", "_object_list")  # collectives that pickle, such as dist.broadcast_object_list
UNSAFE_FLAGS = {"allow_pickle", "trust_remote_code"}


def service_of(name: str) -> str:
    return name.partition(".")[0]


def room_of(name: str) -> str:
    """The room of a service's module.

    >>> room_of("llm_service.request"), room_of("llm_service.engine.core"), room_of("llm_service.prompt.builder")
    ('nouns', 'engine', 'front')
    """
    parts = name.split(".")[1:]
    if ".".join(parts) in NOUNS:
        return "nouns"
    if parts[:1] in (["families"], ["model_config"]):
        return "nouns"
    if parts[-1:] == ["messages"]:
        return "messages"
    return parts[0] if parts and parts[0] in ROOMS else "front"


def ground_floor(tree: Tree) -> list[str]:
    """`common` knows no service, and the client neither."""
    found = []
    for owner, forbidden in (("common", (*SERVICES, GATEWAY)), ("twinlens", ("common", *SERVICES, GATEWAY))):
        for module in tree.matching(f"{owner}.*"):
            found += [f"{module.name} → {each.name}" for each in module.imports if service_of(each.name) in forbidden]
    return found


def services_apart(tree: Tree) -> list[str]:
    """A service imports its own modules, `common`, the contract and the release, and nothing else of ours but what
    whoever opens a connection needs: what its files must hold, and what it means that it failed."""
    ours = {"common", "twinlens", *SERVICES, GATEWAY, "tests", "testkit", "tools", "benchmarks"}
    shared = ("common.*", "twinlens.v1.*", "twinlens.__version__", "twinlens._version.*", *LINKING)
    found = []
    for service in ("common", *SERVICES, GATEWAY):
        for module in tree.matching(f"{service}.*"):
            theirs = [each.name for each in module.imports if service_of(each.name) in ours - {service}]
            found += [f"{module.name} → {name}" for name in theirs if not any(fits(name, each) for each in shared)]
    return found


def light_control_plane(tree: Tree) -> list[str]:
    """Importing a control-plane module loads no torch, even through others; nor does it name torch."""
    found = []
    for module in tree.matching(*(f"{service}.*" for service in (*SERVICES, GATEWAY))):
        computes = any(fits(module.name, pattern) for pattern in COMPUTES)
        if computes and not any(fits(module.name, pattern) for pattern in TORCH_FREE_EVEN_THERE):
            continue
        named = [each.name for each in module.imports if service_of(each.name) in HEAVY]
        found += [f"{module.name} → {name}" for name in named]
        if not named and (chain := tree.loads(module.name, HEAVY)):
            found.append(" → ".join(chain))
    return found


def protobuf_at_the_edge(tree: Tree) -> list[str]:
    """Message classes stop at the servicers and at the clients of other services."""
    found = []
    for module in tree.matching("common.*", *(f"{service}.*" for service in SERVICES)):
        if any(fits(module.name, pattern) for pattern in WIRE):
            continue
        found += [
            f"{module.name} → {each.name}"
            for each in module.imports
            if any(fits(each.name, pattern) for pattern in PROTOBUF)
        ]
    return found


def downwards(tree: Tree) -> list[str]:
    """Imports run downwards: front, engine, messages, nouns; and worker, models, layers."""
    found = []
    for module in tree.matching(*(f"{service}.*" for service in SERVICES)):
        if module.name.endswith("__main__"):
            continue  # a process's first module puts the rooms together
        room = room_of(module.name)
        for each in module.imports:
            target = tree.module_of(each.name)
            if target is None or service_of(target) != service_of(module.name) or "." not in target:
                continue
            if room_of(target) not in (room, *ROOMS[room]):
                found.append(f"{module.name} → {target}")
    return found


def no_circles(tree: Tree) -> list[str]:
    """No module imports itself through others, not even inside a function or for types alone."""
    imports = {
        module.name: {tree.module_of(each.name) for each in module.imports} - {None, module.name}
        for module in tree.modules.values()
    }
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        return [" → ".join(error.args[1])]
    return []


def nothing_unsafe(tree: Tree) -> list[str]:
    """No pickle, no `torch.load`, no `eval` of what comes from outside a process."""
    found = []
    for module in tree.modules.values():
        found += [
            f"{module.name} → {each.name}"
            for each in module.imports
            if service_of(each.name) in UNSAFE_MODULES and not each.name.startswith(SHARED_MEMORY)
        ]
        found += _unsafe_calls(module)
    return found


SHARED_MEMORY = ("multiprocessing.shared_memory", "multiprocessing.resource_tracker")


def _unsafe_calls(module: Module) -> list[str]:
    found = []
    for node in module.nodes:
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            flags = {keyword.arg for keyword in node.keywords if not _is_false(keyword.value)}
            if name in UNSAFE_CALLS or name.endswith(UNSAFE_ENDINGS) or flags & UNSAFE_FLAGS:
                found.append(f"{module.name}:{node.lineno} {name}")
    return found


def _is_false(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is False


def one_owner(tree: Tree) -> list[str]:
    """Nothing but its own module assigns to the fields of a noun that has one owner."""
    found = []
    for module in tree.modules.values():
        for noun, owner in OWNED.items():
            if module.name != owner:
                found += [f"{module.name}:{node.lineno} {noun}" for node in _assigned(module, noun)]
    return found


def _assigned(module: Module, noun: str) -> Iterator[ast.Attribute]:
    """Fields that are assigned to of what is called as the noun, or is an argument of its type."""
    yield from _assigned_within(module.nodes, {noun.lower()})
    for function in module.nodes:
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            given = (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)
            if names := {each.arg for each in given if each.annotation and ast.unparse(each.annotation) == noun}:
                yield from _assigned_within(ast.walk(function), names)


def _assigned_within(nodes: Iterable[ast.AST], names: set[str]) -> Iterator[ast.Attribute]:
    for node in nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
            holder = node.value
            called = holder.id if isinstance(holder, ast.Name) else getattr(holder, "attr", "")
            if called in names:
                yield node


def one_name_one_thing(tree: Tree) -> list[str]:
    """No two public classes that one service sees have the same name, unless they play the same part."""
    found = []
    for service in (*SERVICES, GATEWAY):
        owners: dict[str, list[str]] = {}
        for module in tree.matching("common.*", f"{service}.*"):
            for node in module.syntax.body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    owners.setdefault(node.name, []).append(module.name)
        found += [
            f"{name}: {', '.join(modules)}"
            for name, modules in owners.items()
            if len(modules) > 1 and name not in ROLES
        ]
    return found


def short_heads(tree: Tree) -> list[str]:
    """A module's docstring has four lines at most; what is to be told besides stands where it happens, or in
    docs/design."""
    return [
        module.name
        for module in tree.modules.values()
        if module.name not in LONG_HEADS and len((ast.get_docstring(module.syntax) or "").splitlines()) > 4
    ]


def only_tests_import_tests(tree: Tree) -> list[str]:
    """Nothing imports tests but tests. What they share with benchmarks and tools is in `testkit`, which imports no
    benchmark either."""
    found = []
    for owner, forbidden in (("testkit", {"tests", "benchmarks"}), ("benchmarks", {"tests"}), ("tools", {"tests"})):
        for module in tree.matching(f"{owner}.*"):
            found += [f"{module.name} → {each.name}" for each in module.imports if service_of(each.name) in forbidden]
    return found


def threads_of_the_start(tree: Tree) -> list[str]:
    """Work for a thread goes to `common.aio.tasks.to_thread`: asyncio starts threads when there is work, if it can."""
    found = []
    for module in tree.modules.values():
        found += [
            f"{module.name}:{node.lineno}"
            for node in module.nodes
            if isinstance(node, ast.Attribute) and node.attr == "to_thread" and ast.unparse(node) == "asyncio.to_thread"
        ]
    return found


RULES: tuple[Callable[[Tree], list[str]], ...] = (
    ground_floor,
    services_apart,
    light_control_plane,
    protobuf_at_the_edge,
    downwards,
    no_circles,
    nothing_unsafe,
    one_owner,
    one_name_one_thing,
    short_heads,
    threads_of_the_start,
)


@cache
def whole_tree() -> Tree:
    """All packages: read by the process that runs these tests, not by all that collect them."""
    return Tree.read(ROOT, ("common", *SERVICES, GATEWAY, "twinlens"))


@cache
def workshop() -> Tree:
    """What is not served: tests' and benchmarks' common ground, benchmarks and tools."""
    return Tree.read(ROOT, ("testkit", "benchmarks", "tools"))


def test_nothing_imports_tests() -> None:
    assert only_tests_import_tests(workshop()) == []


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_house_keeps_the_rule(rule: Callable[[Tree], list[str]]) -> None:
    assert rule(whole_tree()) == []


@pytest.mark.parametrize(
    ("rule", "sources"),
    [
        (ground_floor, {"common/a": "from llm_service import request"}),
        (ground_floor, {"common/a": "def f():\n    import encoder_service.item"}),
        (ground_floor, {"twinlens/a": "from common import errors"}),
        (services_apart, {"llm_service/a": "from encoder_service.item import Item"}),
        (services_apart, {"encoder_service/a": "import llm_service.plan"}),
        (services_apart, {"encoder_service/a": "from twinlens.client import LlmClient"}),
        (services_apart, {"common/a": "from tests import checkpoints"}),
        (services_apart, {"gateway/a": "from llm_service.request import Request"}),
        (services_apart, {"gateway/a": "from twinlens.aio import AsyncLlmClient"}),
        (services_apart, {"llm_service/a": "from gateway import convert"}),
        (ground_floor, {"common/a": "from gateway import convert"}),
        (light_control_plane, {"gateway/a": "import torch"}),
        (light_control_plane, {"llm_service/engine/scheduler": "import torch"}),
        (
            light_control_plane,
            {"llm_service/prompt/builder": "def f():\n    from transformers import AutoTokenizer"},
        ),
        (light_control_plane, {"encoder_service/worker/messages": "import torch"}),
        (light_control_plane, {"llm_service/plan": "from common import a", "common/a": "import torch.nn"}),
        (
            light_control_plane,
            {
                "llm_service/plan": "import common.b.c",
                "common/b/__init__": "import torch",
                "common/b/c": "",
            },
        ),
        (protobuf_at_the_edge, {"llm_service/engine/core": "from twinlens.v1 import Media"}),
        (protobuf_at_the_edge, {"encoder_service/media/image": "from twinlens import v1"}),
        (protobuf_at_the_edge, {"common/rows/wire": "import google.protobuf.message"}),
        (
            downwards,
            {"llm_service/request": "from llm_service.prompt import builder", "llm_service/prompt/builder": ""},
        ),
        (
            downwards,
            {
                "llm_service/engine/a": "from llm_service.worker.model_runner import ModelRunner",
                "llm_service/worker/model_runner": "",
            },
        ),
        (downwards, {"llm_service/engine/a": "import llm_service.server", "llm_service/server": ""}),
        (
            downwards,
            {"encoder_service/worker/a": "from .. import engine", "encoder_service/engine/__init__": ""},
        ),
        (
            downwards,
            {"llm_service/layers/a": "from llm_service.models import decoder", "llm_service/models/decoder": ""},
        ),
        (light_control_plane, {"llm_service/model_config/a": "import torch"}),
        (
            downwards,
            {"encoder_service/models/a": "from ..worker import b", "encoder_service/worker/b": ""},
        ),
        (only_tests_import_tests, {"benchmarks/a": "def f():\n    from tests import launch"}),
        (only_tests_import_tests, {"tools/a": "from tests.launch import launch"}),
        (only_tests_import_tests, {"testkit/a": "from benchmarks.device import Machine"}),
        (no_circles, {"common/a": "from common import b", "common/b": "def f():\n    import common.a"}),
        (no_circles, {"common/a": "import common.b", "common/b": "if TYPE_CHECKING:\n    import common.a"}),
        (nothing_unsafe, {"common/a": "import pickle"}),
        (nothing_unsafe, {"common/a": "from multiprocessing import Queue"}),
        (nothing_unsafe, {"common/a": "x = torch.load(path)"}),
        (nothing_unsafe, {"common/a": "eval(text)"}),
        (nothing_unsafe, {"llm_service/worker/a": "dist.broadcast_object_list([plan], 0)"}),
        (nothing_unsafe, {"common/a": "AutoConfig.from_pretrained(path, trust_remote_code=flag)"}),
        (one_owner, {"llm_service/engine/a": "def f(one: Sequence):\n    one.finished = True"}),
        (one_owner, {"encoder_service/engine/a": "ticket.flight.tickets += 1"}),
        (one_name_one_thing, {"llm_service/a": "class Choice: ...", "llm_service/engine/b": "class Choice: ..."}),
        (short_heads, {"common/a": '"""One\n\ntwo\nthree\nfour"""'}),
        (threads_of_the_start, {"gateway/a": "async def f():\n    await asyncio.to_thread(read)"}),
        (one_name_one_thing, {"common/a": "class Reader: ...", "gateway/b": "class Reader: ..."}),
    ],
)
def test_the_rule_bites(rule: Callable[[Tree], list[str]], sources: dict[str, str]) -> None:
    assert rule(Tree.of(sources)) != []


@pytest.mark.parametrize(
    ("rule", "sources"),
    [
        (services_apart, {"llm_service/a": "from twinlens import __version__\nfrom common import errors"}),
        (light_control_plane, {"llm_service/worker/model_runner": "import torch"}),
        (
            light_control_plane,
            {"llm_service/plan": "if TYPE_CHECKING:\n    import common.a", "common/a": "import torch"},
        ),
        (protobuf_at_the_edge, {"llm_service/servicer": "from twinlens.v1 import Media"}),
        (
            downwards,
            {
                "llm_service/engine/a": "import llm_service.worker.messages",
                "llm_service/worker/messages": "",
            },
        ),
        (
            nothing_unsafe,
            {"common/a": "model.eval()\nfrom multiprocessing.shared_memory import SharedMemory"},
        ),
        (nothing_unsafe, {"common/a": "AutoConfig.from_pretrained(path, trust_remote_code=False)"}),
        (one_owner, {"llm_service/engine/sequence": "def f(one: Sequence):\n    one.finished = True"}),
        (one_owner, {"encoder_service/engine/a": "self.flight = flight.joined(ticket)"}),
        (short_heads, {"common/a": '"""One\ntwo\nthree\nfour"""'}),
        (threads_of_the_start, {"gateway/a": "async def f():\n    await tasks.to_thread(read)"}),
        (one_name_one_thing, {"encoder_service/a": "class Meters: ...", "llm_service/a": "class Meters: ..."}),
        (one_name_one_thing, {"llm_service/a": "class _Batch: ...", "llm_service/b": "class _Batch: ..."}),
    ],
)
def test_the_rule_lets_good_code_be(rule: Callable[[Tree], list[str]], sources: dict[str, str]) -> None:
    assert rule(Tree.of(sources)) == []


def test_both_services_have_the_same_rooms() -> None:
    """And so the rules above are about something."""
    for service in SERVICES:
        modules = {room_of(name) for name in whole_tree().modules if service_of(name) == service and "." in name}
        assert modules >= {"nouns", "messages", "models", "worker", "engine", "front"}, service
        for name in ("server", "servicer", "config", "__main__"):
            assert f"{service}.{name}" in whole_tree().modules


def test_what_the_control_plane_is_named_after_exists() -> None:
    expected = {
        *(f"encoder_service.{name}" for name in ("item", "media.limits", "engine.embedding_store", "engine.encode")),
        *(
            f"llm_service.{name}"
            for name in ("request", "plan", "prompt.builder", "prompt.detokenizer", "encoders.pool")
        ),
        *(f"llm_service.engine.{name}" for name in ("scheduler", "block_manager", "core")),
        "llm_service.engine_client.client",
    }
    assert expected <= set(whole_tree().modules)
