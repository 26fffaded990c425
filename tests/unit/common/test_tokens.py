"""Bearer tokens that are replaced while a process runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.rpc.bearer_tokens import AcceptedTokens, TokenFile, read_tokens
from common.rpc.channel import ChannelSecurity


def test_a_token_is_the_one_that_is_in_the_file_now(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("first\n")
    file = TokenFile(str(path))
    security = ChannelSecurity(token_file=file)
    assert security.metadata == (("authorization", "Bearer first"),)
    path.write_text("the second\n")
    assert security.metadata == (("authorization", "Bearer the second"),)
    for unusable in ("", "sekr\u00e9t\n"):
        path.write_text(unusable)
        assert file.token == "the second"
    path.unlink()
    assert file.token == "the second"
    path.write_text("third, again\n")
    assert file.token == "third, again"


def test_one_token_follows_another_with_both_accepted_meanwhile(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_text("old\n")
    accepted, sent = AcceptedTokens(file=str(path)), TokenFile(str(path))

    def now() -> tuple[str, bool, bool]:
        return sent.token, accepted.admit(b"old"), accepted.admit(b"new")

    assert now() == ("old", True, False)
    path.write_text("old\n\n new \n")
    assert now() == ("old", True, True)
    path.write_text("new\nold\n")
    assert now() == ("new", True, True)
    path.write_text("new\n")
    assert now() == ("new", False, True)
    assert not accepted.admit(b"")


def test_everybody_is_let_in_where_there_is_no_token_and_nobody_else_where_there_is_one() -> None:
    assert AcceptedTokens().admit(b"")
    assert AcceptedTokens().admit(b"anything")
    assert [AcceptedTokens("this").admit(token) for token in (b"this", b"", b"this ", b"thi", b"\xff")] == [
        True,
        *[False] * 4,
    ]


def test_what_is_no_token_is_refused_at_the_start(tmp_path: Path) -> None:
    path = tmp_path / "token"
    with pytest.raises(ValueError, match="cannot be read as tokens"):
        TokenFile(str(path))
    path.write_text(" \n\n")
    with pytest.raises(ValueError, match="holds no token"):
        AcceptedTokens(file=str(path))
    for given in ("sekr\u00e9t", "a\x7f", " "):
        with pytest.raises(ValueError, match="one line of ASCII"):
            read_tokens(given, "")
