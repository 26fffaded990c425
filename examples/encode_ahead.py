"""Encodes a picture ahead of the question: calls the encoder directly, and gives the LLM service only a key.

    python examples/encode_ahead.py picture.png "What is in the picture?"

`Prefetch` answers as soon as the picture's dimensions are known and encodes in the background; `Encode` would also send
the rows. Both return the content key, which replaces the picture as long as an encoder has its rows.
"""

import argparse
import sys
from pathlib import Path

from twinlens import EncoderClient, LlmClient, TwinlensError, generate_request, user, v1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("picture", type=Path, help="a file")
    parser.add_argument("question", help="in quotes")
    parser.add_argument("--encoder", metavar="ADDR", default="127.0.0.1:7001", help="default: %(default)s")
    parser.add_argument("--llm", metavar="ADDR", default="127.0.0.1:7002", help="default: %(default)s")
    given = parser.parse_args()
    try:
        ask(given.picture.read_bytes(), given.question, given.encoder, given.llm)
    except (OSError, TwinlensError) as error:
        sys.exit(f"encode_ahead: {error}")


def ask(picture: bytes, question: str, encoder: str, llm: str) -> None:
    item = v1.Media(modality=v1.MODALITY_IMAGE, data=picture)
    with EncoderClient(encoder) as media, LlmClient(llm) as text:
        answer = media.prefetch(v1.PrefetchRequest(items=[item]))
        if answer.errors:
            sys.exit(f"encode_ahead: {answer.errors[0].status.message}")
        header = answer.headers[0]
        print(f"key {header.key.hex()[:16]}…, {header.tokens} rows")
        by_key = v1.Media(modality=v1.MODALITY_IMAGE, key=header.key)
        with text.generate(generate_request(user(by_key, question))) as events:
            for event in events:
                print(event.delta.text, end="", flush=True)
        print()


if __name__ == "__main__":
    main()
