"""Models of the benchmarks in PyTorch, with the same parameters, trained with Opacus.

pip install torch --index-url https://download.pytorch.org/whl/cpu
pip install '.[peers]'
"""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import opacus  # pyright: ignore[reportMissingImports]
import torch  # pyright: ignore[reportMissingImports]
from opacus.optimizers import DPOptimizer  # pyright: ignore[reportMissingImports]
from opacus.utils.uniform_sampler import (  # pyright: ignore[reportMissingImports]
    UniformWithReplacementSampler,
)
from torch import nn  # pyright: ignore[reportMissingImports]

if TYPE_CHECKING:
    from benchmarks import utility


def _tensor(x: Any) -> torch.Tensor:
    return torch.from_numpy(np.array(x, np.float32, order="C"))


def _linear(kernel: Any, bias: Any | None = None) -> nn.Linear:
    """A layer with a kernel of the axes (in, out)."""
    layer = _with_weight(nn.Linear(*kernel.shape, bias=bias is not None), kernel.T)
    if bias is not None:
        layer.bias.data = _tensor(bias)
    return layer


def _with_weight(layer: nn.Module, weight: Any) -> Any:
    layer.weight.data = _tensor(weight)
    return layer


def steps(
    params: Any, tokens: np.ndarray, *, heads: int, in_bfloat16: bool
) -> dict[str, Callable[[], Callable[[], float]]]:
    """What makes the training steps, by name. Each step returns the loss.

    The parameters are those of `models.transformer`, with its layers in a list. They
    are float32; the model computes in bfloat16 under `torch.autocast`.
    """
    inputs = torch.from_numpy(tokens.astype(np.int64))

    def make_step(mode: str | None) -> Callable[[], float]:
        model, optimizer, loss_fn = trainer(params, tokens, heads, mode)
        # The privacy engine needs to know how the loss of tokens becomes one of
        # sequences.
        shape = {"shape": inputs[:, 1:].shape} if mode == "ghost" else {}

        def step() -> float:
            with torch.autocast("cpu", torch.bfloat16, enabled=in_bfloat16):
                logits = model(inputs)[:, :-1]
            logits = logits.float().reshape(-1, logits.shape[-1])
            loss = loss_fn(logits, inputs[:, 1:].reshape(-1), **shape)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.item()

        return step

    modes = {"torch, plain": None, "Opacus, hooks": "hooks", "Opacus, ghost": "ghost"}
    return {name: functools.partial(make_step, mode) for name, mode in modes.items()}


def trainer(
    params: Any,
    tokens: np.ndarray,
    heads: int,
    mode: str | None,
    *,
    noise_multiplier: float = 1.0,
    optimizer: str = "Adam",
) -> tuple[Any, Any, Any]:
    """The model, its optimizer and its loss, made private unless `mode` is None."""
    model = Transformer(params, heads)
    inner = getattr(torch.optim, optimizer)(model.parameters(), lr=1e-3)
    loss_fn = nn.CrossEntropyLoss()
    if mode is None:
        return model, inner, loss_fn
    data = torch.utils.data.TensorDataset(torch.from_numpy(tokens.astype(np.int64)))
    model, private, *rest = opacus.PrivacyEngine().make_private(
        module=model,
        optimizer=inner,
        criterion=loss_fn,
        data_loader=torch.utils.data.DataLoader(data, batch_size=len(tokens)),
        noise_multiplier=noise_multiplier,
        max_grad_norm=1.0,
        poisson_sampling=False,  # the batch is given
        grad_sample_mode=mode,
    )
    return model, private, rest[0] if mode == "ghost" else loss_fn


class _Block(nn.Module):
    def __init__(self, p: Any, heads: int):
        super().__init__()
        self.heads, self.norms = heads, nn.ModuleList(map(_norm, p["norms"]))
        self.qkv, self.out = _linear(p["qkv"]), _linear(p["out"])
        self.up, self.down = _linear(p["up"]), _linear(p["down"])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        size = (*x.shape[:2], self.heads, x.shape[2] // self.heads)
        parts = self.qkv(self.norms[0](x)).chunk(3, dim=-1)
        q, k, v = (y.reshape(size).transpose(1, 2) for y in parts)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(x.shape))
        hidden = nn.functional.gelu(self.up(self.norms[1](x)), approximate="tanh")
        return x + self.down(hidden)


def _norm(scale: Any) -> nn.Module:
    return _with_weight(nn.RMSNorm(len(scale), eps=1e-6), scale)


def _embedding(table: Any) -> nn.Module:
    return _with_weight(nn.Embedding(*table.shape), table)


class Transformer(nn.Module):
    """The model with the parameters of `models.transformer`."""

    def __init__(self, params: Any, heads: int):
        super().__init__()
        self.embed = _embedding(params["embed"])
        self.position = _embedding(params["position"])
        self.blocks = nn.ModuleList(_Block(p, heads) for p in params["blocks"])
        self.head = _linear(params["head"])

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The logits of each position."""
        positions = torch.arange(tokens.shape[1]).expand(tokens.shape)
        positions = positions.contiguous()  # Opacus asks for that
        x = self.embed(tokens) + self.position(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def classifier(initial: Any) -> nn.Module:
    """The model of `benchmarks/utility.py` with these parameters."""
    out = _linear(initial["out"], initial["out_bias"])
    if "hidden" in initial:
        hidden = _linear(initial["hidden"], initial["hidden_bias"])
        return nn.Sequential(hidden, nn.Tanh(), out)
    return nn.Sequential(out, nn.ConstantPad1d((1, 0), 0.0))


def train_classifier(run: "utility.Run") -> dict[str, Any]:
    """The parameters after training, with the names and axes of `run.initial`."""
    from benchmarks.utility import CLIP_NORM

    mechanism, setting = run.mechanism, run.setting
    module = opacus.GradSampleModule(classifier(run.initial))
    adam = torch.optim.Adam(
        module.parameters(), lr=setting.learning_rate, betas=(0.9, setting.b2)
    )
    optimizer = DPOptimizer(
        adam,
        noise_multiplier=mechanism.noise_multiplier,
        max_grad_norm=CLIP_NORM,
        expected_batch_size=setting.batch_size,
        generator=torch.Generator().manual_seed(run.seed),
    )
    batches = UniformWithReplacementSampler(
        num_samples=mechanism.num_examples,
        sample_rate=mechanism.sampling_prob,
        generator=torch.Generator().manual_seed(run.seed),
        steps=mechanism.iterations,
    )
    features, label = (torch.from_numpy(run.data[x]) for x in ("features", "label"))
    for step, chosen in enumerate(batches):
        if setting.decays:
            share = 1 - step / mechanism.iterations
            adam.param_groups[0]["lr"] = share * setting.learning_rate
        optimizer.zero_grad()
        found = module(features[chosen])
        nn.functional.cross_entropy(found, label[chosen].long()).backward()
        optimizer.step()
    weights = [x.detach().numpy() for x in module.parameters()]
    return {
        name: x.T if x.ndim == 2 else x
        for name, x in zip(run.initial, weights, strict=True)
    }
