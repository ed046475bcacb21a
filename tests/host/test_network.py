from capsule.host.network import CERTIFICATES, trusted_certificates


def test_the_first_variable_that_is_set_counts(monkeypatch):
    for name in CERTIFICATES:
        monkeypatch.delenv(name, raising=False)
    assert trusted_certificates() is None
    monkeypatch.setenv("SSL_CERT_FILE", "/last.pem")
    monkeypatch.setenv("CURL_CA_BUNDLE", "")
    assert trusted_certificates() == "/last.pem"
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", "/first.pem")
    assert trusted_certificates() == "/first.pem"
