"""Certificates and tokens that an LLM service shows to encoders, replaced while it runs."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import trustme

from common.rpc.bearer_tokens import TokenFile
from common.rpc.channel import ChannelSecurity
from llm_service.encoders.pool import EncoderPool
from llm_service.encoders.settings import EncoderSettings
from tests.unit.llm_service.scripted import LAYOUT
from tests.unit.twinlens.conftest import serving
from tests.unit.twinlens.fakes import FakeEncoder
from tests.waiting import eventually


class Asked(FakeEncoder):
    """An encoder that remembers which certificate and token its callers showed last."""

    shown = ("", "")

    def GetInfo(self, request, context):
        (pem,) = context.auth_context()["x509_pem_cert"]
        info = super().GetInfo(request, context)
        self.shown = pem.decode().strip(), self.metadata["authorization"]
        return info


def test_what_is_in_the_files_now_is_shown_to_encoders(tmp_path: Path) -> None:
    authority = trustme.CA()
    cert, key, ca, token = (tmp_path / name for name in ("cert.pem", "key.pem", "ca.pem", "token"))
    authority.cert_pem.write_to_path(str(ca))

    def issue(word: str) -> tuple[str, str]:
        issued = authority.issue_cert("llm")
        issued.private_key_pem.write_to_path(str(key))
        cert.write_bytes(issued.cert_chain_pems[0].bytes())
        token.write_text(word)
        return cert.read_text().strip(), f"Bearer {word}"

    async def watch(address: str, encoder: Asked) -> None:
        security = ChannelSecurity(str(ca), str(cert), str(key), token_file=TokenFile(str(token)))
        settings = EncoderSettings(
            digest="0123456789abcdef",
            layout=LAYOUT,
            merge=2,
            security=security,
            resolve_seconds=0.02,
            check_seconds=0.02,
        )
        pool = EncoderPool([address], settings)
        await pool.start()
        try:
            await eventually(lambda: encoder.shown == first, "the first ones are shown")
            second = issue("number two")
            await eventually(lambda: encoder.shown == second, "the second ones are shown")
        finally:
            await pool.stop()

    first = issue("one")
    server = authority.issue_cert("127.0.0.1")
    chain = [(server.private_key_pem.bytes(), server.cert_chain_pems[0].bytes())]
    credentials = grpc.ssl_server_credentials(chain, ca.read_bytes(), require_client_auth=True)  # type: ignore[arg-type]
    encoder = Asked()
    with serving(encoder=encoder, credentials=credentials) as address:
        asyncio.run(watch(address, encoder))
