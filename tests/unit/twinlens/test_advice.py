"""What the command line says where a service cannot be reached: what is in the way, and the flag that helps."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
import trustme

from tests.unit.twinlens.conftest import serving
from tests.unit.twinlens.fakes import FakeEncoder, FakeLlm
from twinlens import Endpoint, LlmClient, NotReachableError, Tls, v1
from twinlens.cli import main
from twinlens.obstacles import Obstacle

HERE = "127.0.0.1"


@pytest.fixture(scope="module")
def papers(authority: trustme.CA, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate and key for this host, another pair, the roots of both, and other roots."""
    folder = tmp_path_factory.mktemp("papers")
    for name, host in (("cert", HERE), ("else", "else.test")):
        issued = authority.issue_cert(host)
        issued.cert_chain_pems[0].write_to_path(folder / f"{name}.pem")
        issued.private_key_pem.write_to_path(folder / f"{name}.key")
    authority.cert_pem.write_to_path(folder / "ca.pem")
    trustme.CA().cert_pem.write_to_path(folder / "others.pem")
    (folder / "token").write_text("inner\n")
    return folder


def credentials(papers: Path, name: str = "cert", *, mutual: bool = False) -> grpc.ServerCredentials:
    pair = ((papers / f"{name}.key").read_bytes(), (papers / f"{name}.pem").read_bytes())
    return grpc.ssl_server_credentials([pair], (papers / "ca.pem").read_bytes() if mutual else None, mutual)


@pytest.fixture
def wants_tls(papers: Path) -> Iterator[str]:
    with serving(llm=FakeLlm(), credentials=credentials(papers)) as address:
        yield address


@pytest.fixture
def wants_certificate(papers: Path) -> Iterator[str]:
    with serving(llm=FakeLlm(), credentials=credentials(papers, mutual=True)) as address:
        yield address


@pytest.fixture
def speaks_otherwise() -> Iterator[str]:
    """A server of another protocol."""
    with socket.create_server((HERE, 0)) as server:

        def answer() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection:
                    connection.recv(4096)
                    connection.sendall(b"HTTP/1.0 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        yield f"{HERE}:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)
        thread.join()


def said(capsys: pytest.CaptureFixture[str], address: str, *flags: object) -> str:
    """What the command line says of a service that is not reached: its last line."""
    assert main(["ask", "--llm", address, "what?", *map(str, flags)]) == 3
    return capsys.readouterr().err.splitlines()[-1].removeprefix(f"twinlens: no service answers at {address}: ")


def test_nobody_there(capsys) -> None:
    line = said(capsys, f"{HERE}:1")
    advice = "is it started? By default encoders listen on port 7001, LLM services on 7002"
    assert line.startswith(f"nothing listens there; {advice}")


def test_a_plain_client_at_a_tls_port(capsys, wants_tls: str, papers: Path) -> None:
    assert said(capsys, wants_tls).endswith("for TLS say --ca-file, or --tls where its certificate is a public one")
    assert main(["ask", "--llm", wants_tls, "what?", "--ca-file", str(papers / "ca.pem")]) == 0


def test_a_missing_client_certificate(capsys, wants_certificate: str, papers: Path) -> None:
    line = said(capsys, wants_certificate, "--ca-file", papers / "ca.pem")
    assert line.endswith("for a client certificate say --cert-file and --key-file")


def test_tls_at_a_plain_port(capsys, llm_address: str, papers: Path) -> None:
    line = said(capsys, llm_address, "--ca-file", papers / "ca.pem")
    assert line == "what listens there does not speak TLS; say no --tls, and none of the flags for certificates"


@pytest.mark.parametrize("roots", ["others.pem", None])
def test_other_roots(capsys, wants_tls: str, papers: Path, roots: str | None) -> None:
    line = said(capsys, wants_tls, *(["--ca-file", papers / roots] if roots else ["--tls"]))
    assert line.startswith("its certificate is not signed by trusted roots; --ca-file")


def test_another_name(capsys, papers: Path) -> None:
    with serving(llm=FakeLlm(), credentials=credentials(papers, "else")) as address:
        line = said(capsys, address, "--ca-file", papers / "ca.pem")
        assert line == "its certificate is for another name; --server-name says which name to expect"


