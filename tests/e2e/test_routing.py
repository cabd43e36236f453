"""A gateway before real workers: prompts find the caches that hold them, traces show the worker."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from queue import Queue
from typing import Any

import httpx

from tests.e2e.conftest import MODEL_NAME, START_TIMEOUT_S, Server, Stack, wait_for

# several pages of the built-in checkpoint
BEGINNING = "Once upon a time there was a cache that remembered. " * 60


@contextmanager
def collector() -> Iterator[tuple[str, Queue[dict[str, Any]]]]:
    """An OTLP collector and the spans it is sent, each with its service."""
    spans: Queue[dict[str, Any]] = Queue()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            for resource in body["resourceSpans"]:
                service = resource["resource"]["attributes"][0]["value"]["stringValue"]
                for span in resource["scopeSpans"][0]["spans"]:
                    spans.put(span | {"service": service})
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", spans
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def ask(gateway: Server, question: str) -> dict[str, Any]:
    messages = [{"role": "user", "content": BEGINNING + question}]
    body = {"model": MODEL_NAME, "messages": messages, "max_tokens": 2}
    reply = httpx.post(f"{gateway.url}/v1/chat/completions", json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    return reply.json()["usage"]


def figure(gateway: Server, name: str) -> float:
    page = httpx.get(f"{gateway.url}/metrics", timeout=60).text
    return next(float(line.split()[-1]) for line in page.splitlines() if line.startswith(name))


def wait_for_figure(gateway: Server, name: str) -> None:
    """Waits until it is two at least."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while (found := figure(gateway, name)) < 2:
        assert time.monotonic() < deadline, f"{name} is {found}"
        # a page of figures tells no one when it changes: it is read again
        time.sleep(0.05)


def test_questions_about_one_text_go_to_the_worker_that_has_read_it(stack: Stack) -> None:
    workers = [stack.worker(), stack.worker()]
    with collector() as (url, spans):
        gateway = stack.gateway(*workers, flags=("--otlp-endpoint", url))
        wait_for(gateway, "/ready")
        wait_for_figure(gateway, 'm3stack_gateway_workers{state="ready"}')
        ask(gateway, "What is it about?")
        # a worker tells of its pages a moment after its answer
        told = 'm3stack_gateway_known_pages{source="told"}'
        wait_for_figure(gateway, told)
        for question in ("Who is in it?", "Where is it?", "When?"):
            usage = ask(gateway, question)
            assert usage["prompt_tokens_details"]["cached_tokens"] >= 256

        assert figure(gateway, told) >= 2
        matched = figure(gateway, "m3stack_gateway_routing_matched_tokens_total ")
        cached = figure(gateway, 'm3stack_gateway_tokens_total{kind="cached"}')
        # the gateway names pages as the worker does, so it knows exactly what will be found
        assert matched == cached > 0

        assert gateway.stop() == 0
        seen = [spans.get_nowait() for _ in range(spans.qsize())]
    names = {(span["service"], span["name"]) for span in seen}
    assert {
        ("m3stack-gateway", "/v1/chat/completions"),
        ("m3stack-gateway", "worker"),
        ("m3stack-worker", "queue"),
        ("m3stack-worker", "prefill"),
        ("m3stack-worker", "decode"),
    } <= names
    by_id = {span["spanId"]: span for span in seen}
    for span in seen:
        if span["service"] == "m3stack-worker":
            assert by_id[span["parentSpanId"]]["name"] == "worker"
