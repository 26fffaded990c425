"""Stands in for vLLM's program: answers as its server does, with as many tokens as are asked for, and has no hits."""

from __future__ import annotations

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

METRICS = "vllm:prefix_cache_hits_total 0.0\nvllm:mm_cache_hits_total 0.0\n"


class Handler(BaseHTTPRequestHandler):
    """vLLM's endpoints, as far as the benchmark asks for them."""

    def do_GET(self) -> None:
        self._answer(METRICS if self.path == "/metrics" else "")

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        pictures = [part for part in asked["messages"][0]["content"] if part["type"] == "image_url"]
        assert asked["stream"]
        assert pictures[0]["image_url"]["url"].startswith("data:image/jpeg;base64,")
        tokens = asked["max_tokens"]
        events = [{"choices": [{"delta": {"content": "word"}}]}] * tokens
        events.append({"choices": [], "usage": {"completion_tokens": tokens}})
        self._answer("".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n")

    def _answer(self, text: str) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        """Says nothing."""


class Server(ThreadingHTTPServer):
    """For as many callers at once as a benchmark has."""

    request_queue_size = 64


if __name__ == "__main__":
    if sys.argv[1] == "--version":
        print("0.1")
    else:
        Server(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
