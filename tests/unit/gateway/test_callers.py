"""Names of callers in the file of tokens, and the salts that keep them apart."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.callers import Callers


def of(path: Path, content: str) -> Callers:
    path.write_text(content)
    return Callers(str(path))


def salt(callers: Callers, token: str, own: str = "") -> str:
    caller = callers.known([token.encode()])
    assert caller is not None
    return caller.salt(own)


def test_a_file_without_names_is_what_it_was(tmp_path: Path) -> None:
    callers = of(tmp_path / "tokens", "alice:secret\n\n alice secret \nbob=x, bob\nbob=x, bob\r\n")
    for token in (b"alice:secret", b"alice secret", b"bob=x, bob"):
        caller = callers.known([b"", token])
        assert caller is not None
        assert (caller.name, caller.salt("own"), caller.salt("")) == ("", "own", "")
    for stranger in (b"", b"alice", b"secret", b"bob", b"alice:secret ", b"\xff"):
        assert callers.known([stranger]) is None
    everybody = Callers().known([b""])
    assert everybody is not None
    assert (everybody.name, everybody.salt("own")) == ("", "own")


def test_a_name_and_a_tab_stand_before_a_token(tmp_path: Path) -> None:
    callers = of(tmp_path / "tokens", "alice\tfirst\nalice\t\tnewer \n third\nbob@example.org\tfourth one\n")
    tokens = ("first", "newer", "third", "fourth one")
    known = [callers.known([token.encode()]) for token in tokens]
    assert [each and each.name for each in known] == ["alice", "alice", "", "bob@example.org"]
    for stranger in (b"alice", b"alice\tfirst", b"", b"bob@example.org"):
        assert callers.known([stranger]) is None


def test_callers_of_different_names_have_no_salt_in_common(tmp_path: Path) -> None:
    callers = of(tmp_path / "tokens", "a\tone\nb\ttwo\nab\tthree\nplain\n")
    stated = ("", "x", "b", "bx", "\0x", "x" * 200, "\u00e9")
    salts = {(token, own): salt(callers, token, own) for token in ("one", "two", "three") for own in stated}
    assert len(set(salts.values())) == len(salts)
    assert all(len(each) == 64 for each in salts.values())
    again = of(tmp_path / "others", "plain\na\tone\na\tnewer\nb\tanother\n")
    assert salt(again, "newer", "x") == salts["one", "x"], "of whichever token, and at whichever gateway"
    assert salt(again, "another", "x") != salts["two", "x"], "who has none of the name's tokens cannot make it up"
    assert salt(again, "plain", salts["one", "x"]) == salts["one", "x"], "a token without a name states any"
    assert "one" not in repr(callers.known([b"one"]))


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("alice\t\n", "a caller's name has no token"),
        ("alice\ta\tb\n", "one line of ASCII"),
        ("alice\tsekr\u00e9t\n", "one line of ASCII"),
        ("al ice\tx\n", "1 to 64 letters"),
        ("\u00e9\tx\n", "1 to 64 letters"),
        ("a" * 65 + "\tx\n", "1 to 64 letters"),
        ("alice\tx\nbob\tx\n", "two callers have the same token"),
        ("alice\tx\nx\n", "two callers have the same token"),
        (" \n\t\n", "holds no token"),
    ],
)
def test_what_is_no_file_of_tokens_is_refused(tmp_path: Path, content: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        of(tmp_path / "tokens", content)


def test_names_are_those_that_are_in_the_file_now(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    callers = of(path, "secret\n")

    def name() -> str | None:
        caller = callers.known([b"secret"])
        return caller and caller.name

    assert name() == ""
    path.write_text("alice\tsecret\n")
    assert name() == "alice"
    path.write_text("alice\t\n")
    assert name() == "alice", "the old ones stay"
    path.write_text("bob\tanother\n")
    assert name() is None
