"""Straight to a worker over gRPC, without a gateway in between.

    m3stack worker --listen 127.0.0.1:50051        # in another terminal
    python examples/direct.py [ADDRESS]

The prompt is prepared in this process by the gateway's own code; the answer is token ids, turned
into text at the end.
"""

from __future__ import annotations

import sys

from m3stack.checkpoints import builtin_checkpoint
from m3stack.client import WorkerClient
from m3stack.prepare import Preparer
from m3stack.types import Finished, Tokens

QUESTION = "Anna lives in Oslo. Ben has a red cup. Tom works in the library. Where does Anna live?"


def main() -> int:
    address = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051"
    preparer = Preparer(builtin_checkpoint("tiny"))
    request, fingerprint = preparer.chat(
        {
            "messages": [{"role": "user", "content": QUESTION}],
            "max_tokens": 32,
            "temperature": 0,
            "thinking": {"type": "disabled"},
        }
    )
    answer: list[int] = []
    with WorkerClient(address) as worker:
        info = worker.info()
        print(f"worker {info.worker_id} serves {info.model_name}")
        for event in worker.generate(request, fingerprint=fingerprint):
            if isinstance(event, Tokens):
                answer += event.token_ids
            elif isinstance(event, Finished):
                print(f"finished: {event.reason.name.lower()}, {event.usage}")
    print(preparer.detokenize(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main())
