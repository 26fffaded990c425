"""Options from flags and the environment: what wins, what is refused, and what help shows."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest
import trustme

from common.config import boolean, load, option, size, words
from encoder_service.config import EncoderConfig
from gateway.config import GatewayConfig
from llm_service.config import LlmConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """A small service's options."""

    name: str = option("demo", "a name")
    count: int = option(3, "how many", minimum=1, maximum=8)
    rate: float = option(0.5, "a rate", minimum=0)
    room: int = option(1 << 20, "how much", parse=size)
    fast: bool = option(False, "hurry")
    peers: tuple[str, ...] = option((), "the others", parse=words)
    level: str = option("info", "what is logged, 100% of it", choices=("info", "error"))
    token: str = option("s3cret", "the password", secret=True)

    def validate(self) -> None:
        if self.fast and self.count > 5:
            raise ValueError("--fast is for --count up to 5")


def read(*argv: str, **environ: str) -> Options:
    return load(Options, "TWINLENS_TEST", "A test.", argv, environ)


def complaint(capsys: pytest.CaptureFixture[str], *argv: str, **environ: str) -> str:
    """The one line that a bad start prints; it must end with status 2."""
    with pytest.raises(SystemExit) as end:
        read(*argv, **environ)
    assert end.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_defaults_stand_where_nothing_is_said() -> None:
    assert read() == Options()


def test_a_flag_wins_over_a_variable_and_a_variable_over_the_default() -> None:
    assert read(TWINLENS_TEST_COUNT="4").count == 4
    assert read("--count", "5", TWINLENS_TEST_COUNT="4").count == 5


def test_a_list_may_be_given_in_one_flag_or_in_several() -> None:
    assert read("--peers=a:1,b:2", "--peers", "c:3").peers == ("a:1", "b:2", "c:3")
    assert read("--peers=a:1", TWINLENS_TEST_PEERS="b:2").peers == ("a:1",)


def test_every_kind_of_value_is_read() -> None:
    got = read("--room=2.5MiB", "--fast", "--peers=a:1, b:2,,", "--rate", "2", "--level=error", "--name=x=y")
    assert (got.room, got.fast, got.peers) == (5 << 19, True, ("a:1", "b:2"))
    assert (got.rate, got.level, got.name) == (2.0, "error", "x=y")
    assert read("--fast=no").fast is False
    assert read(TWINLENS_TEST_FAST="yes").fast is True


def test_variables_of_others_are_left_alone() -> None:
    assert read(TWINLENS_OTHER_COUNT="x", TWINLENS_TESTING="x", PATH="/bin") == Options()


def test_an_empty_variable_says_nothing() -> None:
    """Compose and charts set a variable of every option, empty where nobody gave a value."""
    empty = {f"TWINLENS_TEST_{field.name.upper()}": "" for field in fields(Options)}
    assert read(**empty) == Options()
    assert read("--count=5", **empty).count == 5


@pytest.mark.parametrize(
    ("kind", "prefix"),
    [(LlmConfig, "TWINLENS_LLM"), (EncoderConfig, "TWINLENS_ENCODER"), (GatewayConfig, "TWINLENS_GATEWAY")],
)
def test_no_option_of_a_program_minds_an_empty_variable(kind: type, prefix: str) -> None:
    empty = {f"{prefix}_{field.name.upper()}": "" for field in fields(kind) if field.name != "model"}
    given = [] if kind is GatewayConfig else ["--model=m"]
    assert load(kind, prefix, "", given, empty) == load(kind, prefix, "", given, {})


def test_an_empty_variable_of_no_option_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "is TWINLENS_TEST_COUNT meant?" in complaint(capsys, TWINLENS_TEST_CUONT="")


def test_what_kubernetes_says_of_a_service_of_our_name_is_left_alone() -> None:
    links = {
        "SERVICE_HOST": "10.0.0.1",
        "SERVICE_PORT": "7002",
        "SERVICE_PORT_GRPC": "7002",
        "PORT": "tcp://10.0.0.1:7002",
        "PORT_7002_TCP": "tcp://10.0.0.1:7002",
        "PORT_7002_TCP_PROTO": "tcp",
        "PORT_7002_TCP_PORT": "7002",
        "PORT_7002_TCP_ADDR": "10.0.0.1",
    }
    for service in ("TWINLENS_TEST", "TWINLENS_TEST_CANARY"):
        assert read(**{f"{service}_{name}": value for name, value in links.items()}) == Options()


