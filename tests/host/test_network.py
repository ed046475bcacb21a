import socketserver
import threading

import pytest
import requests

from capsule.host import network
from capsule.host.network import CERTIFICATES, HttpClient, trusted_certificates


def test_the_first_variable_that_is_set_counts(monkeypatch):
    for name in CERTIFICATES:
        monkeypatch.delenv(name, raising=False)
    assert trusted_certificates() is None
    monkeypatch.setenv("SSL_CERT_FILE", "/last.pem")
    monkeypatch.setenv("CURL_CA_BUNDLE", "")
    assert trusted_certificates() == "/last.pem"
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", "/first.pem")
    assert trusted_certificates() == "/first.pem"


@pytest.fixture
def serve(monkeypatch):
    """A function that starts a server with an answer to each request; it returns its address."""
    monkeypatch.setattr(network, "_RETRIES", network._RETRIES.new(backoff_factor=0.0))
    servers = []

    def start(*answers):
        left = iter(answers)

        class Handler(socketserver.StreamRequestHandler):
            def handle(self):
                while self.rfile.readline().strip():
                    pass
                self.wfile.write(next(left))

        server = socketserver.TCPServer(("127.0.0.1", 0), Handler)
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        servers.append((server, thread, left))
        return f"http://127.0.0.1:{server.server_address[1]}/"

    yield start
    for server, thread, left in servers:
        server.shutdown()
        thread.join()
        server.server_close()
        assert list(left) == []


# The header keeps the client from sending its next request over a connection that is being closed.
CLOSED, OVERLOADED = b"", b"HTTP/1.1 503 Busy\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


def get(address, method="GET"):
    with HttpClient() as client:
        return client._session.request(method, address, timeout=600)


@pytest.mark.parametrize("failure", [CLOSED, OVERLOADED])
def test_a_request_that_a_server_does_not_answer_is_sent_again(serve, failure):
    assert get(serve(failure, failure, ANSWER)).text == "ok"


def test_a_server_that_never_answers_is_given_up(serve):
    assert get(serve(*[OVERLOADED] * 3)).status_code == 503
    with pytest.raises(requests.ConnectionError):
        get(serve(*[CLOSED] * 3))


def test_a_request_that_changes_something_is_sent_once(serve):
    with pytest.raises(requests.ConnectionError):
        get(serve(CLOSED), "POST")
