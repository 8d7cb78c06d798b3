"""A source that misbehaves: what is recovered from, what pauses, and that nothing corrupt is ever promoted."""

import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import pytest

from mference_core.errors import DigestMismatch, InstallError, SourceError
from mference_core.install.ranges import RangeRequest
from mference_core.install.saved import decode_saved
from mference_core.testing.fake_hub import Answer, FakeHub
from mference_core.testing.toy_installs import (
    QUICK,
    beside,
    hub_of,
    install_from,
    open_whole,
    planned_toy,
)

SHARD = "model-00001-of-00002.safetensors"
OTHER = "model-00002-of-00002.safetensors"


class On:
    """Applies a change to the answer of one range of `SHARD`: the first `times` times it is asked for."""

    def __init__(self, change: Callable[[Answer], None], request: RangeRequest, times: int = 1_000_000) -> None:
        self.change, self.request, self.left = change, request, times
        self.seen = 0

    def __call__(self, answer: Answer) -> None:
        end = self.request.offset + self.request.size
        mine = answer.name == self.request.shard and self.request.offset <= answer.first < end
        if answer.method == "GET" and answer.status == 206 and mine and self.left:
            self.left -= 1
            self.seen += 1
            self.change(answer)


def reset(answer: Answer) -> None:
    answer.stop_after, answer.reset = len(answer.body) // 10, True


def short(answer: Answer) -> None:
    answer.stop_after = len(answer.body) // 2


