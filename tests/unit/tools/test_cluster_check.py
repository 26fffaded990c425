"""The check of a cluster, where there is none, and where kubectl and helm are stood in for."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tools.cluster_check import __main__ as cluster_check
from tools.cluster_check.cluster import Cluster

PROGRAM = """#!{python} -SE
import json, sys
from pathlib import Path

folder = Path({folder!r})
said = json.loads((folder / "says.json").read_text())
words = [Path(sys.argv[0]).name, *sys.argv[1:]]
with (folder / "asked").open("a") as asked:
    print(json.dumps(words), file=asked)
for wanted, (code, out, err) in said:
    if all(word in words for word in wanted):
        sys.stdout.write(out)
        sys.stderr.write(err)
        sys.exit(code)
"""
Said = list[tuple[list[str], tuple[int, str, str]]]


class Programs:
    """`kubectl` and `helm` on the PATH: they succeed and say nothing, unless `says` has an answer to a command."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder = folder
        for name in ("kubectl", "helm"):
            program = folder / name
            program.write_text(PROGRAM.format(python=sys.executable, folder=str(folder)))
            program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
        self.say([])

    def say(self, said: Said) -> None:
        (self._folder / "says.json").write_text(json.dumps(said))

    def asked(self) -> list[list[str]]:
        asked = self._folder / "asked"
        return [json.loads(line) for line in asked.read_text().splitlines()] if asked.exists() else []


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Programs:
    return Programs(tmp_path, monkeypatch)


def pod(name: str, created: str, *, ready: bool = True, restarts: int = 0, leaves: bool = False) -> dict[str, Any]:
    metadata = {"name": name, "creationTimestamp": created, **({"deletionTimestamp": created} if leaves else {})}
    status = {
        "conditions": [{"type": "Ready", "status": "True" if ready else "False"}],
        "containerStatuses": [{"restartCount": restarts, "lastState": {"terminated": {"exitCode": 70}}}],
    }
    return {"metadata": metadata, "status": status}


def test_without_a_cluster_nothing_is_checked_and_that_is_said(
    programs: Programs, capsys: pytest.CaptureFixture[str]
) -> None:
    programs.say([(["kubectl", "version"], (1, "", "connection refused"))])
    assert cluster_check.main([]) == 0
    assert capsys.readouterr().out == (
        "cluster-check: no cluster answers where KUBECONFIG points; nothing was checked\n"
    )
    assert [words[:2] for words in programs.asked()] == [["kubectl", "version"]]


def test_without_its_programs_nothing_is_checked_and_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert cluster_check.main([]) == 0
    assert "is not installed; nothing was checked" in capsys.readouterr().out


def test_what_was_made_is_removed_where_a_step_fails(programs: Programs, capsys: pytest.CaptureFixture[str]) -> None:
    programs.say([(["helm", "install"], (1, "", "no room for pods"))])
    assert cluster_check.main(["--set", "image.repository=registry.example/twinlens"]) == 1
    assert "no room for pods" in capsys.readouterr().err
    made, *between, uninstalled, deleted = programs.asked()[1:]
    assert made[1:3] == ["create", "namespace"]
    namespace = made[3]
    (install,) = (words for words in between if words[:2] == ["helm", "install"])
    assert install[install.index("--namespace") + 1] == namespace
    assert install[install.index("--set") + 1] == "image.repository=registry.example/twinlens"
    assert uninstalled[:3] == ["helm", "uninstall", "twinlens"]
    assert uninstalled[uninstalled.index("--namespace") + 1] == namespace
    assert deleted[1:4] == ["delete", "namespace", namespace]


def test_the_name_space_refuses_what_the_strictest_standard_does(programs: Programs) -> None:
    Cluster("check", "helm").make("secret")
    labelled = [words for words in programs.asked() if "label" in words]
    assert "pod-security.kubernetes.io/enforce=restricted" in labelled[0]


def test_the_callers_pod_keeps_that_standard_and_may_ask_llm_services() -> None:
    values = yaml.safe_load((cluster_check.CHART / "values.yaml").read_text())
    labels = values["networkPolicy"]["clients"][0]["podSelector"]["matchLabels"]
    made: Any = cluster_check.caller("twinlens:1", labels)
    assert made["metadata"]["labels"] == {"twinlens-client": "true"}
    assert made["spec"]["securityContext"] == {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    (container,) = made["spec"]["containers"]
    assert not container["securityContext"]["allowPrivilegeEscalation"]
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def test_pods_on_their_way_out_count_for_nothing_but_that_all_is_not_settled(programs: Programs) -> None:
    cluster = Cluster("check", "helm")
    pods = [
        pod("b", "2026-01-02T00:00:00Z"),
        pod("a", "2026-01-01T00:00:00Z"),
        pod("c", "2026-01-03T00:00:00Z", leaves=True),
    ]
    programs.say([(["get", "pods"], (0, json.dumps({"items": pods}), ""))])
    assert cluster.names("encoder") == ["a", "b"]
    assert not cluster._ready("encoder", 2)
    programs.say([(["get", "pods"], (0, json.dumps({"items": pods[:2]}), ""))])
    assert cluster._ready("encoder", 2)
    programs.say([(["get", "pods"], (0, json.dumps({"items": [pods[0], pod("a", "", ready=False)]}), ""))])
    assert not cluster._ready("encoder", 2)


def test_what_was_started_again_is_told(programs: Programs) -> None:
    again = json.dumps({"items": [pod("a", ""), pod("b", "", restarts=2)]})
    programs.say([(["get", "pods"], (0, again, ""))])
    told = Cluster("check", "helm").restarts()
    assert len(told) == 3
    assert told[0].startswith("b 2 times")
    assert "70" in told[0]


def test_remarks_of_the_api_server_are_told(programs: Programs) -> None:
    programs.say([(["apply", "--dry-run=server"], (0, "", "Warning: would be refused\nother\n"))])
    assert Cluster("check", "helm").warnings() == ["Warning: would be refused"]
