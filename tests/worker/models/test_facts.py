"""The fingerprint is what the proto says it is."""

from __future__ import annotations

import hashlib
from dataclasses import fields

from m3stack.models.facts import ModelFacts
from m3stack.worker.v1 import worker_pb2


def test_fields_and_their_order_are_those_of_the_proto() -> None:
    descriptor = worker_pb2.ModelFacts.DESCRIPTOR
    in_order = sorted(descriptor.fields, key=lambda field: field.number)
    assert [field.name for field in fields(ModelFacts)] == [field.name for field in in_order]


def test_fingerprint_hashes_one_line_a_field() -> None:
    facts = ModelFacts("m", 10, 1, 2, 3, 14, 2, 2, 99)
    text = (
        "model_type=m\nvocab_size=10\nimage_token_id=1\nvideo_token_id=2\neos_token_id=3\n"
        "patch_size=14\ntemporal_patch_size=2\nmerge_size=2\nmax_position_embeddings=99\n"
    )
    assert facts.fingerprint() == hashlib.sha256(text.encode()).digest()
