"""A server that imitates the Hugging Face Hub, as far as `huggingface_hub` reads datasets and tokenizers."""

import collections
import contextlib
import hashlib
import http.server
import json
import pathlib
import re
import threading
import urllib.parse
from collections.abc import Callable, Iterator
from http import HTTPStatus
from typing import Any

__all__ = ["HubServer", "running"]

_COMMIT = "0123456789abcdef0123456789abcdef01234567"
_API = re.compile(r"/api/(?P<kind>datasets|models)/(?P<repo>[^/]+/[^/]+)(?P<rest>/.*)?")
_RESOLVE = re.compile(r"/(datasets/)?(?P<repo>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<path>.+)")
_RANGE = re.compile(r"bytes=(?P<first>\d+)-(?P<last>\d+)")


class HubServer(http.server.ThreadingHTTPServer):
    """Serves the repositories in a folder, `ORG/NAME`, on a port of this machine.

    As on the Hub, the address of a file redirects to another host, which answers requests for ranges of bytes.

    Attributes:
        folder: the folder.
        requests: number of requests for the content of each file.
        fault: called with the path of each request before it is answered. It returns the status to answer with,
            `DROP` for a connection that ends in the middle of the content, or None for the true answer.
    """

    DROP = -1

    def __init__(self, folder: pathlib.Path):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder = folder
        self.requests: collections.Counter[str] = collections.Counter()
        self.fault: Callable[[str], int | None] = lambda path: None

    @property
    def url(self) -> str:
        """Address of the server, for HF_ENDPOINT."""
        return f"http://127.0.0.1:{self.server_port}"


@contextlib.contextmanager
def running(folder: pathlib.Path) -> Iterator[HubServer]:
    with HubServer(folder) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


class _Handler(http.server.BaseHTTPRequestHandler):
    server: HubServer
    protocol_version = "HTTP/1.1"  # connections are kept, as by the Hub

    def log_message(self, *_):
        pass

    def do_HEAD(self):
        self._answer()

    def do_GET(self):
        self._answer()

    def _answer(self) -> None:
        path = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path)
        fault = self.server.fault(path)
        if fault is not None and fault != HubServer.DROP:
            self._send(fault, b"Sorry, something is wrong.")
        elif api := _API.fullmatch(path):
            self._describe(api["repo"], api["rest"] or "")
        elif resolve := _RESOLVE.fullmatch(path):
            self._redirect(resolve["repo"], resolve["path"])
        elif path.startswith("/cdn/"):
            self._content(path.removeprefix("/cdn/"), drop=fault == HubServer.DROP)
        else:
            self._send(HTTPStatus.NOT_FOUND)

    def _describe(self, repo: str, rest: str) -> None:
        root = self.server.folder / repo
        if not root.is_dir():
            # The Hub does not tell whether a repository is missing or private.
            self._send(HTTPStatus.UNAUTHORIZED, headers={"X-Error-Code": "RepoNotFound"})
        elif rest.startswith("/tree/"):
            _, _, _, *parts = rest.split("/")
            below = root.joinpath(*parts)
            recursive = "recursive=true" in self.path.lower()
            if not below.is_dir():
                self._send(HTTPStatus.NOT_FOUND, headers={"X-Error-Code": "EntryNotFound"})
                return
            found = sorted(below.rglob("*") if recursive else below.iterdir())
            self._send_json([_entry(path, root) for path in found])
        else:  # of a revision, or of none
            files = sorted(path for path in root.rglob("*") if path.is_file())
            siblings = [{"rfilename": str(path.relative_to(root))} for path in files]
            self._send_json({"id": repo, "sha": _COMMIT, "private": False, "tags": [], "siblings": siblings})

    def _redirect(self, repo: str, name: str) -> None:
        path = self.server.folder / repo / name
        if not path.is_file():
            self._send(HTTPStatus.NOT_FOUND, headers={"X-Error-Code": "EntryNotFound"})
            return
        headers = {
            "Location": f"http://localhost:{self.server.server_port}/cdn/{repo}/{urllib.parse.quote(name)}",
            "X-Repo-Commit": _COMMIT,
            "X-Linked-Size": str(path.stat().st_size),
            "X-Linked-ETag": f'"{hashlib.sha256(path.read_bytes()).hexdigest()}"',
        }
        self._send(HTTPStatus.FOUND, headers=headers)

    def _content(self, name: str, *, drop: bool) -> None:
        self.server.requests[name] += 1
        content, status = (self.server.folder / name).read_bytes(), HTTPStatus.OK
        headers = {"Accept-Ranges": "bytes"}
        if part := _RANGE.fullmatch(self.headers.get("Range", "")):
            first, last, size = int(part["first"]), int(part["last"]), len(content)
            content, status = content[first : last + 1], HTTPStatus.PARTIAL_CONTENT
            headers["Content-Range"] = f"bytes {first}-{first + len(content) - 1}/{size}"
        self._send(status, content, headers, length=len(content) // 2 if drop else None)

    def _send_json(self, value: Any) -> None:
        self._send(HTTPStatus.OK, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _send(
        self,
        status: int,
        body: bytes = b"",
        headers: dict[str, str] | None = None,
        *,
        length: int | None = None,
    ) -> None:
        """Sends an answer; if `length` is given, only so much of its body, and then ends the connection."""
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[:length])
        self.close_connection = length is not None


def _entry(path: pathlib.Path, root: pathlib.Path) -> dict[str, Any]:
    name = path.relative_to(root).as_posix()
    oid = hashlib.sha1(name.encode()).hexdigest()
    if path.is_dir():
        return {"type": "directory", "path": name, "size": 0, "oid": oid}
    return {"type": "file", "path": name, "size": path.stat().st_size, "oid": oid}
