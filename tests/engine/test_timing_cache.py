from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from halve.engine import timing_cache
from halve.engine.fuse import fuse
from halve.engine.kernels.kernel import Kernel
from halve.engine.kernels.mma_sp import launch as mma
from halve.engine.kernels.pool import launch as pool
from halve.engine.layer import Layer
from halve.engine.timing_cache import TimingCache, kernel_id, layer_key, network_key
from halve.graph import capture


def test_timings_are_merged_with_those_of_other_processes(tmp_path):
    path = tmp_path / "folder" / "timings.json"
    one, other = TimingCache(path), TimingCache(path)
    one.put("a", {"dense torch": 1.0})
    one.save()
    other.put("b", {"dense torch": 2.0})
    other.save()
    again = TimingCache(path)
    assert again.get("a", ["dense torch"]) == {"dense torch": 1.0}
    assert again.get("b", ["dense torch"]) == {"dense torch": 2.0}
    assert again.get("b", ["dense torch", "dense gemm"]) is None


def test_times_are_measured_again_until_all_of_them_are_known():
    cache, answers = TimingCache(None), [{"a": 1.0}, {"a": 2.0, "b": 3.0}]
    ids = {"a": "kernel one", "b": "kernel two"}
    for expected in ({"a": 1.0}, {"a": 2.0, "b": 3.0}, {"a": 2.0, "b": 3.0}):  # b failed at first
        assert cache.look_up("layer", ids, lambda: answers.pop(0)) == expected
    assert cache.known == {"layer": {"kernel one": 2.0, "kernel two": 3.0}}


def test_without_a_key_times_are_neither_looked_up_nor_stored():
    cache, answers = TimingCache(None), [{"a": 1.0}, {"a": 2.0}]
    for expected in ({"a": 1.0}, {"a": 2.0}):
        assert cache.look_up(None, {"a": "kernel"}, lambda: answers.pop(0)) == expected
    assert cache.known == {}


def test_timings_of_one_layer_by_several_processes_are_all_kept(tmp_path):
    path = tmp_path / "timings.json"
    one, other = TimingCache(path), TimingCache(path)
    one.put("a", {"dense torch": 1.0})
    one.save()
    other.put("a", {"dense gemm": 2.0})
    other.save()
    one.put("b", {"dense torch": 3.0})
    one.save()
    assert TimingCache(path).known == {"a": {"dense torch": 1.0, "dense gemm": 2.0}, "b": {"dense torch": 3.0}}


def test_nothing_is_lost_if_several_save_at_the_same_time(tmp_path):
    path = tmp_path / "timings.json"

    def put_many(name):
        cache = TimingCache(path)
        for number in range(30):
            cache.put(f"layer {number}", {name: float(number)})
            cache.save()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(put_many, "abcd"))
    known = TimingCache(path).known
    assert known == {f"layer {i}": dict.fromkeys("abcd", float(i)) for i in range(30)}


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b'{"a": 1}', b"\xff\xfe"])
def test_an_invalid_file_is_ignored(tmp_path, content):
    path = tmp_path / "timings.json"
    path.write_bytes(content)
    cache = TimingCache(path)
    assert cache.known == {}
    cache.put("a", {"dense torch": 1.0})
    cache.save()
    assert TimingCache(path).get("a", ["dense torch"]) == {"dense torch": 1.0}


def test_an_unwritable_cache_is_not_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    cache = TimingCache(tmp_path / "file" / "timings.json")
    cache.put("a", {"dense torch": 1.0})
    cache.save()
    assert cache.get("a", ["dense torch"]) == {"dense torch": 1.0}


def test_nothing_is_written_if_nothing_was_timed(tmp_path, monkeypatch):
    monkeypatch.setenv("HALVE_CACHE", str(tmp_path / "cache"))
    TimingCache.of(torch.device("cpu")).save()
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("module", "kernel"),
    [(mma, Kernel("mma_sp", "64x64")), (mma, Kernel("mma", "64x64")), (pool, Kernel("pool", "nhwc"))],
)
def test_a_changed_source_is_another_kernel(module, kernel, monkeypatch):
    before = kernel_id(kernel)
    source = module._source()
    monkeypatch.setattr(module, "_source", lambda: source + "\n")
    assert kernel_id(kernel) != before


def test_a_changed_list_of_tiles_is_another_kernel(monkeypatch):
    before = kernel_id(Kernel("mma_sp", "64x64"))
    monkeypatch.setattr(mma, "TILES", dict(list(mma.TILES.items())[:-1]))
    assert kernel_id(Kernel("mma_sp", "64x64")) != before


def key(net, x):
    return network_key(fuse(capture(net.eval(), x).parts[0]), (x,))


def test_network_keys_depend_on_the_entire_graph():
    x = torch.randn(2, 4, 8, 8)
    conv = nn.Conv2d(4, 4, 3, padding=1)
    nets = [nn.Sequential(conv), nn.Sequential(conv, nn.Tanh()), nn.Sequential(conv, nn.Sigmoid())]
    nets += [nn.Sequential(conv, nn.LayerNorm([4, 8, 8])), nn.Sequential(nn.Tanh(), conv)]
    keys = [key(net, x) for net in nets]
    assert len(set(keys)) == len(keys)
    assert key(nets[1], x) == keys[1]
    assert key(nets[1], torch.randn(3, 4, 8, 8)) != keys[1]


def test_a_network_outside_of_a_graph_has_no_key():
    assert network_key(nn.Sequential(nn.Linear(4, 4)), (torch.ones(2, 4),)) is None


def test_layer_keys_contain_shape_dtype_residual_and_sparsity():
    net = nn.Sequential(nn.Conv2d(4, 4, 1, bias=False)).eval()
    [layer] = [m for m in fuse(capture(net, torch.randn(2, 4, 8, 8)).parts[0]).modules() if isinstance(m, Layer)]
    x = torch.randn(2, 4, 8, 8)
    keys = [layer_key(layer, inputs) for inputs in ([x], [x, x], [x[:1]], [x.half()])]
    layer.is_2_4 = True
    keys.append(layer_key(layer, [x]))
    assert len(set(keys)) == 5


def test_a_cache_belongs_to_a_device_and_its_libraries(monkeypatch):
    path = TimingCache.of(torch.device("cpu")).path
    monkeypatch.setattr(timing_cache, "_libraries", lambda: "others")
    assert TimingCache.of(torch.device("cpu")).path != path


def test_network_keys_do_not_depend_on_the_names_of_nodes():
    net = nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)).eval()
    x = torch.ones(2, 4, 8, 8)
    graphs = [fuse(capture(net, (x,), any_size=any_size).parts[0]) for any_size in (True, False)]
    names = [[node.name for node in graph.graph.nodes] for graph in graphs]
    assert names[0] != names[1]
    assert network_key(graphs[0], (x,)) == network_key(graphs[1], (x,))


class Shifted(nn.Module):
    def __init__(self, shift):
        super().__init__()
        self.conv = nn.Conv2d(4, 8, 3)
        self.register_buffer("shift", shift)

    def forward(self, x):
        return self.conv(x).sigmoid() + self.shift


def test_network_keys_depend_on_the_shapes_of_constants_and_not_on_their_values():
    shifts = (torch.ones(8, 1, 1), torch.zeros(8, 1, 1), torch.ones(8, 6, 6), torch.ones(8, 1, 1).double())
    x = torch.ones(2, 4, 8, 8)
    first, same, *others = (network_key(fuse(capture(Shifted(shift).eval(), (x,)).parts[0]), (x,)) for shift in shifts)
    assert first == same
    assert len({first, *others}) == 3