def test_another_protocol(capsys, speaks_otherwise: str) -> None:
    assert said(capsys, speaks_otherwise).startswith("what listens there does not speak gRPC; where it is a proxy")


def test_the_client_says_it_as_well(wants_tls: str) -> None:
    with LlmClient(wants_tls) as client, pytest.raises(NotReachableError) as caught:
        client.get_info()
    assert caught.value.obstacle is Obstacle.CLOSED
    assert str(caught.value).startswith("UNAVAILABLE: the connection was closed at once, as if TLS")


def test_what_grpc_says_of_nothing_that_is_known_is_shown(capsys) -> None:
    error = NotReachableError(grpc.StatusCode.UNAVAILABLE, "the moon is full")
    assert (error.obstacle, str(error)) == (None, "UNAVAILABLE: the moon is full")


@pytest.mark.parametrize("address", ["127.0.0.1", "7002"])
def test_an_address_without_a_port(capsys, address: str) -> None:
    assert said(capsys, address).endswith("an address is HOST:PORT, and this one names no port")


def test_the_file_that_is_refused_is_named(capsys, llm: FakeLlm, llm_address: str, papers: Path) -> None:
    field = "chat.messages[1].parts[1].media.data"
    refused = v1.Status(code=3, message="not a picture", reason="MEDIA_FORMAT", field=field)
    llm.refusal = (grpc.StatusCode.INVALID_ARGUMENT, refused)
    files = [str(papers / name) for name in ("cert.pem", "ca.pem")]
    images = [word for file in files for word in ("--image", file)]
    assert main(["ask", "--llm", llm_address, "--system", "be brief", "what?", *images]) == 1
    err = capsys.readouterr().err
    assert f"MEDIA_FORMAT: not a picture ({files[1]})\n" in err


def test_a_service_that_is_not_there(capsys, llm_address: str) -> None:
    with serving(llm=FakeLlm(), handlers=(_health(grpc.StatusCode.NOT_FOUND),)) as address:
        assert main(["health", address, "--service", "nobody"]) == 1
    assert "the server has no service of that name" in capsys.readouterr().err


def _health(code: grpc.StatusCode) -> grpc.GenericRpcHandler:
    def check(request, context):
        context.abort(code, "")

    return grpc.method_handlers_generic_handler(
        "grpc.health.v1.Health", {"Check": grpc.unary_unary_rpc_method_handler(check)}
    )


def test_a_file_that_no_message_holds(capsys, llm_address: str, tmp_path: Path) -> None:
    file = tmp_path / "long.mp4"
    with file.open("wb") as content:
        content.truncate(80 << 20)
    assert main(["ask", "--llm", llm_address, "what?", "--video", str(file)]) == 1
    assert "are too large together" in capsys.readouterr().err


def test_the_port_of_the_other_service(capsys, encoder_address: str) -> None:
    assert main(["ask", "--llm", encoder_address, "what?"]) == 1
    assert "is it another service's address? Encoders listen on 7001" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--ca-file", "cert.key"], "--ca-file {}/cert.key must hold certificates, and holds a private key"),
        (["--ca-file", "token"], "--ca-file {}/token must hold certificates, and holds no PEM certificate"),
        (["--ca-file", "none.pem"], "--ca-file {}/none.pem: No such file or directory"),
        (["--cert-file", "cert.pem"], "--cert-file and --key-file go together"),
        (
            ["--cert-file", "cert.key", "--key-file", "cert.pem"],
            "--cert-file {}/cert.key must hold certificates, and holds a private key",
        ),
        (
            ["--cert-file", "cert.pem", "--key-file", "ca.pem"],
            "--key-file {}/ca.pem must hold a private key, and holds a certificate",
        ),
        (
            ["--cert-file", "cert.pem", "--key-file", "else.key"],
            "--cert-file {0}/cert.pem and --key-file {0}/else.key are not of one pair",
        ),
    ],
)
def test_a_file_that_is_not_what_it_should_be_is_named_with_its_flag(
    capsys, llm_address: str, papers: Path, flags: list[str], says: str
) -> None:
    given = [word if word.startswith("--") else str(papers / word) for word in flags]
    assert main(["ask", "--llm", llm_address, "what?", *given]) == 2
    assert capsys.readouterr().err == f"twinlens: {says.format(papers)}\n"


