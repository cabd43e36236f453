"""Times of short text requests, one after the other, measured in a process of their own: a client
that also sends clips would measure its own turns.

    python -m tests.e2e.text_times URL COUNT    # 0: until the input ends

Prints milliseconds as JSON.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import httpx

PAUSE_S = 0.02
BODY = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 8}


@contextlib.contextmanager
def text_times_ms(url: str, *, count: int = 0) -> Iterator[list[float]]:
    """A list that is filled at the end: by so many requests, or by all until then."""
    command = [sys.executable, "-m", "tests.e2e.text_times", url, str(count)]
    pipe = subprocess.PIPE
    taken: list[float] = []
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        yield taken
        out, _ = process.communicate()
    assert process.returncode == 0
    taken.extend(json.loads(out))


def main() -> None:
    url, count = sys.argv[1], int(sys.argv[2])
    ended = threading.Event()
    if count == 0:
        threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
    taken: list[float] = []
    with httpx.Client(base_url=url, timeout=60) as client:
        while not ended.is_set() and (count == 0 or len(taken) < count):
            begin = time.perf_counter()
            reply = client.post("/v1/chat/completions", json=BODY)
            taken.append((time.perf_counter() - begin) * 1e3)
            assert reply.status_code == 200, reply.text
            time.sleep(PAUSE_S)  # one user's pace: without it the measure itself would be the load
    print(json.dumps(taken), flush=True)


if __name__ == "__main__":
    main()
