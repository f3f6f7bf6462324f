"""Data at a URL: what is fetched, and every way in which a server or a name may lead astray."""

import gzip
import socket
import threading
import time
from contextlib import contextmanager

import pytest

from inlay.data import downloads, load_task
from inlay.data.data_files import hide_secrets
from inlay.data.downloads import download, is_public
from inlay.data.sources import name_of_source, read_table, use_whole_paths
from inlay.errors import BadData, InlayError, Missing
from inlay.settings.run_config import DataConfig

CSV = b"text,label\n" + b"".join(b"good film %d,yes\nbad film %d,no\n" % (n, n) for n in range(10))


@contextmanager
def serving(*answers):
    """A server that sends these bytes, an answer for each connection; what it was asked is in the list it yields."""
    asked = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(20)

        def work():
            for answer in answers:
                connection, _ = server.accept()
                with connection:
                    asked.append(connection.recv(65536))
                    try:
                        for piece in [answer] if isinstance(answer, bytes) else answer:
                            connection.sendall(piece)
                    except OSError:
                        return

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        yield f"http://data.test:{server.getsockname()[1]}", asked
        thread.join(20)


def reply(body=CSV, status="200 OK", **headers):
    headers = {"Content-Length": len(body), **{name.replace("_", "-"): value for name, value in headers.items()}}
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return f"HTTP/1.1 {status}\r\n{lines}\r\n".encode() + body


@pytest.fixture
def hosts(monkeypatch):
    """Names and their addresses; this machine counts as public, as `data.test` is on it."""
    known = {"data.test": ["127.0.0.1"]}

    def look_up(host, port, *given, **settings):
        if host[0].isdecimal() and host not in known:  # an address
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, port))]
        if host not in known:
            raise socket.gaierror(-2, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in known[host]]

    monkeypatch.setattr(downloads.socket, "getaddrinfo", look_up)
    monkeypatch.setattr(downloads, "is_public", lambda address: address == "127.0.0.1" or is_public(address))
    return known


