"""What a real worker lets in by TLS, and what it tells a gateway of its pages."""

from __future__ import annotations

import shutil
from pathlib import Path

import grpc
import pytest

from m3stack.cache.journal import short_key
from m3stack.cache.pages import PageAllocator
from m3stack.cache.prefix import PrefixCache, Salt
from m3stack.client import WorkerClient, default_sampling
from m3stack.engine.sequence import Sequence
from m3stack.errors import StartupError, WorkerError
from m3stack.rpc.tls import channel_credentials, server_credentials
from m3stack.serve import EXIT_DRAINED
from m3stack.types import Request, WorkerState
from m3stack.worker.v1 import worker_pb2, worker_pb2_grpc
from tests.worker.served import TIMEOUT_S, Served, config, serve_around

PEM = Path(__file__).parents[1] / "data" / "tls"


def secret(folder: Path, **files: str) -> Path:
    """A directory laid out as a Kubernetes TLS secret."""
    folder.mkdir()
    for name, source in files.items():
        shutil.copy(PEM / source, folder / name.replace("_", "."))
    return folder


def test_tls_worker_serves_only_clients_its_authority_has_signed(tmp_path: Path) -> None:
    server = secret(
        tmp_path / "server", tls_crt="server.crt", tls_key="server.key", ca_crt="ca.crt"
    )
    known = secret(tmp_path / "known", tls_crt="client.crt", tls_key="client.key", ca_crt="ca.crt")
    stranger = secret(tmp_path / "stranger", ca_crt="ca.crt")

    def scenario(served: Served) -> None:
        with WorkerClient(served.target, tls_dir=known) as client:
            for update in client.watch():
                if update.state is WorkerState.READY:
                    break
            request = Request("tls", (1, 2, 3), default_sampling(2))
            assert list(client.generate(request))
        for tls_dir in (stranger, None):
            with WorkerClient(served.target, tls_dir=tls_dir) as client, pytest.raises(WorkerError):
                client.info()

    assert serve_around(config(tls_dir=str(server)), scenario) == EXIT_DRAINED


def test_file_that_cannot_be_used_is_named_without_what_it_holds(tmp_path: Path) -> None:
    folder = secret(tmp_path / "half", tls_crt="server.crt")
    with pytest.raises(StartupError, match=r"tls\.key cannot be read"):
        server_credentials(folder)
    (folder / "tls.key").write_text("a secret")
    with pytest.raises(StartupError, match=r"tls\.key holds no PEM") as failed:
        server_credentials(folder)
    assert "secret" not in str(failed.value)
    with pytest.raises(StartupError, match=r"ca\.crt cannot be read"):
        channel_credentials(folder)


def test_watcher_learns_the_pages_of_a_request_under_the_keys_a_gateway_computes() -> None:
    ids = tuple(3 + number % 200 for number in range(300))
    request = Request("pages", ids, default_sampling(1), tenant="t", cache_salt="s")

    def scenario(served: Served) -> None:
        served.wait_until(WorkerState.READY)
        with grpc.insecure_channel(served.target) as channel:
            stub = worker_pb2_grpc.WorkerServiceStub(channel)
            watch = worker_pb2.WatchRequest(heartbeat_ms=100, cache_events=True)
            call = stub.Watch(watch, timeout=TIMEOUT_S)
            first = next(iter(call))
            assert first.cache.is_restart
            assert not first.cache.added
            page_tokens = first.identity.page_tokens
            assert list(served.client.generate(request))
            expected = keys(request, page_tokens)
            held: set[int] = set()
            for message in call:
                held |= set(message.cache.added)
                if expected <= held:
                    break
            assert len(expected) == (len(ids) - 1) // page_tokens
            rate = next(message.load.prompt_tokens_per_s for message in call)
            assert rate > 0
            call.cancel()
            # whoever does not ask is not told
            plain = stub.Watch(worker_pb2.WatchRequest(heartbeat_ms=100), timeout=TIMEOUT_S)
            assert not next(iter(plain)).HasField("cache")
            plain.cancel()

    assert serve_around(config(), scenario) == EXIT_DRAINED


def test_worker_that_shares_no_pages_says_so_once() -> None:
    def scenario(served: Served) -> None:
        served.wait_until(WorkerState.READY)
        with grpc.insecure_channel(served.target) as channel:
            stub = worker_pb2_grpc.WorkerServiceStub(channel)
            watch = worker_pb2.WatchRequest(heartbeat_ms=100, cache_events=True)
            call = stub.Watch(watch, timeout=TIMEOUT_S)
            first, second = next(call), next(call)
            assert first.cache.is_restart
            assert not first.cache.added
            assert not second.HasField("cache")
            call.cancel()

    assert serve_around(config(prefix_cache=False), scenario) == EXIT_DRAINED


def keys(request: Request, page_tokens: int) -> set[int]:
    sequence = Sequence(
        1, request, page_tokens=page_tokens, stop_ids=frozenset(), max_context_tokens=4096
    )
    cache = PrefixCache(PageAllocator(1))
    sequence.root_key = cache.root_key(Salt(request.tenant, request.cache_salt), 1)
    return {short_key(key) for key in sequence.matchable_keys()}
