"""A worker's exchange of pages and features with others: what it hands out, what it fetches."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from m3stack.contents import Contents
from m3stack.rpc.tls import peer_credentials
from m3stack.rpc.transfer_client import GrpcTransport
from m3stack.rpc.transfer_service import TransferService
from m3stack.transfer.interface import Outlet, Transport
from m3stack.transfer.pull import Puller, TransferBook
from m3stack.transfer.store import BetweenSteps, ContentStore


class Transfers:
    """Both sides of the exchange; belongs to the event loop.

    Args:
        tls_dir: of the worker; None speaks plain text, as it listens itself.
        page_tokens: tokens of a page.
        book: is told what was fetched.
        transport: what fetches, if not gRPC; is closed with this.
        outlets: hand contents out as well, beside gRPC, which every worker speaks; are closed
            with this.
    """

    def __init__(
        self,
        tls_dir: str,
        *,
        page_tokens: int,
        book: TransferBook,
        transport: Transport | None = None,
        outlets: Sequence[Outlet] = (),
    ) -> None:
        if transport is None:
            transport = GrpcTransport(peer_credentials(Path(tls_dir)) if tls_dir else None)
        self._transport = transport
        self._page_tokens = page_tokens
        self._book = book
        self.service = TransferService()
        self._outlets: tuple[Outlet, ...] = (self.service, *outlets)

    def open_for(self, engine: BetweenSteps, contents: Contents | None) -> Puller | None:
        """Hands contents out from now on; gives what fetches those of others, if any can be."""
        if contents is None:
            for outlet in self._outlets:
                outlet.refuse("pages that stand in host memory (hot_pages) cannot be handed out")
            return None
        store = ContentStore(
            engine,
            contents.port,
            page_layout=contents.page_layout,
            feature_layout=contents.feature_layout,
        )
        for outlet in self._outlets:
            outlet.open_for(store)
        return Puller(
            store,
            self._transport,
            page_tokens=self._page_tokens,
            book=self._book,
            keeps_pages=contents.keeps_pages,
        )

    async def close(self) -> None:
        """Ends the connections to other workers, and hands nothing out any more."""
        for outlet in self._outlets:
            await outlet.close()
        await self._transport.close()
