"""Roles, addresses and certificates of workers that fetch from each other."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest

from m3stack.errors import ErrorKind, WorkerError
from m3stack.rpc.tls import peer_credentials, server_credentials
from m3stack.rpc.transfer_client import GrpcTransport
from m3stack.rpc.transfer_service import TransferService
from m3stack.types import Finished, Purpose, Role, Source, Stage
from m3stack.worker.v1 import worker_pb2 as pb
from m3stack.worker.v1 import worker_pb2_grpc as pb_grpc
from tests.worker.rpc.worker_harness import Options, run, worker
from tests.worker.transfer.asking import answer, prefill, text

CERTIFICATES = Path(__file__).parents[2] / "data" / "tls"
# one that the server's certificate there is for
SERVER_NAME = "m3-worker.models.svc"


@pytest.mark.parametrize(
    ("role", "purpose", "served"),
    [
        (Role.ALL, Purpose.ANSWER, True),
        (Role.ALL, Purpose.PREFILL, True),
        (Role.ALL, Purpose.ENCODE, False),
        (Role.PREFILL, Purpose.PREFILL, True),
        (Role.PREFILL, Purpose.ANSWER, False),
        (Role.DECODE, Purpose.ANSWER, True),
        (Role.DECODE, Purpose.PREFILL, False),
        (Role.ENCODE, Purpose.ENCODE, True),
        (Role.ENCODE, Purpose.ANSWER, False),
    ],
)
def test_a_role_serves_its_purposes_and_refuses_others_by_name(
    role: Role, purpose: Purpose, served: bool
) -> None:
    async def scenario() -> None:
        async with worker(options=Options(role=role)) as subject:
            call = subject.client.generate(text(20), stage=Stage(purpose))
            if served:
                assert isinstance([event async for event in call][-1], Finished)
                return
            with pytest.raises(WorkerError) as refusal:
                _ = [event async for event in call]
            assert refusal.value.kind is ErrorKind.INVALID_REQUEST
            assert refusal.value.param == "purpose"
            assert f"role {role.name.lower()}" in refusal.value.message

    run(scenario)


@pytest.mark.parametrize(
    "address",
    [
        *("", "host", "host:", ":1", "h\n:1", "é:1", "a" * 300 + ":1", "host:0", "host:65536"),
        # other kinds of address that a resolver knows
        *("unix:/run/m3.sock:1", "unix:m3:1", "dns:host:1", "dns:///host:1", "ipv4:10.0.0.1:1"),
        *("http://host:1", "[::1", "::1:1", "[host]:1"),
    ],
)
def test_an_address_that_is_none_is_refused(address: str) -> None:
    async def scenario() -> None:
        async with worker() as subject:
            with pytest.raises(WorkerError) as refusal:
                await answer(subject, text(20), Source(address))
            assert refusal.value.param == "pages_source.address"

    run(scenario)


def test_workers_with_certificates_fetch_by_tls_and_turn_others_away(tmp_path: Path) -> None:
    for side in ("server", "client"):
        (tmp_path / side).mkdir()
        for name, file in (("ca.crt", "ca"), ("tls.crt", side), ("tls.key", side)):
            given = CERTIFICATES / f"{file}{Path(name).suffix}"
            (tmp_path / side / name).write_bytes(given.read_bytes())

    async def scenario() -> None:
        async with worker() as first, worker() as second:
            await prefill(first, text(70))
            service = TransferService()
            service.open_for(first.store)
            server = grpc.aio.server()
            pb_grpc.add_TransferServiceServicer_to_server(service, server)
            port = server.add_secure_port("127.0.0.1:0", server_credentials(tmp_path / "server"))
            await server.start()
            source = Source(f"127.0.0.1:{port}", SERVER_NAME)
            # without a certificate of its own, nobody gets anything
            assert await second.puller.pages(text(70), source) == 0
            secure = GrpcTransport(peer_credentials(tmp_path / "client"))
            second.puller._transport = secure
            assert await second.puller.pages(text(70), source) == 64
            # the name that was asked for is the one that is checked
            await second.admin.FlushPrefixCache(pb.FlushPrefixCacheRequest())
            other = Source(f"127.0.0.1:{port}", "somebody.else")
            assert await second.puller.pages(text(70), other) == 0
            await secure.close()
            await server.stop(0)

    run(scenario)
