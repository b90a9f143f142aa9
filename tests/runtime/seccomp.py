"""Has the kernel deny this process a system call, as docker's profile does; for a process of its own, as it is for good."""

from __future__ import annotations

import ctypes
import struct

_LOAD, _EQUAL, _ANSWER = 0x20, 0x15, 0x06
_DENY, _ALLOW = 0x00050000 | 1, 0x7FFF0000  # EPERM


def deny(number: int) -> bool:
    """Deny the system call of that number from here on; False: there is no filter of system calls here."""
    program = [(_LOAD, 0, 0, 0), (_EQUAL, 0, 1, number), (_ANSWER, 0, 0, _DENY), (_ANSWER, 0, 0, _ALLOW)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in program))
    header = ctypes.create_string_buffer(struct.pack("HP", len(program), ctypes.addressof(code)))
    libc = ctypes.CDLL(None)
    options = ((38, 1, None), (22, 2, ctypes.c_void_p(ctypes.addressof(header))))  # no new privileges; the filter
    return not any(libc.prctl(option, value, address, None, None) for option, value, address in options)
