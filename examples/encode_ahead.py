"""Encodes a picture ahead of the question: the encoder is called directly, the LLM service is given a key alone.

    python examples/encode_ahead.py picture.png "What is in the picture?" [ENCODER] [LLM]

`Prefetch` answers as soon as the picture's dimensions are known and encodes behind the caller's back; `Encode` would
send the rows as well. Either says the content key, which stands for the picture from then on, for as long as an
encoder has its rows.
"""

import sys
from pathlib import Path

from twinlens import EncoderClient, LlmClient, generate_request, user, v1


def main(file: str, question: str, encoder: str = "127.0.0.1:7001", llm: str = "127.0.0.1:7002") -> None:
    picture = v1.Media(modality=v1.MODALITY_IMAGE, data=Path(file).read_bytes())
    with EncoderClient(encoder) as media, LlmClient(llm) as text:
        answer = media.prefetch(v1.PrefetchRequest(items=[picture]))
        if answer.errors:
            sys.exit(answer.errors[0].status.message)
        header = answer.headers[0]
        print(f"key {header.key.hex()[:16]}…, {header.tokens} rows")
        by_key = v1.Media(modality=v1.MODALITY_IMAGE, key=header.key)
        with text.generate(generate_request(user(by_key, question))) as events:
            for event in events:
                print(event.delta.text, end="", flush=True)
        print()


if __name__ == "__main__":
    main(*sys.argv[1:])
