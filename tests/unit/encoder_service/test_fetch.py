"""Downloads from real HTTP servers: what is allowed, what is refused, and every bound."""

from __future__ import annotations

import asyncio
import socket
import ssl
import subprocess
import sys
import threading

import httpcore2
import pytest
import trustme

from common.errors import DeadlineExceeded, Exhausted, Forbidden, InvalidInput, Precondition, TwinlensError, Unavailable
from encoder_service.media.fetch import FetchConfig, Fetcher
from tests.media_host import MediaHost, media_host
from tests.waiting import eventually

GOOD = bytes(range(256)) * 1000
MOST = 1 << 20


def fetcher(*private: str, public: tuple[str, ...] = (), resolve=None, tls=None, **limits: float) -> Fetcher:
    config = FetchConfig(allow_media_host=public, allow_private_media_host=private, **limits)
    return Fetcher(config, resolve=resolve, tls=tls)


@pytest.fixture
def host():
    with media_host(good=GOOD) as running:
        yield running


def answering(**answers: list[list[str]]):
    """A resolver that gives each name's answers one after the other, and remembers what it was asked."""
    asked: list[str] = []

    async def resolve(name: str, port: int) -> list[str]:
        asked.append(name)
        queue = answers[name.replace(".", "_")]
        return queue.pop(0) if len(queue) > 1 else queue[0]

    resolve.asked = asked  # type: ignore[attr-defined]
    return resolve


async def refusal(made: Fetcher, url: str, most: int = MOST) -> TwinlensError:
    with pytest.raises(TwinlensError) as refused:
        await made.fetch(url, most, "items[0].url")
    assert refused.value.field == "items[0].url"
    return refused.value


@pytest.mark.parametrize("path", ["/good", "/chunked", "/good?size=1"])
async def test_an_allowed_host_gives_what_it_has(host, path):
    made = fetcher(host.authority)
    assert await made.fetch(host.url(path), MOST, "url") == GOOD


async def test_nothing_is_asked_of_a_host_that_is_not_allowed(host):
    made = fetcher("other.test")
    assert isinstance(await refusal(made, host.url("/good")), Forbidden)
    assert not host.asked


@pytest.mark.parametrize("spelling", ["localhost", "2130706433", "0x7f.1", "0177.0.0.1", "127.1", "[::ffff:127.0.0.1]"])
async def test_this_machine_is_refused_in_every_spelling(host, spelling):
    made = fetcher(public=("*", f"*:{host.port}"))
    refused = await refusal(made, host.url("/good", spelling))
    assert (type(refused), refused.reason) == (Forbidden, "FETCH_FORBIDDEN")
    assert not host.asked


@pytest.mark.parametrize(
    "spelling", ["127.0.0.1", "0x7f.1", "10.0.0.1", "[::1]", "[64:ff9b::7f00:1]", "169.254.169.254"]
)
def test_an_address_in_digits_is_judged_before_anything_is_fetched(spelling):
    """It may come with a key whose rows are here, so that nothing would be fetched."""
    with pytest.raises(Forbidden):
        fetcher(public=("*",)).check(f"http://{spelling}/x", "url")
    assert fetcher(public=("*",)).check("http://93.184.216.34/x", "url").host == "93.184.216.34"


async def test_one_bad_answer_among_good_ones_is_enough(host):
    resolve = answering(cdn_test=[["93.184.216.34", "127.0.0.1"]])
    made = fetcher(public=(f"cdn.test:{host.port}",), resolve=resolve)
    assert isinstance(await refusal(made, host.url("/good", "cdn.test")), Forbidden)
    assert not host.asked


async def test_a_connection_goes_to_the_address_that_was_checked(monkeypatch):
    """A name that changes its answer between check and connection changes nothing: it is asked once."""
    resolve = answering(cdn_test=[["93.184.216.34"], ["127.0.0.1"]])
    connected: list[str] = []

    async def connect_tcp(self, host, port, *_):
        connected.append(host)
        raise httpcore2.ConnectError("no way there")

    monkeypatch.setattr(httpcore2.AnyIOBackend, "connect_tcp", connect_tcp)
    made = fetcher(public=("cdn.test",), resolve=resolve)
    assert isinstance(await refusal(made, "http://cdn.test/x"), Unavailable)
    assert (connected, resolve.asked) == (["93.184.216.34"], ["cdn.test"])


async def test_a_private_host_that_turns_to_metadata_is_refused(host):
    resolve = answering(media_internal=[["127.0.0.1"], ["169.254.169.254"]])
    made = fetcher(f"media.internal:{host.port}", resolve=resolve)
    assert await made.fetch(host.url("/good", "media.internal"), MOST, "url") == GOOD
    assert isinstance(await refusal(made, host.url("/good", "media.internal")), Forbidden)


