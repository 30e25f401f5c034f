import os
import pickle
import random
import sys

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import halve
from halve.errors import FileError, HalveError, ModelError
from halve.sources.weights import load_state, load_weights_, save_state
from tests.untouched import same_bits, untouched

WRAPPERS = ("state_dict", "model_state_dict", "model", "model_state", "weights", "net")


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8, 4)).eval()


def same_state(one, other):
    return one.keys() == other.keys() and all(same_bits(one[name], other[name]) for name in one)


class Attack:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (os.mkdir, (str(self.path),))


def test_what_is_saved_is_loaded_to_the_bit(tmp_path):
    state = network().state_dict()
    path = save_state(state, tmp_path / "net.safetensors")
    assert same_state(load_state(path), state)
    assert os.listdir(tmp_path) == ["net.safetensors"]


def test_tied_transposed_and_half_precision_tensors_are_saved_under_each_name(tmp_path):
    weight = torch.randn(4, 6, dtype=torch.float16)
    state = {"a": weight, "b": weight, "c": weight.t(), "d": torch.zeros(()), "e": torch.zeros(0, 3)}
    assert same_state(load_state(save_state(state, tmp_path / "tied.safetensors")), state)


@pytest.mark.parametrize("ending", [".pth", ".pt", ".bin", ".ckpt", ""])
def test_a_pytorch_file_is_loaded_whatever_its_ending(tmp_path, ending):
    state = network().state_dict()
    torch.save(state, tmp_path / f"net{ending}")
    assert same_state(load_state(tmp_path / f"net{ending}"), state)


def test_the_old_format_of_pytorch_is_loaded(tmp_path):
    state = network().state_dict()
    torch.save(state, tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    assert same_state(load_state(tmp_path / "old.pth"), state)


@pytest.mark.parametrize("key", WRAPPERS)
def test_a_state_dict_is_found_beside_what_training_stores(tmp_path, key):
    state = network().state_dict()
    torch.save({key: state, "epoch": 3, "optimizer": {"lr": 0.1}}, tmp_path / "run.pth")
    assert same_state(load_state(tmp_path / "run.pth"), state)


def test_the_module_prefix_of_data_parallel_is_removed(tmp_path):
    state = network().state_dict()
    torch.save({"state_dict": {f"module.{name}": value for name, value in state.items()}}, tmp_path / "ddp.pth")
    model = network()
    load_weights_(model, tmp_path / "ddp.pth")
    assert same_state(model.state_dict(), state)


@pytest.mark.parametrize(
    "wrap",
    [
        nn.DataParallel,
        torch.compile,
        lambda model: torch.compile(nn.DataParallel(model)),
        lambda model: nn.DataParallel(torch.compile(model)),
    ],
    ids=["DataParallel", "compile", "compile of DataParallel", "DataParallel of compile"],
)
def test_checkpoints_of_wrapped_models_load_into_the_plain_one(tmp_path, wrap):
    trained, model = (
        nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)),
        nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)),
    )
    torch.save(wrap(trained).state_dict(), tmp_path / "wrapped.pth")
    load_weights_(model, tmp_path / "wrapped.pth")
    assert same_bits(model[0].weight, trained[0].weight)


def test_checkpoints_of_models_with_wrapped_parts_load_into_the_plain_one(tmp_path):
    trained, model = (nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)) for _ in range(2))
    trained[0], trained[1] = nn.DataParallel(trained[0]), torch.compile(trained[1])
    torch.save(trained.state_dict(), tmp_path / "parts.pth")
    load_weights_(model, tmp_path / "parts.pth")
    assert same_bits(model[1].weight, trained[1]._orig_mod.weight)


def test_a_layer_of_the_model_that_is_called_module_keeps_its_name(tmp_path):
    model = nn.ModuleDict({"module": nn.Linear(4, 2)})
    save_state(model.state_dict(), tmp_path / "own.safetensors")
    load_weights_(model, tmp_path / "own.safetensors")


def test_a_prefix_that_not_every_name_has_stays(tmp_path):
    torch.save({"module.a": torch.zeros(1), "b": torch.zeros(1)}, tmp_path / "some.pth")
    assert set(load_state(tmp_path / "some.pth")) == {"module.a", "b"}


@pytest.mark.parametrize("name", ["net.packed.safetensors", "net-small.safetensors"])
def test_a_packed_checkpoint_is_loaded_as_the_masked_state_whatever_its_name(tmp_path, name):
    model = network()
    masks = halve.prune(model)
    path = halve.pack(model, masks, tmp_path / name)
    state = load_state(path)
    expected = halve.apply(model, masks).state_dict()
    assert same_state({key: state[key] for key in sorted(state)}, {key: expected[key] for key in sorted(expected)})


def test_a_mask_file_is_no_checkpoint(tmp_path):
    path = halve.prune(network()).save(tmp_path / "net.masks.safetensors")
    with pytest.raises(HalveError):
        load_weights_(network(), path)


@pytest.mark.parametrize("how", ["pickle", "torch", "nested"])
def test_a_malicious_file_is_refused_and_runs_nothing(tmp_path, how):
    path, proof = tmp_path / "evil.pth", tmp_path / "proof"
    content = {"state_dict": {"a": Attack(proof)}} if how == "nested" else Attack(proof)
    if how == "pickle":
        path.write_bytes(pickle.dumps(content, protocol=2))
    else:
        torch.save(content, path)
    with pytest.raises(FileError, match=r"evil\.pth"):
        load_state(path)
    assert not proof.exists()


