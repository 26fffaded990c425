from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from types import SimpleNamespace

import grpc
import pytest

from tests.unit.twinlens.conftest import serving
from tests.unit.twinlens.fakes import FakeLlm
from twinlens import __version__, v1
from twinlens.cli import MISUSED, main, watch
from twinlens.cli.tables import milliseconds, share, size, table


@pytest.fixture
def picture(tmp_path):
    path = tmp_path / "cat.png"
    path.write_bytes(b"png")
    return str(path)


def raise_interrupt() -> None:
    raise KeyboardInterrupt


def ask(address: str, *arguments: str) -> int:
    return main(["ask", "--llm", address, *arguments])


def said_in_pieces(
    request: v1.GenerateRequest, *, text: str, size: int, thinking: bool
) -> Iterator[v1.GenerateResponse]:
    """A generation that says this text, so many signs at a time."""
    yield v1.GenerateResponse(started=v1.GenerateStarted(thinking=thinking))
    for at in range(0, len(text), size):
        yield v1.GenerateResponse(delta=v1.GenerateDelta(text=text[at : at + size], token_ids=[at]))
    yield v1.GenerateResponse(finished=v1.GenerateFinished(reason=v1.FINISH_REASON_STOP))


class TestAsk:
    def test_the_answer_is_all_of_standard_output(self, llm_address: str, capsys) -> None:
        assert ask(llm_address, "what?") == 0
        out, err = capsys.readouterr()
        assert (out, err) == ("A red circle.\n", "")

    def test_media_keep_their_order_before_the_question(self, llm: FakeLlm, llm_address: str, picture) -> None:
        clip = "https://host/clip.mp4"
        assert ask(llm_address, "--video", clip, "--image", picture, "--system", "be brief", "what?") == 0
        system, user = llm.requests[0].chat.messages
        assert system.role == "system"
        kinds = [part.media.WhichOneof("source") or part.text for part in user.parts]
        assert kinds == ["url", "data", "what?"]

    def test_sampling_flags_are_sent_and_others_stay_unset(self, llm: FakeLlm, llm_address: str) -> None:
        flags = ["--max-tokens", "5", "--temperature", "0", "--seed", "7", "--stop", "a", "--stop", "b"]
        flags += ["--include-stop-str-in-output", "--bad-words", "c", "--bad-words", "d"]
        assert ask(llm_address, "what?", *flags) == 0
        expected = v1.SamplingParams(
            max_tokens=5, temperature=0, seed=7, stop=["a", "b"], include_stop_str_in_output=True, bad_words=["c", "d"]
        )
        assert llm.requests[0].sampling == expected

    def test_preprocessing_flags_go_to_the_media_that_they_mean(self, llm: FakeLlm, llm_address: str, picture) -> None:
        flags = ["--max-pixels", "100", "--fps", "1", "--max-frames", "4", "--video-pruning-rate", "0.5"]
        flags.append("--with-sound")
        assert ask(llm_address, "what?", "--image", picture, "--video", picture, *flags) == 0
        image, video, _ = llm.requests[0].chat.messages[0].parts
        assert image.media.options == v1.MediaOptions(max_pixels=100)
        asked = {"max_pixels": 100, "fps": 1, "max_frames": 4, "video_pruning_rate": 0.5, "with_sound": True}
        assert video.media.options == v1.MediaOptions(**asked)

    def test_sounds_stand_among_the_other_media(self, llm: FakeLlm, llm_address: str, picture) -> None:
        flags = ["--audio", picture, "--image", picture, "--audio", "https://example.org/a.mp3"]
        assert ask(llm_address, "what?", *flags) == 0
        media = [part.media for part in llm.requests[0].chat.messages[0].parts[:3]]
        assert [each.modality for each in media] == [v1.MODALITY_AUDIO, v1.MODALITY_IMAGE, v1.MODALITY_AUDIO]
        assert [each.WhichOneof("source") for each in media] == ["data", "data", "url"]

    def test_a_flag_that_nothing_could_obey_is_refused(self, llm: FakeLlm, llm_address: str, capsys) -> None:
        assert ask(llm_address, "what?", "--fps", "1") == 2
        assert "--fps needs --video" in capsys.readouterr().err
        assert ask(llm_address, "what?", "--min-pixels", "100") == 2
        assert "--min-pixels needs --image or --video" in capsys.readouterr().err
        assert llm.requests == []

    def test_json_gives_one_event_a_line(self, llm_address: str, capsys) -> None:
        assert ask(llm_address, "--json", "what?") == 0
        events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert "".join(event["delta"]["text"] for event in events if "delta" in event) == "A red circle."
        assert events[-1]["finished"]["usage"]["cached_tokens"] == 4

    def test_timings_go_to_standard_error(self, llm_address: str, capsys) -> None:
        assert ask(llm_address, "--timings", "what?") == 0
        out, err = capsys.readouterr()
        assert out == "A red circle.\n"
        assert "9 prompt tokens (4 cached), 3 generated, FINISH_REASON_STOP" in err
        assert "12.3 ms" in err

    def test_logprobs_go_to_standard_error_the_prompts_before_the_answers(
        self, llm: FakeLlm, llm_address: str, capsys
    ) -> None:
        assert ask(llm_address, "what?", "--prompt-logprobs", "1", "--logprobs", "0") == 0
        out, err = capsys.readouterr()
        assert out == "A red circle.\n"
        assert [line.split() for line in err.splitlines() if "-" not in line[:5]] == [
            ["prompt", "token", "text", "logprob", "likeliest"],
            ["1", "7", '"what"', "-0.500", "8", r'"\n"', "-0.250"],
            ["answer", "token", "text", "logprob", "likeliest"],
            ["0", "0", '"A', 'red"', "-0.125"],
            ["1", "1", '"', 'circle"', "-0.125"],
            ["2", "2", '"."', "-0.125"],
        ]
        sampling = llm.requests[0].sampling
        assert (sampling.prompt_logprobs, sampling.logprobs, sampling.HasField("logprobs")) == (1, 0, True)

    @pytest.mark.parametrize("size", [1, 3, 100])
    def test_what_the_model_thinks_goes_to_standard_error(
        self, llm: FakeLlm, llm_address: str, size: int, capsys
    ) -> None:
        rest = "A < b.\n</think>\n\nYes.\n\nNo."
        for thinking, text in ((False, f"<think>\n{rest}"), (True, rest)):
            llm.play = partial(said_in_pieces, text=text, size=size, thinking=thinking)
            assert ask(llm_address, "what?") == 0
            assert capsys.readouterr() == ("Yes.\n\nNo.\n", "A < b.\n\n")

    def test_thoughts_without_an_answer_and_answers_without_thoughts(
        self, llm: FakeLlm, llm_address: str, capsys
    ) -> None:
        expected = {
            "<think>Hm. </thi": ("\n", "Hm. </thi\n"),
            " <thin> air": (" <thin> air\n", ""),
            "<thi": ("<thi\n", ""),
        }
        for text, shown in expected.items():
            llm.play = partial(said_in_pieces, text=text, size=2, thinking=False)
            assert ask(llm_address, "what?") == 0
            assert capsys.readouterr() == shown

    @pytest.mark.parametrize(("flags", "expected"), [((), None), (("--thinking",), True), (("--no-thinking",), False)])
    def test_whether_it_thinks_is_the_templates_to_know(
        self, llm: FakeLlm, llm_address: str, flags: tuple[str, ...], expected: bool | None
    ) -> None:
        assert ask(llm_address, "what?", *flags) == 0
        chat = llm.requests[0].chat
        assert (chat.thinking if chat.HasField("thinking") else None) is expected
        assert ask(llm_address, "what?", "--reasoning-effort", "low") == 0
        assert (chat.reasoning_effort, llm.requests[1].chat.reasoning_effort) == ("", "low")

    def test_variables_of_the_template_are_an_object(self, llm: FakeLlm, llm_address: str, capsys) -> None:
        assert ask(llm_address, "what?", "--template-variables", '{"style": [1]}') == 0
        assert json.loads(llm.requests[0].chat.template_variables) == {"style": [1]}
        for text in ("[]", "{"):
            with pytest.raises(SystemExit):
                ask(llm_address, "what?", "--template-variables", text)
            assert "expected a JSON object" in capsys.readouterr().err

    def test_the_form_of_the_answer_is_sent(self, llm: FakeLlm, llm_address: str, tmp_path, capsys) -> None:
        schema = tmp_path / "schema.json"
        schema.write_text('{"enum": [1]}', "utf-8")
        assert (
            ask(llm_address, "what?", "--json-object") == ask(llm_address, "what?", "--json-schema", str(schema)) == 0
        )
        assert [request.sampling.json_schema for request in llm.requests] == ['{"type": "object"}', '{"enum": [1]}']
        assert [request.chat.thinks_before_form for request in llm.requests] == [True, True]
        for thinking, begin in ((True, ""), (False, "<think>")):
            llm.play = partial(said_in_pieces, text=begin + "Hm.</think>{}", size=1, thinking=thinking)
            capsys.readouterr()
            assert ask(llm_address, "what?", "--json-object") == 0
            assert capsys.readouterr() == ("{}\n", "Hm.\n\n")
        assert ask(llm_address, "what?", "--json-schema", str(tmp_path / "none")) == 2
        assert "none: No such file" in capsys.readouterr().err

    def test_a_session_is_named(self, llm: FakeLlm, llm_address: str) -> None:
        assert ask(llm_address, "what?", "--session", "talk") == 0
        assert llm.requests[0].session_id == "talk"

    def test_a_dash_reads_the_question(self, llm: FakeLlm, llm_address: str, monkeypatch) -> None:
        monkeypatch.setattr(sys, "stdin", io.StringIO("from a pipe"))
        assert ask(llm_address, "-") == 0
        assert llm.requests[0].chat.messages[0].parts[0].text == "from a pipe"

    def test_a_refusal_says_why_and_exits_with_1(self, llm: FakeLlm, llm_address: str, capsys) -> None:
        status = v1.Status(code=8, message="the queue is full", reason="QUEUE_FULL", retry_after_ms=2000)
        llm.play = lambda request: iter(())
        llm.refusal = (grpc.StatusCode.RESOURCE_EXHAUSTED, status)
        assert ask(llm_address, "what?") == 1
        assert capsys.readouterr().err == "twinlens: QUEUE_FULL: the queue is full; try again in 2 s\n"

    def test_a_refusal_in_json_is_an_event_too(self, llm: FakeLlm, llm_address: str, capsys) -> None:
        llm.refusal = (grpc.StatusCode.NOT_FOUND, v1.Status(code=5, message="no", reason="NO_MODEL"))
        assert ask(llm_address, "--json", "what?") == 1
        last = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert (last["error"]["code"], last["error"]["reason"]) == ("NOT_FOUND", "NO_MODEL")

    def test_a_service_that_is_not_up_exits_with_3_and_names_the_address(self, capsys) -> None:
        assert ask("127.0.0.1:1", "what?") == 3
        assert "no service answers at 127.0.0.1:1" in capsys.readouterr().err

    @pytest.mark.parametrize(
        "arguments",
        [
            ["--image", "/no/such/file"],
            ["--max-tokens", "99999999999"],
            ["--seed", "-1"],
            ["--cert-file", "c.pem"],
            ["--token-file", "/no/such/file"],
        ],
    )
    def test_misuse_exits_with_2(self, llm: FakeLlm, llm_address: str, arguments: list[str], capsys) -> None:
        assert ask(llm_address, "what?", *arguments) == 2
        assert capsys.readouterr().err.startswith("twinlens: ")
        assert llm.requests == []

    @pytest.mark.parametrize("timeout", ["0", "-1", "nan", "soon"])
    def test_a_timeout_that_is_no_time_is_refused(self, timeout: str) -> None:
        with pytest.raises(SystemExit) as caught:
            ask("127.0.0.1:1", "what?", "--timeout", timeout)
        assert caught.value.code == 2

    @pytest.mark.parametrize("timeout", ["inf", "1e12"])
    def test_a_timeout_may_be_endless(self, llm_address: str, timeout: str) -> None:
        assert ask(llm_address, "what?", "--timeout", timeout) == 0

    def test_the_token_comes_from_a_file_or_the_environment(
        self, llm: FakeLlm, llm_address: str, tmp_path, monkeypatch
    ) -> None:
        monkeypatch.setenv("TWINLENS_TOKEN", "outer")
        assert ask(llm_address, "what?") == 0
        assert llm.metadata["authorization"] == "Bearer outer"
        monkeypatch.setenv("TWINLENS_TOKEN", "from a secret\n")
        assert ask(llm_address, "what?") == 0
        assert llm.metadata["authorization"] == "Bearer from a secret"
        (tmp_path / "token").write_text("inner\n")
        assert ask(llm_address, "what?", "--token-file", str(tmp_path / "token")) == 0
        assert llm.metadata["authorization"] == "Bearer inner"

    def test_of_several_tokens_in_a_file_the_first_is_sent(self, llm: FakeLlm, llm_address: str, tmp_path) -> None:
        path = tmp_path / "tokens"
        path.write_text("\n of two \nanother\n")
        assert ask(llm_address, "what?", "--token-file", str(path)) == 0
        assert llm.metadata["authorization"] == "Bearer of two"

    def test_an_empty_token_file_is_refused(self, llm_address: str, tmp_path) -> None:
        (tmp_path / "token").write_text("\n")
        assert ask(llm_address, "what?", "--token-file", str(tmp_path / "token")) == 2


