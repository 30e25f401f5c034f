import copy
import re
import warnings

import pytest
import torch
from timm.layers import Conv2dSame, StdConv2d
from torch import nn
from torch.nn.utils import parametrizations, prune, spectral_norm, weight_norm
from torchvision import models

import halve
from halve import Pattern, select
from halve.errors import ModelError, OptionError, PatternError
from tests.untouched import untouched


def small():
    return nn.Sequential(
        nn.Conv2d(3, 16, 3),
        nn.BatchNorm2d(16),
        nn.Conv2d(16, 16, 3, groups=16),
        nn.Conv2d(16, 16, 3, groups=4),
        nn.Conv2d(16, 16, 3),
        nn.Flatten(),
        nn.Linear(16, 8),
        nn.ReLU(),
        nn.Linear(8, 4),
    )


def reasons(model, *args, **options):
    return {choice.name: choice.reason for choice in select(model, *args, **options)}


def masked(model, *args, **options):
    return [choice.name for choice in select(model, *args, **options).masked]


def test_every_layer_has_a_decision_and_a_reason():
    assert reasons(small()) == {
        "0": "3 input channels, not divisible by 4 (remainder='pad' pads them)",
        "2": "depthwise convolution (also='2' masks within each group)",
        "3": "grouped (4 groups) convolution (also='3' masks within each group)",
        "4": "along input channels",
        "6": "along input channels",
        "8": "output head (also='8' masks it)",
    }
    assert masked(small()) == ["4", "6"]


def test_a_choice_says_what_it_is_about():
    choice = select(small())[3]
    assert (choice.name, choice.type, choice.shape) == ("4", "Conv2d", (16, 16, 3, 3))
    assert choice.pattern == Pattern("2:4")
    assert (choice.layout.kind, choice.layout.shape, choice.layout.order) == ("conv", (16, 16, 3, 3), "channels")
    dense = select(small())[0]
    assert dense.pattern is None
    assert dense.layout is None
    assert not dense.masked


def test_the_table_has_one_line_for_every_layer_with_its_name():
    selection = select(small())
    lines = str(selection).splitlines()
    assert len(lines) == len(selection) == 6
    for line, choice in zip(lines, selection, strict=True):
        assert line.split()[0] == choice.name
        assert choice.reason in line
        assert "x".join(map(str, choice.shape)) in line
        assert ("2:4" if choice.masked else "dense") in line.split()
    assert str(select(nn.ReLU())) == ""


def test_in_a_notebook_it_is_a_table_in_which_names_stay_text():
    model = nn.ModuleDict({"<script>": nn.Linear(4, 4), "head": nn.Linear(4, 2)})
    chosen = select(model)
    assert repr(chosen) == f"Selection({len(chosen.masked)} of 2 layers masked)"
    shown = chosen._repr_html_()
    assert shown.count("<tr>") == 3
    assert "&lt;script&gt;" in shown
    assert "<script>" not in shown


def test_also_opts_in_what_the_default_leaves_out():
    assert masked(small(), also=["3", "8"]) == ["3", "4", "6", "8"]
    assert reasons(small(), also="3")["3"] == "along input channels, within each of 4 groups"
    assert "1 input channels per group, not divisible by 4" in reasons(small(), also="2")["2"]
    padded = {choice.name: choice for choice in select(small(), also="2", remainder="pad")}["2"]
    assert padded.layout.virtual == 3


def test_the_groups_of_a_resnext_are_skipped_and_can_be_opted_in():
    with torch.device("meta"):
        block = models.resnet.Bottleneck(64, 16, groups=4, base_width=64)
    model = nn.Sequential(block.to_empty(device="cpu"), nn.ReLU())
    assert masked(model) == ["0.conv1", "0.conv3"]
    assert masked(model, also="*.conv2") == ["0.conv1", "0.conv2", "0.conv3"]


