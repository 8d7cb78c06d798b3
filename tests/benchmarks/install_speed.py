"""An install over HTTP against `curl` of the same bytes: seconds, rates and peak memory as JSON.

    python -m tests.benchmarks.install_speed --source DIR --work DIR [--pace 125] [--connections 4] [--rounds 1]

DIR is a quantised MLX directory, a synthetic one for example (`python -m mference_core.testing.synthetic NAME DIR --mlx`).
A server on this machine sends its files as a hub and its storage do, with `sendfile`; `--pace` caps all
connections together, in MB/s. In each round curl downloads every file, one after the other, to the work folder (`curl_seconds`; with a sync at
the end `curl_synced_seconds`), then `mference install` installs the same repository there: its time has the syncs, the
read-back digests, the SHA-256 of every source file and of every output in it. The peak is that of the whole process.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Lock
from typing import Any

from mference_core.testing.fake_hub import REPO, Answer, FakeHub, Handler, serving

MIB = 1 << 20
SEND_BYTES = 1 << 20

INSTALL = """
import re, resource, sys
from pathlib import Path
from mference_core import plugins, records
if {loaded}:  # a family that the gate has not accepted: everything an accepted one costs, without the verdict
    def dispatch(name, notice=None):
        records.Environment.here()
        return plugins.load(name)
    plugins.dispatch = dispatch
from mference_core.cli import run_cli
code = run_cli(sys.argv[1:])
status = Path("/proc/self/status").read_text()
used = resource.getrusage(resource.RUSAGE_SELF)
print(int(re.search(r"VmHWM:\\s*(\\d+) kB", status)[1]) * 1024, used.ru_utime, used.ru_stime, file=sys.stderr)
sys.exit(code)
"""


class Line:
    """A line of limited speed that all connections share."""

    def __init__(self, bytes_per_second: float) -> None:
        self.speed, self.free_at, self.lock = bytes_per_second, time.monotonic(), Lock()

    def take(self, size: int) -> None:
        """Wait as long as bytes take."""
        with self.lock:
            self.free_at = max(self.free_at, time.monotonic()) + size / self.speed
            until = self.free_at
        time.sleep(max(0.0, until - time.monotonic()))


class Fast(Handler):
    """Sends files from the page cache to the socket without reading them, at most at a given pace."""

    line: "Line | None" = None

    def _file(self, method: str, name: str, headers: dict[str, str]) -> Answer:
        wanted = self.headers["range"]
        del self.headers["range"]
        answer = super()._file("HEAD", name, headers)
        size = int(headers["Content-Length"])
        first, last = map(int, wanted.removeprefix("bytes=").split("-")) if wanted else (0, size - 1)
        if wanted:
            answer.status, answer.first = 206, first
            answer.headers |= {
                "Content-Range": f"bytes {first}-{last}/{size}",
                "Content-Length": str(last + 1 - first),
            }
        answer.method = method
        return answer

    def _send(self, answer: Answer) -> None:
        if answer.method == "HEAD" or answer.status not in (200, 206):
            super()._send(answer)
            return
        self.send_response(answer.status)
        for key, value in answer.headers.items():
            self.send_header(key, value)
        self.end_headers()
        at, left = answer.first, int(answer.headers["Content-Length"])
        with (self.hub.folder / answer.name).open("rb") as file:
            while left:
                count = os.sendfile(self.connection.fileno(), file.fileno(), at, min(left, SEND_BYTES))
                at, left = at + count, left - count
                if self.line is not None:
                    self.line.take(count)


def serve(options: argparse.Namespace) -> None:
    """Serve the source until killed; print where."""
    Fast.line = Line(options.pace * 1e6) if options.pace else None
    with serving(FakeHub(options.source, commit="c" * 40), Fast) as hub:
        sys.stdout.write(json.dumps({"endpoint": hub.endpoint}) + "\n")
        sys.stdout.flush()
        Event().wait()


@contextmanager
def served() -> Iterator[dict[str, str]]:
    """Serve in a process of its own, digests stated."""
    command = [sys.executable, "-m", __spec__.name, *sys.argv[1:], "--serve"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            yield json.loads(server.stdout.readline())
        finally:
            server.kill()


def curl(options: argparse.Namespace, endpoint: str, files: list[str]) -> dict[str, float]:
    """Download every file with one curl; return seconds, and seconds with a sync."""
    target = options.work / "curl"
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    words = [word for name in files for word in ("-o", str(target / name), f"{endpoint}/{REPO}/resolve/main/{name}")]
    started = time.perf_counter()
    subprocess.run(["curl", "--silent", "--fail", "--location", *words], check=True)  # noqa: S607
    seconds = time.perf_counter() - started
    subprocess.run(["sync", "--file-system", str(target)], check=True)  # noqa: S607
    synced = time.perf_counter() - started
    assert all((target / name).stat().st_size == (options.source / name).stat().st_size for name in files)
    shutil.rmtree(target)
    return {"curl_seconds": seconds, "curl_synced_seconds": synced}


def install(options: argparse.Namespace, endpoint: str) -> dict[str, Any]:
    """Install once; return its report with the time and peak of the process."""
    output = options.work / "model.gturbo"
    shutil.rmtree(output, ignore_errors=True)
    words = ["install", "--repo", REPO, "--output", str(output), "--connections", str(options.connections), "--json"]
    if options.family:
        words += ["--family", options.family]
    started = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", INSTALL.format(loaded=bool(options.family)), *words],
        env={**os.environ, "HF_ENDPOINT": endpoint},
        capture_output=True,
        text=True,
        check=False,
    )
    seconds = time.perf_counter() - started
    if done.returncode:
        sys.exit(done.stderr)
    report = json.loads(done.stdout.splitlines()[-1])
    shutil.rmtree(output)
    peak, user, system = done.stderr.splitlines()[-1].split()
    return {
        "install_seconds": seconds,
        "processor_seconds": {"user": float(user), "system": float(system)},
        "peak_bytes": int(peak),
        "downloaded_bytes": report["downloaded_bytes"],
        "installed_bytes": report["size_bytes"],
        "checked_files": report["checked_files"],
    }


def main() -> None:
    """Print the figures of each round."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--family", help="load this family whether it is accepted or not")
    parser.add_argument("--pace", type=float, default=0.0, help="MB/s of all connections together, 0 for none")
    parser.add_argument("--connections", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options)
        return
    files = sorted(path.name for path in options.source.iterdir() if path.is_file())
    rounds = list[dict[str, Any]]()
    with served() as at:
        # Digests are taken by the server when they are first asked for: not on anybody's time.
        for name in files:
            url = f"{at['endpoint']}/{REPO}/resolve/main/{name}"
            subprocess.run(["curl", "--silent", "--fail", "--head", "-o", "/dev/null", url], check=True)  # noqa: S607
        for _ in range(options.rounds):
            figures = {**curl(options, at["endpoint"], files), **install(options, at["endpoint"])}
            figures["of_curl"] = figures["curl_seconds"] / figures["install_seconds"]
            figures["of_curl_synced"] = figures["curl_synced_seconds"] / figures["install_seconds"]
            figures["install_mb_per_second"] = figures["downloaded_bytes"] / figures["install_seconds"] / 1e6
            figures["peak_mib"] = figures["peak_bytes"] / MIB
            rounds.append(figures)
    report = {"pace": options.pace, "connections": options.connections, "rounds": rounds}
    sys.stdout.write(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
