"""What the gateway speaks: TLS to callers and to LLM services, traces through all of them."""

from __future__ import annotations

import json
import ssl
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx2
import openai
import pytest
import trustme
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc

from tests.gateway.scripted import scripted
from tests.gateway.trio import Door, fronted, said
from tests.launch import Service, gateway
from tests.ports import held_address
from tests.rpc.pairs import pair
from tests.rpc.test_tracing import PARENT, TRACE, Collector
from tests.unit.twinlens.conftest import serving
from tests.unit.twinlens.fakes import WORDS, FakeLlm
from tests.waiting import until
from twinlens import v1


def test_tls_to_callers_and_to_llm_services(tmp_path: Path) -> None:
    authority = trustme.CA()
    issued = authority.issue_cert("localhost", "127.0.0.1")
    cert, key, ca, token = (tmp_path / name for name in ("cert.pem", "key.pem", "ca.pem", "token"))
    cert.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
    issued.private_key_pem.write_to_path(str(key))
    authority.cert_pem.write_to_path(str(ca))
    token.write_text("inner\n")
    chain = [(issued.private_key_pem.bytes(), cert.read_bytes())]
    credentials = grpc.ssl_server_credentials(chain)  # type: ignore[arg-type]
    llm = FakeLlm()
    with (
        serving(llm=llm, credentials=credentials) as address,
        gateway(address, tls_cert=cert, tls_key=key, llm_ca=ca, llm_token_file=token) as door,
        httpx2.Client(verify=ssl.create_default_context(cafile=str(ca))) as http,
        openai.OpenAI(base_url=f"https://{door.address}/v1", api_key="x", http_client=http, max_retries=0) as client,
    ):
        until(lambda: http.get(f"https://{door.address}/health/ready").status_code == 200, "it is ready")
        answer = client.chat.completions.create(model="demo", messages=[{"role": "user", "content": "x"}])
        assert answer.choices[0].message.content == "".join(WORDS)
        assert llm.metadata["authorization"] == "Bearer inner"


class Shown(FakeLlm):
    """An LLM service that remembers which certificates its callers showed."""

    def __init__(self) -> None:
        super().__init__()
        self.certificates: list[str] = []

    def Generate(self, request, context):
        (pem,) = context.auth_context()["x509_pem_cert"]
        self.certificates.append(pem.decode().strip())
        yield from super().Generate(request, context)


def test_a_certificate_and_a_token_that_are_replaced_are_shown_to_llm_services(tmp_path: Path) -> None:
    authority = trustme.CA()
    cert, key, ca, token = (tmp_path / name for name in ("cert.pem", "key.pem", "ca.pem", "token"))
    authority.cert_pem.write_to_path(str(ca))

    def issue(word: str) -> str:
        issued = authority.issue_cert("gateway")
        issued.private_key_pem.write_to_path(str(key))
        cert.write_bytes(issued.cert_chain_pems[0].bytes())
        token.write_text(f"{word}\n")
        return cert.read_text().strip()

    first = issue("one")
    server = authority.issue_cert("127.0.0.1")
    chain = [(server.private_key_pem.bytes(), server.cert_chain_pems[0].bytes())]
    credentials = grpc.ssl_server_credentials(chain, ca.read_bytes(), require_client_auth=True)  # type: ignore[arg-type]
    llm = Shown()
    with (
        serving(llm=llm, credentials=credentials) as address,
        gateway(address, llm_ca=ca, llm_cert=cert, llm_key=key, llm_token_file=token) as running,
    ):
        door = Door(running)

        def shown() -> tuple[str, str | bytes]:
            assert door.post("/v1/chat/completions", {"messages": [said("x")]}).status == 200
            return llm.certificates[-1], llm.metadata["authorization"]

        until(lambda: door.get("/health/ready").status == 200, "it is ready")
        assert shown() == (first, "Bearer one")
        second = issue("number two")
        assert shown()[1] == "Bearer number two"
        until(lambda: shown()[0] == second, "the new certificate is shown")


