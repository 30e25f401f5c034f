import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import halve
from halve.errors import ChangedWeightsWarning, DtypeWarning, FileError, HalveError, MaskError, ModelError
from halve.masks import storage
from halve.masks.layout import Layout
from halve.masks.mask import MaskSet
from halve.masks.packed import FORMAT, pack, unpack
from tests.masks.damage import accepted, flipped, truncated
from tests.random_masks import a_mask, masks_for, random
from tests.untouched import same_bits, untouched


class Net(nn.Module):
    """Plain, padded, grouped and transposed layers, BatchNorm, a buffer that is not stored."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3)
        self.bn = nn.BatchNorm2d(8)
        self.grouped = nn.Conv2d(8, 8, 3, groups=2)
        self.up = nn.ConvTranspose2d(8, 6, 2)
        self.head = nn.Linear(6, 5)
        self.register_buffer("scale", torch.ones(2))
        self.register_buffer("temporary", torch.ones(2), persistent=False)

    def forward(self, x):
        return self.head(self.up(self.grouped(self.bn(self.stem(x)))).mean((2, 3)))


@pytest.fixture
def net():
    torch.manual_seed(0)
    return Net().eval()


def net_masks(net, rule="2:4", **layout):
    return masks_for(net, "stem", "grouped", "up", "head", pattern=rule, pad=True, **layout)


def assert_states_equal(one, other):
    assert set(one) == set(other)
    different = [name for name in one if not same_bits(one[name], other[name])]
    assert not different


@pytest.mark.parametrize("rule", ["2:4", "1:4", "4:4", "4:8", "1:2", "2:3", "1:1", "8:16"])
@pytest.mark.parametrize("order", ["channels", "flat"])
def test_unpacking_gives_the_state_of_the_masked_model_to_the_bit(tmp_path, net, rule, order):
    masks = net_masks(net, rule, order=order)
    with untouched(net):
        state, again = unpack(pack(net, masks, tmp_path / "x"))
    assert_states_equal(state, halve.apply(net, masks).state_dict())
    assert again == masks
    assert again.recipe == masks.recipe


@given(st.integers(0, 999), st.sampled_from(["1:2", "2:4", "3:4", "2:5", "4:8"]), st.integers(1, 9), st.integers(1, 3))
def test_any_linear_layer_comes_back(tmp_path_factory, seed, rule, columns, rows):
    model = nn.Sequential(nn.Linear(columns, rows))
    model[0].weight.data = random(rows, columns, seed=seed)
    masks = masks_for(model, "0", pattern=rule, pad=True)
    state, again = unpack(pack(model, masks, tmp_path_factory.mktemp("packed") / "x"))
    assert_states_equal(state, halve.apply(model, masks).state_dict())
    assert again == masks


def test_the_unpacked_state_can_be_loaded_into_the_model(tmp_path, net):
    masks = net_masks(net)
    state, _ = halve.unpack(halve.pack(net, masks, tmp_path / "x"))
    fresh = Net().eval()
    fresh.load_state_dict(state)
    image = random(2, 3, 8, 8)
    assert same_bits(fresh(image), halve.apply(net, masks)(image))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_a_model_of_another_precision_comes_back(tmp_path, net, dtype):
    net = net.to(dtype)
    masks = net_masks(net)
    state, again = unpack(pack(net, masks, tmp_path / "x"))
    assert_states_equal(state, halve.apply(net, masks).state_dict())
    assert again == masks


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_cast_is_that_of_the_masked_model(tmp_path, net, dtype):
    masks = net_masks(net)
    state, again = unpack(pack(net, masks, tmp_path / "x", dtype=dtype))
    assert_states_equal(state, halve.apply(net, masks).to(dtype).state_dict())
    assert state["bn.num_batches_tracked"].dtype == torch.int64
    assert again == masks


def test_a_variance_beyond_half_precision_keeps_its_dtype(tmp_path, net):
    net.bn.running_var[0] = 8e4
    net.scale[1] = 65_504.0  # the largest value of float16
    masks = net_masks(net)
    with pytest.warns(DtypeWarning, match=r"^bn\.running_var: values overflow torch\.float16, .* torch\.float32$"):
        state, _ = unpack(pack(net, masks, tmp_path / "x", dtype=torch.float16))
    assert state["bn.running_var"].dtype == torch.float32
    assert state["bn.running_mean"].dtype == state["scale"].dtype == state["stem.weight"].dtype == torch.float16
    fresh = Net().eval()
    fresh.load_state_dict(state)
    assert float(fresh.bn.running_var[0]) == 8e4
    image = random(2, 3, 8, 8)
    torch.testing.assert_close(fresh(image), halve.apply(net, masks)(image), atol=2e-3, rtol=1e-2)


@pytest.mark.parametrize("name", ["stem.weight", "head.bias", "bn.weight", "grouped.weight"])
def test_a_parameter_beyond_half_precision_is_refused_by_name(tmp_path, net, name):
    net.get_parameter(name).data.fill_(7e4)
    with pytest.raises(
        ModelError, match=rf"{name} has values up to 7e\+04, which overflow torch.float16; use .*bfloat16"
    ):
        pack(net, net_masks(net), tmp_path / "x", dtype=torch.float16)
    assert not (tmp_path / "x").exists()
    pack(net, net_masks(net), tmp_path / "x", dtype=torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.bool, torch.complex64])
def test_a_cast_to_what_is_no_floating_point_is_refused(tmp_path, net, dtype):
    with pytest.raises(HalveError):
        pack(net, net_masks(net), tmp_path / "x", dtype=dtype)
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("rule", "dtype", "share"),
    [("2:4", torch.float16, 0.5625), ("1:4", torch.float16, 0.28125), ("4:8", torch.float32, (4 * 32 + 4 * 3) / 256)],
)
def test_the_file_holds_values_and_indices_of_kept_weights_alone(tmp_path, rule, dtype, share):
    model = nn.Sequential(nn.Linear(512, 512, bias=False)).to(dtype)
    size = pack(model, masks_for(model, "0", pattern=rule), tmp_path / "x").stat().st_size
    assert size / (dtype.itemsize * 512 * 512) == pytest.approx(share, abs=0.01)


def test_statistics_are_in_the_state_and_in_the_masks(tmp_path, net):
    masks = net_masks(net).with_statistics({"bn.running_mean": random(8), "bn.running_var": random(8).abs()})
    state, again = unpack(pack(net, masks, tmp_path / "x"))
    assert torch.equal(state["bn.running_mean"], random(8))
    assert again == masks


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(64, 64, bias=False)
        self.second = nn.Linear(64, 64, bias=False)
        self.second.weight = self.first.weight
        self.third = self.first
        self.embedding = nn.Embedding(64, 64)
        self.embedding.weight = self.first.weight

    def forward(self, x):
        return self.third(self.second(self.first(x)))


@pytest.mark.parametrize("masked", ["first", "second"])
def test_tied_weights_are_stored_once_and_come_back_tied(tmp_path, masked):
    torch.manual_seed(0)
    model = Tied()
    masks = masks_for(model, masked)
    path = pack(model, masks, tmp_path / "x")
    state, again = unpack(path)
    assert path.stat().st_size < 64 * 64 * 4 * 0.75
    assert_states_equal(state, halve.apply(model, masks).state_dict())
    assert len({value.data_ptr() for value in state.values()}) == 1
    assert again == masks


def test_a_model_that_is_one_layer_comes_back(tmp_path):
    model = nn.Linear(8, 8)
    masks = masks_for(model, "")
    state, again = unpack(pack(model, masks, tmp_path / "x"))
    assert_states_equal(state, halve.apply(model, masks).state_dict())
    assert again == masks


def test_a_masked_layer_under_weight_norm_is_packed_as_a_plain_one(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)), nn.Linear(8, 2))
    masks = masks_for(model, "0")
    with untouched(model):
        state, again = unpack(pack(model, masks, tmp_path / "x"))
    assert set(state) == {"0.weight", "0.bias", "1.weight", "1.bias"}
    assert again == masks


class WithExtraState(nn.Sequential):
    def get_extra_state(self):
        return {"epoch": 3}

    def set_extra_state(self, state):
        pass


def test_a_state_that_holds_more_than_tensors_is_refused(tmp_path):
    model = WithExtraState(nn.Linear(8, 8), nn.Linear(8, 2))
    with pytest.raises(HalveError, match="extra_state"):
        pack(model, masks_for(model, "0"), tmp_path / "x")


def test_changed_weights_are_told_as_by_apply(tmp_path, net):
    masks = net_masks(net)
    net.head.weight.data *= 1.1
    with pytest.warns(ChangedWeightsWarning, match="head"):
        pack(net, masks, tmp_path / "x")
    with pytest.raises(MaskError, match="head"):
        pack(net, masks, tmp_path / "y", on_changed="error")
    assert not (tmp_path / "y").exists()
    pack(net, masks, tmp_path / "x", on_changed="ignore")


def test_masks_of_another_model_are_refused(tmp_path, net):
    with pytest.raises(MaskError, match="other"):
        pack(net, MaskSet({"other": a_mask("2:4", Layout("linear", (4, 4), 4))}), tmp_path / "x")


def test_a_mask_file_is_no_packed_file(tmp_path, net):
    with pytest.raises(FileError, match="not a packed checkpoint; 'halve pack' writes"):
        unpack(net_masks(net).save(tmp_path / "x"))


def test_no_damaged_file_gives_a_state(tmp_path):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
    path = pack(model, masks_for(model, "0"), tmp_path / "x")
    content = path.read_bytes()
    for damaged in (*flipped(content, 200), *truncated(content, 53)):
        path.write_bytes(damaged)
        with pytest.raises(FileError):
            unpack(path)


# The indices of 2:4 take two bits each, the lower index first: 0b01_00 keeps places 0 and 1.
def blocks_of(*bytes_):
    return torch.tensor(bytes_, dtype=torch.uint8)


ATTACKS = {
    "no indices": lambda header, tensors: tensors.pop("indices:0"),
    "no values": lambda header, tensors: tensors.pop("values:0"),
    "no aliases": lambda header, tensors: header.pop("aliases"),
    "aliases a list": lambda header, tensors: header.update(aliases=["0.weight"]),
    "aliases null": lambda header, tensors: header.update(aliases=None),
    "alias of nothing": lambda header, tensors: header.update(aliases={"a": "nothing"}),
    "alias of a list": lambda header, tensors: header.update(aliases={"a": ["0.weight"]}),
    "alias of a number": lambda header, tensors: header.update(aliases={"a": 1}),
    "alias of itself": lambda header, tensors: header.update(aliases={"a": "a"}),
    "alias over a masked weight": lambda header, tensors: header.update(aliases={"0.weight": "0.bias"}),
    "tensor over a masked weight": lambda header, tensors: tensors.update({"tensor:0.weight": torch.ones(2, 4)}),
    "indices that descend": lambda header, tensors: tensors.update({"indices:0": blocks_of(0b0100_0001)}),
    "indices that are equal": lambda header, tensors: tensors.update({"indices:0": blocks_of(0b0100_0101)}),
    "indices too long": lambda header, tensors: tensors.update({"indices:0": blocks_of(0b0100_0100, 0)}),
    "indices too short": lambda header, tensors: tensors.update({"indices:0": blocks_of()}),
    "indices in float": lambda header, tensors: tensors.update({"indices:0": torch.zeros(1)}),
    "values of another shape": lambda header, tensors: tensors.update({"values:0": torch.ones(2, 2)}),
    "values of more rows": lambda header, tensors: tensors.update({"values:0": torch.ones(3, 1, 2)}),
    "huge shape": lambda header, tensors: header["layers"]["0"].update(shape=[2**20, 2**19]),
    "other pattern": lambda header, tensors: header["layers"]["0"].update(pattern="1:4"),
    "padded though it is not": lambda header, tensors: header["layers"]["0"].update(shape=[2, 3], pad=True),
    "extra tensor": lambda header, tensors: tensors.update({"weight": torch.ones(2)}),
    "extra values": lambda header, tensors: tensors.update({"values:1": torch.ones(2)}),
    "extra codes": lambda header, tensors: tensors.update({"codes:0": torch.zeros(1, dtype=torch.uint8)}),
}


def craft(tmp_path, attack):
    model = nn.Sequential(nn.Linear(4, 2))
    model[0].weight.data = torch.tensor([[4.0, 3, 2, 1], [1, 2, 3, 4]])
    pack(model, masks_for(model, "0"), tmp_path / "x")
    _, header, tensors = storage.read(tmp_path / "x", [FORMAT])
    header = json.loads(json.dumps(header))
    attack(header, tensors)
    return storage.write(tmp_path / "x", FORMAT, header, tensors)


def test_the_indices_lie_in_the_file_as_documented(tmp_path):
    _, _, tensors = storage.read(craft(tmp_path, lambda header, tensors: None), [FORMAT])
    assert tensors["indices:0"].tolist() == [0b11_10_01_00]
    assert tensors["values:0"].tolist() == [[[4, 3]], [[3, 4]]]


def test_crafted_files_with_a_fitting_checksum_are_refused(tmp_path):
    assert accepted(ATTACKS, lambda attack: craft(tmp_path, attack), unpack) == []


def test_indices_beyond_the_block_are_refused(tmp_path):
    model = nn.Sequential(nn.Linear(3, 1))
    pack(model, masks_for(model, "0", pattern="1:3"), tmp_path / "x")
    _, header, tensors = storage.read(tmp_path / "x", [FORMAT])
    tensors["indices:0"] = blocks_of(0b11)
    with pytest.raises(FileError, match=r"0\.\.2"):
        unpack(storage.write(tmp_path / "x", FORMAT, header, tensors))


def test_a_weight_that_the_state_dict_does_not_hold_cannot_be_packed(tmp_path):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
    weight = model[0].weight.detach().clone()
    del model[0].weight
    model[0].weight = weight
    with pytest.raises(ModelError, match="no weight of 0"):
        halve.pack(model, halve.prune(model), tmp_path / "x.packed.safetensors")
    assert not list(tmp_path.iterdir())