def test_a_key_with_a_password_is_refused(papers: Path, tmp_path: Path) -> None:
    key = tmp_path / "locked.key"
    key.write_text("-----BEGIN ENCRYPTED PRIVATE KEY-----\n-----END ENCRYPTED PRIVATE KEY-----\n")
    with pytest.raises(ValueError, match=r"key_file .*locked\.key is protected by a password"):
        Endpoint(f"{HERE}:1", tls=Tls(cert_file=papers / "cert.pem", key_file=key)).open()


class TestStatusOfEncodersWithPapersOfTheirOwn:
    """An LLM service without TLS, and an encoder that wants a client certificate and another token."""

    @pytest.fixture
    def encoder(self) -> FakeEncoder:
        return FakeEncoder()

    @pytest.fixture
    def address(self, encoder: FakeEncoder, papers: Path) -> Iterator[str]:
        with serving(encoder=encoder, credentials=credentials(papers, mutual=True)) as address:
            yield address

    @pytest.fixture(autouse=True)
    def known(self, llm: FakeLlm, address: str) -> None:
        llm.encoders = [address]

    def own(self, papers: Path) -> list[str]:
        files = {"ca": "ca.pem", "cert": "cert.pem", "key": "cert.key"}
        return [word for kind, name in files.items() for word in (f"--encoder-{kind}-file", str(papers / name))]

    def test_they_are_looked_at_with_their_own(self, llm_address: str, address: str, papers: Path, capsys) -> None:
        flags = [*self.own(papers), "--encoder-token-file", str(papers / "token")]
        assert main(["status", "--llm", llm_address, *flags]) == 0
        assert f"encoder {address}: demo" in capsys.readouterr().out

    def test_the_token_is_theirs(
        self, llm: FakeLlm, llm_address: str, encoder: FakeEncoder, papers: Path, monkeypatch, capsys
    ) -> None:
        monkeypatch.setenv("TWINLENS_TOKEN", "outer")
        for flags, theirs in ((["--encoder-token-file", str(papers / "token")], "inner"), ([], "outer")):
            assert main(["status", "--llm", llm_address, *self.own(papers), *flags]) == 0
            assert encoder.metadata["authorization"] == f"Bearer {theirs}"
            assert llm.metadata["authorization"] == "Bearer outer"

    def test_without_them_the_flags_that_help_are_named(self, llm_address: str, address: str, capsys) -> None:
        assert main(["status", "--llm", llm_address]) == 1
        out = capsys.readouterr().out
        assert f"encoder {address}: UNAVAILABLE: the connection was closed at once" in out
        assert "for TLS say --encoder-ca-file, or --encoder-tls" in out

    def test_half_of_a_pair_is_none(self, llm_address: str, papers: Path, capsys) -> None:
        assert main(["status", "--llm", llm_address, *self.own(papers)[:4]]) == 1
        assert "--encoder-cert-file and --encoder-key-file go together" in capsys.readouterr().out

    def test_what_is_not_given_is_as_for_the_llm_service(self, papers: Path, address: str, capsys) -> None:
        llm = FakeLlm()
        llm.encoders = [address]
        shown = [word.replace("--encoder-", "--") for word in self.own(papers)]
        with serving(llm=llm, credentials=credentials(papers, mutual=True)) as secure:
            assert main(["status", "--llm", secure, *shown]) == 0

    def test_encoders_may_do_without_tls_though_the_llm_service_has_it(
        self, papers: Path, encoder_address: str, capsys
    ) -> None:
        llm = FakeLlm()
        llm.encoders = [encoder_address]
        with serving(llm=llm, credentials=credentials(papers)) as secure:
            flags = ["status", "--llm", secure, "--ca-file", str(papers / "ca.pem")]
            assert main(flags) == 1
            assert "does not speak TLS; say --encoder-plaintext" in capsys.readouterr().out
            assert main([*flags, "--encoder-plaintext"]) == 0
