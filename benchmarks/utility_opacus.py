"""The network of benchmarks/utility.py in PyTorch, trained with Opacus."""

from typing import TYPE_CHECKING, Any

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
from opacus import GradSampleModule  # pyright: ignore[reportMissingImports]
from opacus.optimizers import DPOptimizer  # pyright: ignore[reportMissingImports]
from opacus.utils.uniform_sampler import (  # pyright: ignore[reportMissingImports]
    UniformWithReplacementSampler,
)
from torch import nn  # pyright: ignore[reportMissingImports]

if TYPE_CHECKING:
    from benchmarks.utility import Arrays, Run


def make_module(initial: "Arrays") -> nn.Module:
    """The network with these parameters."""
    layers = [_linear(initial[x], initial[f"{x}_bias"]) for x in ("hidden", "out")]
    return nn.Sequential(layers[0], nn.Tanh(), layers[1])


def _linear(kernel: np.ndarray, bias: np.ndarray) -> nn.Linear:
    """A layer with a kernel of the axes (in, out)."""
    layer = nn.Linear(*kernel.shape)
    layer.weight.data = torch.from_numpy(np.array(kernel.T, order="C"))
    layer.bias.data = torch.from_numpy(np.array(bias))
    return layer


def train(run: "Run") -> dict[str, Any]:
    """The parameters after training, with the names and axes of `run.initial`."""
    from benchmarks.utility import BATCH_SIZE, CLIP_NORM

    mechanism = run.mechanism
    module = GradSampleModule(make_module(run.initial))
    optimizer = DPOptimizer(
        torch.optim.Adam(module.parameters(), lr=run.learning_rate),
        noise_multiplier=mechanism.noise_multiplier,
        max_grad_norm=CLIP_NORM,
        expected_batch_size=BATCH_SIZE,
        generator=torch.Generator().manual_seed(run.seed),
    )
    batches = UniformWithReplacementSampler(
        num_samples=mechanism.num_examples,
        sample_rate=mechanism.sampling.sampling_prob,
        generator=torch.Generator().manual_seed(run.seed),
        steps=mechanism.iterations,
    )
    image, label = (torch.from_numpy(run.data[x]) for x in ("image", "label"))
    for chosen in batches:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(module(image[chosen]), label[chosen].long())
        loss.backward()
        optimizer.step()
    weights = [x.detach().numpy() for x in module.parameters()]
    return {
        name: x.T if x.ndim == 2 else x
        for name, x in zip(run.initial, weights, strict=True)
    }