def test_a_certificate_that_is_replaced_is_shown_to_callers(tmp_path: Path) -> None:
    authority = trustme.CA()
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"

    def issue() -> None:
        issued = authority.issue_cert("127.0.0.1")
        issued.private_key_pem.write_to_path(str(key))
        cert.write_bytes(issued.cert_chain_pems[0].bytes())

    issue()
    with gateway("127.0.0.1:1", tls_cert=cert, tls_key=key) as door:
        host, _, port = door.address.rpartition(":")

        def shown() -> str:
            return ssl.get_server_certificate((host, int(port))).replace("\n", "")

        assert shown() == cert.read_text().replace("\n", "")
        issue()
        until(lambda: shown() == cert.read_text().replace("\n", ""), "the new one is shown")


def test_a_gateway_that_serves_knows_the_services_that_are_there() -> None:
    began = int(time.time())
    with serving(llm=FakeLlm()) as address, gateway(address) as door, httpx2.Client() as http:
        assert http.get(f"http://{door.address}/health/ready").status_code == 200  # at the first question
        (model,) = http.get(f"http://{door.address}/v1/models").json()["data"]
        assert began <= model["created"] <= time.time()
        assert http.get(f"http://{door.address}/v1/models/{model['id']}").json() == model


@pytest.mark.parametrize(
    ("flags", "said_of_it"),
    [
        ({"tls_cert": "x"}, "--tls-cert and --tls-key go together"),
        ({"llm": "nowhere"}, "--llm: nowhere is not host:port"),
        ({"auth_token_file": "/nowhere"}, "--auth-token-file: /nowhere cannot be read as tokens: No such file"),
        ({"max_inflight_bytes": 5}, "--max-inflight-bytes must be"),
        ({"listen": "8000"}, "--listen must be HOST:PORT, with a port of at most 65535"),
    ],
)
def test_options_that_make_no_sense_are_refused(flags: dict[str, Any], said_of_it: str) -> None:
    with pytest.raises(RuntimeError, match=said_of_it), gateway("127.0.0.1:1", **flags):
        pass


@contextmanager
def collecting(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    collector = Collector()
    server = grpc.server(futures.ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
    server.start()
    yield collector
    server.stop(None).wait()


def test_a_request_is_one_trace_over_the_gateway_and_the_services(
    monkeypatch: pytest.MonkeyPatch, checkpoint: Path
) -> None:
    with collecting(monkeypatch) as collector, pair(checkpoint) as services, fronted(services) as door:
        body = {"messages": [said("Hello")], "max_tokens": 2}
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
        assert door.post("/v1/chat/completions", body, headers).status == 200
        until(lambda: {"Generate", "POST /v1/chat/completions"} <= {span.name for _, span in collector.spans}, "spans")
        by_name = {span.name: (service, span) for service, span in collector.spans}
        service, ours = by_name["POST /v1/chat/completions"]
        assert (service, ours.parent_span_id.hex(), ours.trace_id.hex()) == ("twinlens-gateway", PARENT, TRACE)
        assert by_name["Generate"][1].parent_span_id == ours.span_id


def test_a_model_whose_service_is_down_is_not_unknown() -> None:
    body = {"messages": [said("x")], "model": "demo"}
    with ExitStack() as running, ExitStack() as serves:
        address = serves.enter_context(serving(llm=FakeLlm()))
        door = Door(running.enter_context(gateway(address)))
        until(lambda: door.post("/v1/chat/completions", body).status == 200, "it serves")
        unknown = door.post("/v1/chat/completions", {**body, "model": "other"})
        assert (unknown.status, unknown.error["code"]) == (404, "UNKNOWN_MODEL")
        serves.close()
        until(lambda: door.metric("llm_services_usable") == 0, "it is gone")
        down = door.post("/v1/chat/completions", body)
        assert (down.status, down.error["code"]) == (503, "NO_LLM_SERVICE")
        one = door.get("/v1/models/demo")
        assert (one.status, one.error["code"]) == (503, "NO_LLM_SERVICE")


def test_models_are_listed_once_a_service_has_said_that_it_can_serve() -> None:
    llm = FakeLlm()
    llm.context_tokens = 0  # its engine has not said yet how long a context it has memory for
    with serving(llm=llm) as address, gateway(address) as running:
        front = Door(running)
        for path in ("/v1/models", "/v1/models/demo", "/health/ready"):
            answer = front.get(path)
            assert (answer.status, answer.error["code"]) == (503, "NO_LLM_SERVICE"), path
            assert answer.headers["retry-after"] == "1"
        llm.context_tokens = 4096
        until(lambda: front.get("/health/ready").status == 200, "it is ready")
        assert [model["id"] for model in json.loads(front.get("/v1/models").body)["data"]] == ["demo"]
        assert front.get("/v1/models/other").status == 404


def test_sixty_megabytes_are_refused_or_handed_on_without_piling_up() -> None:
    with scripted() as door:
        address = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 60_000_000}}
        body = {"messages": [said(address, {"type": "text", "text": "x"})]}
        assert door.post("/v1/chat/completions", body).status == 200
        for content in (b"[" * 60_000_000, b'{"a":' * 10_000_000, b"[0," * 20_000_000):
            assert door.post("/v1/chat/completions", content).status in (400, 413)
        peak = int(Path(f"/proc/{door.gateway.pid}/status").read_text().partition("VmHWM:")[2].split()[0])
        assert peak < 800 << 10, f"{peak} KiB"
        assert door.metric("body_bytes") == 0


