"""Ranges of an install that is there: listed with their digests, and fetched again in place."""

from pathlib import Path

import pytest

from mference_core.errors import InstallError
from mference_core.install.existing import fetch_ranges, range_digests
from mference_core.install.remote import connected
from mference_core.testing.fake_hub import REPO, FakeHub
from mference_core.testing.toy_installs import hub_of, install_from, open_whole, planned_toy


def test_a_damaged_range_is_found_and_fetched_again_alone(hub: FakeHub, output: Path) -> None:
    install_from(hub, output)
    plan = planned_toy(hub)
    good = dict(range_digests(output, plan.requests))
    assert list(good) == list(plan.requests.ranges)
    victims = [plan.requests.ranges[0], plan.requests.ranges[-1]]
    for request in victims:
        copy = max(request.copies, key=lambda copy: copy.size)
        with (output / copy.dest_path).open("r+b") as file:
            file.seek(copy.dest_offset)
            file.write(b"damaged")
    now = dict(range_digests(output, plan.requests))
    assert [request for request in good if now[request] != good[request]] == victims
    assert victims[0].gap_bytes
    hub.clear()
    with connected(hub_of(hub), REPO, "main") as client:
        found = fetch_ranges(client, plan.remote.files, plan.requests, output, victims)
    assert found == {request.ident: good[request] for request in victims}
    for request in plan.requests.ranges:
        sent = hub.coverage(request.shard)[request.offset : request.offset + request.size]
        assert set(sent) == ({1} if request in victims else {0})
    open_whole(output)
    assert not (output / ".remote-metadata").exists()


def test_named_ranges_and_files_cut_short(hub: FakeHub, output: Path) -> None:
    install_from(hub, output)
    plan = planned_toy(hub)
    last = plan.requests.ranges[3]
    assert [request for request, _ in range_digests(output, plan.requests, [last])] == [last]
    (output / last.copies[0].dest_path).write_bytes(b"")
    with pytest.raises(InstallError, match="cut short"):
        list(range_digests(output, plan.requests, [last]))
