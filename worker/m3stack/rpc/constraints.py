"""Is a request's constraint one that can be kept? Checked and compiled before it is accepted."""

from __future__ import annotations

import asyncio

from m3stack.engine.grammar import GrammarCompiler
from m3stack.errors import ErrorKind, WorkerError
from m3stack.rpc.convert import constraint_from_proto
from m3stack.types import Constraint, Sampling
from m3stack.worker.v1 import worker_pb2 as pb

MAX_SPEC_BYTES = 512 << 10
MAX_PARAM_CHARS = 128
MAX_PENDING = 64
COMPILE_TIMEOUT_S = 10.0


def read_constraint(
    header: pb.GenerateHeader, sampling: Sampling, *, eos_token_id: int, vocab_size: int
) -> Constraint | None:
    """The constraint a header names, as far as it can be checked without compiling it.

    Raises:
        WorkerError: names the field at fault, its value and the limit.
    """
    if not header.HasField("constraint"):
        return None
    given = header.constraint
    if len(given.param) > MAX_PARAM_CHARS or not (given.param.isprintable() or not given.param):
        raise _invalid(
            "constraint.param", f"is not printable or longer than {MAX_PARAM_CHARS} characters"
        )
    if given.WhichOneof("spec") is None:
        raise _invalid("constraint", "names no json_schema, regex or lark")
    constraint = constraint_from_proto(header)
    assert constraint is not None
    num_bytes = len(constraint.text.encode())
    if num_bytes > MAX_SPEC_BYTES:
        raise _invalid(constraint.param, f"has {num_bytes} bytes, the limit is {MAX_SPEC_BYTES}")
    ends = sampling.stop_token_ids | (
        frozenset[int]() if sampling.ignore_eos else frozenset((eos_token_id,))
    )
    allowed = sampling.allowed_token_ids
    if not any(
        end not in sampling.banned_token_ids and (not allowed or end in allowed) for end in ends
    ):
        raise _invalid(
            "constraint", "needs an id that ends the output: none is left by the sampling settings"
        )
    begin = constraint.after_token_id
    if begin is not None:
        _check_begin(begin, sampling, ends, vocab_size)
    return constraint


async def compile_constraint(compiler: GrammarCompiler, constraint: Constraint) -> None:
    """Returns once a constraint is compiled, and kept for the engine.

    Raises:
        WorkerError: it cannot be compiled, allows nothing, or is too large; or too many others
            are being compiled.
    """
    if compiler.num_pending >= MAX_PENDING:
        raise WorkerError(
            ErrorKind.OVERLOADED, f"{MAX_PENDING} constraints are being compiled, the limit"
        )
    grammar = compiler.submit(constraint)
    try:
        async with asyncio.timeout(COMPILE_TIMEOUT_S):
            # others may wait for the same one: whoever leaves must not cancel it
            await asyncio.shield(asyncio.wrap_future(grammar))
    except TimeoutError:
        if not grammar.running():
            raise WorkerError(
                ErrorKind.OVERLOADED, "other constraints keep the compiler busy"
            ) from None
        raise _invalid(
            constraint.param, f"took longer than {COMPILE_TIMEOUT_S:g} s to compile, the limit"
        ) from None
    except WorkerError as error:
        message = f"{constraint.param} {error.message}"
        raise WorkerError(error.kind, message, constraint.param) from error


def _check_begin(token_id: int, sampling: Sampling, ends: frozenset[int], vocab_size: int) -> None:
    param, allowed = "constraint.after_token_id", sampling.allowed_token_ids
    if token_id >= vocab_size:
        raise _invalid(param, f"is {token_id}, the vocabulary ends at {vocab_size - 1}")
    if token_id in ends:
        raise _invalid(param, f"is {token_id}, which ends the request")
    if token_id in sampling.banned_token_ids or (allowed and token_id not in allowed):
        raise _invalid(param, f"is {token_id}, which the sampling settings do not allow")


def _invalid(param: str, complaint: str) -> WorkerError:
    return WorkerError(ErrorKind.INVALID_REQUEST, f"{param} {complaint}", param)