class TestStatus:
    def test_it_shows_both_services(self, llm: FakeLlm, llm_address: str, encoder_address: str, capsys) -> None:
        llm.encoders = [encoder_address]
        assert main(["status", "--llm", llm_address]) == 0
        out = capsys.readouterr().out
        assert f"LLM {llm_address}: demo (Qwen3VL) on cpu" in out
        assert "50 tokens (25%)" in out
        assert "1,500 ms" in out
        assert f"encoder {encoder_address}: demo (Qwen3VL) on cpu" in out
        assert "3 / 1 (75%)" in out
        lines = [" ".join(line.split()) for line in out.splitlines()]
        assert "sessions kept warm 3" in lines
        assert f"encoder {encoder_address} usable, 0 in flight, 2 streams broke in a row" in lines
        assert "patches queued / running 0 / 0, done in about 1,500 ms" in lines
        assert "rows sent: shared memory 9, 9.0 KiB" in lines
        assert "rows sent: 99 9, 9.0 KiB" in lines
        assert "embedding rows received 12, of them 5 from shared memory, 7 from GPU to GPU" in lines
        assert "rows kept on GPUs 1.0 MiB of 4.0 MiB" in lines
        assert "release 0.9, for encoders with digest 0123456789ab" in lines
        assert "release 0.9, digest 0123456789ab" in lines
        assert "context / ranks 4096 tokens / 2" in lines
        assert "weights 1.0 GiB on the first rank; fp8, e4m3 of 8 bits, longer in registers" in lines
        assert "rows 3 levels of 64 bfloat16" in lines
        assert "rows leave inline, shared memory" in lines
        assert "shared store 6 hits, 5 written, 0 not written, 0 errors, 0 damaged, 0 waits in vain" in lines

    def test_encoders_may_be_named(self, llm_address: str, encoder_address: str, capsys) -> None:
        assert main(["status", "--llm", llm_address, "--encoder", encoder_address, "--json"]) == 0
        report = json.loads(capsys.readouterr().out)
        assert report["llm"]["load"]["prompt_tokens"] == "300"
        assert report["encoders"][0]["load"]["vit_calls"] == "3"

    def test_an_encoder_that_the_token_may_not_be_sent_to_hides_nothing_else(
        self, llm: FakeLlm, llm_address: str, monkeypatch, capsys
    ) -> None:
        llm.encoders = ["192.0.2.7:7001"]
        monkeypatch.setenv("TWINLENS_TOKEN", "secret")
        assert main(["status", "--llm", llm_address]) == 1
        out = capsys.readouterr().out
        assert f"LLM {llm_address}: demo" in out
        assert "encoder 192.0.2.7:7001: a token would cross the network unencrypted" in out

    @pytest.mark.parametrize("seconds", ["0", "-1", "nan", "1e9"])
    def test_a_pause_that_is_none_is_refused_before_anyone_is_asked(self, seconds: str) -> None:
        with pytest.raises(SystemExit) as caught:
            main(["status", "--llm", "127.0.0.1:1", f"--watch={seconds}"])
        assert caught.value.code == 2

    def test_watching_goes_on_while_the_llm_service_is_away(self, monkeypatch, capsys) -> None:
        with ExitStack() as running:
            address = running.enter_context(serving(llm=FakeLlm()))
            pauses = iter([running.close])

            def pause(seconds: float) -> None:
                assert seconds == 0.5
                next(pauses, raise_interrupt)()

            monkeypatch.setattr(watch, "time", SimpleNamespace(sleep=pause))
            assert main(["status", "--llm", address, "--watch=0.5"]) == 0
        lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("LLM")]
        assert ["no answer" in line for line in lines] == [False, True]

    def test_watching_what_was_never_there_exits_with_3(self) -> None:
        assert main(["status", "--llm", "127.0.0.1:1", "--watch"]) == 3

    def test_an_encoder_that_is_down_is_shown_as_such(self, llm: FakeLlm, llm_address: str, capsys) -> None:
        llm.encoders = ["127.0.0.1:1"]
        assert main(["status", "--llm", llm_address]) == 1
        out, err = capsys.readouterr()
        assert "encoder 127.0.0.1:1: UNAVAILABLE" in out
        assert "1 of the encoders did not answer" in err


