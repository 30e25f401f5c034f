"""The networks of experiments/export.py with fewer channels: the same operators in the same graph, with narrow weights.

Polygraphy takes minutes for the weights of the full networks, as it reads them in a Python loop.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torchvision.models import ConvNeXt, EfficientNet, mobilenet_v3_large
from torchvision.models._utils import IntermediateLayerGetter
from torchvision.models.convnext import CNBlockConfig
from torchvision.models.detection import RetinaNet
from torchvision.models.detection._utils import retrieve_out_channels
from torchvision.models.detection.anchor_utils import DefaultBoxGenerator
from torchvision.models.detection.backbone_utils import BackboneWithFPN
from torchvision.models.detection.retinanet import RetinaNetHead, _default_anchorgen
from torchvision.models.detection.ssd import SSD
from torchvision.models.detection.ssdlite import SSDLiteHead, _mobilenet_extractor
from torchvision.models.efficientnet import _efficientnet_conf
from torchvision.models.resnet import BasicBlock, Bottleneck, ResNet
from torchvision.models.segmentation.deeplabv3 import DeepLabHead, DeepLabV3
from torchvision.ops.feature_pyramid_network import LastLevelP6P7

CLASSES = 4
SIZE = 64


class NarrowResNet(ResNet):
    """A ResNet with fewer channels in each stage."""

    def __init__(self, block: type[nn.Module], layers: list[int], widths: dict[int, int], **options: object) -> None:
        self.widths = widths
        super().__init__(block, layers, **options)
        self.fc = nn.Linear(widths[512] * block.expansion, CLASSES)

    def _make_layer(self, block, planes, blocks, stride=1, dilate=False):
        return super()._make_layer(block, self.widths[planes], blocks, stride, dilate)


def _resnet18() -> nn.Module:
    return NarrowResNet(BasicBlock, [2, 2, 2, 2], {64: 64, 128: 32, 256: 64, 512: 32})  # the stem has 64


def _resnet50(**options: object) -> NarrowResNet:
    # each stage differs from the one before, so that it has a convolution in its shortcut
    return NarrowResNet(Bottleneck, [3, 4, 6, 3], {64: 32, 128: 40, 256: 32, 512: 40}, **options)


def _convnext() -> nn.Module:
    return ConvNeXt(
        [CNBlockConfig(16, 24, 3), CNBlockConfig(24, 32, 3), CNBlockConfig(32, 48, 9), CNBlockConfig(48, None, 3)],
        layer_scale=1.0,
        num_classes=CLASSES,
    )


def _mobilenet() -> nn.Module:
    return mobilenet_v3_large(width_mult=0.25, num_classes=CLASSES)


def _efficientnet() -> nn.Module:
    setting, last = _efficientnet_conf("efficientnet_b0", width_mult=0.25, depth_mult=1.0)
    return EfficientNet(setting, 0.2, num_classes=CLASSES, last_channel=last)


def _deeplab() -> nn.Module:
    backbone = _resnet50(replace_stride_with_dilation=[False, True, True])
    features = IntermediateLayerGetter(backbone, {"layer4": "out"})
    return DeepLabV3(features, DeepLabHead(160, CLASSES, (12, 24, 36)))


def _retinanet() -> nn.Module:
    levels = {f"layer{stage}": str(i) for i, stage in enumerate((2, 3, 4))}
    backbone = BackboneWithFPN(_resnet50(), levels, [160, 128, 160], 32, extra_blocks=LastLevelP6P7(160, 32))
    anchors = _default_anchorgen()
    head = RetinaNetHead(32, anchors.num_anchors_per_location()[0], CLASSES, norm_layer=partial(nn.GroupNorm, 32))
    return RetinaNet(backbone, CLASSES, anchor_generator=anchors, head=head, min_size=SIZE, max_size=SIZE)


def _ssdlite() -> nn.Module:
    norm = partial(nn.BatchNorm2d, eps=0.001, momentum=0.03)
    backbone = _mobilenet_extractor(mobilenet_v3_large(width_mult=0.25, norm_layer=norm, reduced_tail=True), 6, norm)
    anchors = DefaultBoxGenerator([[2, 3] for _ in range(6)], min_ratio=0.2, max_ratio=0.95)
    channels = retrieve_out_channels(backbone, (SIZE, SIZE))
    head = SSDLiteHead(channels, anchors.num_anchors_per_location(), CLASSES, norm)
    return SSD(backbone, anchors, (SIZE, SIZE), CLASSES, head=head, image_mean=[0.5] * 3, image_std=[0.5] * 3)


NARROW: dict[str, Callable[[], nn.Module]] = {  # by the names in experiments/results/export.json
    "resnet18": _resnet18,
    "resnet50_v1": _resnet50,
    "convnext_tiny": _convnext,
    "mobilenet_v3_large": _mobilenet,
    "efficientnet_b0": _efficientnet,
    "deeplabv3_resnet50": _deeplab,
    "retinanet_resnet50_fpn_v2": _retinanet,
    "ssdlite320_mobilenet_v3_large": _ssdlite,
}


def narrow(name: str) -> nn.Module:
    """A narrow network, with BatchNorm statistics that are not those of a new one."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = NARROW[name]().eval()
        for norm in model.modules():
            if isinstance(norm, nn.BatchNorm2d):
                nn.init.normal_(norm.running_mean, 0, 0.1)
                nn.init.uniform_(norm.running_var, 0.5, 2)
    return model