def test_a_refused_file_gives_no_advice_to_switch_the_protection_off(tmp_path):
    torch.save(Attack(tmp_path / "proof"), tmp_path / "evil.pth")
    with pytest.raises(FileError) as raised:
        load_state(tmp_path / "evil.pth")
    message = str(raised.value)
    assert "False" not in message
    assert "file an issue" not in message


def test_a_whole_pickled_model_is_refused(tmp_path):
    torch.save(network(), tmp_path / "whole.pth")
    with pytest.raises(FileError, match=r"whole\.pth"):
        load_state(tmp_path / "whole.pth")


@pytest.mark.parametrize("kind", [".safetensors", ".pth", ".packed.safetensors"])
def test_a_truncated_file_is_refused(tmp_path, kind):
    model = network()
    path = tmp_path / f"net{kind}"
    if kind == ".pth":
        torch.save(model.state_dict(), path)
    elif kind == ".safetensors":
        save_state(model.state_dict(), path)
    else:
        halve.pack(model, halve.prune(model), path)
    whole = path.read_bytes()
    for size in (0, 1, 7, 8, 9, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(FileError, match="net"):
            load_state(path)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol:UserWarning")
@pytest.mark.parametrize("kind", [".safetensors", ".pth", "old.pth"])
def test_a_damaged_file_is_refused_or_loaded_but_never_breaks_anything_else(tmp_path, kind):
    path = tmp_path / f"net{kind}"
    if kind == ".safetensors":
        save_state(network().state_dict(), path)
    else:
        torch.save(network().state_dict(), path, _use_new_zipfile_serialization=kind == ".pth")
    whole = path.read_bytes()
    chance = random.Random(0)
    for _ in range(150):
        damaged = bytearray(whole)
        for _ in range(chance.randint(1, 8)):
            damaged[chance.randrange(min(len(damaged), 1500))] = chance.randrange(256)
        path.write_bytes(damaged)
        try:
            load_weights_(network(), path)
        except HalveError:
            continue


@pytest.mark.parametrize("content", [b"", b"hello, world", b"\x80\x02.", b"PK\x03\x04", b"\x00" * 64, b"(lp0\n."])
@pytest.mark.parametrize("name", ["x.pth", "x.safetensors"])
def test_what_is_no_checkpoint_is_refused(tmp_path, content, name):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(FileError, match="x"):
        load_state(tmp_path / name)


@pytest.mark.parametrize(
    "content", [{}, {"epoch": 3}, [torch.zeros(1)], torch.zeros(1), 7, {"a": torch.zeros(1), "epoch": 3}]
)
def test_a_file_without_a_state_dict_says_where_one_is_looked_for(tmp_path, content):
    torch.save(content, tmp_path / "x.pth")
    with pytest.raises(FileError, match=r"has no state dict.*model_state_dict"):
        load_state(tmp_path / "x.pth")


def test_a_missing_file_and_a_folder_are_named(tmp_path):
    with pytest.raises(FileError, match=r"no such file"):
        load_state(tmp_path / "nothing.pth")
    with pytest.raises(FileError, match="not a regular file"):
        load_state(tmp_path)


@pytest.mark.skipif(sys.platform == "win32" or os.geteuid() == 0, reason="permissions do not bind")
def test_a_file_that_may_not_be_read_is_named(tmp_path):
    path = save_state(network().state_dict(), tmp_path / "net.safetensors")
    path.chmod(0)
    with pytest.raises(FileError, match="cannot read"):
        load_state(path)


def test_a_checkpoint_that_does_not_fit_names_what_is_missing_strange_and_of_another_shape(tmp_path):
    model = network()
    state = model.state_dict()
    del state["0.bias"]
    state["extra"] = torch.zeros(1)
    state["3.weight"] = torch.zeros(5, 8)
    save_file(state, tmp_path / "net.safetensors")
    with untouched(model), pytest.raises(ModelError) as raised:
        load_weights_(model, tmp_path / "net.safetensors")
    assert "missing 0.bias" in str(raised.value)
    assert "unexpected extra" in str(raised.value)
    assert "3.weight (5, 8) instead of (4, 8)" in str(raised.value)


def test_a_long_list_of_misfits_is_cut_short(tmp_path):
    state = {f"blocks.{i}": torch.zeros(1) for i in range(200)}
    with pytest.raises(ModelError, match=r"unexpected .* and 196 more") as raised:
        load_weights_(network(), save_state(state, tmp_path / "other.safetensors"))
    assert len(str(raised.value)) < 500


def test_checkpoints_from_before_batches_were_counted_are_loaded(tmp_path):
    state = {name: value for name, value in network().state_dict().items() if "num_batches" not in name}
    model = network()
    load_weights_(model, save_state(state, tmp_path / "net.safetensors"))
    assert same_bits(model.state_dict()["0.weight"], state["0.weight"])


def test_half_precision_weights_are_loaded_into_a_float_model(tmp_path):
    state = {
        name: value.half() if value.is_floating_point() else value for name, value in network().state_dict().items()
    }
    model = network()
    load_weights_(model, save_state(state, tmp_path / "net.safetensors"))
    assert same_bits(model[0].weight.detach(), state["0.weight"].float())


def test_saving_into_a_folder_that_does_not_exist_is_an_error_of_ours(tmp_path):
    with pytest.raises(FileError, match="cannot write"):
        save_state(network().state_dict(), tmp_path / "nothing" / "net.safetensors")
