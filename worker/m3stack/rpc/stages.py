"""What a request is for, and how what others have computed for it comes here before it runs."""

from __future__ import annotations

import dataclasses

from m3stack.errors import ErrorKind, WorkerError
from m3stack.rpc.admission import Reservation
from m3stack.rpc.source_addresses import MAX_CHARS, AllowedSources
from m3stack.transfer.pull import Puller
from m3stack.types import Purpose, Request, Role, Sampling, Source, Stage
from m3stack.worker.v1 import worker_pb2 as pb

_SERVED = {
    Role.ALL: (Purpose.ANSWER, Purpose.PREFILL),
    Role.ENCODE: (Purpose.ENCODE,),
    Role.PREFILL: (Purpose.PREFILL,),
    Role.DECODE: (Purpose.ANSWER,),
}
_DOES = {
    Role.ALL: "answers and computes pages for others",
    Role.ENCODE: "encodes media only",
    Role.PREFILL: "computes pages for others only",
    Role.DECODE: "answers only",
}


def staged(request: Request, stage: Stage) -> Request:
    """The request that serves a stage: for a prompt's sake alone, one token of any kind."""
    if not stage.is_silent:
        return request
    sampling = _first_token_only(request.sampling)
    return dataclasses.replace(request, sampling=sampling, constraint=None)


def read_stage(header: pb.GenerateHeader, role: Role, allowed: AllowedSources) -> Stage:
    """The stage a header is about.

    Raises:
        WorkerError: this worker's role does not serve it; a source that is none, or not allowed.
    """
    try:
        purpose = Purpose(header.purpose)
    except ValueError:
        raise WorkerError(
            ErrorKind.INVALID_REQUEST, f"purpose is {header.purpose}, expected 0 to 2", "purpose"
        ) from None
    if purpose not in _SERVED[role]:
        raise WorkerError(
            ErrorKind.INVALID_REQUEST,
            f"purpose is {purpose.name.lower()}, but this worker {_DOES[role]} (role "
            f"{role.name.lower()})",
            "purpose",
        )
    return Stage(
        purpose,
        _source(header, "pages_source", allowed),
        _source(header, "features_source", allowed),
    )


async def pull_features(stage: Stage, puller: Puller | None, reservation: Reservation) -> None:
    """Brings features of needed items from where they may be; the rest is left to the client."""
    for source in dict.fromkeys((stage.features, stage.pages)):
        if puller is not None and source is not None and reservation.needed:
            reservation.found(await puller.features(reservation.missing, source))


async def pull_pages(stage: Stage, puller: Puller | None, request: Request) -> int:
    """Brings pages of the prompt from where they may be; returns the tokens that came."""
    if puller is None or stage.pages is None:
        return 0
    return await puller.pages(request, stage.pages)


def _source(header: pb.GenerateHeader, param: str, allowed: AllowedSources) -> Source | None:
    if not header.HasField(param):  # type: ignore[arg-type]
        return None
    given: pb.Source = getattr(header, param)
    expected = allowed.refusal(given.address)
    if expected is not None:
        raise WorkerError(
            ErrorKind.INVALID_REQUEST,
            f"{param}.address is {given.address[:MAX_CHARS]!r}, expected {expected}",
            f"{param}.address",
        )
    return Source(given.address, given.tls_name)


def _first_token_only(sampling: Sampling) -> Sampling:
    return dataclasses.replace(
        sampling,
        temperature=0.0,
        max_tokens=1,
        min_tokens=0,
        ignore_eos=True,
        repetition_penalty=1.0,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        logprobs=False,
        top_logprobs=0,
        stop_token_ids=frozenset(),
        logit_bias={},
        allowed_token_ids=frozenset(),
        banned_token_ids=frozenset(),
    )