async def test_the_next_address_is_tried_where_one_does_not_answer(host):
    resolve = answering(media_internal=[["127.0.0.2", "127.0.0.1"]])
    made = fetcher(f"media.internal:{host.port}", resolve=resolve)
    assert await made.fetch(host.url("/good", "media.internal"), MOST, "url") == GOOD
    assert host.headers["/good"]["host"] == f"media.internal:{host.port}"


@pytest.mark.parametrize("code", ["utf-8", "latin-1"])
async def test_a_redirect_may_have_letters_that_are_not_ascii(host, code):
    host.redirects["/1"] = "/bücher".encode(code).decode("latin-1")  # as which the host writes its headers
    host.files["/b%C3%BCcher"] = b"books"
    assert await fetcher(host.authority).fetch(host.url("/1"), MOST, "url") == b"books"


async def test_redirects_are_followed_three_times_and_each_is_checked(host):
    host.redirects |= {"/1": "/2", "/2": host.url("/3"), "/3": "good", "/0": "/1"}
    made = fetcher(host.authority)
    assert await made.fetch(host.url("/1"), MOST, "url") == GOOD
    refused = await refusal(made, host.url("/0"))
    assert (type(refused), refused.reason) == (InvalidInput, "TOO_MANY_REDIRECTS")


@pytest.mark.parametrize(
    ("location", "kind"),
    [
        ("http://127.0.0.1:1/", Forbidden),
        ("http://localhost/", Forbidden),
        ("http://169.254.169.254/latest/meta-data", Forbidden),
        ("//other.test/x", Forbidden),
        ("file:///etc/passwd", Forbidden),
        ("ftp://cdn.test/x", InvalidInput),
        ("http://user@cdn.test/", InvalidInput),
        ("http:\\\\cdn.test", InvalidInput),
        (":ftp://]", InvalidInput),
        ("//[::1", InvalidInput),
    ],
)
async def test_a_redirect_may_lead_nowhere_that_the_caller_may_not_go(host, location, kind):
    host.redirects["/away"] = location
    resolve = answering(media_internal=[["127.0.0.1"]], localhost=[["127.0.0.1"]], cdn_test=[["93.184.216.34"]])
    made = fetcher(f"media.internal:{host.port}", public=("localhost", "cdn.test"), resolve=resolve)
    assert type(await refusal(made, host.url("/away", "media.internal"))) is kind


@pytest.mark.parametrize(
    ("path", "kind", "reason"),
    [
        ("/status/404", Precondition, "MEDIA_HOST_REFUSED"),
        ("/status/403", Precondition, "MEDIA_HOST_REFUSED"),
        ("/status/304", Precondition, "MEDIA_HOST_REFUSED"),
        ("/status/206", Precondition, "MEDIA_HOST_REFUSED"),
        ("/status/500", Unavailable, "MEDIA_HOST_UNAVAILABLE"),
        ("/status/503", Unavailable, "MEDIA_HOST_UNAVAILABLE"),
        ("/status/429", Unavailable, "MEDIA_HOST_UNAVAILABLE"),
        ("/truncated", Unavailable, "MEDIA_HOST_UNAVAILABLE"),
        ("/nonsense", Unavailable, "MEDIA_HOST_UNAVAILABLE"),
        ("/packed", Precondition, "MEDIA_HOST_REFUSED"),
        ("/silent", DeadlineExceeded, "MEDIA_HOST_SLOW"),
        ("/held", DeadlineExceeded, "MEDIA_HOST_SLOW"),
        ("/endless", InvalidInput, "MEDIA_TOO_LARGE"),
        ("/huge", InvalidInput, "MEDIA_TOO_LARGE"),
    ],
)
async def test_a_host_that_fails_is_answered_by_its_own_fault(host, path, kind, reason):
    stalls = kind is DeadlineExceeded
    made = fetcher(host.authority, fetch_stall_seconds=0.3 if stalls else 60)
    refused = await refusal(made, host.url(path))
    assert (type(refused), refused.reason) == (kind, reason)
    assert host.sent < MOST + (16 << 20)  # what the sockets' buffers hold, and no more


@pytest.mark.parametrize("path", ["/good", "/chunked"])
async def test_its_size_is_told_before_it_is_taken(host, path):
    told: list[int] = []
    assert await fetcher(host.authority).fetch(host.url(path), MOST, "url", on_size=told.append) == GOOD
    assert told == sorted(told)
    assert told[-1] == len(GOOD)
    assert (len(told) == 1) == (path == "/good")


