"""Finished ranges on their way to the record: bounded in number, synced together, a failure told at once."""

from collections.abc import Iterable
from pathlib import Path
from queue import Queue
from threading import Event, Thread

import pytest
from attrs import define, field

from mference_core.install.files import OutputFiles
from mference_core.install.ranges import RangePlan, RangeRequest
from mference_core.install.settling import MOST_UNSETTLED, Settler


def request(number: int) -> RangeRequest:
    return RangeRequest(ident=f"range-{number:08d}", shard="s", offset=number, size=1, copies=())


@define(kw_only=True)
class Slow(OutputFiles):
    """Files whose sync waits until it is let go; digests are the ranges' names."""

    plan: RangePlan = RangePlan(ranges=(), outputs={}, index_sha256="")
    syncs: list[list[str]] = field(factory=list)
    under_way: Event = field(factory=Event)
    go: Event = field(factory=Event)
    error: OSError | None = None

    def sync(self, requests: Iterable[RangeRequest]) -> None:
        self.syncs.append([request.ident for request in requests])
        self.under_way.set()
        assert self.go.wait(10)
        if self.error is not None:
            raise self.error

    def digest(self, request: RangeRequest) -> str:
        return f"digest of {request.ident}"


@pytest.fixture
def files(tmp_path: Path) -> Slow:
    return Slow(root=tmp_path)


def test_ranges_share_a_sync_and_are_recorded_in_order(files: Slow) -> None:
    found, told = list[tuple[str, str]](), Queue[BaseException]()
    settler = Settler(outputs=files, settled=lambda done: found.extend((r.ident, d) for r, d in done), failed=told.put)
    settler.add(request(0))
    assert files.under_way.wait(10)
    for number in range(1, 5):
        settler.add(request(number))
    assert not found
    files.go.set()
    settler.finish()
    names = [request(number).ident for number in range(5)]
    assert files.syncs == [names[:1], names[1:]]
    assert found == [(name, f"digest of {name}") for name in names]
    assert told.empty()


def test_no_more_than_so_many_are_unrecorded(files: Slow) -> None:
    added, done = Queue[int](), Event()
    settler = Settler(outputs=files, settled=lambda _: None, failed=lambda _: None)

    def add() -> None:
        for number in range(MOST_UNSETTLED + 1):
            settler.add(request(number))
            added.put(number)
        done.set()

    thread = Thread(target=add)
    thread.start()
    assert [added.get(timeout=10) for _ in range(MOST_UNSETTLED)] == list(range(MOST_UNSETTLED))
    assert not done.wait(0.2)
    files.go.set()
    assert done.wait(10)
    thread.join()
    settler.finish()
    assert sum(map(len, files.syncs)) == MOST_UNSETTLED + 1


def test_a_failure_is_told_at_once_and_ends_it(files: Slow) -> None:
    settled, told = list[object](), Queue[BaseException]()
    settler = Settler(outputs=files, settled=settled.append, failed=told.put)
    files.error = OSError(28, "No space left on device")
    settler.add(request(0))
    assert files.under_way.wait(10)
    settler.add(request(1))
    files.go.set()
    assert told.get(timeout=10) is files.error
    with pytest.raises(OSError, match="No space"):
        settler.finish()
    settler.close()
    assert len(files.syncs) == 1
    assert not settled


def test_a_failed_record_frees_who_waits(files: Slow) -> None:
    failure = OSError(30, "Read-only file system")

    def refuse(_: object) -> None:
        raise failure

    files.go.set()
    settler = Settler(outputs=files, settled=refuse, failed=lambda _: None)
    for number in range(3 * MOST_UNSETTLED):
        settler.add(request(number))
    with pytest.raises(OSError, match="Read-only"):
        settler.finish()
