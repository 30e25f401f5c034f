"""Small networks of every kind that torchvision has: its own blocks, but few of them, for small images."""

from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torchvision import models
from torchvision.models import convnext, efficientnet, mobilenetv3, regnet, resnet, segmentation, swin_transformer
from torchvision.models._utils import IntermediateLayerGetter
from torchvision.models.segmentation import deeplabv3


def _alexnet() -> nn.Module:
    model = models.AlexNet(num_classes=10)
    model.classifier = nn.Sequential(nn.Dropout(), nn.Linear(256 * 36, 32), nn.ReLU(inplace=True), nn.Linear(32, 10))
    return model


def _vgg() -> nn.Module:
    layers = models.vgg.make_layers([8, "M", 16, "M", 16, 16], batch_norm=True)
    with torch.device("meta"):  # its classifier is large
        model = models.VGG(layers, num_classes=10, init_weights=False)
    model.classifier = nn.Sequential(nn.Linear(16 * 49, 32), nn.ReLU(True), nn.Dropout(), nn.Linear(32, 10))
    return model


def _convnext() -> nn.Module:
    blocks = [convnext.CNBlockConfig(16, 32, 2), convnext.CNBlockConfig(32, None, 1)]
    return models.ConvNeXt(blocks, num_classes=10, norm_layer=partial(convnext.LayerNorm2d, eps=1e-6))


def _efficientnet() -> nn.Module:
    plain = [(1, 3, 1, 16, 16), (6, 3, 2, 16, 24), (6, 5, 2, 24, 40)]  # expansion, kernel, stride, channels
    blocks = [efficientnet.MBConvConfig(*block, 2) for block in plain]
    return models.EfficientNet(blocks, 0.2, num_classes=10, last_channel=64)


def _efficientnet_v2() -> nn.Module:
    blocks = [
        efficientnet.FusedMBConvConfig(1, 3, 1, 16, 16, 2),
        efficientnet.FusedMBConvConfig(4, 3, 2, 16, 24, 2),
        efficientnet.MBConvConfig(4, 3, 2, 24, 40, 2),
    ]
    return models.EfficientNet(blocks, 0.2, num_classes=10, last_channel=64)


def _googlenet() -> nn.Module:
    model = models.GoogLeNet(num_classes=10, aux_logits=False, init_weights=False)
    return _without(model, "inception4b", "inception4c", "inception5a")


def _inception_v3() -> nn.Module:
    model = models.Inception3(num_classes=10, aux_logits=False, init_weights=False)
    return _without(model, "Mixed_5d", "Mixed_6c", "Mixed_6d", "Mixed_6e", "Mixed_7c")


def _without(model: nn.Module, *blocks: str) -> nn.Module:
    """Leave out blocks that return as many channels as they get."""
    for name in blocks:
        setattr(model, name, nn.Identity())
    return model


def _maxvit() -> nn.Module:
    return models.MaxVit((64, 64), 16, 4, [16, 32], [1, 1], 8, stochastic_depth_prob=0.1, num_classes=10)


def _mobilenet_v2() -> nn.Module:
    return models.MobileNetV2(10, inverted_residual_setting=[[1, 16, 1, 1], [6, 24, 2, 2], [6, 32, 2, 2]])


def _mobilenet_v3() -> nn.Module:
    rows = [  # input, kernel, expanded, output, squeeze and excitation, activation, stride, dilation, width
        (16, 3, 16, 16, True, "RE", 2, 1, 1),
        (16, 3, 72, 24, False, "RE", 2, 1, 1),
        (24, 5, 96, 24, True, "HS", 1, 1, 1),
    ]
    return models.MobileNetV3([mobilenetv3.InvertedResidualConfig(*row) for row in rows], 64, num_classes=10)


def _regnet(squeeze: float | None) -> nn.Module:
    blocks = regnet.BlockParams([1, 2], [16, 32], [8, 8], [1.0, 1.0], [2, 2], squeeze)
    return models.RegNet(blocks, num_classes=10, norm_layer=nn.BatchNorm2d)


def _resnet(block: type[nn.Module], **options: int) -> nn.Module:
    return models.ResNet(block, [2, 1, 1, 1], num_classes=10, **options)


def _swin(**options: type[nn.Module]) -> nn.Module:
    return models.SwinTransformer([4, 4], 16, [2, 2], [2, 4], [4, 4], num_classes=10, **options)


def _mobile_features(**layers: str) -> nn.Module:
    return IntermediateLayerGetter(_mobilenet_v3().features, {place: name for name, place in layers.items()})


def _lraspp() -> nn.Module:
    return segmentation.LRASPP(_mobile_features(low="1", high="4"), 16, 144, num_classes=10, inter_channels=16)


def _deeplab() -> nn.Module:
    return segmentation.DeepLabV3(_mobile_features(out="4"), deeplabv3.DeepLabHead(144, 10, (2, 3)))


FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "alexnet": _alexnet,
    "convnext": _convnext,
    "deeplabv3": _deeplab,
    "densenet": partial(models.DenseNet, 8, (2, 3), 16, num_classes=10),
    "efficientnet": _efficientnet,
    "efficientnet_v2": _efficientnet_v2,
    "googlenet": _googlenet,
    "inception_v3": _inception_v3,
    "lraspp": _lraspp,
    "maxvit": _maxvit,
    "mobilenet_v2": _mobilenet_v2,
    "mobilenet_v3": _mobilenet_v3,
    "regnet_x": partial(_regnet, None),
    "regnet_y": partial(_regnet, 0.25),
    "resnet_basic": partial(_resnet, resnet.BasicBlock),
    "resnet_bottleneck": partial(_resnet, resnet.Bottleneck),
    "resnext": partial(_resnet, resnet.Bottleneck, groups=4, width_per_group=16),
    "shufflenet_v2": partial(models.ShuffleNetV2, [2, 2, 2], [24, 48, 96, 192, 256], num_classes=10),
    "squeezenet": partial(models.SqueezeNet, "1_1", num_classes=10),
    "swin": _swin,
    "swin_v2": partial(
        _swin, block=swin_transformer.SwinTransformerBlockV2, downsample_layer=swin_transformer.PatchMergingV2
    ),
    "vgg": _vgg,
    "vit": partial(models.VisionTransformer, 64, 16, 2, 2, 16, 32, num_classes=10),
}


def family(name: str) -> nn.Module:
    """One of them, always with the same weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return lively(FAMILIES[name]())


def size(name: str) -> int:
    """The height and width of its images."""
    return 96 if name == "inception_v3" else 64


def lively(model: nn.Module) -> nn.Module:
    """Give every tensor distinct numbers, so that one in the wrong place shows, and that signals get through."""
    generator = torch.Generator().manual_seed(0)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if not tensor.is_floating_point():
            continue
        with torch.no_grad():
            if "bias" in name or "running_mean" in name:
                tensor.copy_(torch.rand(tensor.shape, generator=generator) - 0.5)
            elif tensor.dim() == 1 or "scale" in name or "token" in name:
                tensor.copy_(torch.rand(tensor.shape, generator=generator) + 0.5)
            elif "weight" in name:
                nn.init.kaiming_normal_(tensor, generator=generator)
    return model.eval()
