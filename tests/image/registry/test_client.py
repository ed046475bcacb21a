"""The client against a server that demands tokens, redirects and lies."""

import gzip
import hashlib
import io
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import urllib3
from requests import Response

from capsule.image.registry import client
from capsule.image.registry.client import Descriptor, Repository
from capsule.image.registry.reference import Reference
from tests.refusals import refused

BLOB = b"some bytes of a layer"
DIGEST = f"sha256:{hashlib.sha256(BLOB).hexdigest()}"
AUTH = "Basic YWxpY2U6c2VjcmV0"  # alice:secret


class Server:
    """Answers as ``answers`` says, and keeps what it was asked."""

    def __init__(self):
        self.asked, self.answers = [], {}
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                outer.asked.append((self.path, self.headers.get("Authorization")))
                status, headers, body = outer.answers[self.path.partition("?")[0]](self.headers)
                self.send_response(status)
                for name, value in {"Content-Length": str(len(body)), **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)

            do_POST = do_GET  # noqa: N815

            def log_message(self, *_):
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.host = f"127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()


@pytest.fixture
def server():
    server = Server()
    yield server
    server.http.shutdown()
    server.http.server_close()


@pytest.fixture
def login(tmp_path):
    def write(host):
        (tmp_path / "docker").mkdir(exist_ok=True)
        entry = {host: {"auth": AUTH.removeprefix("Basic ")}}
        (tmp_path / "docker" / "config.json").write_text(json.dumps({"auths": entry}))

    return write


def blob(server):
    with Repository(Reference.parse(f"{server.host}/a/b:1")) as repository:
        return b"".join(repository.blob(Descriptor(DIGEST, len(BLOB))))


def demanding(server, given="t0ken"):
    """Have a server demand a token, which it gives to alice."""
    scope = "repository:a/b:pull"
    challenge = f'Bearer realm="http://{server.host}/token",service="tests",scope="{scope}"'

    def give(headers):
        if headers.get("Authorization") not in (None, AUTH):
            return 401, {}, b"{}"
        return 200, {}, json.dumps({"token": given}).encode()

    def answer(headers):
        if headers.get("Authorization") != "Bearer t0ken":
            return 401, {"WWW-Authenticate": challenge}, b""
        return 200, {}, BLOB

    server.answers = {"/token": give, f"/v2/a/b/blobs/{DIGEST}": answer}


def test_a_token_is_fetched_with_the_login_and_used(server, login):
    demanding(server)
    login(server.host)
    assert blob(server) == BLOB
    paths = [path for path, _ in server.asked]
    assert paths[1] == "/token?service=tests&scope=repository%3Aa%2Fb%3Apull"
    assert [given for _, given in server.asked] == [None, AUTH, "Bearer t0ken"]


def test_a_token_is_fetched_without_a_login(server):
    demanding(server)
    assert blob(server) == BLOB
    assert [given for _, given in server.asked] == [None, None, "Bearer t0ken"]


def test_a_token_that_is_not_accepted_is_the_end(server):
    demanding(server, given="another")
    assert "denies access" in refused("CAP-I403", blob, server)
    assert len(server.asked) == 3


def test_a_login_does_not_follow_a_redirection_to_another_host(server, login):
    demanding(server)
    login(server.host)
    other = Server()
    other.answers = {"/store": lambda _: (200, {}, BLOB)}
    first = server.answers[f"/v2/a/b/blobs/{DIGEST}"]

    def redirect(headers):
        status, found, body = first(headers)
        if status != 200:
            return status, found, body
        # By another name, so that it is another host.
        place = f"http://localhost:{other.http.server_port}/store"
        return 307, {"Location": place}, b""

    server.answers[f"/v2/a/b/blobs/{DIGEST}"] = redirect
    assert blob(server) == BLOB
    assert other.asked == [("/store", None)]
    other.http.shutdown()
    other.http.server_close()


def test_bytes_are_asked_for_as_they_are_stored(server):
    def compressed(headers):
        if "gzip" in headers.get("Accept-Encoding", ""):
            return 200, {"Content-Encoding": "gzip"}, gzip.compress(BLOB)
        return 200, {}, BLOB

    server.answers = {f"/v2/a/b/blobs/{DIGEST}": compressed}
    assert blob(server) == BLOB


