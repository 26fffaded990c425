"""Items that do not fit a message: what an encoder takes is for it to say, and no encoder is to blame for one."""

from __future__ import annotations

import grpc
import pytest

from common.errors import InvalidInput
from common.rpc.channel import ChannelSecurity, open_channel
from tests.unit.llm_service.scripted import ScriptedEncoder, bench
from twinlens import v1


async def test_an_item_larger_than_an_encoder_s_messages_is_the_caller_s_fault_and_not_the_encoder_s() -> None:
    """gRPC itself refuses it, in the status of a full queue; the servers here take 4 MiB."""
    async with bench(ScriptedEncoder(), ScriptedEncoder()) as b:
        await b.usable(2)
        with pytest.raises(InvalidInput) as error:
            await b.land(bytes(5 << 20))
        assert (error.value.reason, error.value.field) == ("MEDIA_TOO_LARGE", "here[0]")
        assert b.receiver.counters.attempts == 1
        assert all(replica.usable and not replica.breaker.failures for replica in b.pool.replicas)


async def test_an_encoder_that_takes_larger_messages_is_sent_them() -> None:
    received: list[int] = []

    class Encoder(v1.EncoderServiceServicer):
        async def Prefetch(self, request: v1.PrefetchRequest, context: object) -> v1.PrefetchResponse:
            received.append(len(request.items[0].data))
            return v1.PrefetchResponse()

    server = grpc.aio.server(options=[("grpc.max_receive_message_length", 80 << 20)])
    v1.add_EncoderServiceServicer_to_server(Encoder(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    channel = open_channel(f"127.0.0.1:{port}", ChannelSecurity())
    item = v1.Media(modality=v1.MODALITY_VIDEO, data=bytes(69 << 20))
    await v1.EncoderServiceStub(channel).Prefetch(v1.PrefetchRequest(items=[item]))
    assert received == [69 << 20]
    await channel.close()
    await server.stop(None)