PRIVATE = [
    *("127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.0.1", "169.254.169.254", "100.64.0.1", "0.0.0.0", "224.0.0.1"),
    *("255.255.255.255", "::1", "::", "fe80::1%eth0", "fd00::1", "ff02::1", "::ffff:127.0.0.1", "::ffff:10.0.0.1"),
    *("64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "2002:7f00:1::", "::7f00:1", "198.18.0.1", "240.0.0.1", "fec0::1"),
]


@pytest.mark.parametrize("address", PRIVATE)
def test_addresses_of_this_network_are_not_public(address):
    assert not is_public(address)


@pytest.mark.parametrize("address", ["8.8.8.8", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"])
def test_addresses_of_the_web_are_public(address):
    assert is_public(address)


def test_a_url_is_read_as_a_file_is(hosts):
    with serving(reply()) as (url, asked):
        task = load_task(DataConfig(f"{url}/a%20b/mail.csv?token=secret"), "task")
    assert len(task.train) + len(task.dev) == 20
    assert b"GET /a%20b/mail.csv?token=secret HTTP/1.1" in asked[0]
    assert b"Host: data.test" in asked[0]
    assert "secret" not in "".join(task.notes)
    assert name_of_source("https://data.test/a/mail.csv.gz?x=1") == "mail"
    assert use_whole_paths(DataConfig("https://data.test/mail.csv")).source == "https://data.test/mail.csv"


SECRET_LINKS = [
    ("https://data.test/a.csv?X-Amz-Signature=s3cret", "https://data.test/a.csv"),
    ("https://data.test/a.csv#s3cret", "https://data.test/a.csv"),
    ("https://me:s3cret@data.test:8080/v@1/a.csv", "https://data.test:8080/v@1/a.csv"),
    ("https://me:s3/cret@data.test/a.csv", "https://data.test/a.csv"),
    ("https://me:s3?cret@data.test/a.csv", "https://data.test/a.csv"),
    ("https://s3cret@data.test", "https://data.test"),
]


@pytest.mark.parametrize(("link", "shown"), SECRET_LINKS)
def test_what_is_secret_in_a_link_is_neither_shown_nor_kept(link, shown):
    kept = use_whole_paths(DataConfig(link, dev=link, test=link))
    assert hide_secrets(link) == shown
    for place in (kept.source, kept.dev, kept.test):
        assert place.startswith(f"{shown}#")
        assert not any(part in place for part in ("s3", "cret", "Signature"))
    assert use_whole_paths(kept) == kept  # kept again it stays
    assert use_whole_paths(DataConfig(f"{link}x")).source != kept.source  # another link is told from it
    assert "s3" not in name_of_source(link)


def test_what_is_kept_of_a_link_proves_no_guess_of_its_password():
    first, second = (
        use_whole_paths(DataConfig(f"https://me:{word}@data.test/a.csv?x=1")) for word in ("apple", "pear")
    )
    assert first.source == second.source


@pytest.mark.parametrize("link", ["https://data.test/v@1/a.csv", "http://[::1]:80/x@y", "https://data.test:80/a@b"])
def test_a_link_without_secrets_is_kept_as_it_is(link):
    assert hide_secrets(link) == link == use_whole_paths(DataConfig(link)).source


@pytest.mark.parametrize("link", ["https://me:s3cret@data.test/a.csv", "https://me:s3/cret@data.test/a.csv"])
def test_a_refused_link_is_named_without_its_password(link):
    with pytest.raises(Missing) as raised:
        download(link)
    assert not any(part in raised.value.message + str(raised.value.hint) for part in ("s3", "cret"))


@pytest.mark.parametrize(
    ("path", "answer"),
    [
        ("/mail.csv.gz", reply(gzip.compress(CSV))),
        ("/mail.csv", reply(gzip.compress(CSV), Content_Encoding="gzip")),
        ("/export", reply(Content_Type="text/csv; charset=utf-8")),
        ("/export", reply(Content_Type="application/octet-stream")),
        ("/mail.csv", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(CSV), CSV)),
        ("/mail.csv", b"HTTP/1.0 200 OK\r\n\r\n" + CSV),
    ],
)
def test_what_servers_send_is_understood(hosts, path, answer):
    with serving(answer) as (url, _):
        assert len(read_table(url + path).rows) == 20


def test_redirects_are_followed(hosts):
    with serving(reply(b"", "302 Found", Location="/b.csv"), reply()) as (url, asked):
        assert len(read_table(f"{url}/a").rows) == 20
    assert b"GET /b.csv" in asked[1]


@pytest.mark.parametrize(
    ("location", "words"),
    [
        ("http://internal.test/x", "at 10.0.0.7, which is not on the public network"),
        ("http://169.254.169.254/latest/meta-data", "at 169.254.169.254, which is not on the public network"),
        ("http://mixed.test/x", "at 10.0.0.8, which is not on the public network"),
        ("file:///etc/passwd", "leads to `file:`"),
        ("ftp://data.test/x", "leads to `ftp:`"),
        ("http://user:word@data.test/x", "a URL with a name or password"),
        ("//nowhere.test/x", "no address found for `nowhere.test`"),
    ],
)
def test_redirects_lead_nowhere_else(hosts, location, words):
    hosts |= {"internal.test": ["10.0.0.7"], "169.254.169.254": ["169.254.169.254"]}
    hosts["mixed.test"] = ["8.8.8.8", "10.0.0.8"]
    with serving(reply(b"", "302 Found", Location=location)) as (url, asked), pytest.raises(Missing, match=words):
        download(f"{url}/a.csv")
    assert len(asked) == 1


def test_a_name_is_looked_up_once_and_its_checked_address_is_connected_to(hosts, monkeypatch):
    """A name server that says a public address first and a private one later gets the public one connected to."""
    said = iter((["127.0.0.1"], ["10.0.0.1"]))
    monkeypatch.setitem(hosts, "data.test", next(said))
    reached, connect = [], socket.create_connection

    def note(address, *given, **settings):
        hosts["data.test"] = next(said)
        reached.append(address[0])
        return connect(address, *given, **settings)

    monkeypatch.setattr(downloads.socket, "create_connection", note)
    with serving(reply()) as (url, _):
        download(f"{url}/a.csv")
    assert reached == ["127.0.0.1"]


def test_endless_redirects_end(hosts):
    with serving(*[reply(b"", "301 Moved", Location="/a.csv")] * 6) as (url, asked):
        with pytest.raises(Missing, match="redirects more than 5 times"):
            download(f"{url}/a.csv")
        assert len(asked) == 6


@pytest.mark.parametrize(
    "url",
    ["ftp://data.test/a.csv", "file:///etc/passwd", "s3://bucket/a.csv", "gopher://data.test"],
)
def test_other_schemes_are_refused(url):
    with pytest.raises(Missing, match="no way to read"):
        read_table(url)


@pytest.mark.parametrize("url", ["https://", "http://[::1", "http://data.test:99999/a.csv", "https://u:p@data.test/a"])
def test_a_url_that_is_none_is_refused(hosts, url):
    with pytest.raises(Missing) as caught:
        read_table(url)
    assert caught.value.hint


@pytest.mark.parametrize("header", [b"Content-Length: 99999999\r\n", b""])
def test_a_url_that_never_ends_is_refused_at_the_limit(hosts, monkeypatch, header):
    monkeypatch.setattr(downloads, "MOST_BYTES", 1_000_000)
    endless = (piece for piece in [b"HTTP/1.1 200 OK\r\n" + header + b"\r\n", *[b"a,b\n" * 10_000] * 100])
    with serving(endless) as (url, _), pytest.raises(BadData, match="longer than 1,000,000 bytes"):
        download(f"{url}/a.csv")


@pytest.mark.parametrize("start", [b"", b"HTTP/1.1 200 OK\r\nX: ", b"HTTP/1.1 200 OK\r\n\r\n"])
def test_a_server_that_drips_is_cut_off(hosts, monkeypatch, start):
    monkeypatch.setattr(downloads, "MOST_SECONDS", 0.5)

    def drip():
        yield start
        for _ in range(100):
            time.sleep(0.05)
            yield b"a"

    began = time.monotonic()
    with serving(drip()) as (url, _), pytest.raises(BadData, match="was not read within"):
        download(f"{url}/a.csv")
    assert time.monotonic() - began < 4


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (reply(b"", "404 Not Found"), "answered 404 Not Found"),
        (reply(b"", "503 Busy"), "answered 503 Busy"),
        (reply(b"", "302 Found"), "without saying where to go"),
        (reply(b""), "the answer is empty"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\nshort", "broke off after 5 of 500 bytes"),
        (b"nonsense\r\n\r\n", "cannot be read"),
        (b"", "cannot be read"),
    ],
)
def test_answers_without_data_are_said(hosts, answer, words):
    with serving(answer) as (url, _), pytest.raises(InlayError, match=words) as caught:
        download(f"{url}/a.csv")
    assert caught.value.hint


def test_a_page_instead_of_data_is_said(hosts):
    with serving(reply(b"<!DOCTYPE html><html>...")) as (url, _), pytest.raises(BadData, match="this is a web page"):
        read_table(f"{url}/blob/mail.csv")


def test_a_query_is_sent_quoted_and_never_shown(hosts):
    with serving(reply()) as (url, asked):
        assert len(read_table(f"{url}/mail.csv?name=a b&key=sécret%20&x=?").rows) == 20
    assert b"GET /mail.csv?name=a%20b&key=s%C3%A9cret%20&x=? HTTP/1.1" in asked[0]
