import copy
import pickle
import sys
import urllib.error

import pytest
import torch
from torch import nn

from halve.errors import HalveError, ModelError, SourceError
from halve.sources.models import load_model
from halve.sources.weights import save_state
from tests.untouched import same_bits

ZOO = """
import torch
from torch import nn

def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))

def nest():
    return net()

answer = 42

def number():
    return 7

def broken():
    raise ValueError("width must be even")

def needs(width):
    return nn.Linear(width, width)
"""


@pytest.fixture
def zoo(tmp_path):
    path = tmp_path / "zoo.py"
    path.write_text(ZOO)
    return path


@pytest.fixture(autouse=True)
def no_network(monkeypatch, tmp_path):
    """No download: neither the network nor what an earlier one left in a cache."""

    def refuse(url, *_, **__):
        raise urllib.error.URLError(f"no network for {url}")

    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "no-cache"))
    monkeypatch.setattr(torch.hub, "download_url_to_file", refuse)


def written(tmp_path, text, name="mine.py"):
    path = tmp_path / name
    path.write_text(text)
    return path


def test_a_torchvision_model_is_built_in_eval_mode_with_random_weights_and_its_preprocessing():
    source = load_model("torchvision:resnet18")
    assert type(source.model).__name__ == "ResNet"
    assert not any(module.training for module in source.model.modules())
    assert (source.spec, source.weights) == ("torchvision:resnet18", "random")
    assert source.preprocess.crop_size == [224]


def test_an_unknown_torchvision_model_lists_near_names():
    with pytest.raises(SourceError, match=r"unknown torchvision model 'resnet19'; did you mean .*resnet18"):
        load_model("torchvision:resnet19")


def test_an_unknown_name_that_is_near_nothing_lists_some_that_exist():
    with pytest.raises(SourceError, match=r"known are alexnet, .* and \d+ more"):
        load_model("torchvision:$$$$$$$$$$$$")


def test_unknown_torchvision_weights_list_those_that_exist():
    with pytest.raises(SourceError, match=r"unknown weights for torchvision:resnet50 'IMAGENET1K_V3'.*IMAGENET1K_V2"):
        load_model("torchvision:resnet50@IMAGENET1K_V3")
    with pytest.raises(SourceError, match="DEFAULT, IMAGENET1K_V1"):
        load_model("torchvision:resnet18@")


@pytest.mark.parametrize("name", ["IMAGENET1K_V1", "DEFAULT"])
def test_weights_that_cannot_be_downloaded_give_an_error_that_names_the_way_out(name):
    with pytest.raises(SourceError, match=rf"torchvision:resnet18@{name} cannot be built: URLError.*--weights FILE"):
        load_model(f"torchvision:resnet18@{name}")


def test_weights_from_a_file_are_used_instead_of_those_that_are_named_without_a_download(tmp_path):
    torch.manual_seed(1)
    from torchvision.models import squeezenet1_1

    path = save_state(squeezenet1_1().state_dict(), tmp_path / "mine.safetensors")
    source = load_model("torchvision:squeezenet1_1@IMAGENET1K_V1", path)
    assert source.weights == "mine.safetensors"
    assert same_bits(source.model.state_dict()["features.0.weight"], load_state_of(path)["features.0.weight"])
    assert source.preprocess.crop_size == [224]


def load_state_of(path):
    from safetensors.torch import load_file

    return load_file(path)


@pytest.mark.parametrize("name", ["fasterrcnn_resnet50_fpn", "deeplabv3_mobilenet_v3_large", "googlenet"])
def test_models_that_would_download_a_backbone_or_initialise_slowly_are_built_without_either(name):
    source = load_model(f"torchvision:{name}")
    assert source.weights == "random"
    assert sum(p.numel() for p in source.model.parameters()) > 5_000_000


def test_a_timm_model_is_built_with_its_preprocessing():
    pytest.importorskip("timm")
    source = load_model("timm:test_resnet")
    assert isinstance(source.model, nn.Module)
    assert not source.model.training
    assert source.weights == "random"
    assert callable(source.preprocess)


def test_an_unknown_timm_model_lists_near_names():
    pytest.importorskip("timm")
    with pytest.raises(SourceError, match=r"unknown timm model 'resnet51'; did you mean .*resnet50"):
        load_model("timm:resnet51")
    with pytest.raises(SourceError, match=r"unknown weights for timm:resnet18 'IMAGENET'.*pretrained"):
        load_model("timm:resnet18@IMAGENET")


def test_without_timm_the_error_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(SourceError, match=r"pip install 'halve\[timm\]'"):
        load_model("timm:resnet18")


@pytest.mark.parametrize("spec", ["resnet18", "", ":", "zoo:net", "hub:resnet18", "zoo.txt:net", "torchvision"])
def test_what_names_no_model_lists_the_forms(spec):
    with pytest.raises(SourceError, match=r"use torchvision:NAME.*timm:NAME.*path/file.py:callable"):
        load_model(spec)


def test_a_callable_in_a_file_is_called(zoo):
    source = load_model(f"{zoo}:net")
    assert isinstance(source.model, nn.Sequential)
    assert not source.model.training
    assert source.preprocess is None
    assert source.weights == "as built"


def test_a_class_in_a_file_is_instantiated_and_can_be_pickled_and_copied(tmp_path):
    text = "from torch import nn\nclass Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
    model = load_model(f"{written(tmp_path, text)}:Net").model
    assert type(pickle.loads(pickle.dumps(model))) is type(copy.deepcopy(model)) is type(model)