def stated_short(answer: Answer) -> None:
    answer.body = answer.body[: len(answer.body) // 2]
    answer.headers["Content-Length"] = str(len(answer.body))


def stall(answer: Answer) -> None:
    answer.stop_after, answer.stall_seconds = len(answer.body) // 2, 0.6


def whole(answer: Answer) -> None:
    answer.status = 200
    del answer.headers["Content-Range"]
    answer.body = bytes(50_000)
    answer.headers["Content-Length"] = "50000"


def other_range(answer: Answer) -> None:
    answer.headers["Content-Range"] = answer.headers["Content-Range"].replace("bytes ", "bytes 1")


def other_total(answer: Answer) -> None:
    answer.headers["Content-Range"] += "0"


def no_range(answer: Answer) -> None:
    del answer.headers["Content-Range"]


def gzipped(answer: Answer) -> None:
    answer.headers["Content-Encoding"] = "gzip"


def status(code: int, **headers: str) -> Callable[[Answer], None]:
    def change(answer: Answer) -> None:
        answer.status, answer.body = code, b"busy"
        answer.headers = {"Content-Length": "4", **{k.replace("_", "-"): v for k, v in headers.items()}}

    return change


def garbage(answer: Answer) -> None:
    """Answer something that is not HTTP."""
    answer.headers["Content-Length"] = "-5"


SOON = format_datetime(datetime.now(UTC) - timedelta(seconds=5), usegmt=True)
RECOVERED: dict[str, tuple[Callable[[Answer], None], str]] = {
    "reset": (reset, "cut short|broken off"),
    "short body": (short, "broken off"),
    "short body, stated": (stated_short, "answered with .* bytes"),
    "stall": (stall, "no answer in time"),
    "whole file": (whole, "answered with the whole file"),
    "other range": (other_range, "answered with range 'bytes 1"),
    "other total": (other_total, "answered with range"),
    "no content range": (no_range, "answered with range ''"),
    "gzip": (gzipped, "encoded with gzip; expected plain bytes"),
    "429": (status(429, Retry_After="0"), "answered with status 429"),
    "503": (status(503, Retry_After=SOON), "answered with status 503"),
    "500": (status(500), "answered with status 500"),
    "expired 403": (status(403), "answered with status 403"),
    "expired 401": (status(401), "answered with status 401"),
    "gone": (status(410), "answered with status 410"),
    "malformed": (garbage, "unreachable|broken off|answered with -5 bytes"),
}


def impatient(hub: FakeHub, change: Callable[[Answer], None] = stall) -> Any:
    """Return a hub that is not waited for where it stalls; elsewhere a busy machine may take its time."""
    return hub_of(hub, read_seconds=0.25 if change is stall else 5.0)


def victim(hub: FakeHub) -> RangeRequest:
    """Return a range in the middle of the first shard."""
    requests = [request for request in planned_toy(hub).requests.ranges if request.shard == SHARD]
    hub.clear()
    return requests[len(requests) // 2]


@pytest.mark.parametrize(("change", "_text"), RECOVERED.values(), ids=RECOVERED)
def test_one_bad_answer_costs_one_range(
    hub: FakeHub, output: Path, change: Callable[[Answer], None], _text: str
) -> None:
    """It is asked for again, and nothing else is; of a body that broke off, not even what had come."""
    request = victim(hub)
    hub.faults.append(On(change, request, times=1))
    report = install_from(hub, output, hub=impatient(hub, change))
    open_whole(output)
    assert report.repeated_requests <= (1 if change is not stall else 4)
    counts = hub.coverage(SHARD)
    inside = slice(request.offset, request.offset + request.size)
    assert max(counts[inside]) <= 2
    assert set(counts[: inside.start] + counts[inside.stop :]) == {1}
    assert set(hub.coverage(OTHER)) == {1}


@pytest.mark.parametrize(("change", "text"), RECOVERED.values(), ids=RECOVERED)
def test_what_stays_bad_pauses_and_goes_on_later(
    hub: FakeHub, output: Path, change: Callable[[Answer], None], text: str
) -> None:
    """After four attempts in a row it pauses; a later session fetches what is missing and nothing that was recorded."""
    request = victim(hub)
    hub.faults.append(fault := On(change, request))
    with pytest.raises(SourceError, match=text):
        install_from(hub, output, hub=impatient(hub, change))
    assert QUICK.attempts <= fault.seen <= 2 * QUICK.attempts  # each from the address kept, or from a new one
    assert beside(output) == ["toy.gturbo.partial", "toy.gturbo.resume.json"]
    recorded = recorded_ranges(hub, output)
    assert request.ident not in recorded
    hub.faults.clear()
    hub.clear()
    report = install_from(hub, output)
    assert report.reused_bytes == sum(done.size for done in recorded.values())
    assert_not_sent_again(hub, recorded)
    open_whole(output)
    assert beside(output) == ["toy.gturbo"]


def recorded_ranges(hub: FakeHub, output: Path) -> dict[str, RangeRequest]:
    """Return the ranges that the saved state says are done."""
    path = Path(f"{output}.resume.json")
    saved = decode_saved(path.read_bytes(), path)
    return {request.ident: request for request in planned_toy(hub).requests.ranges if request.ident in saved.ranges}


def assert_not_sent_again(hub: FakeHub, recorded: dict[str, RangeRequest]) -> None:
    """No byte of a recorded range was sent since the hub was cleared."""
    for request in recorded.values():
        assert not any(hub.coverage(request.shard)[request.offset : request.offset + request.size])


# --- bytes that are wrong


def flip(at: int) -> Callable[[Answer], None]:
    def change(answer: Answer) -> None:
        body = bytearray(answer.body)
        body[at] ^= 1
        answer.body = bytes(body)

    return change


def test_byte_flipped_on_the_way_is_found_and_mended(hub: FakeHub, output: Path, tmp_path: Path) -> None:
    """The file's digest tells that it is bad, not where: its ranges are fetched again, those of the other are not."""
    hub.faults.append(On(flip(7), victim(hub), times=1))
    report = install_from(hub, output)
    open_whole(output)
    install_from(hub, tmp_path / "clean.gturbo")
    assert (output / "manifest.json").read_bytes() == (tmp_path / "clean.gturbo/manifest.json").read_bytes()
    assert report.checked_files == 2
    assert max(hub.coverage(OTHER)) == 2  # once per install


def test_byte_that_stays_flipped_is_never_promoted(hub: FakeHub, output: Path) -> None:
    """A corrupt source: refused, the good file's ranges kept, the bad one's forgotten, and mended later."""
    hub.faults.append(On(flip(7), victim(hub)))
    with pytest.raises(DigestMismatch, match=f"{SHARD} sha256 digest is .*, as the hub states"):
        install_from(hub, output)
    assert beside(output) == ["toy.gturbo.partial", "toy.gturbo.resume.json"]
    recorded = recorded_ranges(hub, output)
    assert {request.shard for request in recorded.values()} == {OTHER}
    hub.faults.clear()
    hub.clear()
    install_from(hub, output)
    assert_not_sent_again(hub, recorded)
    assert set(hub.coverage(OTHER)) == {0}  # checked already
    open_whole(output)


@pytest.mark.parametrize("where", ["between copies", "after the last range"])
def test_corruption_of_what_is_not_installed_is_found_too(hub: FakeHub, output: Path, where: str) -> None:
    """Once: read again, no range is. Always: the file is not what the hub says, so nothing of it is promoted."""
    requests = planned_toy(hub).requests.ranges
    if where == "between copies":
        request = next(r for r in requests if r.gap_bytes)
        piece = next(piece for piece in request.pieces if piece.path is None)
        name, at = request.shard, request.offset + piece.start
    else:
        name, at = OTHER, (hub.folder / OTHER).stat().st_size - 5
    hub.clear()
    flipped = list[int]()

    def fault(answer: Answer) -> None:
        inside = answer.name == name and answer.first <= at < answer.first + len(answer.body)
        if answer.status == 206 and answer.method == "GET" and inside and len(flipped) < limit:
            flipped.append(at)
            flip(at - answer.first)(answer)

    limit = 1
    hub.faults.append(fault)
    install_from(hub, output)
    assert flipped
    assert max(hub.coverage(SHARD)) + max(hub.coverage(OTHER)) <= 3
    limit = 1_000_000
    with pytest.raises(DigestMismatch, match=f"{name} sha256 digest"):
        install_from(hub, output.with_name("other.gturbo"))
    assert not output.with_name("other.gturbo").exists()


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors.index.json"])
def test_small_file_that_stays_flipped_is_refused(hub: FakeHub, output: Path, name: str) -> None:
    def fault(answer: Answer) -> None:
        if answer.name == name and answer.method == "GET":
            flip(0)(answer)

    hub.faults.append(fault)
    with pytest.raises(SourceError, match=f"{name} is of digest"):
        install_from(hub, output)
    assert not output.exists()


def test_small_file_flipped_once_is_read_again(hub: FakeHub, output: Path) -> None:
    names = {"config.json", "tokenizer.json", "model.safetensors.index.json", "chat_template.jinja"}

    def fault(answer: Answer) -> None:
        if answer.name in names and answer.method == "GET":
            names.remove(answer.name)
            flip(0)(answer)

    hub.faults.append(fault)
    assert install_from(hub, output).repeated_requests == 4
    open_whole(output)


# --- patience


def test_expired_addresses_are_asked_for_again(hub: FakeHub, output: Path) -> None:
    """Each time the storage's addresses expire, a request finds out and asks the hub: no failure, no byte twice."""
    count, hub.digests = 0, False

    def fault(answer: Answer) -> None:
        nonlocal count
        if answer.storage and answer.method == "GET" and answer.status == 206:
            count += 1
            if count % 3 == 0:
                hub.expire()

    hub.faults.append(fault)
    assert install_from(hub, output, connections=1).repeated_requests == 0
    assert sum(asked.status == 403 for asked in hub.asked) > 2
    assert max(hub.coverage(SHARD)) == max(hub.coverage(OTHER)) == 1


@pytest.mark.parametrize("method", ["HEAD", "GET"])
def test_requests_for_metadata_are_repeated_too(hub: FakeHub, output: Path, method: str) -> None:
    """Every first request for a file is turned away once."""
    seen = set[str]()

    def fault(answer: Answer) -> None:
        if answer.method == method and answer.name not in seen:
            seen.add(answer.name)
            status(503)(answer)

    hub.faults.append(fault)
    report = install_from(hub, output)
    assert report.repeated_requests == len(seen) > 5
    open_whole(output)


def test_retry_after_is_waited_for(hub: FakeHub, output: Path) -> None:
    hub.faults.append(On(status(429, Retry_After="1"), victim(hub), times=1))
    started = time.monotonic()
    install_from(hub, output)
    assert time.monotonic() - started >= 1


@pytest.mark.parametrize("wait", ["3601", "Fri, 31 Dec 2100 23:59:59 GMT", "soon"])
def test_unreasonable_retry_after_pauses_at_once(hub: FakeHub, output: Path, wait: str) -> None:
    hub.faults.append(fault := On(status(503, Retry_After=wait), victim(hub)))
    with pytest.raises(SourceError, match=f"to be asked again after '{wait[:3]}.*; expected at most 3600 seconds"):
        install_from(hub, output)
    assert fault.seen == 1


def test_progress_starts_the_count_of_failures_again(hub: FakeHub, output: Path) -> None:
    """Ten resets in a row, each after some bytes: no pause, and no byte comes twice."""
    request = victim(hub)
    hub.faults.append(On(short, request, times=10))
    retry = QUICK.__class__(first_seconds=0.0, jitter_seconds=0.0, progress_bytes=1)
    report = install_from(hub, output, hub=hub_of(hub, retry=retry))
    assert report.repeated_requests == 10
    assert set(hub.coverage(SHARD)) == {1}
    open_whole(output)


def test_unreachable_hub(hub: FakeHub, output: Path) -> None:
    with pytest.raises(SourceError, match=r"127\.0\.0\.1 is unreachable \(.*refused.*\); expected an answer"):
        install_from(hub, output, hub=hub_of(hub, endpoint="http://127.0.0.1:9"))
    assert beside(output) == []


def test_signed_addresses_stay_out_of_errors(hub: FakeHub, output: Path) -> None:
    hub.faults.append(On(reset, victim(hub)))
    with pytest.raises(SourceError) as caught:
        install_from(hub, output)
    assert "signature" not in str(caught.value)


@pytest.mark.parametrize("xet", [False, True])
def test_storage_that_changes_its_object_is_refused(hub: FakeHub, output: Path, *, xet: bool) -> None:
    """By its entity tag, where the hub states no digest; by the hub's own hash where it states one."""
    hub.digests, request = xet, victim(hub)

    def fault(answer: Answer) -> None:
        if answer.method == "HEAD" and xet:
            answer.headers["X-Xet-Hash"] = "e" * 64
        if answer.storage:
            changed = answer.first >= request.offset and answer.name == request.shard
            answer.headers["ETag"] = f'"{("f" if changed else "e") * 64}"'

    hub.faults.append(fault)
    with pytest.raises(SourceError, match=r"is tagged 'f{64}'; expected 'e{64}', as before"):
        install_from(hub, output, connections=1)
    assert not output.exists()


def test_nothing_is_promoted_by_any_of_these(hub: FakeHub, output: Path) -> None:
    """All the faults at once, at random places, over several sessions: the end is a whole install or a pause."""
    changes = [change for change, _ in RECOVERED.values()] + [flip(0)]
    requests = planned_toy(hub).requests.ranges
    for round_number in range(6):
        hub.faults[:] = [
            On(changes[(7 * i + round_number) % len(changes)], request, times=2) for i, request in enumerate(requests)
        ]
        try:
            install_from(hub, output, hub=impatient(hub))
        except InstallError:
            assert not output.exists()
        else:
            open_whole(output)
            return
    hub.faults.clear()
    install_from(hub, output)
    open_whole(output)