def test_plain_http_is_not_used_for_another_machine(server, monkeypatch):
    """Neither for an upload, nor after a redirect."""
    server.answers = {"/upload": lambda _: (201, {}, b""), "/blob": lambda _: (200, {}, BLOB)}
    with Repository(Reference.parse("registry.example.org/a/b:1")) as repository:
        adapter = repository._session.get_adapter("https://registry.example.org")
        answers = []
        monkeypatch.setattr(adapter, "send", lambda request, **_: answers.pop()(request))

        def redirect(status, path):
            def answer(request):
                response = Response()
                response.status_code, response.url, response.request = status, request.url, request
                response.raw = urllib3.HTTPResponse(io.BytesIO(), preload_content=False)
                response.headers["Location"] = f"http://{server.host}{path}"
                return response

            return answer

        answers.append(redirect(307, "/blob"))
        descriptor = Descriptor(DIGEST, len(BLOB))
        assert "plain HTTP" in refused("CAP-I402", lambda: list(repository.blob(descriptor)))
        answers.append(redirect(202, "/upload"))
        assert "plain HTTP" in refused("CAP-I402", repository.push_blob, descriptor, BLOB)
    assert server.asked == []


@pytest.mark.parametrize("body", [b"other bytes of a layer", BLOB[:-1], BLOB + b"!", b""])
def test_other_bytes_than_those_of_the_digest_are_refused(body, server):
    server.answers = {f"/v2/a/b/blobs/{DIGEST}": lambda _: (200, {}, body)}
    refused("CAP-I404", blob, server)


def test_a_manifest_of_another_digest_is_refused(server):
    server.answers = {f"/v2/a/b/manifests/{DIGEST}": lambda _: (200, {}, b"{}")}
    with Repository(Reference.parse(f"{server.host}/a/b@{DIGEST}")) as repository:
        refused("CAP-I404", repository.manifest)


def test_a_manifest_without_an_end_is_refused(server):
    server.answers = {"/v2/a/b/manifests/1": lambda _: (200, {}, bytes(5 << 20))}
    with Repository(Reference.parse(f"{server.host}/a/b:1")) as repository:
        refused("CAP-I404", repository.manifest)


def test_a_failure_is_named_with_what_the_registry_says(server):
    server.answers = {f"/v2/a/b/blobs/{DIGEST}": lambda _: (500, {}, b"disk is full")}
    message = refused("CAP-I402", blob, server)
    assert "500" in message
    assert "disk is full" in message


def test_a_registry_that_does_not_answer_is_named_with_the_cause_alone(server):
    server.http.shutdown()
    server.http.server_close()
    message = refused("CAP-I402", blob, server)
    assert message == f"{server.host}/a/b:1 is not available: connection refused"


def test_an_answer_that_ends_early_is_an_unavailable_registry(server):
    longer = {"Content-Length": str(len(BLOB) + 1), "Connection": "close"}
    server.answers = {f"/v2/a/b/blobs/{DIGEST}": lambda _: (200, longer, BLOB)}
    assert "is not available" in refused("CAP-I402", blob, server)


@pytest.mark.parametrize("body", [b"<html>Sign in</html>", b'["t0ken"]', b"[" * 99_999])
def test_something_else_than_a_token_is_named(body, server):
    demanding(server)
    server.answers["/token"] = lambda _: (200, {}, body)
    message = refused("CAP-I402", blob, server)
    assert f"http://{server.host}/token answers with something else than a token" in message


def test_an_answer_in_place_of_a_token_is_not_read_to_its_end(server, monkeypatch):
    monkeypatch.setattr(client, "MAX_DOCUMENT_BYTES", 1000)
    demanding(server)
    server.answers["/token"] = lambda _: (200, {}, b" " * 1000 + b'{"token": "t0ken"}')
    assert "something else than a token" in refused("CAP-I402", blob, server)


def test_an_upload_to_a_malformed_address_is_named(server):
    place = {"Location": "http://[x/upload"}
    server.answers = {"/v2/a/b/blobs/uploads/": lambda _: (202, place, b"")}
    with Repository(Reference.parse(f"{server.host}/a/b:1")) as repository:
        message = refused("CAP-I402", repository.push_blob, Descriptor(DIGEST, len(BLOB)), BLOB)
    assert "Invalid IPv6 URL" in message


def test_a_server_of_tokens_that_fails_does_not_deny_access(server):
    demanding(server)
    server.answers["/token"] = lambda _: (503, {}, b"")
    assert f"http://{server.host}/token: 503" in refused("CAP-I402", blob, server)


@pytest.mark.parametrize(
    "text", ["[]", "{", '{"auths": {"HOST": {"auth": "not base64"}}}', "[" * 99_999]
)
def test_a_malformed_configuration_file_is_named(text, server, tmp_path):
    (tmp_path / "docker").mkdir()
    place = tmp_path / "docker" / "config.json"
    place.write_text(text.replace("HOST", server.host))
    assert str(place) in refused("CAP-I403", blob, server)
