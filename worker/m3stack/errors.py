"""The kinds of failure a caller can meet, and the one table from kind to gRPC status code."""

from __future__ import annotations

from enum import Enum


class ErrorKind(Enum):
    """Same names as the proto's ErrorKind and the gateway's error kinds; value = proto number."""

    INVALID_REQUEST = 1
    CONTEXT_TOO_LONG = 2
    MEDIA_REJECTED = 3
    OVERLOADED = 4
    WORKER_UNAVAILABLE = 5
    DEADLINE_EXCEEDED = 6
    CANCELLED = 7
    INTERNAL = 8


# names of grpc.StatusCode members; the rpc package turns them into the real ones
GRPC_STATUS_NAME = {
    ErrorKind.INVALID_REQUEST: "INVALID_ARGUMENT",
    ErrorKind.CONTEXT_TOO_LONG: "INVALID_ARGUMENT",
    ErrorKind.MEDIA_REJECTED: "INVALID_ARGUMENT",
    ErrorKind.OVERLOADED: "RESOURCE_EXHAUSTED",
    ErrorKind.WORKER_UNAVAILABLE: "UNAVAILABLE",
    ErrorKind.DEADLINE_EXCEEDED: "DEADLINE_EXCEEDED",
    ErrorKind.CANCELLED: "CANCELLED",
    ErrorKind.INTERNAL: "INTERNAL",
}


class WorkerError(Exception):
    """A failure of one request, fit to be shown to its sender.

    Attributes:
        kind: what sort of failure; decides status code and retry.
        message: what was wrong, with the value and the limit.
        param: field at fault such as `sampling.top_p`, or empty.
    """

    def __init__(self, kind: ErrorKind, message: str, param: str = "") -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.param = param


class LoadingStoppedError(Exception):
    """The worker was told to stop before it was ready."""


class StartupError(Exception):
    """The worker cannot start: a bad setting, checkpoint or back end. Says what to do next."""
