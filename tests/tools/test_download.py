# SPDX-License-Identifier: Apache-2.0
"""Pinned files: downloads that continue, wheelhouses, work without a network."""

import fcntl
import os
import shutil
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.tools.toy import Toy
from tools.common.pin import Project
from tools.source.fetch import fetch


@dataclass
class Index:
    """A package index on the loopback interface that serves one file."""

    name: str
    data: bytes
    ranges: bool = True
    cut: int | None = None  # close the connection after so many bytes
    asked: list[str | None] = field(default_factory=list)  # the Range of each request for the file
    url: str = ""


def handler(index: Index) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *arguments: object) -> None:
            pass

        def do_GET(self) -> None:
            if not self.path.endswith(index.name):
                page = f'<html><body><a href="/{index.name}">{index.name}</a></body></html>'
                self.answer(200, page.encode(), "text/html")
                return
            wanted = self.headers.get("Range")
            index.asked.append(wanted)
            if wanted and index.ranges:
                start = int(wanted.removeprefix("bytes=").removesuffix("-"))
                self.answer(206, index.data[start:], "application/gzip", start)
            else:
                self.answer(200, index.data, "application/gzip")

        def answer(self, status: int, data: bytes, kind: str, start: int | None = None) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(data)))
            if start is not None:
                end = len(index.data) - 1
                self.send_header("Content-Range", f"bytes {start}-{end}/{len(index.data)}")
            self.end_headers()
            self.wfile.write(data if kind == "text/html" else data[: index.cut])

    return Handler


@pytest.fixture
def index(empty: Toy, monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    """Serves the source archive, which is no longer in the downloads."""
    found = Index(empty.archive.name, empty.archive.read_bytes())
    empty.archive.unlink()
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler(found))
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    found.url = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setenv("PIP_INDEX_URL", f"{found.url}/simple/")
    yield found
    server.shutdown()
    server.server_close()
    thread.join(10)


def part_of(toy: Toy) -> Path:
    return toy.downloads / f".{toy.archive.name}.part"


def test_an_interrupted_download_says_where_the_next_one_continues(
    empty: Toy, index: Index
) -> None:
    index.cut = 100
    error = empty.refuse("source", "fetch")
    assert "a download failed" in error
    assert "continues at byte 100" in error
    assert part_of(empty).read_bytes() == index.data[:100]
    assert not empty.archive.exists()


def test_a_download_continues_where_it_stopped(empty: Toy, index: Index) -> None:
    part_of(empty).write_bytes(index.data[:70])
    empty.do("source", "fetch")
    assert index.asked == ["bytes=70-"]
    assert empty.archive.read_bytes() == index.data
    assert not part_of(empty).exists()


def test_a_server_without_ranges_sends_the_whole_file_again(empty: Toy, index: Index) -> None:
    index.ranges = False
    part_of(empty).write_bytes(index.data[:70])
    empty.do("source", "fetch")
    assert empty.archive.read_bytes() == index.data


def test_the_beginning_of_another_file_is_discarded(empty: Toy, index: Index) -> None:
    part_of(empty).write_bytes(b"x" * 70)
    assert "not the pinned one" in empty.refuse("source", "fetch")
    assert not part_of(empty).exists()
    empty.do("source", "fetch")
    assert index.asked == ["bytes=70-", None]


def test_a_part_as_long_as_the_file_is_downloaded_again(empty: Toy, index: Index) -> None:
    part_of(empty).write_bytes(b"x" * len(index.data))
    empty.do("source", "fetch")
    assert index.asked == [None]


def test_progress_counts_every_byte_once(empty: Toy, index: Index) -> None:
    part_of(empty).write_bytes(index.data[:70])
    shown = empty.run("source", "fetch").err
    size = len(index.data)
    assert f"{size}/{size} bytes" in shown


def test_two_processes_download_a_file_once(empty: Toy, index: Index) -> None:
    project = Project(empty.root)
    other = os.open(empty.downloads, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    thread = threading.Thread(target=fetch, args=(project.pin.source, project))
    thread.start()
    thread.join(0.2)
    assert thread.is_alive()
    assert index.asked == []
    empty.archive.write_bytes(index.data)  # what the other process does at its end
    os.close(other)
    thread.join(30)
    assert not thread.is_alive()
    assert index.asked == []


def test_a_wheelhouse_is_used_instead_of_the_index(
    empty: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "file:///nowhere/")
    house = tmp_path / "house"
    shutil.move(empty.downloads, house)
    before = empty.snapshot(house)
    flags = ("--wheelhouse", str(house), "--offline")
    empty.do("source", "fetch", *flags)
    empty.do("series", "apply", "--pristine", *flags)
    empty.do("wheel", "build", "--variant", "cuda", *flags)
    assert "verified: " in empty.do("wheel", "verify", *flags)
    assert not empty.downloads.exists()
    assert empty.snapshot(house) == before


def test_a_file_of_a_wheelhouse_with_another_digest_is_refused(empty: Toy, tmp_path: Path) -> None:
    data = bytearray(empty.archive.read_bytes())
    data[10] ^= 1
    other = tmp_path / empty.archive.name
    other.write_bytes(data)
    error = empty.refuse("source", "fetch", "--wheelhouse", str(tmp_path))
    assert "the wrong digest" in error
    assert str(other) in error


def test_a_file_that_the_wheelhouse_lacks_is_taken_from_the_downloads(
    empty: Toy, tmp_path: Path
) -> None:
    (tmp_path / "house").mkdir()
    empty.do("source", "fetch", "--wheelhouse", str(tmp_path / "house"), "--offline")


@pytest.mark.parametrize(
    "words",
    [
        ("source", "fetch"),
        ("series", "apply", "--pristine"),
        ("wheel", "build", "--variant", "cuda"),
    ],
    ids=" ".join,
)
def test_offline_asks_no_index(empty: Toy, index: Index, words: tuple[str, ...]) -> None:
    if words[0] == "wheel":
        empty.archive.write_bytes(index.data)
        empty.do("series", "apply", "--pristine")
        shutil.rmtree(empty.downloads)
    error = empty.refuse(*words, "--offline")
    assert "--offline forbids the network" in error
    assert "--wheelhouse" in error
    assert index.asked == []


def test_a_missing_wheelhouse_is_refused(empty: Toy) -> None:
    missing = str(empty.root / "missing")
    assert "no such wheelhouse" in empty.refuse("source", "fetch", "--wheelhouse", missing)