def test_include_and_exclude_take_globs_and_lists():
    model = models.shufflenet_v2_x0_5(weights=None)
    inside = masked(model, include="stage3.*")
    assert inside
    assert all(name.startswith("stage3.") for name in inside)
    assert masked(model, include=["stage3.*", "conv5.*"]) == [*inside, "conv5.0"]
    outside = masked(model, exclude="stage3.*")
    assert sorted(inside + outside) == sorted(masked(model))
    assert masked(model, include="stage3.*", exclude="*.branch2.*") == [n for n in inside if ".branch2." not in n]


def test_exclude_wins_over_also_and_also_over_include():
    assert masked(small(), include="4", also="8") == ["4", "8"]
    assert masked(small(), also="8", exclude="8") == ["4", "6"]
    assert reasons(small(), include="4")["6"] == "not in include"
    assert reasons(small(), exclude="4")["4"] == "in exclude"


@pytest.mark.parametrize("option", ["include", "exclude", "also", "kinds"])
@pytest.mark.parametrize("value", [5, ["0", 5], {"0": "2:4"}, True])
def test_names_that_are_no_strings_are_refused(option, value):
    says = f"{option} must be a string or a list of strings, got {value!r}"
    with pytest.raises(OptionError, match=re.escape(says)):
        select(small(), **{option: value})


def test_a_pattern_for_layers_that_are_not_named_by_strings_is_refused():
    with pytest.raises(OptionError, match="keys of pattern must be names or globs of layers, got 5"):
        select(small(), {5: "2:4"})


def test_names_may_be_given_as_a_set_and_one_kind_as_a_string():
    assert masked(small(), include={"4", "6"}) == ["4", "6"]
    assert masked(small(), kinds="linear") == masked(small(), kinds=["linear"]) == ["6"]


@pytest.mark.parametrize("option", ["include", "exclude", "also"])
def test_a_glob_that_matches_no_layer_is_refused_with_the_layers_there_are(option):
    with pytest.raises(OptionError, match=r"'layer9\.\*' matches no layer of Sequential.*0, 2, 3, 4, 6, 8"):
        select(small(), **{option: "layer9.*"})
    with pytest.raises(OptionError, match=r"layer9"):
        select(small(), pattern={"layer9.*": "2:4", "*": "2:4"})


def test_different_layers_may_have_different_patterns_and_the_first_match_wins():
    chosen = {c.name: c for c in select(small(), {"4": "1:4", "6": None, "[0-9]": "4:8"}, also="8")}
    assert str(chosen["4"].pattern) == "1:4"
    assert chosen["6"].reason == "no pattern matches it"
    assert str(chosen["8"].pattern) == "4:8"
    assert chosen["8"].layout.block == 8
    assert masked(small(), {"4": "2:4"}) == ["4"]


def test_a_pattern_object_is_as_good_as_its_text():
    assert list(select(small(), Pattern("1:2"))) == list(select(small(), "1:2"))


def test_a_wrong_pattern_order_or_remainder_is_refused():
    with pytest.raises(PatternError, match="5:4"):
        select(small(), "5:4")
    with pytest.raises(OptionError, match="order must be one of channels, flat, got 'sideways'"):
        select(small(), order="sideways")
    with pytest.raises(OptionError, match="remainder must be one of skip, pad, error, got 'drop'"):
        select(small(), remainder="drop")


def test_a_remainder_is_skipped_padded_or_an_error():
    model = nn.Sequential(nn.Conv2d(6, 8, 3), nn.ReLU())
    assert masked(model) == masked(model, remainder="skip") == []
    (choice,) = select(model, remainder="pad")
    assert choice.layout.pad
    assert choice.reason == "along input channels, 2 virtual columns"
    with pytest.raises(ModelError, match=r"layer 0: 6 input channels, not divisible by 4.*'skip'.*'pad'"):
        select(model, remainder="error")


def test_padding_is_only_for_layers_that_need_it():
    assert not select(small(), remainder="pad")[3].layout.pad


