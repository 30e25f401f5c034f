import pytest

from halve.engine.timing_cache import Memory


def test_timings_are_kept_and_added_to_what_others_wrote(tmp_path):
    path = tmp_path / "folder" / "timings.json"
    one, other = Memory(path), Memory(path)
    one.remember("a", {"torch": 1.0})
    one.save()
    other.remember("b", {"torch": 2.0})
    other.save()
    again = Memory(path)
    assert again.recall("a", ["torch"]) == {"torch": 1.0}
    assert again.recall("b", ["torch"]) == {"torch": 2.0}
    assert again.recall("b", ["torch", "gemm"]) is None


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b'{"a": 1}', b"\xff\xfe"])
def test_a_torn_file_is_as_good_as_none(tmp_path, content):
    path = tmp_path / "timings.json"
    path.write_bytes(content)
    memory = Memory(path)
    assert memory.known == {}
    memory.remember("a", {"torch": 1.0})
    memory.save()
    assert Memory(path).recall("a", ["torch"]) == {"torch": 1.0}


def test_a_disk_that_cannot_be_written_to_costs_nothing_but_time(tmp_path):
    (tmp_path / "file").write_text("")
    memory = Memory(tmp_path / "file" / "timings.json")
    memory.remember("a", {"torch": 1.0})
    memory.save()
    assert memory.recall("a", ["torch"]) == {"torch": 1.0}