@contextmanager
def nobody() -> Iterator[str]:
    """An address where nothing listens."""
    yield held_address()


@contextmanager
def another_service() -> Iterator[str]:
    server = grpc.server(futures.ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()


def test_callers_tokens_are_those_that_are_in_the_file_now(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("old\n")
    with scripted(auth_token_file=tokens) as door:

        def statuses() -> list[int]:
            return [door.get("/v1/models", {"authorization": f"Bearer {token}"}).status for token in ("old", "new")]

        assert statuses() == [200, 401]
        tokens.write_text("new\n")
        assert statuses() == [401, 200]


def test_a_service_that_answers_nonsense_is_asked_again_and_each_new_cause_is_logged() -> None:
    """What is no message comes out of gRPC as None."""
    whole = v1.LlmServiceGetInfoResponse(model="demo", context_tokens=4096).SerializeToString()
    said = {"GetInfo": b"\xff", "GetLoad": b"\xff"}
    methods = {name: grpc.unary_unary_rpc_method_handler(lambda *_, name=name: said[name]) for name in said}
    server = grpc.server(futures.ThreadPoolExecutor(2))
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("twinlens.v1.LlmService", methods)])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with gateway(f"127.0.0.1:{port}", fork=False) as service:

        def causes() -> list[str]:
            return [each["cause"] for each in logged(service) if "an LLM service can" in each["event"]]

        nonsense = "its answer is not one of our messages"
        until(lambda: causes() == [nonsense], "it is logged")
        said["GetInfo"] = v1.LlmServiceGetInfoResponse(model="demo").SerializeToString()
        until(lambda: causes() == [nonsense, "STARTING"], "it is asked again")
        said["GetInfo"] = whole
        until(lambda: causes() == [nonsense, "STARTING", nonsense], "of its load it says nonsense")
        said["GetLoad"] = b""
        until(lambda: causes()[3:] == [""], "it can be used")
        server.stop(None).wait()


def logged(service: Service) -> list[dict[str, str]]:
    """A service's log so far."""
    return [json.loads(line) for line in service.log.read_text("utf-8").splitlines()]


@pytest.mark.parametrize(
    ("listening", "cause"),
    [(nobody, "nothing listens there"), (another_service, "what listens there is not an LLM service")],
)
def test_an_address_without_an_llm_service_is_logged_with_its_cause(
    listening: Callable[[], AbstractContextManager[str]], cause: str
) -> None:
    with listening() as address, gateway(address, fork=False) as service:

        def lines() -> list[dict[str, str]]:
            return [line for line in logged(service) if line["event"] == "an LLM service cannot be used"]

        until(lambda: bool(lines()), "it is logged")
        assert {(line["address"], line["cause"]) for line in lines()} == {(address, cause)}
