import torch

from halve import machine


def test_a_cpu_is_named_by_its_model_and_threads(tmp_path, monkeypatch):
    info = tmp_path / "cpuinfo"
    info.write_text("processor\t: 0\nmodel name\t: AMD EPYC 9R14\n")
    monkeypatch.setattr(machine, "_CPU_INFO", info)
    machine._processor.cache_clear()
    try:
        assert machine.device_name(torch.device("cpu")) == f"AMD EPYC 9R14, {torch.get_num_threads()} threads"
        monkeypatch.setattr(machine, "_CPU_INFO", tmp_path / "none")
        machine._processor.cache_clear()
        assert machine.device_name(torch.device("cpu")) in machine.device_names()
    finally:
        machine._processor.cache_clear()