def test_a_wrapped_model_is_unwrapped_so_that_plain_checkpoints_fit(tmp_path):
    text = "from torch import nn\ndef net(): return nn.DataParallel(nn.Sequential(nn.Linear(4, 2)))\n"
    save_state(nn.Sequential(nn.Linear(4, 2)).state_dict(), tmp_path / "plain.safetensors")
    source = load_model(f"{written(tmp_path, text)}:net", tmp_path / "plain.safetensors")
    assert type(source.model) is nn.Sequential


def test_a_file_that_does_not_exist_is_named(tmp_path):
    with pytest.raises(SourceError, match=r"no such file .*nothing\.py"):
        load_model(f"{tmp_path}/nothing.py:net")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import halve_has_no_such_module", "ModuleNotFoundError: No module named 'halve_has_no_such_module'"),
        ("def net(:", "SyntaxError"),
        ("1 / 0", "ZeroDivisionError"),
        ("b\0", "null bytes"),
    ],
)
def test_a_file_that_cannot_be_imported_gives_its_own_error(tmp_path, text, message):
    path = sys.path.copy()
    with pytest.raises(SourceError, match=rf"mine\.py cannot be imported: .*{message}"):
        load_model(f"{written(tmp_path, text)}:net")
    assert sys.path == path


def test_a_script_that_exits_when_imported_is_an_error(tmp_path):
    with pytest.raises(SourceError, match="cannot be imported"):
        load_model(f"{written(tmp_path, 'import sys; sys.exit(0)')}:net")


def test_a_callable_that_exits_is_an_error(tmp_path):
    with pytest.raises(SourceError, match="cannot be built"):
        load_model(f"{written(tmp_path, 'import sys' + chr(10) + 'def net(): sys.exit(0)')}:net")


def test_a_missing_callable_lists_near_names(zoo):
    with pytest.raises(SourceError, match=r"unknown callable in .*zoo\.py 'nett'; did you mean net"):
        load_model(f"{zoo}:nett")
    with pytest.raises(SourceError, match="unknown callable"):
        load_model(f"{zoo}:answer")
    with pytest.raises(SourceError, match="unknown callable"):
        load_model(f"{zoo}:")


def test_what_is_not_a_module_is_named(zoo):
    with pytest.raises(SourceError, match=r"zoo\.py:number must return a torch\.nn\.Module, got int"):
        load_model(f"{zoo}:number")


@pytest.mark.parametrize(("name", "message"), [("broken", "ValueError: width must be even"), ("needs", "TypeError.*w")])
def test_a_callable_that_fails_gives_its_own_error_and_no_advice_about_networks(zoo, name, message):
    with pytest.raises(SourceError, match=rf"zoo\.py:{name} cannot be built: {message}") as raised:
        load_model(f"{zoo}:{name}")
    assert "without a network" not in str(raised.value)


def test_a_file_may_import_its_siblings(tmp_path):
    written(tmp_path, "from torch import nn\ndef block(): return nn.Linear(4, 4)\n", "halve_sibling_top.py")
    path = written(tmp_path, "from halve_sibling_top import block\ndef net(): return block()\n")
    before = sys.path.copy()
    assert isinstance(load_model(f"{path}:net").model, nn.Linear)
    assert sys.path == before


def test_a_callable_may_import_siblings_when_it_is_called(tmp_path):
    written(tmp_path, "from torch import nn\ndef block(): return nn.Linear(4, 4)\n", "halve_sibling_late.py")
    path = written(tmp_path, "def net():\n    from halve_sibling_late import block\n    return block()\n")
    assert isinstance(load_model(f"{path}:net").model, nn.Linear)


def test_a_file_that_changes_the_import_path_is_loaded(tmp_path):
    text = "import sys\nsys.path = [p for p in sys.path if 'site-packages' in p or 'lib' in p]\n"
    before = sys.path
    try:
        path = written(tmp_path, text + "from torch import nn\ndef net(): return nn.Linear(4, 4)\n")
        assert isinstance(load_model(f"{path}:net").model, nn.Linear)
    finally:
        sys.path = before


def test_a_module_level_preprocess_is_found(tmp_path):
    text = "from torch import nn\ndef preprocess(image): return 'module'\ndef net(): return nn.Linear(4, 4)\n"
    assert load_model(f"{written(tmp_path, text)}:net").preprocess(None) == "module"


def test_the_preprocess_of_the_model_itself_comes_first(tmp_path):
    text = (
        "from torch import nn\ndef preprocess(image): return 'module'\nclass Net(nn.Module):\n"
        "    def preprocess(self, image): return 'model'\n"
    )
    assert load_model(f"{written(tmp_path, text)}:Net").preprocess(None) == "model"


def test_a_preprocess_that_is_no_callable_is_passed_over(tmp_path):
    text = "from torch import nn\npreprocess = 'resize'\ndef net(): return nn.Linear(4, 4)\n"
    assert load_model(f"{written(tmp_path, text)}:net").preprocess is None


def test_weights_are_loaded_into_a_model_from_a_file(zoo, tmp_path):
    model = load_model(f"{zoo}:net").model
    state = {name: value + 1 for name, value in model.state_dict().items()}
    source = load_model(f"{zoo}:net", save_state(state, tmp_path / "net.safetensors"))
    assert source.weights == "net.safetensors"
    assert all(same_bits(value, state[name]) for name, value in source.model.state_dict().items())


def test_weights_of_another_model_are_refused(zoo, tmp_path):
    path = save_state({"fc.weight": torch.zeros(2, 2)}, tmp_path / "other.safetensors")
    with pytest.raises(ModelError, match="not a checkpoint of this Sequential"):
        load_model(f"{zoo}:net", path)
    with pytest.raises(HalveError, match="no such file"):
        load_model(f"{zoo}:net", tmp_path / "nothing.pth")


def test_an_onnx_file_says_what_to_do():
    with pytest.raises(SourceError, match=r"net.onnx is an ONNX file.*file.py:callable that converts it"):
        load_model("net.onnx")
