"""What surrounds every call, over real gRPC: tokens, deadlines, errors as statuses, and generators that are closed."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, Self

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from common import errors
from common.errors import OUTCOMES, TwinlensError
from common.rpc.bearer_tokens import AcceptedTokens
from common.rpc.calls import Call, CallInterceptor, StallLimit, current
from common.rpc.channel import from_rpc_error
from common.rpc.request_budget import RequestBudget
from common.rpc.server import GrpcServer, ServerConfig
from common.rpc.status import fail, from_plain_status
from common.telemetry import tracing
from tests.clock import Forward, turns
from tests.waiting import eventually
from twinlens import v1

TOKEN = "open sesame"
GENERATE = "/twinlens.v1.LlmService/Generate"


class Scripted(v1.LlmServiceServicer):
    """Does what a test says, and remembers how its generators ended."""

    def __init__(self) -> None:
        self.act: Callable[[], Any] = lambda: None
        self.begun = asyncio.Event()
        self.closed = asyncio.Event()
        self.asked: list[Any] = []
        self.length = 10_000
        self.stall_seconds = 0.0
        self.accepts: asyncio.Event | None = None
        """Where it is set, a caller is told that its request is here, and waits for this."""

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[v1.GenerateResponse]:
        self.asked.append(request)
        if self.stall_seconds:
            current().limit_stalls(self.stall_seconds)
        if self.accepts is not None:
            await current().accept(context)
            await self.accepts.wait()
        try:
            self.begun.set()
            yield v1.GenerateResponse(started=v1.GenerateStarted(request_id=request.request_id))
            self.act()
            if request.model == "endless":
                while True:
                    yield v1.GenerateResponse(delta=v1.GenerateDelta(text="x" * self.length))
            if request.model == "silent":
                await asyncio.Event().wait()
        finally:
            self.closed.set()

    async def GetInfo(self, request: Any, context: Any) -> v1.LlmServiceGetInfoResponse:
        self.act()
        return v1.LlmServiceGetInfoResponse(model="tiny")


class Serving:
    """A server with a frame, its scripted servicer, and a channel to it."""

    def __init__(self, token: str = "", max_calls: int = 1024) -> None:
        self.interceptor = CallInterceptor(AcceptedTokens(token), max_calls)
        self.servicer = Scripted()
        self.server = grpc.aio.server(interceptors=[self.interceptor])
        v1.add_LlmServiceServicer_to_server(self.servicer, self.server)
        self.port = self.server.add_insecure_port("127.0.0.1:0")

    async def __aenter__(self) -> Self:
        await self.server.start()
        self.channel = grpc.aio.insecure_channel(f"127.0.0.1:{self.port}")
        self.stub = v1.LlmServiceStub(self.channel)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.channel.close()
        await eventually(lambda: self.interceptor.open_calls == 0, "every call is counted off")
        await self.server.stop(None)


async def failure(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await (_drained(call) if isinstance(call, grpc.aio.UnaryStreamCall) else call)
    return error.value


async def _drained(call: Any) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


def details(error: grpc.aio.AioRpcError) -> dict[str, Any]:
    """The standard details of a failed call, by their short names."""
    trailers = dict(error.trailing_metadata() or ())
    rich = status_pb2.Status.FromString(trailers["grpc-status-details-bin"])
    assert (rich.code, rich.message) == (error.code().value[0], error.details())
    found: dict[str, Any] = {}
    for packed in rich.details:
        kind = getattr(error_details_pb2, packed.TypeName().rpartition(".")[2])()
        assert packed.Unpack(kind)
        found[packed.TypeName().rpartition(".")[2]] = kind
    return found


def raising(error: Exception) -> Callable[[], None]:
    def act() -> None:
        raise error

    return act


@pytest.mark.parametrize("kind", OUTCOMES, ids=lambda kind: str(kind.__name__))
@pytest.mark.parametrize("streamed", [False, True], ids=["unary", "streamed"])
async def test_a_raised_error_becomes_its_status_with_details(kind: type[TwinlensError], streamed: bool) -> None:
    async with Serving() as serving:
        serving.servicer.act = raising(kind("a fixed sentence", reason="WORD", field="sampling.n", retry_after=1.5))
        stub = serving.stub
        error = await failure(
            stub.Generate(v1.GenerateRequest()) if streamed else stub.GetInfo(v1.LlmServiceGetInfoRequest())
        )
        assert (error.code(), error.details()) == (OUTCOMES[kind].grpc, "a fixed sentence")
        given = details(error)
        assert (given["ErrorInfo"].reason, given["ErrorInfo"].domain) == ("WORD", "twinlens")
        assert given["BadRequest"].field_violations[0].field == "sampling.n"
        assert given["RetryInfo"].retry_delay.ToMilliseconds() == 1500
        short = v1.Status.FromString(dict(error.trailing_metadata() or ())["twinlens-status-bin"])
        for back in (from_plain_status(short), from_rpc_error(error)):
            assert type(back) is kind
            assert (back.reason, back.field, back.retry_after) == ("WORD", "sampling.n", 1.5)


async def test_without_field_or_hint_there_is_no_detail_for_them() -> None:
    async with Serving() as serving:
        serving.servicer.act = raising(errors.NotFound("not here"))
        error = await failure(serving.stub.GetInfo(v1.LlmServiceGetInfoRequest()))
        assert set(details(error)) == {"ErrorInfo"}


@pytest.mark.parametrize("streamed", [False, True], ids=["unary", "streamed"])
async def test_a_bug_is_internal_and_tells_nothing_of_itself(streamed: bool) -> None:
    async with Serving() as serving:
        serving.servicer.act = raising(RuntimeError("/srv/model at 0x7f3a <object Foo>"))
        stub = serving.stub
        error = await failure(
            stub.Generate(v1.GenerateRequest()) if streamed else stub.GetInfo(v1.LlmServiceGetInfoRequest())
        )
        assert error.code() is grpc.StatusCode.INTERNAL
        assert error.details() == "the service failed to handle this call"
        assert details(error)["ErrorInfo"].reason == "INTERNAL"


async def test_a_handler_that_was_cancelled_from_inside_leaves_no_caller_waiting() -> None:
    async with Serving() as serving:
        serving.servicer.act = raising(asyncio.CancelledError())
        error = await failure(serving.stub.Generate(v1.GenerateRequest(), timeout=180))
        assert error.code() is grpc.StatusCode.INTERNAL


@pytest.mark.parametrize("model", ["silent", "endless"])
async def test_a_handler_whose_task_is_cancelled_leaves_no_caller_waiting(model: str) -> None:
    """Also where that happens in the middle of a message."""
    async with Serving() as serving:
        tasks: list[asyncio.Task[Any] | None] = []
        serving.servicer.act = lambda: tasks.append(asyncio.current_task())
        call = serving.stub.Generate(v1.GenerateRequest(model=model), timeout=180)
        assert (await call.read()).HasField("started")
        await eventually(lambda: tasks, "it is under way")
        assert tasks[0] is not None
        tasks[0].cancel()
        error = await failure(call)
        assert (error.code(), details(error)["ErrorInfo"].reason) == (grpc.StatusCode.UNAVAILABLE, "CALL_ENDED")


async def test_a_caller_who_does_not_read_on_keeps_no_place_once_the_call_has_ended() -> None:
    """The status stands behind what was sent, and gets to the caller where it reads that after all."""
    async with Serving() as serving:
        serving.servicer.length = 1_000_000
        tasks: list[asyncio.Task[Any] | None] = []
        serving.servicer.act = lambda: tasks.append(asyncio.current_task())
        call = serving.stub.Generate(v1.GenerateRequest(model="endless"))
        assert (await call.read()).HasField("started")
        await eventually(lambda: tasks, "it is under way")
        assert tasks[0] is not None
        tasks[0].cancel()
        await asyncio.wait_for(serving.interceptor.empty(), 180)
        assert serving.servicer.closed.is_set()
        error = await failure(call)
        assert (error.code(), details(error)["ErrorInfo"].reason) == (grpc.StatusCode.UNAVAILABLE, "CALL_ENDED")


async def test_a_caller_who_does_not_read_is_given_up() -> None:
    async with Serving() as serving:
        serving.servicer.length, serving.servicer.stall_seconds = 1_000_000, 0.01
        call = serving.stub.Generate(v1.GenerateRequest(model="endless"))
        await asyncio.wait_for(serving.servicer.closed.wait(), 180)
        await asyncio.wait_for(serving.interceptor.empty(), 180)
        error = await failure(call)
        assert (error.code(), details(error)["ErrorInfo"].reason) == (grpc.StatusCode.UNAVAILABLE, "CALLER_STALLED")


class Held:
    """What a handler holds."""


@pytest.mark.parametrize("way", ["finished", "failed", "bug", "cancelled"])
@pytest.mark.usefixtures("no_garbage_collection")
async def test_what_a_handler_held_is_freed_without_a_look_for_garbage(way: str) -> None:
    held: list[weakref.ref[Any]] = []

    def act() -> None:
        frame, call = Held(), current()
        held.extend((weakref.ref(frame), weakref.ref(call)))
        if way in ("failed", "bug"):
            raise errors.InvalidInput("no") if way == "failed" else RuntimeError("no")

    async with Serving() as serving:
        serving.servicer.act = act
        call = serving.stub.Generate(v1.GenerateRequest(model="silent" if way == "cancelled" else ""))
        await call.read()
        await eventually(lambda: held, "it is under way")
        if way == "cancelled":
            call.cancel()
        await asyncio.wait({asyncio.ensure_future(call.code())})
        await eventually(lambda: serving.interceptor.open_calls == 0, "the call has ended")
        await eventually(lambda: held[0]() is None, "nobody holds what the handler held")
        if way == "finished":  # gRPC keeps the frames of its own, and ours of the call, where it sends an error
            await eventually(lambda: held[1]() is None, "nor the call")


async def seconds_pass(count: int, forward: Forward) -> None:
    for _ in range(count):
        forward(1)
        await turns()


async def test_a_caller_is_given_up_by_one_message_and_not_by_all_together(forward: Forward) -> None:
    call = Call()
    limit = StallLimit(call, 10)
    for _ in range(5):
        with limit:
            forward(9)
            await turns()
    forward(1000)  # between messages there is nothing to accept
    await turns()
    with limit:
        forward(9)
        await turns()
        assert call.ending is None
        with pytest.raises(asyncio.CancelledError):
            await seconds_pass(9, forward)
    assert call.ending is not None
    assert call.ending.reason == "CALLER_STALLED"
    limit.close()


@pytest.mark.parametrize("body", [b"\xff\xff\xff", b"\x0a\x02\xff\xfe", b"\x22\xff\xff\xff\xff\x0f"])
@pytest.mark.parametrize("method", [GENERATE, "/twinlens.v1.LlmService/Abort"])
async def test_bytes_that_are_no_message_are_the_callers_fault_and_name_no_class(method: str, body: bytes) -> None:
    async with Serving() as serving:
        error = await failure(serving.channel.unary_stream(method)(body))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert (error.details() or "").islower()
        assert details(error)["ErrorInfo"].reason == "MALFORMED_MESSAGE"


async def test_a_method_that_does_not_exist_is_unimplemented() -> None:
    async with Serving() as serving:
        error = await failure(serving.channel.unary_unary("/twinlens.v1.LlmService/Nothing")(b""))
        assert error.code() is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize("leave", ["cancel", "deadline", "channel"])
@pytest.mark.parametrize("model", ["endless", "silent"])
async def test_a_generator_is_closed_when_its_caller_goes_away(leave: str, model: str) -> None:
    async with Serving() as serving:
        channel = grpc.aio.insecure_channel(f"127.0.0.1:{serving.port}")
        while True:
            call = v1.LlmServiceStub(channel).Generate(
                v1.GenerateRequest(model=model), timeout=2 if leave == "deadline" else None
            )
            try:
                assert (await call.read()).HasField("started")
                break
            except grpc.aio.AioRpcError:
                assert leave == "deadline", "its time was over before it had begun"
        if leave == "cancel":
            call.cancel()
        elif leave == "channel":
            await channel.close()
        await serving.servicer.closed.wait()
        await channel.close()


async def test_a_caller_who_goes_away_while_a_message_is_on_its_way_is_no_failure_of_ours(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """gRPC fails the write at times before it cancels the handler: of large messages, in one call of five."""
    async with Serving() as serving:
        serving.servicer.length = 1_000_000
        for _ in range(60):
            call = serving.stub.Generate(v1.GenerateRequest(model="endless"))
            await call.read()
            call.cancel()
            await serving.servicer.closed.wait()
            serving.servicer.closed.clear()
        await eventually(lambda: serving.interceptor.open_calls == 0, "every call is counted off")
    said = capsys.readouterr().out
    assert said.count("outcome=CANCELLED") == 60
    assert "failed" not in said


async def test_a_caller_who_has_got_everything_before_he_leaves_has_cancelled_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async with Serving() as serving:
        for complete in (True, False):
            serving.servicer.act = lambda complete=complete: setattr(current(), "complete", complete)
            call = serving.stub.Generate(v1.GenerateRequest(model="silent"))
            await call.read()
            call.cancel()
            await eventually(lambda: serving.interceptor.open_calls == 0, "it is counted off")
    said = capsys.readouterr().out
    assert (said.count("outcome=OK"), said.count("outcome=CANCELLED")) == (1, 1)


async def test_a_call_that_its_deadline_ends_is_told_from_one_that_its_caller_ends(
    capsys: pytest.CaptureFixture[str],
) -> None:
    told: list[str] = []
    async with Serving() as serving:
        serving.interceptor.on_error = told.append
        call = serving.stub.Generate(v1.GenerateRequest(model="silent"), timeout=3600)
        await eventually(lambda: serving.interceptor.open_calls == 1, "it is there")
        call.cancel()
        await serving.servicer.closed.wait()
        await eventually(lambda: serving.interceptor.open_calls == 0, "it is counted off")
        assert told == []
        for _ in range(20):  # a message that is long on its way may have the service hear of the end far too early
            error = await failure(serving.stub.Generate(v1.GenerateRequest(model="silent"), timeout=0.2))
            assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            await eventually(lambda: serving.interceptor.open_calls == 0, "it is counted off")
            if told:
                break
    assert told == ["DEADLINE_EXCEEDED"]
    assert capsys.readouterr().out.count("outcome=DEADLINE_EXCEEDED") == 1


async def test_more_calls_than_allowed_are_refused_with_a_hint_until_one_ends() -> None:
    async with Serving(max_calls=2) as serving:
        calls = [serving.stub.Generate(v1.GenerateRequest(model="silent")) for _ in range(2)]
        for call in calls:
            await call.read()
        error = await failure(serving.stub.GetInfo(v1.LlmServiceGetInfoRequest()))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert details(error)["RetryInfo"].retry_delay.ToMilliseconds() > 0
        calls[0].cancel()
        await eventually(lambda: serving.interceptor.open_calls == 1, "the first has ended")
        assert (await serving.stub.GetInfo(v1.LlmServiceGetInfoRequest())).model == "tiny"
        calls[1].cancel()


@pytest.mark.parametrize("field", ["request_id", "cache_salt", "session_id"])
async def test_names_are_at_most_128_characters(field: str) -> None:
    async with Serving() as serving:
        assert await serving.stub.Generate(v1.GenerateRequest(**{field: "é" * 128})).read()
        error = await failure(serving.stub.Generate(v1.GenerateRequest(**{field: "x" * 129})))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert details(error)["BadRequest"].field_violations[0].field == field


async def test_a_request_without_a_name_is_given_one() -> None:
    async with Serving() as serving:
        names = [(await serving.stub.Generate(v1.GenerateRequest()).read()).started.request_id for _ in range(2)]
        assert len(set(names)) == 2
        assert all(len(name) == 32 for name in names)


def bearer(token: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {token}"),)


@pytest.mark.parametrize(
    "metadata",
    [
        (),
        bearer("open"),
        bearer(TOKEN + "!"),
        (("authorization", TOKEN),),
        (("authorization", f"bearer {TOKEN}"),),
        (("token", TOKEN),),
    ],
)
@pytest.mark.parametrize("path", [GENERATE, "/twinlens.v1.LlmService/GetInfo", "/no.such/Path"])
async def test_without_the_right_token_no_path_can_be_told_from_another(path: str, metadata: Any) -> None:
    async with Serving(TOKEN) as serving:
        error = await failure(serving.channel.unary_stream(path)(b"\xff", metadata=metadata))
        assert error.code() is grpc.StatusCode.UNAUTHENTICATED
        assert error.details() == "a valid bearer token is needed"
        assert serving.servicer.asked == []


async def test_with_the_right_token_calls_go_through() -> None:
    async with Serving(TOKEN) as serving:
        info = await serving.stub.GetInfo(v1.LlmServiceGetInfoRequest(), metadata=bearer(TOKEN))
        assert info.model == "tiny"


async def test_health_and_reflection_ask_for_the_token_too() -> None:
    frame = GrpcServer(ServerConfig(auth_token=TOKEN), ["twinlens.v1.LlmService"])
    await frame.bind()
    async with grpc.aio.insecure_channel(frame.address) as channel:
        health, look = health_pb2_grpc.HealthStub(channel), reflection_pb2_grpc.ServerReflectionStub(channel)
        asked = reflection_pb2.ServerReflectionRequest(list_services="")
        error = await failure(health.Check(health_pb2.HealthCheckRequest()))
        assert error.code() is grpc.StatusCode.UNAUTHENTICATED
        with pytest.raises(grpc.aio.AioRpcError):
            await look.ServerReflectionInfo(iter([asked])).read()
        answer = await look.ServerReflectionInfo(iter([asked]), metadata=bearer(TOKEN)).read()
        names = {service.name for service in answer.list_services_response.service}
        assert {"twinlens.v1.LlmService", "grpc.health.v1.Health"} <= names
        status = await health.Check(health_pb2.HealthCheckRequest(), metadata=bearer(TOKEN))
        assert status.status == health_pb2.HealthCheckResponse.NOT_SERVING
    frame.stop()
    await frame.wait()
    await frame.drain()


@pytest.mark.parametrize("package", ["v1", "v1alpha"])
async def test_reflection_answers_by_both_of_its_names(package: str) -> None:
    frame = GrpcServer(ServerConfig(), ["twinlens.v1.LlmService"])
    await frame.bind()
    name = f"grpc.reflection.{package}.ServerReflection"
    request, response = reflection_pb2.ServerReflectionRequest, reflection_pb2.ServerReflectionResponse
    async with grpc.aio.insecure_channel(frame.address) as channel:
        look = channel.stream_stream(f"/{name}/ServerReflectionInfo", request.SerializeToString, response.FromString)
        asking = [request(list_services=""), *(request(file_containing_symbol=name) for _ in range(2))]
        services, *files = [answer async for answer in look(iter(asking))]
        assert name in {service.name for service in services.list_services_response.service}
        assert all(answer.file_descriptor_response.file_descriptor_proto for answer in files)
        assert f"reflection.{package}".encode() in files[0].file_descriptor_response.file_descriptor_proto[0]
    await frame.drain()


async def test_refused_strangers_are_counted_and_logged_without_filling_the_log(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async with Serving(TOKEN) as serving:
        reasons: list[str] = []
        serving.interceptor.on_error = reasons.append
        for _ in range(20):
            await failure(serving.stub.GetInfo(v1.LlmServiceGetInfoRequest(), metadata=bearer("open")))
        assert reasons == ["UNAUTHENTICATED"] * 20
    lines = [line for line in capsys.readouterr().out.splitlines() if "UNAUTHENTICATED" in line]
    assert 1 <= len(lines) < 20
    assert "ipv4:127.0.0.1:" in lines[0] or "ipv6:" in lines[0]
    assert "open" not in lines[0], "no part of what was sent"


async def test_the_reason_of_each_failed_call_is_told_once() -> None:
    async with Serving(max_calls=1) as serving:
        reasons: list[str] = []
        serving.interceptor.on_error = reasons.append
        holding = serving.stub.Generate(v1.GenerateRequest(model="silent"))
        await holding.read()
        await failure(serving.stub.GetInfo(v1.LlmServiceGetInfoRequest()))
        holding.cancel()
        await eventually(lambda: serving.interceptor.open_calls == 0, "it has ended")
        assert await serving.stub.GetInfo(v1.LlmServiceGetInfoRequest())
        serving.servicer.act = raising(RuntimeError("oh"))
        await failure(serving.stub.GetInfo(v1.LlmServiceGetInfoRequest()))
        assert reasons == ["TOO_MANY_CALLS", "INTERNAL"]


async def test_a_call_beyond_those_that_are_served_is_refused_at_once_though_all_come_by_one_connection() -> None:
    async with _framed(ServerConfig()) as stub:
        held = [stub.Generate(v1.GenerateRequest(model="silent")) for _ in range(ServerConfig().max_concurrent_calls)]
        await asyncio.gather(*(call.read() for call in held))
        error = await failure(stub.GetInfo(v1.LlmServiceGetInfoRequest(), timeout=180))
        assert details(error)["ErrorInfo"].reason == "TOO_MANY_CALLS"
        for call in held:
            call.cancel()


async def test_no_call_of_a_burst_is_cancelled_before_a_handler_takes_it() -> None:
    """By itself gRPC cancels, without a word, some of those that wait beyond a thousand."""
    async with _framed(ServerConfig()) as stub:
        limit = ServerConfig().max_concurrent_calls
        burst = [stub.Generate(v1.GenerateRequest(model="silent")) for _ in range(2 * limit)]
        answers = await asyncio.gather(*(call.read() for call in burst), return_exceptions=True)
        refused = [answer for answer in answers if isinstance(answer, grpc.aio.AioRpcError)]
        assert len(refused) == limit
        assert {details(error)["ErrorInfo"].reason for error in refused} == {"TOO_MANY_CALLS"}
        for call in burst:
            call.cancel()


@asynccontextmanager
async def _framed(config: ServerConfig) -> AsyncIterator[Any]:
    """A stub for a scripted servicer behind the whole frame of a server, which is drained after."""
    frame = GrpcServer(config, [])
    v1.add_LlmServiceServicer_to_server(Scripted(), frame.server)
    await frame.bind()
    try:
        async with grpc.aio.insecure_channel(frame.address) as channel:
            yield v1.LlmServiceStub(channel)
        await eventually(lambda: frame.open_calls == 0, "every call is counted off")
    finally:
        await frame.drain()


async def test_a_caller_is_told_that_its_request_is_here_before_there_is_an_answer() -> None:
    async with Serving() as serving:
        serving.servicer.accepts = asyncio.Event()
        call = serving.stub.Generate(v1.GenerateRequest())
        await call.initial_metadata()
        assert not serving.servicer.begun.is_set()
        serving.servicer.accepts.set()
        assert (await call.read()).HasField("started")
        await _drained(call)


async def test_lines_of_a_traced_call_name_its_trace(capsys: pytest.CaptureFixture[str]) -> None:
    from opentelemetry.sdk.trace import TracerProvider

    tracing.use(TracerProvider())
    trace = "0af7651916cd43dd8448eb211c80319c"
    try:
        async with Serving() as serving:
            metadata = (("traceparent", f"00-{trace}-b7ad6b7169203331-01"),)
            await _drained(serving.stub.Generate(v1.GenerateRequest(), metadata=metadata))
    finally:
        tracing.use(None)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "outcome=" in line]
    assert f"trace_id={trace}" in line


async def test_what_is_sent_may_be_larger_than_what_is_accepted() -> None:
    frame, servicer = GrpcServer(ServerConfig(max_message_bytes=1 << 20), []), Scripted()
    servicer.length = 2 << 20
    v1.add_LlmServiceServicer_to_server(servicer, frame.server)
    await frame.bind()
    async with grpc.aio.insecure_channel(frame.address) as channel:
        generate = v1.LlmServiceStub(channel).Generate
        call = generate(v1.GenerateRequest(model="endless"))
        assert (await call.read()).HasField("started")
        assert len((await call.read()).delta.text) == servicer.length
        call.cancel()
        error = await failure(generate(v1.GenerateRequest(text=v1.TextInput(prompt="x" * servicer.length))))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    frame.stop()
    await frame.wait()
    await frame.drain()


async def test_a_port_that_is_taken_is_an_oserror() -> None:
    first = GrpcServer(ServerConfig(), [])
    await first.bind()
    with pytest.raises(OSError, match="cannot listen"):
        await GrpcServer(ServerConfig(listen=first.address), []).bind()
    await first.drain()


async def test_a_failed_call_is_over_though_its_status_waits_behind_what_is_not_read() -> None:
    """Whatever it fails with."""

    async def never(*_: object) -> None:
        await asyncio.Event().wait()

    context: Any = SimpleNamespace(abort=never)
    with pytest.raises(asyncio.CancelledError):
        await fail(context, errors.DeadlineExceeded("too late"), sent_within=0.01)


async def test_what_a_health_check_brought_is_let_go_of() -> None:
    budget = RequestBudget(64 << 20, 20 << 20)
    interceptor = CallInterceptor(AcceptedTokens(), budget=budget)

    async def check(_request: bytes, _context: object) -> None:
        assert budget.held == 5

    async def find(_: object) -> Any:
        return grpc.unary_unary_rpc_method_handler(check, bytes, bytes)  # type: ignore[arg-type]

    async def read() -> bytes:
        return b"12345"

    called = SimpleNamespace(method="/grpc.health.v1.Health/Check", invocation_metadata=())
    handler = await interceptor.intercept_service(find, called)  # type: ignore[arg-type]
    context: Any = SimpleNamespace(read=read, peer=lambda: "unix:", invocation_metadata=lambda: ())
    await handler.stream_stream(None, context)
    assert budget.held == 0


class Late:
    """The context of a call whose deadline passed on the way."""

    def __init__(self, remaining: float) -> None:
        self.remaining = remaining
        self.code: grpc.StatusCode | None = None

    def time_remaining(self) -> float:
        return self.remaining

    async def abort(self, code: grpc.StatusCode, *_: object) -> None:
        self.code = code
        raise grpc.aio.AbortError


@pytest.mark.parametrize("remaining", [0.0, -1.0])
async def test_a_call_whose_deadline_has_passed_is_refused_before_any_work(remaining: float) -> None:
    servicer, context = Scripted(), Late(remaining)

    async def find(_: object) -> grpc.RpcMethodHandler[Any, Any]:
        return grpc.unary_stream_rpc_method_handler(
            servicer.Generate, v1.GenerateRequest.FromString, v1.GenerateResponse.SerializeToString
        )

    called = SimpleNamespace(method=GENERATE, invocation_metadata=())
    handler = await CallInterceptor(AcceptedTokens()).intercept_service(find, called)  # type: ignore[arg-type]
    with pytest.raises(grpc.aio.AbortError):
        await handler.stream_stream(None, context)
    assert context.code is grpc.StatusCode.DEADLINE_EXCEEDED
    assert servicer.asked == []
