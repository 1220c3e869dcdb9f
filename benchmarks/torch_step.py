"""The same training step in PyTorch, written as its users write one.

Networks, loss and optimiser are those of `kln_jax` for the MNIST and conv-large
networks; PyTorch's own initialisation stays, which no time depends on.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

BANDWIDTHS = (1.0, 3.0, 5.0, 7.0, 9.0)


def mnist_autoencoder() -> tuple[nn.Module, nn.Module]:
    """Encoder and decoder for 28x28 grey images."""
    encoder = nn.Sequential(
        nn.Conv2d(1, 64, 4, stride=2, padding=1),
        nn.LeakyReLU(0.2),
        *_conv(64, 128, 4, 0.2, stride=2, padding=1),
        *_conv(128, 1024, 7, 0.2),
        *_conv(1024, 128, 1, 0.2),
        nn.Flatten(),
    )
    decoder = nn.Sequential(
        nn.Unflatten(1, (128, 1, 1)),
        *_deconv(128, 1024, 1),
        *_deconv(1024, 128, 7),
        *_deconv(128, 64, 4, stride=2, padding=1),
        nn.ConvTranspose2d(64, 1, 4, stride=2, padding=1),
        nn.Sigmoid(),
    )
    return encoder, decoder


def conv_large_autoencoder() -> tuple[nn.Module, nn.Module]:
    """Encoder and decoder for 32x32 colour images."""
    encoder = nn.Sequential(
        *_conv(3, 128, 3, 0.1, padding=1),
        *_conv(128, 128, 3, 0.1, padding=1),
        *_conv(128, 128, 3, 0.1, padding=1),
        nn.MaxPool2d(2),
        nn.Dropout(0.5),
        *_conv(128, 256, 3, 0.1, padding=1),
        *_conv(256, 256, 3, 0.1, padding=1),
        *_conv(256, 256, 3, 0.1, padding=1),
        nn.MaxPool2d(2),
        nn.Dropout(0.5),
        *_conv(256, 512, 3, 0.1),
        *_conv(512, 256, 1, 0.1),
        *_conv(256, 128, 1, 0.1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    )
    decoder = nn.Sequential(
        nn.Unflatten(1, (128, 1, 1)),
        *_deconv(128, 512, 4),
        *_deconv(512, 256, 4, stride=2, padding=1),
        *_deconv(256, 128, 4, stride=2, padding=1),
        nn.ConvTranspose2d(128, 3, 4, stride=2, padding=1),
        nn.Sigmoid(),
    )
    return encoder, decoder


def _conv(
    channels: int,
    features: int,
    side: int,
    slope: float,
    *,
    stride: int = 1,
    padding: int = 0,
) -> list[nn.Module]:
    conv = nn.Conv2d(channels, features, side, stride, padding, bias=False)
    return [conv, nn.BatchNorm2d(features), nn.LeakyReLU(slope)]


def _deconv(
    channels: int, features: int, side: int, *, stride: int = 1, padding: int = 0
) -> list[nn.Module]:
    deconv = nn.ConvTranspose2d(channels, features, side, stride, padding, bias=False)
    return [deconv, nn.BatchNorm2d(features), nn.ReLU()]


AUTOENCODERS = {"mnist": mnist_autoencoder, "conv_large": conv_large_autoencoder}


def cmmd(x_s: Tensor, y_s: Tensor, x_t: Tensor, y_t: Tensor, ridge: float) -> Tensor:
    """The CMMD with a linear label kernel."""

    def kernel(a: Tensor, b: Tensor) -> Tensor:
        squares = torch.cdist(a, b).square()
        return torch.stack([torch.exp(-squares / (2 * v)) for v in BANDWIDTHS]).mean(0)

    K_s, K_t, K_ts = kernel(x_s, x_s), kernel(x_t, x_t), kernel(x_t, x_s)
    A_s = torch.linalg.solve(K_s + ridge * torch.eye(len(x_s), device=x_s.device), y_s)
    A_t = torch.linalg.solve(K_t + ridge * torch.eye(len(x_t), device=x_t.device), y_t)
    same = (A_s * (K_s @ A_s)).sum() + (A_t * (K_t @ A_t)).sum()
    return same - 2 * (A_t * (K_ts @ A_s)).sum()


def make_step(
    network: str, images: np.ndarray, labels: np.ndarray, batch_size: int
) -> Callable[[], Tensor]:
    """Makes a function that makes one step and returns its loss.

    Args:
      network: ``"mnist"`` or ``"conv_large"``.
      images: uint8 images ``(N, h, w, c)``; they lie on the GPU if there is one.
      labels: Their class numbers.
      batch_size: Images of s, and of t.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    encoder, decoder = (part.to(device) for part in AUTOENCODERS[network]())
    classifier = nn.Linear(128, 10).to(device)
    parameters = [
        parameter
        for part in (encoder, decoder, classifier)
        for parameter in part.parameters()
    ]
    optimizer = torch.optim.SGD(parameters, lr=0.02, momentum=0.9, weight_decay=5e-4)
    data = torch.tensor(images, device=device).permute(0, 3, 1, 2)
    targets = torch.tensor(labels, device=device, dtype=torch.long)

    def step() -> Tensor:
        rows_s, rows_t = torch.randperm(len(data), device=device).split(batch_size)[:2]
        x = data[torch.cat([rows_s, rows_t])].float() / 255
        z = encoder(x)
        reconstruction = (decoder(z) - x).square().sum(dim=(1, 2, 3)).mean()
        probabilities = classifier(z[batch_size:]).softmax(dim=1)
        y_s = nn.functional.one_hot(targets[rows_s], 10).float()
        discrepancy = cmmd(z[:batch_size], y_s, z[batch_size:], probabilities, 0.1)
        loss = discrepancy + 0.1 * reconstruction
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 10.0)
        optimizer.step()
        return loss.detach()

    return step


def wait() -> None:
    """Waits until the GPU, if there is one, has done what it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
