"""Who may ask: names, origins and tokens."""

import pytest
from starlette.datastructures import Headers

from mference_core.errors import UsageError
from mference_core.server.errors import ApiError
from mference_core.server.safety import Policy

TOKEN = "correct-horse"  # noqa: S105  a test's own
LOCAL = Policy()
OPEN = Policy.of("0.0.0.0", ["box.example"], ["https://app.example"], TOKEN)  # noqa: S104


def status(
    policy: Policy, *, method: str = "POST", path: str = "/v1/models", page: bool = False, **headers: str
) -> int:
    named = {name.replace("_", "-"): value for name, value in ({"host": "localhost:8080"} | headers).items()}
    try:
        policy.check(method, path, Headers(named), page=page)
    except ApiError as error:
        return error.status
    return 200


@pytest.mark.parametrize(
    ("host", "code"),
    [
        ("localhost", 200),
        ("LOCALHOST:8080", 200),
        ("127.0.0.1:8080", 200),
        ("127.8.8.8", 200),
        ("[::1]:8080", 200),
        ("evil.example", 403),
        ("localhost.evil.example", 403),
        ("127.0.0.1.evil.example:8080", 403),
        ("192.168.1.5:8080", 403),
        ("", 403),
        ("localhost:8080:1", 403),
        ("localhost@evil.example", 403),
        ("localhost,evil.example", 403),
        ("0.0.0.0", 403),  # noqa: S104
    ],
)
def test_on_loopback_only_this_machines_names_are_hosts(host: str, code: int) -> None:
    assert status(LOCAL, host=host) == code


def test_a_host_is_there_once() -> None:
    headers = Headers(raw=[(b"host", b"localhost"), (b"host", b"localhost")])
    with pytest.raises(ApiError, match="not served here"):
        LOCAL.check("GET", "/health", headers, page=False)
    with pytest.raises(ApiError, match="not served here"):
        LOCAL.check("GET", "/health", Headers({}), page=False)


def test_names_can_be_added() -> None:
    policy = Policy.of("127.0.0.1", ["My.Box"], [], None)
    assert status(policy, host="my.box:8080") == 200
    assert status(policy, host="other.box") == 403


@pytest.mark.parametrize(
    ("origin", "code"),
    [
        ("http://localhost:8080", 200),
        ("http://localhost:8081", 403),
        ("https://evil.example", 403),
        ("null", 403),
        ("file://", 403),
    ],
)
def test_only_the_servers_own_pages_may_ask(origin: str, code: int) -> None:
    assert status(LOCAL, origin=origin) == code
    assert status(LOCAL, origin=origin, method="GET") == code


def test_foreign_pages_are_known_even_without_an_origin() -> None:
    assert status(LOCAL, method="GET", sec_fetch_site="cross-site", sec_fetch_mode="no-cors") == 403
    assert status(LOCAL, method="GET", sec_fetch_site="same-site", sec_fetch_mode="no-cors") == 403
    assert status(LOCAL, method="GET", sec_fetch_site="cross-site", sec_fetch_mode="navigate") == 403
    assert (
        status(LOCAL, method="GET", path="/", page=True, sec_fetch_site="cross-site", sec_fetch_mode="navigate") == 200
    )
    assert status(LOCAL, method="GET", sec_fetch_site="none") == 200
    assert status(LOCAL, method="GET", sec_fetch_site="same-origin") == 200


def test_an_allowed_origin_may_ask_and_read() -> None:
    bearer = f"Bearer {TOKEN}"
    assert status(OPEN, host="10.0.0.2", origin="https://app.example", authorization=bearer) == 200
    assert status(OPEN, host="10.0.0.2", origin="https://app.example.evil", authorization=bearer) == 403
    assert OPEN.cors("https://app.example")["access-control-allow-origin"] == "https://app.example"
    assert OPEN.cors("https://other.example") == {}
    assert LOCAL.cors("http://localhost:8080") == {}


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({"authorization": f"Bearer {TOKEN}"}, 200),
        ({"authorization": f"bearer  {TOKEN} "}, 200),
        ({"x_api_key": TOKEN}, 200),
        ({}, 401),
        ({"authorization": TOKEN}, 401),
        ({"authorization": f"Basic {TOKEN}"}, 401),
        ({"authorization": "Bearer "}, 401),
        ({"authorization": f"Bearer {TOKEN}x"}, 401),
        ({"x_api_key": TOKEN[:-1]}, 401),
        ({"x_api_key": "\xff"}, 401),
    ],
)
def test_a_token_is_needed_where_there_is_one(headers: dict[str, str], code: int) -> None:
    assert status(OPEN, host="10.0.0.2", **headers) == code


def test_what_holds_no_secret_needs_no_token() -> None:
    assert status(OPEN, host="box.example", method="GET", path="/health") == 200
    assert status(OPEN, host="box.example", method="GET", path="/", page=True) == 200
    assert status(OPEN, host="box.example", method="GET", path="/metrics") == 401
    assert status(OPEN, host="box.example", method="GET", path="/figures") == 401
    assert status(OPEN, host="evil.example", method="GET", path="/health") == 403


def test_the_token_is_in_no_text() -> None:
    assert TOKEN not in repr(OPEN)


@pytest.mark.parametrize(
    ("bind", "origins", "token", "said"),
    [
        ("0.0.0.0", [], None, "without a token"),  # noqa: S104
        ("::", [], None, "without a token"),
        ("192.168.1.5", [], None, "without a token"),
        ("box.example", [], None, "without a token"),
        ("127.0.0.1", ["*"], None, "allow-origin"),
        ("127.0.0.1", ["app.example"], None, "allow-origin"),
        ("127.0.0.1", ["https://app.example/path"], None, "allow-origin"),
        ("127.0.0.1", [], "short", "--token"),
        ("127.0.0.1", [], "with a space", "--token"),
        ("127.0.0.1", [], "", "--token"),
    ],
)
def test_a_policy_that_lets_strangers_in_is_refused(
    bind: str, origins: list[str], token: str | None, said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        Policy.of(bind, [], origins, token)


@pytest.mark.parametrize("bind", ["127.0.0.1", "::1", "localhost", "127.1.2.3"])
def test_loopback_needs_no_token(bind: str) -> None:
    assert Policy.of(bind, [], [], None).token is None
