"""A hub on the loopback address: one repository, with the endpoints that its client asks for."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "0123456789abcdef0123456789abcdef01234567"
REPOSITORY = "MiniMaxAI/MiniMax-M3-Tiny"


@dataclass(slots=True)
class Hub:
    """What the server serves, and what it saw.

    Attributes:
        files: name -> content.
        refuse: file whose content is refused with 403.
        cut: file whose next answer ends halfway.
        error: (status, X-Error-Code) for every request about the repository.
        ranges: Range headers asked for, by file.
    """

    files: dict[str, bytes]
    address: str = ""
    refuse: str = ""
    cut: str = ""
    error: tuple[int, str] | None = None
    ranges: dict[str, list[str]] = field(default_factory=dict)
    fetched: list[str] = field(default_factory=list)


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    """Serves in a thread until the block ends."""

    class Handler(_Handler):
        served = hub

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    served: Hub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _answer(self, *, with_body: bool) -> None:
        path = self.path.split("?")[0]
        if self.served.error is not None:
            status, code = self.served.error
            self._send(status, b"{}", {"X-Error-Code": code}, with_body=with_body)
        elif not re.match(rf"(/api/models)?/{REPOSITORY}(/|$)", path):
            headers = {"X-Error-Code": "RepoNotFound"}
            self._send(404, b"{}", headers, with_body=with_body)
        elif path.startswith("/api/"):
            self._api(path, with_body=with_body)
        else:
            self._file(path.removeprefix(f"/{REPOSITORY}/resolve/"), with_body=with_body)

    def _api(self, path: str, *, with_body: bool) -> None:
        rest = path.removeprefix(f"/api/models/{REPOSITORY}").split("/")
        if "tree" in rest:
            body: object = [
                {"type": "file", "path": name, "size": len(data), "oid": _etag(data)}
                for name, data in self.served.files.items()
            ]
        elif rest[-1] in ("", "main", COMMIT):
            siblings = [{"rfilename": name} for name in self.served.files]
            body = {"id": REPOSITORY, "sha": COMMIT, "siblings": siblings}
        else:
            headers = {"X-Error-Code": "RevisionNotFound"}
            self._send(404, b"{}", headers, with_body=with_body)
            return
        self._send(200, json.dumps(body).encode(), {}, with_body=with_body)

    def _file(self, path: str, *, with_body: bool) -> None:
        name = path.split("/", 1)[1]
        data = self.served.files[name]
        headers = {"ETag": f'"{_etag(data)}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        if not with_body:
            self._send(200, data, headers, with_body=False)
            return
        self.served.fetched.append(name)
        if name == self.served.refuse:
            self._send(403, b"{}", {}, with_body=True)
            return
        status, asked = 200, self.headers.get("Range")
        if asked:
            self.served.ranges.setdefault(name, []).append(asked)
            first = int(re.match(r"bytes=(\d+)-", asked)[1])  # type: ignore[index]
            headers["Content-Range"] = f"bytes {first}-{len(data) - 1}/{len(data)}"
            status, data = 206, data[first:]
        if name == self.served.cut:
            self.served.cut = ""
            self._send(status, data[: len(data) // 2], headers, with_body=True, length=len(data))
            self.wfile.flush()
            self.close_connection = True
            return
        self._send(status, data, headers, with_body=True)

    def _send(
        self,
        status: int,
        data: bytes,
        headers: dict[str, str],
        *,
        with_body: bool,
        length: int | None = None,
    ) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(data) if length is None else length))
        self.end_headers()
        if with_body:
            self.wfile.write(data)


def _etag(data: bytes) -> str:
    return hashlib.sha1(data, usedforsecurity=False).hexdigest()
