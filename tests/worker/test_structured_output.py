"""Structured output of a whole worker with the built-in checkpoint and its real tokenizer."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jsonschema
from tokenizers import Tokenizer

from m3stack.checkpoints import builtin_checkpoint
from m3stack.client import WorkerClient, default_sampling
from m3stack.types import Constraint, ConstraintKind, Finished, FinishReason, Request, WorkerState
from tests.worker.served import Served, config, serve_around

TINY = Path(builtin_checkpoint("tiny"))
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "degrees": {"type": "integer", "minimum": -50, "maximum": 60},
        "rain": {"type": "boolean"},
        "hours": {
            "type": "array",
            "items": {"type": "integer", "maximum": 23, "minimum": 0},
            "maxItems": 3,
        },
    },
    "required": ["city", "degrees", "rain", "hours"],
    "additionalProperties": False,
}


def test_outputs_of_the_real_vocabulary_are_valid_and_free_neighbours_unchanged() -> None:
    tokenizer = Tokenizer.from_file(str(TINY / "tokenizer.json"))
    control = tokenizer.token_to_id("]<]minimax[>[")
    blanks = [id_ for text, id_ in tokenizer.get_vocab().items() if not text.strip("ĠĊčĉ")]
    prompt = tuple(tokenizer.encode("The weather today, as JSON:").ids)

    def asking(seed: int, constraint: Constraint | None) -> Request:
        rules = default_sampling(
            400,
            temperature=1.0,
            seed=seed,
            # hardly any blanks, and an attempt to slip control tokens into strings
            logit_bias={**dict.fromkeys(blanks, -50.0), control: 20.0},
        )
        return Request(f"r{seed}", prompt, rules, constraint=constraint)

    def scenario(served: Served) -> None:
        served.wait_until(WorkerState.READY)
        schema = Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(SCHEMA))
        free = Request("free", prompt, default_sampling(30, temperature=1.0, ignore_eos=True))
        alone = served.tokens(free)

        def run(request: Request) -> list[object]:
            with WorkerClient(served.target) as client:
                return list(client.generate(request))

        with ThreadPoolExecutor(5) as pool:
            asked = pool.map(run, [asking(seed, schema) for seed in range(4)])
            beside = pool.submit(served.tokens, free)
            for events in asked:
                end = events[-1]
                assert isinstance(end, Finished)
                assert end.reason is FinishReason.STOP
                ids = [t for e in events for t in getattr(e, "token_ids", ())]
                assert control not in ids
                document = json.loads(tokenizer.decode(ids, skip_special_tokens=False))
                jsonschema.Draft202012Validator(SCHEMA).validate(document)
            assert beside.result() == alone
        served.stop()

    assert serve_around(config(TINY), scenario) == 0
