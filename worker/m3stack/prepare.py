"""Requests for a worker, prepared in this process by the gateway's own code."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from os import PathLike
from typing import Any

from m3stack import _gateway
from m3stack.errors import ErrorKind, WorkerError
from m3stack.rpc import convert
from m3stack.types import Request
from m3stack.worker.v1 import worker_pb2 as pb


class Preparer:
    """Turns chat completion bodies into requests that `m3stack.client` can send.

    Template, tokenizer and pixel work are the gateway's: a request prepared here and the same one
    sent through REST reach the worker alike.

    Args:
        model_path: checkpoint directory; its weights are not read.

    Raises:
        ValueError: the directory cannot be used; the text says why.
    """

    def __init__(self, model_path: str | PathLike[str]) -> None:
        self._preparer = _gateway.Preparer(model_path)

    def chat(self, body: Mapping[str, Any]) -> tuple[Request, bytes]:
        """The request of a chat completion body, and the fingerprint of the model it is for.

        Raises:
            WorkerError: as the gateway would refuse it, naming the field.
        """
        try:
            header_bytes, patches = self._preparer.prepare_chat(json.dumps(body).encode())
        except _gateway.RefusedError as refused:
            message, param, _code, _status = refused.args
            raise WorkerError(ErrorKind.INVALID_REQUEST, message, param or "") from refused
        header = pb.GenerateHeader.FromString(header_bytes)
        header.request_id = f"direct-{uuid.uuid4().hex}"
        rows = [bytes(rows) for rows in patches]
        return convert.request_from_header(header, rows), header.fingerprint

    def tokenize(self, text: str) -> list[int]:
        """Ids of a text, control tokens in it meant as such."""
        return self._preparer.tokenize(text)

    def detokenize(self, token_ids: list[int]) -> str:
        """Text of ids, control tokens shown."""
        return self._preparer.detokenize(token_ids)