@pytest.mark.parametrize("line", ["ask what? --max-tok=5", "status --watc", "--vers"])
def test_an_option_is_spelt_out(line: str) -> None:
    """An abbreviation may mean another option tomorrow."""
    with pytest.raises(SystemExit) as caught:
        main(line.split())
    assert caught.value.code == MISUSED


@pytest.mark.parametrize(
    "line", ["ask --imag cat.png what?", "ask what is it?", "health --llm 127.0.0.1:1 127.0.0.1:1"]
)
def test_what_a_command_does_not_know_is_looked_up_in_its_own_help(line: str, capsys) -> None:
    with pytest.raises(SystemExit) as caught:
        main(line.split())
    assert caught.value.code == MISUSED
    command = f"twinlens {line.split(maxsplit=1)[0]}"
    told = capsys.readouterr().err
    assert told.startswith(f"{command}: unrecognized arguments: ")
    assert told.endswith(f" (see `{command} --help`)\n")


def test_python_m_twinlens_is_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "twinlens", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"twinlens {__version__}\n"


def test_ctrl_c_ends_the_call_and_exits_with_130(llm: FakeLlm, llm_address: str) -> None:
    def play(request: v1.GenerateRequest):
        yield v1.GenerateResponse(delta=v1.GenerateDelta(text="one\n"))
        llm.ended.wait(180)

    llm.play = play
    # A shell has what it runs in the background ignore SIGINT, and Python leaves that as it is.
    heeds = "import runpy, signal; signal.signal(signal.SIGINT, signal.default_int_handler);"
    program = f"{heeds} runpy.run_module('twinlens', run_name='__main__', alter_sys=True)"
    command = [sys.executable, "-c", program, "ask", "--llm", llm_address, "what?"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "one\n"
            process.send_signal(signal.SIGINT)
            assert llm.ended.wait(180)
            _, err = process.communicate(timeout=180)
        finally:
            process.kill()
    assert process.returncode == 130
    assert "Traceback" not in err


def run_in_shell(command: str) -> subprocess.CompletedProcess[str]:
    """`twinlens` stands for the command; its output is buffered, as it is for users."""
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    program = command.replace("twinlens", f"{sys.executable} -m twinlens")
    return subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=False, env=environ)


