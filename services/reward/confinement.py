"""Limits that a child puts on itself before it loads user code. Says what could not be enforced.

The system-call filter is seccomp's, written out here: no new processes (threads are fine), no sockets but Unix ones, no
reaching into other processes. It is a fence against accidents and careless code, not a jail for hostile code: files
are those the service's user can reach.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import resource
import struct
from typing import NamedTuple

FILE_BYTES = 256 * 2**20
OPEN_FILES = 512

_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 22, 38
_SECCOMP_MODE_FILTER = 2
_RETURN_ERRNO, _RETURN_ALLOW = 0x00050000, 0x7FFF0000
_LOAD, _JUMP_EQUAL, _JUMP_AT_LEAST, _JUMP_ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_OFFSET_NUMBER, _OFFSET_ARCH, _OFFSET_FIRST_ARGUMENT = 0, 4, 16  # of struct seccomp_data
_CLONE_THREAD = 0x00010000
_AF_UNIX = 1


class _Architecture(NamedTuple):
    """System-call numbers of one architecture (Linux, include/uapi/asm/unistd.h)."""

    audit: int
    clone: int
    clone3: int
    fork: tuple[int, ...]
    socket: int
    intrusive: tuple[int, ...]  # ptrace, process_vm_readv, process_vm_writev, unshare, setns
    io_uring_setup: int
    foreign_numbers_from: int | None  # a second table of numbers for the same calls (x32)


_ARCHITECTURES = {
    "x86_64": _Architecture(0xC000003E, 56, 435, (57, 58), 41, (101, 310, 311, 272, 308), 425, 0x40000000),
    "aarch64": _Architecture(0xC00000B7, 220, 435, (), 198, (117, 270, 271, 97, 268), 425, None),
}


def confine(memory_mib: int, *, allow_network: bool, allow_processes: bool) -> list[str]:
    """Applies the limits to this process and its future children; answers what is not enforced, in words."""
    memory = memory_mib * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES, FILE_BYTES))
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    most = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    missing = ["access to files"]
    problem = _filter_system_calls(allow_network=allow_network, allow_processes=allow_processes)
    if allow_processes:
        missing.append("the number of processes (allowed by allow_processes)")
    elif problem:
        missing.append(f"no new processes ({problem})")
    if allow_network:
        missing.append("no network (allowed by allow_network)")
    elif problem:
        missing.append(f"no network ({problem})")
    return missing


def _filter_system_calls(*, allow_network: bool, allow_processes: bool) -> str | None:
    """Installs the filter; answers why not, where it cannot."""
    architecture = _ARCHITECTURES.get(platform.machine())
    if architecture is None:
        return f"no system-call filter for {platform.machine()}"
    program = _program(architecture, allow_network=allow_network, allow_processes=allow_processes)
    instructions = ctypes.create_string_buffer(b"".join(program))

    class Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p)]

    libc = ctypes.CDLL(None, use_errno=True)
    header = Program(len(program), ctypes.addressof(instructions))
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        return f"prctl(PR_SET_NO_NEW_PRIVS): {errno.errorcode.get(ctypes.get_errno())}"
    if libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(header), 0, 0) != 0:
        return f"prctl(PR_SET_SECCOMP): {errno.errorcode.get(ctypes.get_errno())}"
    return None


def _program(architecture: _Architecture, *, allow_network: bool, allow_processes: bool) -> list[bytes]:
    """The filter as classic BPF instructions (struct sock_filter); each refusal is a jump over one return."""

    def instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
        return struct.pack("HBBI", code, if_true, if_false, value)

    def refuse(number: int, error: int) -> list[bytes]:
        return [instruction(_JUMP_EQUAL, number, 0, 1), instruction(_RETURN, _RETURN_ERRNO | error)]

    def unless_first_argument(number: int, jump: int, value: int, error: int) -> list[bytes]:
        return [
            instruction(_JUMP_EQUAL, number, 0, 4),
            instruction(_LOAD, _OFFSET_FIRST_ARGUMENT),
            instruction(jump, value, 0, 1),
            instruction(_RETURN, _RETURN_ALLOW),
            instruction(_RETURN, _RETURN_ERRNO | error),
        ]

    program = [
        instruction(_LOAD, _OFFSET_ARCH),
        instruction(_JUMP_EQUAL, architecture.audit, 1, 0),
        instruction(_RETURN, _RETURN_ERRNO | errno.EPERM),
        instruction(_LOAD, _OFFSET_NUMBER),
    ]
    if architecture.foreign_numbers_from is not None:
        program += [
            instruction(_JUMP_AT_LEAST, architecture.foreign_numbers_from, 0, 1),
            instruction(_RETURN, _RETURN_ERRNO | errno.EPERM),
        ]
    for number in architecture.intrusive:
        program += refuse(number, errno.EPERM)
    if not allow_processes:
        for number in architecture.fork:
            program += refuse(number, errno.EPERM)
        # clone3 hides its flags in memory; on ENOSYS the C library falls back to clone, whose flags can be read.
        program += refuse(architecture.clone3, errno.ENOSYS)
        program += unless_first_argument(architecture.clone, _JUMP_ANY_BIT, _CLONE_THREAD, errno.EPERM)
    if not allow_network:
        program += refuse(architecture.io_uring_setup, errno.ENOSYS)  # opens sockets without the socket call
        program += unless_first_argument(architecture.socket, _JUMP_EQUAL, _AF_UNIX, errno.EACCES)
    program.append(instruction(_RETURN, _RETURN_ALLOW))
    return program
