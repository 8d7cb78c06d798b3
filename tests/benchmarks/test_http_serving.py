"""The benchmark of the HTTP server runs; no figure is judged."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_http_serving_measures_every_number_of_clients() -> None:
    options = ("--clients", "1", "2", "--new", "6", "--rounds", "1", "--held", "3")
    command = [sys.executable, "-m", "tests.benchmarks.http_serving", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert [row["clients"] for row in report["rows"]] == [1, 2]
    for row in report["rows"]:
        assert row["first_token_ms"]["median"] > 0
        assert row["tokens_per_second"] > 0
        assert row["loop_ms_per_request"] > 0
    assert report["held"]["asked"] == report["held"]["answered"] == 3
    assert report["held"]["held_at_once"] >= 1