def test_the_flat_order_takes_whole_rows():
    model = nn.Sequential(nn.Conv2d(3, 8, 2), nn.Conv2d(3, 8, 3), nn.ReLU())
    flat = select(model, order="flat")
    assert flat[0].reason == "flat, as in the paper"
    assert flat[0].layout.order == "flat"
    assert flat[1].reason.startswith("27 weights per row, not divisible by 4")


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv1d(8, 8, 3),
        nn.Conv3d(8, 8, 3),
        nn.ConvTranspose1d(8, 6, 3),
        nn.ConvTranspose2d(8, 6, 3),
        nn.ConvTranspose3d(8, 6, 2),
    ],
)
def test_every_kind_of_convolution_is_masked_along_its_input_channels(layer):
    (choice,) = select(nn.Sequential(layer, nn.ReLU()))
    assert choice.masked
    assert choice.layout.channels == 8


def test_the_input_channels_of_a_transposed_convolution_count():
    model = nn.Sequential(nn.ConvTranspose2d(6, 8, 3), nn.ConvTranspose2d(8, 8, 3, groups=4), nn.ReLU())
    assert reasons(model)["0"].startswith("6 input channels, not divisible by 4")
    assert reasons(model)["1"].startswith("grouped (4 groups)")
    assert reasons(model, also="1")["1"].startswith("2 input channels per group, not divisible by 4")


def test_tied_linear_layers_are_masked_once():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    model[2].weight = model[0].weight
    first, second, _ = select(model)
    assert first.masked
    assert first.shared_with == ("2",)
    assert second.reason == "shares its weight with 0"
    assert not second.masked


def test_a_weight_that_the_head_shares_is_the_heads_and_stays_dense():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    model[2].weight = model[0].weight
    assert masked(model) == []


def test_a_linear_layer_tied_to_an_embedding_is_not_masked():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(16, 8)
            self.body = nn.Linear(8, 8)
            self.out = nn.Linear(8, 16, bias=False)
            self.out.weight = self.embedding.weight

        def forward(self, x):
            return self.out(torch.relu(self.body(self.embedding(x))))

    why = reasons(Tied(), also="out")
    assert why["out"] == "shares its weight with embedding.weight"
    assert why["embedding"] == "not a convolution or Linear"
    assert masked(Tied(), also="*") == ["body"]


def test_one_module_under_two_names_is_listed_once_and_knows_both():
    layer = nn.Linear(8, 8)
    (choice,) = select(nn.Sequential(layer, nn.ReLU(), layer, nn.LayerNorm(8)))
    assert choice.name == "0"
    assert choice.masked
    assert choice.shared_with == ("2",)


def test_a_lazy_layer_asks_for_a_first_run():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = nn.Sequential(nn.LazyConv2d(8, 3), nn.Flatten(), nn.LazyLinear(8), nn.ReLU(), nn.Linear(8, 2))
    why = reasons(model)
    assert why["0"] == why["2"] == "not initialised yet: run the model once"
    assert masked(model) == []
    model(torch.zeros(1, 4, 5, 5))
    assert masked(model) == ["0", "2"]


def lazy():
    return nn.Sequential(nn.Conv2d(8, 8, 3), nn.LazyConv2d(8, 3), nn.LazyBatchNorm2d(), nn.Flatten(), nn.Linear(8, 4))


def test_a_lazy_layer_is_a_reason_where_it_is_listed_and_an_error_where_the_model_is_used():
    assert masked(lazy()) == ["0"]
    assert reasons(lazy())["1"] == "not initialised yet: run the model once"
    batch, none = torch.randn(2, 8, 5, 5), halve.MaskSet({})
    uses = {
        "prune": lambda: halve.prune(lazy()),
        "learn": lambda: halve.learn(lazy(), batch, steps=1),
        "compile": lambda: halve.compile(lazy(), none, batch),
        "evaluate": lambda: halve.evaluate(lazy(), none, [batch]),
    }
    for use in uses.values():
        with pytest.raises(ModelError, match="not initialised yet: 1, 2; run the model"):
            use()
    for name in ("learn", "compile", "evaluate"):  # a lazy layer can be copied where a lazy BatchNorm cannot
        model = nn.Sequential(nn.Conv2d(8, 8, 3), nn.LazyConv2d(8, 3))
        call = {"learn": (batch,), "compile": (none, batch), "evaluate": (none, [batch])}[name]
        with pytest.raises(ModelError, match="not initialised yet: 1; run the model"):
            getattr(halve, name)(model, *call)