@pytest.mark.parametrize(
    ("argv", "environ", "said"),
    [
        ([], {"TWINLENS_TEST_PORT": "7002"}, "TWINLENS_TEST_PORT"),
        ([], {"TWINLENS_TEST_CUONT": "4"}, "TWINLENS_TEST_CUONT"),
        ([], {"TWINLENS_TEST_CUONT": "4"}, "is TWINLENS_TEST_COUNT meant?"),
        (["--cuont=4"], {}, "--cuont=4: is --count meant?"),
        (["--coun=4"], {}, "--coun"),
        (["--wholly-unknown"], {}, "--help` lists what there is"),
        (["stray"], {}, "stray"),
        (["--count=many"], {}, "--count: 'many' is not valid: expected a whole number"),
        (["--count=1.5"], {}, "expected a whole number"),
        (["--rate=fast"], {}, "expected a number"),
        ([], {"TWINLENS_TEST_COUNT": "many"}, "the environment variable TWINLENS_TEST_COUNT: argument --count"),
        (["--count=0"], {}, "not within 1 to 8"),
        (["--count=9"], {}, "not within 1 to 8"),
        (["--rate=nan"], {}, "not at least 0"),
        (["--rate=-1"], {}, "not at least 0"),
        (["--room=big"], {}, "--room"),
        (["--room=-1"], {}, "--room"),
        (["--room=" + "9" * 400], {}, "--room"),
        (["--room=8388608t"], {}, "64 bits"),
        (["--count=-" + "9" * 20], {}, "64 bits"),
        (["--rate=inf"], {}, "64 bits"),
        (["--rate=1e400"], {}, "64 bits"),
        (["--fast=perhaps"], {}, "--fast"),
        (["--level=loud"], {}, "--level"),
        (["--fast", "--count=6"], {}, "--fast is for --count up to 5"),
    ],
)
def test_a_bad_start_is_one_line_that_names_what_is_wrong(
    capsys: pytest.CaptureFixture[str], argv: list[str], environ: dict[str, str], said: str
) -> None:
    assert said in complaint(capsys, *argv, **environ)


