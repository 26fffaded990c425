from __future__ import annotations

import grpc
import pytest
import trustme

from tests.unit.twinlens.conftest import serving
from tests.unit.twinlens.fakes import FakeLlm
from twinlens import Endpoint, LlmClient, NotReachableError, Tls
from twinlens.channel import is_local


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1:7002", "127.8.9.1:1", "[::1]:7002", "localhost:7002", "dns:///localhost:7002", "unix:/run/x"],
)
def test_an_address_of_this_machine_is_local(address: str) -> None:
    assert is_local(address)


@pytest.mark.parametrize(
    "address",
    ["encoder:7001", "10.0.0.7:7001", "dns:///llm:7002", "localhost.example.org:1", "[2001:db8::1]:1"],
)
def test_another_address_is_not_local(address: str) -> None:
    assert not is_local(address)


def test_a_token_is_refused_in_plaintext_to_another_machine() -> None:
    with pytest.raises(ValueError, match="unencrypted"):
        Endpoint("llm:7002", token="secret")
    assert Endpoint("llm:7002", token="secret", plaintext_token=True).metadata
    assert Endpoint("llm:7002", token="secret", tls=Tls()).metadata


def test_a_token_reaches_a_plaintext_service_on_this_machine(llm: FakeLlm, llm_address: str) -> None:
    with LlmClient(Endpoint(llm_address, token="secret")) as client:
        client.ask("hello")
    assert llm.metadata["authorization"] == "Bearer secret"


def test_without_a_token_no_authorization_is_sent(llm: FakeLlm, llm_address: str) -> None:
    with LlmClient(llm_address) as client:
        client.ask("hello")
    assert "authorization" not in llm.metadata


@pytest.mark.parametrize("token", ["sekret\n", "sek\r\nx: y", "sekrét"])
def test_a_token_that_no_header_carries_is_refused_and_not_shown(token: str) -> None:
    with pytest.raises(ValueError, match="one line of ASCII") as caught:
        Endpoint("127.0.0.1:7002", token=token)
    assert "sek" not in str(caught.value)


@pytest.mark.parametrize("address", ["127.0.0.1:99999", "dns:///llm:65536", "[::1]:70020"])
def test_a_port_that_there_is_not_is_refused(address: str) -> None:
    """gRPC takes 99999 for 34463: a token would go to whoever listens there."""
    with pytest.raises(ValueError, match="port"):
        Endpoint(address)


@pytest.mark.parametrize("address", ["127.0.0.1", "unix:/run/99999", "unix:/run/a:99999", "dns:///llm", "[::1]"])
def test_an_address_without_a_port_is_grpcs_to_understand(address: str) -> None:
    assert Endpoint(address).address == address


@pytest.mark.parametrize("variable", ["grpc_proxy", "https_proxy", "http_proxy"])
def test_a_service_on_this_machine_is_reached_without_a_proxy(
    llm_address: str, variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A proxy cannot reach it, and would be shown the token."""
    monkeypatch.setenv(variable, "http://127.0.0.1:1")
    with LlmClient(Endpoint(llm_address, token="secret")) as client:
        assert client.get_info().model == "demo"


def test_half_a_client_certificate_is_refused() -> None:
    with pytest.raises(ValueError, match="together"):
        Tls(cert_file="c.pem")


@pytest.mark.parametrize("address", ["http://127.0.0.1:7002", "https://llm.example.org"])
def test_an_address_of_the_web_is_none(address: str) -> None:
    with pytest.raises(ValueError, match="HOST:PORT"):
        Endpoint(address)


def test_an_empty_address_is_refused() -> None:
    with pytest.raises(ValueError, match="address"):
        Endpoint("")


def test_a_missing_roots_file_is_an_os_error(tmp_path) -> None:
    with pytest.raises(FileNotFoundError):
        Endpoint("localhost:1", tls=Tls(ca_file=tmp_path / "none.pem")).open()


class TestTls:
    """A server with a certificate for `llm.test`, which also asks for a client certificate."""

    @pytest.fixture
    def pem(self, authority: trustme.CA, tmp_path):
        authority.cert_pem.write_to_path(tmp_path / "ca.pem")
        mine = authority.issue_cert("client.test")
        mine.cert_chain_pems[0].write_to_path(tmp_path / "client.pem")
        mine.private_key_pem.write_to_path(tmp_path / "client.key")
        return tmp_path

    @pytest.fixture
    def address(self, authority: trustme.CA, llm: FakeLlm):
        own = authority.issue_cert("llm.test")
        credentials = grpc.ssl_server_credentials(
            [(own.private_key_pem.bytes(), own.cert_chain_pems[0].bytes())],
            authority.cert_pem.bytes(),
            require_client_auth=True,
        )
        with serving(llm=llm, credentials=credentials) as address:
            yield address

    def test_the_right_roots_and_certificate_are_let_in(self, address: str, pem) -> None:
        tls = Tls(pem / "ca.pem", pem / "client.pem", pem / "client.key", server_name="llm.test")
        with LlmClient(Endpoint(address, token="secret", tls=tls)) as client:
            assert client.ask("hello").text == "A red circle."

    def test_no_client_certificate_is_not_let_in(self, address: str, pem) -> None:
        tls = Tls(pem / "ca.pem", server_name="llm.test")
        with LlmClient(Endpoint(address, tls=tls)) as client, pytest.raises(NotReachableError):
            client.get_info()

    def test_a_certificate_for_another_name_is_not_trusted(self, address: str, pem) -> None:
        tls = Tls(pem / "ca.pem", pem / "client.pem", pem / "client.key", server_name="other.test")
        with LlmClient(Endpoint(address, tls=tls)) as client, pytest.raises(NotReachableError):
            client.get_info()

    def test_plaintext_to_a_tls_port_fails(self, address: str) -> None:
        with LlmClient(address) as client, pytest.raises(NotReachableError):
            client.get_info()