@pytest.mark.parametrize(("path", "most"), [("/huge", 1 << 50), ("/endless", MOST)])
async def test_a_download_for_which_there_is_no_room_ends_at_once(host, path, most):
    def no_room(size: int) -> None:
        if size:
            raise Exhausted("no room", reason="QUEUE_FULL")

    with pytest.raises(Exhausted):
        await fetcher(host.authority).fetch(host.url(path), most, "url", on_size=no_room)
    assert host.sent < MOST + (16 << 20)  # what the sockets' buffers hold, and no more


async def test_a_download_is_bounded_in_time_as_a_whole(host):
    made = fetcher(host.authority, fetch_seconds=0.3)
    refused = await refusal(made, host.url("/endless"), 1 << 50)
    assert refused.reason == "MEDIA_HOST_SLOW"


async def test_a_host_that_is_not_there_is_unavailable():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        made = fetcher(f"127.0.0.1:{port}")
        assert isinstance(await refusal(made, f"http://127.0.0.1:{port}/"), Unavailable)


async def test_a_name_that_nobody_knows_is_a_precondition():
    async def resolve(name: str, port: int) -> list[str]:
        raise socket.gaierror(socket.EAI_NONAME, "unknown")

    made = fetcher(public=("cdn.test",), resolve=resolve)
    assert (await refusal(made, "http://cdn.test/")).reason == "MEDIA_HOST_UNKNOWN"


async def test_look_ups_that_hang_are_as_many_as_downloads_may_be_and_give_way_when_they_end(monkeypatch):
    go_on, asked = threading.Event(), []

    def hangs(host: str, *_: object, **__: object) -> list[tuple[object, ...]]:
        asked.append(host)
        go_on.wait(180)
        return [(0, 0, 0, "", ("127.0.0.1", 0))]

    monkeypatch.setattr(socket, "getaddrinfo", hangs)
    made = fetcher(public=("*",), max_fetches=4, fetch_seconds=0.1)

    async def is_late() -> None:
        assert isinstance(await refusal(made, "http://cdn.test/"), DeadlineExceeded)

    while len(asked) < 2:  # where the time was over before a look-up had begun
        await is_late()
    for _ in range(2):
        await is_late()
    assert len(asked) == 2
    go_on.set()
    monkeypatch.setattr(made, "_seconds", 60.0)
    assert isinstance(await refusal(made, "http://last.test/"), Forbidden)
    assert asked[2:] == ["last.test"]


HANGS = """
import asyncio, socket, time
from common.errors import DeadlineExceeded
from encoder_service.media.fetch import FetchConfig, Fetcher

async def main():
    try:
        await Fetcher(FetchConfig(allow_media_host=("*",), fetch_seconds=0.1)).fetch("http://a.test/", 1, "url")
    except DeadlineExceeded:
        print("it hangs")

socket.getaddrinfo = lambda *_, **__: time.sleep(3600)
asyncio.run(main())
"""


def test_a_look_up_that_hangs_does_not_keep_the_process_from_ending():
    ended = subprocess.run([sys.executable, "-c", HANGS], capture_output=True, text=True, timeout=120, check=True)
    assert ended.stdout == "it hangs\n"


async def test_no_cookie_proxy_or_password_is_used(host, monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    made = fetcher(host.authority)
    for _ in range(2):
        await made.fetch(host.url("/good"), MOST, "url")
    assert host.asked["/good"] == 2
    assert not host.headers["/good"].keys() & {"cookie", "authorization", "referer"}
    assert host.headers["/good"]["accept-encoding"] == "identity"


async def test_at_most_so_many_downloads_go_on_at_once(host: MediaHost):
    made = fetcher(host.authority, max_fetches=4)
    waiting = [asyncio.create_task(made.fetch(host.url("/held"), MOST, "url")) for _ in range(5)]
    await eventually(lambda: host.asked["/held"] == 2, "two downloads are under way")
    assert (await asyncio.wait(waiting, timeout=0.2))[0] == set()
    assert host.asked["/held"] == 2
    host.held.set()
    assert await asyncio.gather(*waiting) == [GOOD] * 5


async def test_the_certificate_must_be_the_name_s_and_not_the_address_s():
    authority = trustme.CA()
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.create_default_context()
    authority.issue_cert("media.internal").configure_cert(server)
    authority.configure_trust(client)
    resolve = answering(media_internal=[["127.0.0.1"]], other_internal=[["127.0.0.1"]])
    with media_host(server, good=GOOD) as host:
        hosts = (f"media.internal:{host.port}", f"other.internal:{host.port}")
        made = fetcher(*hosts, resolve=resolve, tls=client)
        assert await made.fetch(host.url("/good", "media.internal"), MOST, "url") == GOOD
        assert isinstance(await refusal(made, host.url("/good", "other.internal")), Unavailable)
        untrusting = fetcher(*hosts, resolve=resolve)
        assert isinstance(await refusal(untrusting, host.url("/good", "media.internal")), Unavailable)