@pytest.mark.parametrize("arguments", ["ask --json what? --llm", "ask what? --llm", "status --llm", "ask --help"])
def test_a_reader_that_leaves_is_no_error(llm_address: str, arguments: str) -> None:
    done = run_in_shell(f"twinlens {arguments} {llm_address} | true")
    assert done.stderr == ""


def test_output_that_cannot_be_written_is_said_once(llm_address: str) -> None:
    done = run_in_shell(f"twinlens status --llm {llm_address} > /dev/full")
    assert (done.returncode, done.stderr) == (2, "twinlens: [Errno 28] No space left on device\n")


def test_a_letter_that_the_terminal_has_not_does_not_end_the_answer(llm: FakeLlm, llm_address: str) -> None:
    llm.play = lambda request: iter([v1.GenerateResponse(delta=v1.GenerateDelta(text="é…!"))])
    done = run_in_shell(f"PYTHONIOENCODING=ascii twinlens ask what? --llm {llm_address}")
    assert (done.returncode, done.stdout, done.stderr) == (0, "??!\n", "")


def test_a_question_from_a_closed_standard_input_is_misuse(llm_address: str) -> None:
    done = run_in_shell(f"twinlens ask - --llm {llm_address} <&-")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "no standard input" in done.stderr


def test_a_table_lines_up() -> None:
    assert table([("stage", "ms"), ("vit", "123.4"), ("decode", "1")]).splitlines() == [
        "stage      ms",
        "-------------",
        "vit     123.4",
        "decode      1",
    ]


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (milliseconds(0), "0 ms"),
        (milliseconds(0.0123456), "12.3 ms"),
        (milliseconds(2.5), "2,500 ms"),
        (share(0, 0), "–"),
        (share(1, 3), "33%"),
        (size(0), "0 B"),
        (size(1023), "1023 B"),
        (size(1536), "1.5 KiB"),
        (size(5 << 40), "5.0 TiB"),
    ],
)
def test_units(shown: str, expected: str) -> None:
    assert shown == expected


