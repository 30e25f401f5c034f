"""torchvision's detectors with small backbones, whose boxes depend on the image; and images of different sizes."""

import torch
from torch import Tensor, nn
from torchvision.models.detection import FasterRCNN, MaskRCNN, RetinaNet
from torchvision.models.detection.anchor_utils import AnchorGenerator, DefaultBoxGenerator
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor
from torchvision.models.detection.ssd import SSD
from torchvision.ops import MultiScaleRoIAlign

CLASSES = 5
SIZES = {"min_size": 32, "max_size": 48}


class Backbone(nn.Module):
    """One feature map with 16 channels, an eighth as high and wide as the image."""

    out_channels = 16

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU())
        self.body = nn.Sequential(nn.Conv2d(8, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU())
        self.last = nn.Sequential(nn.Conv2d(16, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.body(self.stem(x)))


def faster_rcnn() -> nn.Module:
    return lively(FasterRCNN(Backbone(), **_two_stages()))


def mask_rcnn() -> nn.Module:
    return lively(
        MaskRCNN(
            Backbone(),
            **_two_stages(),
            mask_roi_pool=MultiScaleRoIAlign(["0"], 2, 1),
            mask_head=MaskRCNNHeads(16, (8, 8), 1),
            mask_predictor=MaskRCNNPredictor(8, 8, CLASSES),
        )
    )


def _two_stages() -> dict[str, object]:
    return {
        "rpn_anchor_generator": AnchorGenerator(((8, 16),), ((0.5, 1.0, 2.0),)),
        "rpn_pre_nms_top_n_test": 100,
        "rpn_post_nms_top_n_test": 20,
        "box_roi_pool": MultiScaleRoIAlign(["0"], 2, 1),
        "box_head": TwoMLPHead(16 * 4, 16),
        "box_predictor": FastRCNNPredictor(16, CLASSES),
        **SIZES,
    }


def retinanet() -> nn.Module:
    return lively(RetinaNet(Backbone(), CLASSES, anchor_generator=AnchorGenerator(((8, 16),), ((1.0,),)), **SIZES))


def ssd() -> nn.Module:
    backbone = Backbone()
    backbone.out_channels = [16]
    return lively(SSD(backbone, DefaultBoxGenerator([[2]], scales=[0.3, 0.6]), (32, 32), CLASSES))


DETECTORS = {"faster_rcnn": faster_rcnn, "mask_rcnn": mask_rcnn, "retinanet": retinanet, "ssd": ssd}


def lively(model: nn.Module) -> nn.Module:
    """Weights with which signals reach the heads, and confident boxes come out."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                nn.init.kaiming_normal_(parameter, generator=generator)
                if "bbox" in name or "regression" in name:
                    parameter.mul_(0.1)
                if "cls" in name or "classification_head.module_list" in name:
                    parameter.mul_(3)
            elif "bias" in name:
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def pictures(count: int = 2, seed: int = 0) -> list[Tensor]:
    """Images of different sizes."""
    generator = torch.Generator().manual_seed(seed)
    sizes = [(40, 32), (32, 36), (48, 32)]
    return [torch.rand(3, *sizes[i % 3], generator=generator) for i in range(count)]


def targets(count: int = 2) -> list[dict[str, Tensor]]:
    """What torchvision's detectors are trained with."""
    box = {"boxes": torch.tensor([[1.0, 1.0, 9.0, 9.0]]), "labels": torch.tensor([1])}
    return [dict(box) for _ in range(count)]
