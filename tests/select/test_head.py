import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torchvision import models

from halve.select.head import find_heads


class Untraceable(nn.Module):
    """Its forward looks at numbers, so that it cannot be traced symbolically."""

    def __init__(self, last):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)
        self.last = last

    def forward(self, x):
        x = self.first(x)
        return self.last(self.second(-x if x.sum() > 0 else x))


class After(nn.Module):
    """A Linear layer and what comes after it."""

    def __init__(self, after):
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.fc = nn.Linear(8, 4)
        self.after = after

    def forward(self, x):
        return self.after(self.fc(F.relu(self.body(x))))


def on_meta(build, **options):
    with torch.device("meta"):
        return build(weights=None, **options)


BOX_HEADS = ("roi_heads.box_predictor.cls_score", "roi_heads.box_predictor.bbox_pred")


@pytest.mark.parametrize(
    ("build", "options", "heads"),
    [
        (models.resnet18, {}, {"fc"}),
        (models.mobilenet_v3_small, {}, {"classifier.3"}),
        (models.densenet121, {}, {"classifier"}),
        (models.googlenet, {"init_weights": False}, {"fc", "aux1.fc2", "aux2.fc2"}),
        (models.inception_v3, {"init_weights": False}, {"fc", "AuxLogits.fc"}),
        (models.squeezenet1_1, {}, {"classifier.1"}),
        (models.convnext_tiny, {}, {"classifier.2"}),
        (models.swin_t, {}, {"head"}),
        (models.vit_b_16, {}, {"heads.head"}),
        (models.efficientnet_b0, {}, {"classifier.1"}),
        (
            models.segmentation.deeplabv3_mobilenet_v3_large,
            {"weights_backbone": None, "aux_loss": True},
            {"classifier.4", "aux_classifier.4"},
        ),
        (
            models.segmentation.lraspp_mobilenet_v3_large,
            {"weights_backbone": None},
            {"classifier.low_classifier", "classifier.high_classifier"},
        ),
        (
            models.detection.fasterrcnn_mobilenet_v3_large_320_fpn,
            {"weights_backbone": None},
            {*BOX_HEADS, "rpn.head.cls_logits", "rpn.head.bbox_pred"},
        ),
        (
            models.detection.maskrcnn_resnet50_fpn,
            {"weights_backbone": None},
            {*BOX_HEADS, "rpn.head.cls_logits", "rpn.head.bbox_pred", "roi_heads.mask_predictor.mask_fcn_logits"},
        ),
        (
            models.detection.retinanet_resnet50_fpn,
            {"weights_backbone": None},
            {"head.classification_head.cls_logits", "head.regression_head.bbox_reg"},
        ),
        (
            models.detection.ssdlite320_mobilenet_v3_large,
            {"weights_backbone": None},
            {f"head.{kind}_head.module_list.{i}.1" for kind in ("classification", "regression") for i in range(6)},
        ),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_the_heads_of_torchvision_models_are_found(build, options, heads):
    assert find_heads(on_meta(build, **options)) == heads


def test_a_backbone_whose_fc_was_taken_off_has_no_head():
    model = on_meta(models.resnet18)
    model.fc = nn.Identity()
    assert find_heads(model) == set()


@pytest.mark.parametrize(
    "after",
    [
        lambda x: F.log_softmax(x, dim=1),
        lambda x: x.softmax(dim=-1),
        torch.sigmoid,
        lambda x: x.reshape(-1, 2, 2).mean(2),
        lambda x: torch.flatten(x.unsqueeze(2), 1),
        lambda x: x[:, :3],
        lambda x: {"logits": x},
        lambda x: (x, x),
        nn.Sequential(nn.Dropout(), nn.Softmax(dim=1)),
    ],
)
def test_what_has_no_weights_may_follow_the_head(after):
    assert find_heads(After(after)) == {"fc"}


@pytest.mark.parametrize("after", [nn.BatchNorm1d(4), nn.PReLU(), nn.Sequential(nn.ReLU(), nn.LayerNorm(4))])
def test_a_layer_with_weights_behind_it_makes_it_no_head(after):
    assert find_heads(After(after)) == set()


def test_a_large_kernel_is_no_head():
    assert find_heads(nn.Sequential(nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 3, padding=1))) == set()


def test_each_output_has_its_head():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.age, self.name = nn.Linear(8, 8), nn.Linear(8, 1), nn.Linear(8, 5)

        def forward(self, x):
            x = self.body(x)
            return {"age": self.age(x), "name": self.name(x)}

    assert find_heads(Two()) == {"age", "name"}


def test_a_subclass_of_linear_with_a_forward_of_its_own_can_be_the_head():
    class Scaled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    assert find_heads(nn.Sequential(nn.Linear(8, 8), Scaled(8, 2))) == {"1"}


class Detector(nn.Module):
    """Looks at the boxes that it finds, so that only its modules can be traced."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 8, 3), nn.ReLU())
        self.classes, self.boxes = nn.Conv2d(8, 6, 3), nn.Conv2d(8, 4, 3)
        self.second = nn.Sequential(nn.Flatten(), nn.Linear(8 * 36, 32), nn.ReLU(), nn.Linear(32, 7))

    def forward(self, images):
        x = self.body(torch.stack(list(images)))
        classes, boxes = self.classes(x), self.boxes(x)
        return (classes, boxes, self.second(x)) if classes.max() > 0 else (classes, boxes)


def test_every_output_of_a_detector_has_its_head_also_with_large_kernels():
    assert find_heads(Detector()) == {"classes", "boxes", "second.3"}


def test_a_convolution_that_is_flattened_before_it_is_read_is_no_head():
    class Pool(Untraceable):
        def __init__(self):
            super().__init__(nn.Linear(2, 2))
            self.first, self.second = nn.Conv2d(3, 8, 3), nn.Linear(8 * 9, 2)

    assert find_heads(Pool()) == {"last"}


def test_queries_keys_and_values_of_untraceable_attention_are_no_heads():
    class Attention(Untraceable):
        def __init__(self):
            super().__init__(nn.Linear(8, 5))
            self.first, self.second = nn.Linear(8, 24), nn.Linear(8, 8)

    assert find_heads(Attention()) == {"last"}


def test_layers_that_do_not_run_are_heads_if_nothing_reads_them():
    class Stopping(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.middle, self.aux, self.fc = (nn.Linear(8, n) for n in (8, 8, 3, 2))

        def forward(self, x):
            return self.fc(self.body(x))

    assert find_heads(Stopping()) == {"aux", "fc"}


def test_where_tracing_fails_the_last_registered_layer_counts():
    assert find_heads(Untraceable(nn.Identity())) == {"second"}
    assert find_heads(Untraceable(nn.Linear(8, 2))) == {"last"}
    assert find_heads(Untraceable(nn.LayerNorm(8))) == set()
    assert find_heads(Untraceable(nn.Conv2d(8, 8, 3))) == set()


def test_where_tracing_fails_a_norm_without_weights_does_not_count():
    assert find_heads(Untraceable(nn.LayerNorm(8, elementwise_affine=False))) == {"second"}


def test_a_model_without_weights_has_no_head():
    assert find_heads(nn.Sequential(nn.ReLU(), nn.Flatten())) == set()


class Calling(nn.Module):
    """Calls a function in the middle of its forward pass."""

    def __init__(self, act):
        super().__init__()
        self.fc, self.act = nn.Linear(8, 2), act

    def forward(self, x):
        self.act()
        return self.fc(x)


def test_other_threads_run_their_models_while_one_is_traced():
    other, outputs = nn.Linear(8, 2), []

    def elsewhere():
        thread = threading.Thread(target=lambda: outputs.append(other(torch.ones(1, 8))))
        thread.start()
        thread.join()

    assert find_heads(Calling(elsewhere)) == {"fc"}
    assert outputs[0].equal(other(torch.ones(1, 8)))


def test_heads_are_found_in_threads_at_once():
    call, first_ended, found = nn.Module.__call__, threading.Event(), []
    second = threading.Thread(target=lambda: found.append(find_heads(Calling(lambda: first_ended.wait(10)))))

    def overlap():
        second.start()
        second.join(0.5)  # it gets so far that it is traced too, unless it waits

    found.append(find_heads(Calling(overlap)))
    first_ended.set()
    second.join()
    assert found == [{"fc"}, {"fc"}]
    assert nn.Module.__call__ is call