def test_help_shows_every_option_with_its_default_and_variable_but_no_secret(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as end:
        read("--help")
    assert end.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    for field in fields(Options):
        assert "--" + field.name in shown
        assert f"TWINLENS_TEST_{field.name.upper()}" in shown
    for told in ("--count N", "--rate NUMBER", "--room BYTES", "--fast [yes|no]", "--name NAME"):
        assert told in shown
    for default in ("demo", "3", "0.5", "1MiB", "no", "none"):
        assert f"(default: {default}; " in shown
    assert "s3cret" not in shown


@dataclass(frozen=True, slots=True, kw_only=True)
class Grouped(Options):
    """Options in groups, before and among those of its base."""

    name: str = option("own", "a name", group="first things")
    beside: int = option(1, "beside it")
    depth: int = option(1, "how deep", group="second things")


def test_help_shows_groups_in_their_order_and_a_class_before_its_base(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load(Grouped, "TWINLENS_TEST", "A test.", ["--help"], {})
    shown = capsys.readouterr().out
    wanted = ["--count", "first things:", "--name", "--beside", "second things:", "--depth"]
    assert sorted(wanted, key=lambda word: shown.index(f"  {word}" if word[0] == "-" else word)) == wanted


@pytest.mark.parametrize("kind", [LlmConfig, EncoderConfig, GatewayConfig])
def test_every_option_of_a_service_is_in_a_group(capsys: pytest.CaptureFixture[str], kind: type) -> None:
    with pytest.raises(SystemExit):
        load(kind, "TWINLENS_TEST", "A service.", ["--help"], {})
    ungrouped, _, grouped = capsys.readouterr().out.partition("what is served, and where:")
    assert re.findall(r"^  --[a-z-]+", ungrouped, re.MULTILINE) == []
    assert len(re.findall(r"^  --[a-z-]+", grouped, re.MULTILINE)) == len(fields(kind))


@pytest.mark.parametrize(("kind", "prefix"), [(LlmConfig, "TWINLENS_LLM"), (EncoderConfig, "TWINLENS_ENCODER")])
def test_both_services_show_the_variable_of_every_option(
    capsys: pytest.CaptureFixture[str], kind: type, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    with pytest.raises(SystemExit):
        load(kind, prefix, "A service.", ["--help"], {})
    shown = " ".join(capsys.readouterr().out.split())
    for field in fields(kind):
        assert f"{prefix}_{field.name.upper()})" in shown


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0", 0),
        ("17", 17),
        ("1k", 1024),
        ("1KiB", 1024),
        ("2 MB", 2 << 20),
        ("1.5g", 3 << 29),
        ("1T", 1 << 40),
        (str(2**63 - 1), 2**63 - 1),
    ],
)
def test_sizes_are_read_in_binary_units(text: str, value: int) -> None:
    assert size(text) == value


@pytest.mark.parametrize("text", ["", "k", "-1", "1 Q", "0x10", "1e3", "nan"])
def test_what_is_not_a_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected a size"):
        size(text)


def test_yes_and_no_have_their_usual_spellings() -> None:
    assert [boolean(word) for word in ("1", "True", "YES", "on")] == [True] * 4
    assert [boolean(word) for word in ("0", "False", "no", "OFF")] == [False] * 4


@pytest.mark.parametrize(("kind", "port"), [(EncoderConfig, 7001), (LlmConfig, 7002)])
def test_the_ports_are_those_of_the_contract(kind: type[EncoderConfig | LlmConfig], port: int) -> None:
    assert kind().listen == f"127.0.0.1:{port}"


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "--model"),
        (["--model=m", "--tls-cert=c"], "--tls-key"),
        (["--model=m", "--tls-client-ca=c"], "--tls-cert"),
        (["--model=m", "--auth-token=a", "--auth-token-file=f"], "not both"),
        (["--model=m", "--max-running=9", "--max-step-tokens=8"], "--max-step-tokens"),
        (["--model=m", "--encoder-cert=c"], "--encoder-key"),
        (["--model=m", "--encoder-cert=c", "--encoder-key=k"], "--encoder-ca"),
        (["--model=m", "--encoder-token=a", "--encoder-token-file=/dev/null"], "not both"),
        (["--model=m", "--auth-token-file=/no/such/file"], "/no/such/file cannot be read"),
        (["--model=m", "--auth-token-file=/dev/null"], "/dev/null holds no token"),
        (["--model=m", "--encoder-token-file=/dev/null"], "/dev/null holds no token"),
        (["--model=m", "--auth-token= "], "a token is one line"),
        (["--model=m", "--auth-token=sekr\nt"], "a token is one line"),
        (["--model=m", "--encoder-token=sekrét"], "a token is one line"),
        (["--model=m", "--encoder-ca=/no/such/file"], "/no/such/file cannot be read"),
        (["--model=m", "--device=cuda:0"], "--device cuda:0: no GPU"),
        (["--model=m", "--device=gpu"], "--device gpu is not cpu, cuda or cuda:N"),
        (["--model=m", "--max-message-bytes=2g"], "--max-message-bytes"),
        (["--model=m", "--encoders=h:70000"], "--encoders: h:70000"),
        (["--model=m", "--tp=2", "--nodes=2", "--node-rank=0", "--rendezvous=h:70000"], "--rendezvous"),
    ],
)
def test_options_of_the_llm_service_that_contradict_each_other_are_refused(
    capsys: pytest.CaptureFixture[str], argv: list[str], said: str
) -> None:
    with pytest.raises(SystemExit):
        load(LlmConfig, "TWINLENS_LLM", "LLM.", argv, {})
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"tls-cert": "key.pem", "tls-key": "key.pem"}, "--tls-cert {}/key.pem must hold certificates"),
        ({"tls-cert": "cert.pem", "tls-key": "cert.pem"}, "--tls-key {}/cert.pem must hold a private key"),
        ({"tls-cert": "cert.pem", "tls-key": "none.pem"}, "--tls-key {}/none.pem cannot be read: No such file"),
        ({"tls-cert": "cert.pem", "tls-key": "other.pem"}, "and --tls-key {}/other.pem are not of one pair"),
        (
            {"tls-cert": "cert.pem", "tls-key": "key.pem", "tls-client-ca": "key.pem"},
            "--tls-client-ca {}/key.pem must hold certificates, and holds a private key",
        ),
        ({"encoder-ca": "key.pem"}, "--encoder-ca {}/key.pem must hold certificates, and holds a private key"),
        (
            {"encoder-ca": "cert.pem", "encoder-cert": "cert.pem", "encoder-key": "other.pem"},
            "--encoder-cert {0}/cert.pem and --encoder-key {0}/other.pem are not of one pair",
        ),
    ],
)
def test_a_file_for_tls_that_is_another_is_named_with_its_option(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: dict[str, str], says: str
) -> None:
    authority = trustme.CA()
    for name, issued in (("key", authority.issue_cert("a.test")), ("other", authority.issue_cert("b.test"))):
        issued.private_key_pem.write_to_path(str(tmp_path / f"{name}.pem"))
        if name == "key":
            issued.cert_chain_pems[0].write_to_path(str(tmp_path / "cert.pem"))
    given = [f"--{name}={tmp_path / file}" for name, file in flags.items()]
    with pytest.raises(SystemExit):
        load(LlmConfig, "TEST", "", ["--model=m", *given], {})
    (line,) = capsys.readouterr().err.splitlines()
    assert says.format(tmp_path) in line


