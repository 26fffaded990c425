"""TLS and tokens on both services and on the link between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
import trustme

from tests import pictures
from tests.launch import Service, encoder_server, llm_server
from tests.rpc.pairs import ENCODER_FLAGS, LLM_FLAGS, about, answer, asked, usable
from tests.waiting import until
from twinlens import EncoderClient, Endpoint, LlmClient, NotReachableError, Tls, TwinlensError, user

OUTER, INNER = "what callers send", "what the LLM service sends"
PICTURE = pictures.encoded(pictures.noise(64, 64, 77))


@dataclass(frozen=True, slots=True)
class Papers:
    """A certificate for this host, its key, and the roots that vouch for it."""

    cert: Path
    key: Path
    ca: Path


@pytest.fixture(scope="module")
def papers(tmp_path_factory: pytest.TempPathFactory) -> Papers:
    folder, authority = tmp_path_factory.mktemp("papers"), trustme.CA()
    issued = authority.issue_cert("localhost", "127.0.0.1")
    found = Papers(folder / "cert.pem", folder / "key.pem", folder / "ca.pem")
    found.cert.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
    issued.private_key_pem.write_to_path(str(found.key))
    authority.cert_pem.write_to_path(str(found.ca))
    return found


@pytest.fixture(scope="module")
def encoder(checkpoints: Callable[..., Path], papers: Papers) -> Iterator[Service]:
    flags = {"tls_cert": papers.cert, "tls_key": papers.key, "tls_client_ca": papers.ca, "auth_token": INNER}
    with encoder_server(checkpoints("qwen3_vl"), **flags, **ENCODER_FLAGS) as service:
        yield service


@pytest.fixture(scope="module")
def llm(checkpoints: Callable[..., Path], papers: Papers, encoder: Service) -> Iterator[Service]:
    file = papers.ca.parent / "token"
    file.write_text(INNER + "\n")
    flags = {
        "tls_cert": papers.cert,
        "tls_key": papers.key,
        "auth_token": OUTER,
        "encoder_ca": papers.ca,
        "encoder_cert": papers.cert,
        "encoder_key": papers.key,
        "encoder_token_file": file,
    }
    with llm_server(checkpoints("qwen3_vl"), encoder.address, **flags, **LLM_FLAGS) as service:
        yield service


def test_a_picture_crosses_with_tls_and_tokens_everywhere(llm: Service, papers: Papers) -> None:
    with LlmClient(Endpoint(llm.address, OUTER, Tls(papers.ca))) as client:
        until(lambda: usable(client, 1), "the encoder is usable")
        assert answer(client, asked(about(PICTURE))).usage.completion_tokens == 8


@pytest.mark.parametrize("token", [None, INNER, OUTER + " "])
def test_a_caller_without_the_token_is_turned_away(llm: Service, papers: Papers, token: str | None) -> None:
    with LlmClient(Endpoint(llm.address, token, Tls(papers.ca))) as client, pytest.raises(TwinlensError) as error:
        answer(client, asked(user("hello")))
    assert error.value.code is grpc.StatusCode.UNAUTHENTICATED


def test_a_caller_without_tls_or_with_other_roots_gets_no_answer(llm: Service) -> None:
    for endpoint in (Endpoint(llm.address, OUTER), Endpoint(llm.address, OUTER, Tls())):
        with LlmClient(endpoint) as client, pytest.raises(NotReachableError):
            client.get_info()


def test_the_encoder_wants_a_certificate_of_its_callers(encoder: Service, papers: Papers) -> None:
    with EncoderClient(Endpoint(encoder.address, INNER, Tls(papers.ca))) as client, pytest.raises(NotReachableError):
        client.get_info()
    shown = Tls(papers.ca, papers.cert, papers.key)
    with EncoderClient(Endpoint(encoder.address, INNER, shown)) as client:
        assert client.get_info().digest


@pytest.mark.parametrize("wrong", ["token", "no TLS"])
def test_with_a_wrong_link_pictures_are_unavailable_and_text_goes_on(
    checkpoints: Callable[..., Path], papers: Papers, encoder: Service, wrong: str
) -> None:
    secure = {"encoder_ca": papers.ca, "encoder_cert": papers.cert, "encoder_key": papers.key}
    flags = {"encoder_token": "wrong", **secure} if wrong == "token" else {"encoder_token": INNER}
    with (
        llm_server(checkpoints("qwen3_vl"), encoder.address, **flags, **LLM_FLAGS) as service,
        LlmClient(service.address) as client,
    ):
        with pytest.raises(TwinlensError) as error:
            answer(client, asked(about(PICTURE)))
        assert (error.value.code, error.value.reason) == (grpc.StatusCode.UNAVAILABLE, "NO_ENCODER")
        assert encoder.address not in error.value.message
        assert answer(client, asked(user("hello"))).usage.completion_tokens == 8


def test_a_token_that_is_taken_out_of_the_file_opens_nothing_any_more(
    checkpoints: Callable[..., Path], tmp_path: Path
) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("old\nnew\n")

    def admitted(service: Service, token: str) -> bool:
        with LlmClient(Endpoint(service.address, token)) as client:
            try:
                return bool(client.get_info().model)
            except TwinlensError as error:
                if error.code is not grpc.StatusCode.UNAUTHENTICATED:
                    raise
                return False

    with llm_server(checkpoints("qwen3_vl"), auth_token_file=tokens, **LLM_FLAGS) as service:
        assert [admitted(service, token) for token in ("old", "new", "newer")] == [True, True, False]
        tokens.write_text("new\nnewer\n")
        assert [admitted(service, token) for token in ("old", "new", "newer")] == [False, True, True]


def test_an_encoder_of_another_model_is_not_used(
    checkpoints: Callable[..., Path], papers: Papers, encoder: Service
) -> None:
    secure = {"encoder_ca": papers.ca, "encoder_cert": papers.cert, "encoder_key": papers.key, "encoder_token": INNER}
    with (
        llm_server(checkpoints("qwen3_vl", seed=5), encoder.address, **secure, **LLM_FLAGS) as service,
        LlmClient(service.address) as client,
    ):
        with pytest.raises(TwinlensError) as error:
            answer(client, asked(about(PICTURE)))
        assert (error.value.code, error.value.reason) == (grpc.StatusCode.UNAVAILABLE, "NO_ENCODER")
        until(lambda: "another model" in service.log.read_text("utf-8"), "the log says why")


@pytest.mark.parametrize("wrong", ["nothing", "token", "no TLS"])
def test_prompts_are_computed_elsewhere_by_tls_and_a_token_and_without_them_here(
    checkpoints: Callable[..., Path], papers: Papers, encoder: Service, tmp_path: Path, wrong: str
) -> None:
    (tmp_path / "lender").write_text(INNER + "\n")
    (tmp_path / "borrower").write_text("another\n" if wrong == "token" else INNER + "\n")
    shared = {**LLM_FLAGS, "encoder_token": INNER, "kv_host_bytes": "8MiB"}
    shared |= {"encoder_ca": papers.ca, "encoder_cert": papers.cert, "encoder_key": papers.key}
    lends = {"tls_cert": papers.cert, "tls_key": papers.key, "tls_client_ca": papers.ca, "lend_prefill": "yes"}
    borrows = {"prefill_ca": papers.ca, "prefill_cert": papers.cert, "prefill_key": papers.key, "prefill_tokens": 32}
    if wrong == "no TLS":
        borrows = {"prefill_tokens": 32}
    model = checkpoints("qwen3_vl")
    with (
        llm_server(model, encoder.address, auth_token_file=tmp_path / "lender", **lends, **shared) as lender,
        llm_server(
            model,
            encoder.address,
            prefill_services=lender.address,
            prefill_token_file=tmp_path / "borrower",
            **borrows,
            **shared,
        ) as borrower,
        LlmClient(borrower.address) as client,
    ):
        usage = answer(client, asked(user("Nothing but words, " * 40))).usage
        load = client.get_load()
        assert (load.prefills_elsewhere, load.prefills_failed) == (1, int(wrong != "nothing"))
        assert (usage.cached_tokens > 0) == (wrong == "nothing")