class TestAdapters:
    def test_adapters_are_added_and_removed_at_each_service(self, llm: FakeLlm, llm_address: str, capsys) -> None:
        other = FakeLlm()
        other.adapters["old"] = v1.Adapter(name="old", rank=8, in_flight=2)
        llm.adapters["old"] = v1.Adapter(name="old", rank=8)
        with serving(llm=other) as second:
            both = ["--llm", llm_address, "--llm", second]
            assert main(["adapters", *both]) == 0
            lines = capsys.readouterr().out.splitlines()
            assert [line.split()[-3:] for line in lines[2:]] == [["old", "8", "0"], ["old", "8", "2"]]
            assert main(["adapters", *both, "--load", "a=b/c", "--unload", "old"]) == 0
            assert [line.split() for line in capsys.readouterr().out.splitlines()[2:]] == [
                [llm_address, "a", "3", "0"],
                [second, "a", "3", "0"],
            ]

    def test_what_one_service_refuses_the_others_do(self, llm: FakeLlm, llm_address: str, capsys) -> None:
        with serving(llm=FakeLlm()) as gone:
            pass
        llm.adapters["a"] = v1.Adapter(name="a", rank=8)
        with serving(llm=FakeLlm()) as second:
            assert main(["adapters", "--llm", gone, "--llm", llm_address, "--llm", second, "--load", "a=x"]) == 1
        out, err = capsys.readouterr()
        assert [line.split()[:2] for line in out.splitlines()[2:]] == [[llm_address, "a"], [second, "a"]]
        assert f"twinlens: {llm_address}: a: ALREADY_EXISTS: it has one of that name" in err
        assert f"no service answers at {gone}" in err

    def test_a_service_without_any_says_so(self, llm_address: str, capsys) -> None:
        assert main(["adapters", "--llm", llm_address]) == 0
        assert capsys.readouterr().out == "no adapters\n"

    def test_where_no_service_answers_that_is_the_exit_code(self, capsys) -> None:
        with serving(llm=FakeLlm()) as gone:
            pass
        assert main(["adapters", "--llm", gone]) == 3
        assert capsys.readouterr().out == ""

    @pytest.mark.parametrize("words", [["--load", "a"], ["--load", "=x"], ["--load", "a="]])
    def test_an_adapter_needs_a_name_and_a_folder(self, words: list[str], capsys) -> None:
        with pytest.raises(SystemExit) as ended:
            main(["adapters", *words])
        assert ended.value.code == MISUSED
        assert "is not NAME=FOLDER" in capsys.readouterr().err
