import subprocess
import sys

import pytest

from halve.engine.kernels.cuda import jit
from halve.errors import EngineError

pytestmark = pytest.mark.skipif(jit.unavailable() is not None, reason=str(jit.unavailable()))
ARCHITECTURES = ("sm_80", "sm_90a", "sm_120")

# One 16x8x32 sparse product, the instruction that mma_sp is built on
SPARSE = r"""
extern "C" __global__ void product(const unsigned* a, const unsigned* b, const unsigned* e, float* d) {
    float c[4] = {0, 0, 0, 0};
    const int lane = threadIdx.x;
    asm volatile(
        "mma.sp::ordered_metadata.sync.aligned.m16n8k32.row.col.f32.f16.f16.f32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9,%10,%11}, {%0,%1,%2,%3}, %12, 0x0;\n"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[4 * lane]), "r"(a[4 * lane + 1]), "r"(a[4 * lane + 2]), "r"(a[4 * lane + 3]),
          "r"(b[4 * lane]), "r"(b[4 * lane + 1]), "r"(b[4 * lane + 2]), "r"(b[4 * lane + 3]), "r"(e[lane]));
    for (int i = 0; i < 4; ++i) d[4 * lane + i] = c[i];
}
"""
NOTHING = 'extern "C" __global__ void nothing() {}'


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HALVE_CACHE", str(tmp_path / "kernels"))
    return tmp_path / "kernels"


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_sparse_products_compile_for_every_architecture(architecture):
    code = jit.cubin(SPARSE, architecture)
    assert code.startswith(b"\x7fELF")
    assert b"product" in code


def test_compiled_kernels_are_cached(folder, monkeypatch):
    first = jit.cubin(NOTHING, "sm_80")
    monkeypatch.setattr(jit, "_compiled", None)  # compiling would fail
    assert jit.cubin(NOTHING, "sm_80") == first
    assert [path.suffix for path in folder.iterdir()] == [".cubin"]


def test_source_architecture_and_options_are_part_of_the_cache_key(folder):
    jit.cubin(NOTHING, "sm_80")
    jit.cubin(NOTHING, "sm_90a")
    jit.cubin(NOTHING + " ", "sm_80")
    jit.cubin(NOTHING, "sm_80", ["-DSIZE=1"])
    assert len(list(folder.iterdir())) == 4


@pytest.mark.parametrize(
    "damage", [lambda x: b"", lambda x: b"\x00" * 100, lambda x: x[: len(x) // 2], lambda x: x[:-1] + b"\x01"]
)
def test_a_damaged_file_is_compiled_again(folder, damage):
    code = jit.cubin(NOTHING, "sm_80")
    (path,) = folder.iterdir()
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    assert jit.cubin(NOTHING, "sm_80") == code
    assert path.read_bytes() == whole


def test_without_a_home_directory_kernels_are_cached_in_the_temporary_directory(monkeypatch, tmp_path):
    def homeless():
        raise RuntimeError("Could not determine home directory.")

    for name in ("HALVE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(jit.Path, "home", homeless)
    monkeypatch.setattr(jit.tempfile, "gettempdir", lambda: str(tmp_path))
    assert tmp_path in jit.cache_dir().parents


def test_an_unwritable_cache_is_not_an_error(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("HALVE_CACHE", str(tmp_path / "file" / "kernels"))
    assert jit.cubin(NOTHING, "sm_80").startswith(b"\x7fELF")


def test_the_error_contains_the_compiler_log(folder):
    with pytest.raises(EngineError, match=r"does not compile for sm_80: .*identifier \"nonsense\" is undefined"):
        jit.cubin('extern "C" __global__ void f() { nonsense(); }', "sm_80")
    with pytest.raises(EngineError, match="does not compile for sm_1"):
        jit.cubin(NOTHING, "sm_1")
    assert not list(folder.iterdir())


def test_of_several_processes_that_need_a_kernel_one_compiles_it(folder, tmp_path):
    code = f"""
import os, time
from halve.engine.kernels.cuda import jit

def compiled(source, flags, own=jit._compiled):
    open({str(tmp_path)!r} + f"/compiled-{{os.getpid()}}", "x").close()
    time.sleep(0.5)
    return own(source, flags)

jit._compiled = compiled
print(len(jit.cubin({NOTHING!r}, "sm_80")))
"""
    runs = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    sizes = {run.communicate()[0].strip() for run in runs}
    assert len(list(tmp_path.glob("compiled-*"))) == 1
    assert sizes == {str(len(jit.cubin(NOTHING, "sm_80")))}
    assert [path.suffix for path in folder.iterdir()] == [".cubin"]
