"""The spam filter of benchmarks/spam_filter.py in PyTorch, trained with Opacus."""

import pathlib
from typing import TYPE_CHECKING, Any

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
from opacus import GradSampleModule  # pyright: ignore[reportMissingImports]
from opacus.optimizers import DPOptimizer  # pyright: ignore[reportMissingImports]
from opacus.utils.uniform_sampler import (  # pyright: ignore[reportMissingImports]
    UniformWithReplacementSampler,
)
from torch import nn  # pyright: ignore[reportMissingImports]

from dpmp import lora
from examples import llm

if TYPE_CHECKING:
    from benchmarks.spam_filter import Run


class Adapted(nn.Module):
    """A frozen linear layer, and the factors of its change."""

    def __init__(self, frozen: nn.Linear, a: np.ndarray, b: np.ndarray):
        super().__init__()
        self.frozen, self.a, self.b = frozen, _linear(a), _linear(b)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """From (..., inputs) to (..., outputs)."""
        return self.frozen(x) + self.b(self.a(x))


class Filter(nn.Module):
    """A head on vectors of texts, which an encoder computes if there is one."""

    def __init__(self, head: dict[str, Any], encoder: nn.Module | None):
        super().__init__()
        self.encoder = encoder
        kernel = np.asarray(head["kernel"])[:, None]
        self.head = _linear(kernel, np.asarray(head["bias"])[None])

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """The logits of a batch."""
        vectors = batch["vectors"]
        if self.encoder is not None:
            mask = batch["is_token"]
            found = self.encoder(batch["tokens"].long(), attention_mask=mask.long())
            total = (found.last_hidden_state * mask[..., None]).sum(1)
            vectors = nn.functional.normalize(total, dim=-1)
        return self.head(vectors)[..., 0]


def _linear(kernel: np.ndarray, bias: np.ndarray | None = None) -> nn.Linear:
    """A layer with a kernel of the axes (in, out)."""
    layer = nn.Linear(*kernel.shape, bias=bias is not None)
    layer.weight.data = torch.from_numpy(np.array(kernel.T, order="C"))
    if bias is not None:
        layer.bias.data = torch.from_numpy(np.array(bias))
    return layer


def make_encoder(folder: pathlib.Path, adapters: lora.Adapters) -> nn.Module:
    """The frozen BERT with adapters in it, and without dropout."""
    import transformers  # pyright: ignore[reportMissingImports]

    encoder = transformers.AutoModel.from_pretrained(
        folder,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        add_pooling_layer=False,
    ).requires_grad_(False)
    assert adapters.scale == 1
    for path, factors in adapters.factors.items():
        for layer, (a, b) in enumerate(zip(*map(np.asarray, factors), strict=True)):
            name = llm.huggingface_name(path, layer, "bert")
            frozen = encoder.get_submodule(name)
            encoder.set_submodule(name, Adapted(frozen, a, b))
    return encoder


def train(run: "Run") -> np.ndarray:
    """The logits of held-out e-mails after training."""
    adapters = run.initial.get("adapters")
    encoder = None if adapters is None else make_encoder(run.folder, adapters)
    module = GradSampleModule(Filter(run.initial["head"], encoder), strict=False)
    optimizer = _optimizer(run, module)
    batches = UniformWithReplacementSampler(
        num_samples=run.mechanism.num_examples,
        sample_rate=run.mechanism.sampling.sampling_prob,
        generator=torch.Generator().manual_seed(run.seed),
        steps=run.settings.steps,
    )
    rates = [group["lr"] for group in optimizer.param_groups]
    for step, chosen in enumerate(batches):
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * (1 - step / run.settings.steps)
        microbatches = _parts(np.array(chosen), run.settings.microbatch_size)
        _step(module, optimizer, [_take(run.data, part) for part in microbatches])
    module.eval()
    with torch.no_grad():
        indices = np.arange(len(run.held_out["is_spam"]))
        parts = [module(_take(run.held_out, x)) for x in _parts(indices, 32)]
    return torch.cat(parts).numpy()


def _optimizer(run: "Run", module: nn.Module) -> DPOptimizer:
    of_head = [x for name, x in module.named_parameters() if "head" in name]
    of_adapters = [
        x
        for name, x in module.named_parameters()
        if "head" not in name and x.requires_grad
    ]
    groups = [{"params": of_head, "lr": run.settings.head_rate}]
    if of_adapters:
        groups.append({"params": of_adapters, "lr": run.settings.adapter_rate})
    mechanism = run.mechanism
    return DPOptimizer(
        torch.optim.Adam(groups, betas=(0.9, run.settings.b2)),
        noise_multiplier=mechanism.noise_multiplier,
        # Without privacy, no gradient is as long as this.
        max_grad_norm=run.settings.l2_clip_norm if mechanism.is_private else 1e9,
        expected_batch_size=run.settings.batch_size,
        generator=torch.Generator().manual_seed(run.seed),
    )


def _step(module: nn.Module, optimizer: DPOptimizer, parts: list[Any]) -> None:
    """One step of DP-SGD in microbatches."""
    for number, batch in enumerate(parts, 1):
        optimizer.zero_grad()
        optimizer.signal_skip_step(do_skip=number < len(parts))
        loss_fn = nn.functional.binary_cross_entropy_with_logits
        loss_fn(module(batch), batch["is_spam"]).backward()
        optimizer.step()


def _parts(indices: np.ndarray, size: int) -> list[np.ndarray]:
    return [indices[i : i + size] for i in range(0, len(indices), size)]


def _take(data: Any, indices: np.ndarray) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(x[indices]) for name, x in data.items()}
