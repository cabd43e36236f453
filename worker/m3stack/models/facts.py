"""What gateway and worker must agree on about a model, and the fingerprint that proves it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Same fields, in the same order, as `ModelFacts` of `worker.proto`."""

    model_type: str
    vocab_size: int
    image_token_id: int
    video_token_id: int
    eos_token_id: int
    patch_size: int
    temporal_patch_size: int
    merge_size: int
    max_position_embeddings: int

    def fingerprint(self) -> bytes:
        """SHA-256 over UTF-8 lines `name=value\\n` in field order: 32 bytes."""
        lines = "".join(f"{field.name}={getattr(self, field.name)}\n" for field in fields(self))
        return hashlib.sha256(lines.encode()).digest()