@pytest.mark.parametrize(
    ("kind", "option"),
    [
        (EncoderConfig, "--auth-token-file"),
        (LlmConfig, "--encoder-token-file"),
        (GatewayConfig, "--auth-token-file"),
        (GatewayConfig, "--llm-token-file"),
    ],
)
def test_a_file_of_tokens_that_cannot_be_used_is_named_with_its_option(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: type[Any], option: str
) -> None:
    needed = [] if kind is GatewayConfig else ["--model=m"]
    empty = tmp_path / "empty"
    empty.touch()
    for file, why in ((tmp_path / "none", "cannot be read as tokens: No such file"), (empty, "holds no token")):
        with pytest.raises(SystemExit):
            load(kind, "TEST", "", [*needed, f"{option}={file}"], {})
        assert f"{option}: {file} {why}" in capsys.readouterr().err


def test_a_token_that_cannot_be_one_is_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load(EncoderConfig, "TEST", "", ["--model=m", "--auth-token=sekrét"], {})
    assert "sekr" not in capsys.readouterr().err


def test_what_stands_around_a_token_is_no_part_of_it() -> None:
    """A secret that is handed over as a variable often ends with a line feed, which no caller could send."""
    config = load(LlmConfig, "TEST", "", ["--model=m"], {"TEST_AUTH_TOKEN": "in\n", "TEST_ENCODER_TOKEN": "out\n"})
    assert (config.accepted().tokens, config.encoder_security().token) == (("in",), "out")
    gateway = load(GatewayConfig, "TEST", "", [], {"TEST_LLM_TOKEN": "out\n"})
    assert gateway.llm_security().token == "out"


@pytest.mark.parametrize("address", ["7001", ":7001", "127.0.0.1", "localhost:http", "127.0.0.1:99999", "127.0.0.1:-1"])
def test_an_address_to_listen_on_has_a_host_and_a_port(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    """gRPC takes 99999 for 34463, and an address without a port for one with 443."""
    with pytest.raises(SystemExit):
        load(EncoderConfig, "TEST", "", ["--model=m", f"--listen={address}"], {})
    assert "--listen must be HOST:PORT, with a port of at most 65535" in capsys.readouterr().err


@pytest.mark.parametrize("address", ["9400", "localhost:http", "127.0.0.1:65536", "127.0.0.1:"])
def test_a_metrics_address_without_a_port_is_refused(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load(EncoderConfig, "TEST", "", ["--model=m", f"--metrics-listen={address}"], {})
    assert "--metrics-listen must be HOST:PORT, with a port of at most 65535" in capsys.readouterr().err
