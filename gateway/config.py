"""Options of the gateway."""

from __future__ import annotations

import re
from dataclasses import dataclass

from common.config import is_port, option, size, words
from common.rpc.bearer_tokens import of_option
from common.rpc.channel import ChannelSecurity
from common.rpc.client_options import check_addresses, security
from gateway.callers import Callers
from twinlens import credentials

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://(\[[0-9a-f:]+\]|[a-z0-9._-]+)(:[0-9]{1,5})?")
"""An origin as browsers write it: no path, no slash at its end, no capitals."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig:
    """Everything that `python -m gateway` can be told."""

    listen: str = option(
        "127.0.0.1:8000", "address to serve HTTP on; port 0 picks a free one", group="what is served, and where"
    )
    llm: tuple[str, ...] = option(
        ("127.0.0.1:7002",), "LLM services: host:port, dns:///name:port or file:///path, comma-separated", parse=words
    )
    page: bool = option(True, "serve the page to try it on, at /")
    allow_lora_updates: bool = option(False, "callers may load and unload LoRA adapters, at every LLM service")
    allow_cache_resets: bool = option(False, "callers may empty the caches of every LLM service")
    auth_token_file: str = option(
        "",
        "file of bearer tokens, one a line, or of callers' names, a tab and their tokens; callers must send one",
        group="callers",
    )
    tls_cert: str = option("", "PEM certificate chain; with --tls-key, the port speaks only TLS")
    tls_key: str = option("", "PEM private key of --tls-cert")
    allow_origins: tuple[str, ...] = option(
        (), "origins whose web pages may call it: https://host[:port], comma-separated, or *", parse=words
    )
    allow_hosts: tuple[str, ...] = option(
        (),
        "Host names, or *, that a gateway on loopback without tokens accepts besides localhost, addresses, and those of"
        " --allow-origins",
        parse=words,
    )
    llm_ca: str = option(
        "", "PEM roots of the LLM services' certificates; turns TLS on towards them", group="LLM services"
    )
    llm_cert: str = option("", "PEM client certificate shown to LLM services")
    llm_key: str = option("", "PEM private key of --llm-cert")
    llm_token: str = option("", "bearer token sent to LLM services", secret=True)
    llm_token_file: str = option("", "file that holds that token; of several, one a line, the first")
    max_requests: int = option(
        512, "requests served at once; further ones are refused", minimum=1, group="bounds of requests"
    )
    max_prompts: int = option(
        2048, "prompts of one request for completions or embeddings, or documents to score", minimum=1
    )
    max_prompt_calls: int = option(
        32, "prompts of one such request sent to LLM services at once; the others wait", minimum=1
    )
    max_batch_calls: int = option(
        128,
        "prompts of all such requests sent at once to each LLM service that can serve; a request with one prompt does"
        " not wait for them",
        minimum=1,
    )
    max_connections: int = option(2048, "open connections; further ones are closed at once", minimum=1)
    max_body_bytes: int = option(64 << 20, "largest body of a request", parse=size, minimum=1 << 10)
    max_inflight_bytes: int = option(
        512 << 20, "bytes of bodies held or arriving at once; further ones are refused", parse=size, minimum=1
    )
    request_stall_seconds: float = option(
        10.0,
        "a request that brings no data for this long is dropped, and one whose head takes longer",
        minimum=0.1,
    )
    answer_stall_seconds: float = option(
        30.0, "a caller who reads nothing of an answer for this long is dropped", minimum=0.1
    )
    request_seconds: float = option(
        600.0, "longest wait for the first token of an answer, and from each token to the next", minimum=0.1
    )
    answer_seconds: float = option(
        86400.0, "longest that a whole answer may take while tokens keep coming", minimum=0.1
    )
    max_handovers: int = option(
        2,
        "how many crashes of LLM services an answer may survive, each time continued by another service",
        minimum=0,
        group="answers whose LLM service ends",
    )
    handover_seconds: float = option(
        60.0, "how long an answer whose LLM service has ended waits for another to continue it", minimum=0
    )
    max_kept_bytes: int = option(
        256 << 20,
        "memory for requests kept to continue their answers; beyond it, an answer ends with its service",
        parse=size,
        minimum=0,
    )
    grace_seconds: float = option(
        30.0, "on SIGTERM, running requests get this long to finish", minimum=0, group="the end, and the log"
    )
    log_level: str = option("info", "what is logged", choices=("debug", "info", "warning", "error"))

    def validate(self) -> None:
        """Raises ValueError if options contradict each other."""
        host, _, port = self.listen.rpartition(":")
        if not (host and is_port(port)):
            raise ValueError("--listen must be HOST:PORT, with a port of at most 65535")
        if not self.llm:
            raise ValueError("--llm is needed: the addresses of LLM services")
        check_addresses("--llm", self.llm)
        for origin in self.allow_origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise ValueError(f"--allow-origins: {origin} is neither * nor scheme://host[:port] in small letters")
        if bool(self.tls_cert) != bool(self.tls_key):
            raise ValueError("--tls-cert and --tls-key go together")
        if self.max_inflight_bytes < self.max_body_bytes:
            raise ValueError(
                "--max-inflight-bytes must be at least --max-body-bytes, or the largest body would never be admitted"
            )
        credentials.check_files(cert=("--tls-cert", self.tls_cert), key=("--tls-key", self.tls_key))
        with of_option("--auth-token-file"):
            self.callers()
        self.llm_security()

    @property
    def longest_seconds(self) -> float:
        """That any request may take."""
        return max(self.request_seconds, self.answer_seconds)

    def callers(self) -> Callers:
        """The admitted callers. Raises ValueError if the file of tokens cannot be used."""
        return Callers(self.auth_token_file)

    def llm_security(self) -> ChannelSecurity:
        """How LLM services are spoken to. Raises ValueError as `security`."""
        return security(
            "--llm",
            ca=self.llm_ca,
            cert=self.llm_cert,
            key=self.llm_key,
            token=self.llm_token,
            token_file=self.llm_token_file,
        )
