"""Over TLS, as hubs are: certificates are checked, and no redirect leaves it."""

import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path
from shutil import which

import pytest

from mference_core.errors import SourceError
from mference_core.install import http
from mference_core.testing.fake_hub import FakeHub, Server, serving
from mference_core.testing.toy_installs import beside, hub_of, install_from, open_whole

pytestmark = pytest.mark.skipif(which("openssl") is None, reason="makes its certificate with openssl")
MAKE = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext subjectAltName=DNS:localhost"


@pytest.fixture
def hub(repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    key, certificate = str(tmp_path / "key.pem"), str(tmp_path / "certificate.pem")
    subprocess.run([*MAKE.split(), "-keyout", key, "-out", certificate], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)

    class Encrypted(Server):
        def get_request(self) -> tuple[ssl.SSLSocket, object]:
            connection, address = super().get_request()
            return context.wrap_socket(connection, server_side=True), address

    monkeypatch.setenv("SSL_CERT_FILE", certificate)
    http._trust.cache_clear()
    with serving(FakeHub(repo), server=Encrypted) as fake:
        fake.endpoint = fake.endpoint.replace("http://127.0.0.1", "https://localhost")
        fake.storage = fake.storage.replace("http://127.0.0.1", "https://localhost")
        yield fake
    http._trust.cache_clear()


def test_install_over_tls(hub: FakeHub, output: Path) -> None:
    assert install_from(hub, output).checked_files == 2
    open_whole(output)


def test_redirect_out_of_tls_is_refused(hub: FakeHub, output: Path) -> None:
    hub.storage = hub.storage.replace("https", "http")
    with pytest.raises(SourceError, match="redirect is to http://localhost; expected https"):
        install_from(hub, output)
    assert beside(output) == []


def test_certificate_that_nobody_trusts(hub: FakeHub, output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SSL_CERT_FILE")
    http._trust.cache_clear()
    with pytest.raises(SourceError, match=r"localhost is unreachable \(.*certificate"):
        install_from(hub, output)
    assert not hub.asked


def test_certificate_of_another_host(hub: FakeHub, output: Path) -> None:
    with pytest.raises(SourceError, match=r"127\.0\.0\.1 is unreachable \(.*certificate"):
        install_from(hub, output, hub=hub_of(hub, endpoint=hub.endpoint.replace("localhost", "127.0.0.1")))