def test_a_model_on_the_meta_device_has_no_numbers_to_mask():
    with torch.device("meta"):
        model = small()
    assert masked(model) == []
    assert all("meta" in reason for reason in reasons(model).values())


def test_the_in_projection_of_attention_is_listed_with_a_reason():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
            self.norm = nn.LayerNorm(8)

        def forward(self, x):
            return self.norm(self.attention(x, x, x)[0])

    chosen = {choice.name: choice for choice in select(Attention())}
    assert chosen["attention"].reason == "not a convolution or Linear"
    assert chosen["attention"].shape == (24, 8)
    assert chosen["attention.out_proj"].masked


def test_a_weight_standardised_convolution_is_refused_and_a_padding_one_is_not():
    model = nn.Sequential(StdConv2d(8, 8, 3), Conv2dSame(8, 8, 3, stride=2), nn.ReLU())
    assert reasons(model) == {
        "0": "StdConv2d transforms its weight when it runs, so zeros would not stay zero",
        "1": "along input channels",
    }
    assert masked(model, also="0") == ["1"]


@pytest.mark.parametrize(
    "wrap",
    [
        spectral_norm,
        pytest.param(weight_norm, marks=pytest.mark.filterwarnings("ignore::FutureWarning")),
        lambda layer: prune.random_unstructured(layer, "weight", 0.3),
        parametrizations.spectral_norm,
        parametrizations.weight_norm,
        parametrizations.orthogonal,
    ],
    ids=["spectral_norm hook", "weight_norm hook", "prune hook", "spectral_norm", "weight_norm", "orthogonal"],
)
def test_a_layer_whose_weight_is_computed_is_masked_and_the_model_not_touched(wrap):
    torch.manual_seed(0)
    model = nn.Sequential(wrap(nn.Conv2d(8, 8, 3)), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8, 4)).train()
    model(torch.randn(2, 8, 3, 3))
    with untouched(model):
        selection = select(model)
    assert [choice.name for choice in selection.masked] == ["0"]
    assert [choice.name for choice in selection] == ["0", "3"]


@pytest.mark.parametrize("training", [True, False])
def test_select_leaves_the_model_as_it_is_also_when_it_raises(training):
    model = small().train(training)
    with untouched(model):
        select(model, "2:4", also="*", remainder="pad", order="flat")
        with pytest.raises(ModelError):
            select(model, remainder="error")
        with pytest.raises(OptionError):
            select(model, include="nothing")


def test_select_moves_no_random_numbers():
    model = small()
    state = torch.get_rng_state()
    select(model, also="*")
    assert torch.equal(torch.get_rng_state(), state)


def test_the_selection_is_a_sequence_and_the_same_for_a_copy():
    model = small()
    selection = select(model)
    assert list(selection) == list(select(copy.deepcopy(model)))
    assert selection[0] == next(iter(selection))
    assert list(selection[:2]) == list(selection)[:2]


def test_an_empty_layer_is_left_out_and_blocks_nothing():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.ReLU())
    model.extra = nn.Linear(8, 4)
    model.extra.weight = nn.Parameter(torch.empty(0, 8))
    reasons = {choice.name: choice.reason for choice in select(model)}
    assert reasons["extra"] == "empty weight"
    assert select(model).masked


def test_what_is_no_model_is_refused():
    with pytest.raises(ModelError, match=r"must be a torch\.nn\.Module, got int"):
        select(5)
