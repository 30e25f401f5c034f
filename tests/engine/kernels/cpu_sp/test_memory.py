import ctypes
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from halve.engine.kernels.cpu_sp import memory
from halve.engine.kernels.cpu_sp.assembler import RAX, Assembler
from halve.engine.kernels.cpu_sp.memory import Block, Executable
from halve.errors import EngineError

pytestmark = pytest.mark.cpu_kernels


def answer(number):
    a = Assembler()
    a.mov_immediate(RAX, number)
    a.ret()
    return np.frombuffer(bytes(a.code), np.uint8)


def permissions(address):
    """How the page at an address is mapped, such as `r-xp`."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, end, mode = re.match(r"(\w+)-(\w+) (\S+)", line).groups()
        if int(first, 16) <= address < int(end, 16):
            return mode
    return None


def writable_code():
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if " rwx" in line]


@pytest.mark.parametrize("size", [1, 5000, 3 << 20])
def test_code_is_never_writable_and_executable_at_once(size):
    before = writable_code()  # oneDNN has some
    code = np.full(size, 0x90, np.uint8)
    code[: len(answer(42))] = answer(42)[:size]
    block = Executable(code)
    assert permissions(block.address) == permissions(block.address + size - 1) == "r-xp"
    assert not block.bytes.flags.writeable
    if size > 8:
        assert ctypes.CFUNCTYPE(ctypes.c_int64)(block.address)() == 42
    assert writable_code() == before


def test_memory_goes_back_when_it_is_no_longer_used():
    block = Executable(answer(1))
    address = block.address
    del block
    assert permissions(address) != "r-xp"


def test_weights_are_aligned_and_not_executable():
    block = Block(3 << 20)
    assert block.address % 64 == 0
    assert permissions(block.address) == "rw-p"
    assert block.bytes.size == 3 << 20
    assert not block.bytes.any()


def test_a_system_that_refuses_executable_memory_is_a_reason(monkeypatch):
    class Libc:
        @staticmethod
        def mprotect(*_):
            ctypes.set_errno(13)
            return -1

    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: Libc)
    with pytest.raises(EngineError, match=r"refuses executable memory \(errno 13"):
        Executable(answer(1))
    memory.unavailable.cache_clear()
    assert "refuses executable memory" in memory.unavailable()
    memory.unavailable.cache_clear()


def test_other_systems_are_a_reason(monkeypatch):
    memory.unavailable.cache_clear()
    monkeypatch.setattr(memory.sys, "platform", "darwin")
    assert memory.unavailable() == "machine code is emitted on Linux only, this is darwin"
    memory.unavailable.cache_clear()


def test_large_tensors_use_memory_again():
    first = memory.empty(1 << 20, torch.float32)
    address = first.data_ptr()
    view = first[10:]
    del first
    other = memory.empty(1 << 20, torch.float32)
    assert other.data_ptr() != address  # a view is left
    del view
    again = memory.new_planes((1, 2, 512, 1024), 1, torch.bfloat16)
    assert again.data_ptr() == address
    assert again.dtype == torch.bfloat16


def test_little_memory_is_kept():
    tensors = [memory.empty(1 << 20, torch.float32) for _ in range(20)]
    del tensors
    assert len(memory._free) <= 16
    assert memory.empty(1 << 18, torch.float32).untyped_storage().nbytes() == 1 << 20
