"""Models of the benchmarks in PyTorch, with the same parameters, trained with Opacus.

pip install torch --index-url https://download.pytorch.org/whl/cpu
pip install '.[peers]'
"""

import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import opacus  # pyright: ignore[reportMissingImports]
import torch  # pyright: ignore[reportMissingImports]
from opacus.optimizers import DPOptimizer  # pyright: ignore[reportMissingImports]
from opacus.utils.uniform_sampler import (  # pyright: ignore[reportMissingImports]
    UniformWithReplacementSampler,
)
from torch import nn  # pyright: ignore[reportMissingImports]

from dpmp import lora
from examples import llm

if TYPE_CHECKING:
    from benchmarks import spam_filter, utility


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


# ---------------------------------------------- whole steps of `models.transformer`


def steps(
    params: Any, tokens: np.ndarray, *, heads: int, in_bfloat16: bool
) -> dict[str, Callable[[], Callable[[], float]]]:
    """What makes the training steps, by name. Each step returns the loss.

    The parameters are those of `models.transformer`, with its layers in a list. They
    are float32; the model computes in bfloat16 under `torch.autocast`.
    """
    modes = {"torch, plain": None, "Opacus, hooks": "hooks", "Opacus, ghost": "ghost"}
    return {
        name: functools.partial(_make_step, params, tokens, heads, mode, in_bfloat16)
        for name, mode in modes.items()
    }


def _make_step(
    params: Any, tokens: np.ndarray, heads: int, mode: str | None, in_bfloat16: bool
) -> Callable[[], float]:
    model, optimizer, loss_fn = trainer(params, tokens, heads, mode)
    inputs = torch.from_numpy(tokens.astype(np.int64))
    # The privacy engine needs to know how the loss of tokens becomes one of sequences.
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


# ------------------------------------------- the networks of `utility`, `spam_filter`


def digits_module(initial: Any) -> nn.Module:
    """The network of `benchmarks/utility.py` with these parameters."""
    layers = [_linear(initial[x], initial[f"{x}_bias"]) for x in ("hidden", "out")]
    return nn.Sequential(layers[0], nn.Tanh(), layers[1])


def train_digits(run: "utility.Run") -> dict[str, Any]:
    """The parameters after training, with the names and axes of `run.initial`."""
    from benchmarks.utility import BATCH_SIZE, CLIP_NORM

    module = opacus.GradSampleModule(digits_module(run.initial))
    optimizer = DPOptimizer(
        torch.optim.Adam(module.parameters(), lr=run.learning_rate),
        noise_multiplier=run.mechanism.noise_multiplier,
        max_grad_norm=CLIP_NORM,
        expected_batch_size=BATCH_SIZE,
        generator=torch.Generator().manual_seed(run.seed),
    )
    image, label = (torch.from_numpy(run.data[x]) for x in ("image", "label"))
    for chosen in _batches(run.mechanism, run.seed):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(module(image[chosen]), label[chosen].long())
        loss.backward()
        optimizer.step()
    weights = [x.detach().numpy() for x in module.parameters()]
    return {
        name: x.T if x.ndim == 2 else x
        for name, x in zip(run.initial, weights, strict=True)
    }


def _batches(mechanism: Any, seed: int) -> Iterator[list[int]]:
    """The indices of each batch."""
    return iter(
        UniformWithReplacementSampler(
            num_samples=mechanism.num_examples,
            sample_rate=mechanism.sampling_prob,
            generator=torch.Generator().manual_seed(seed),
            steps=mechanism.iterations,
        )
    )


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


def _encoder(adapters: lora.Adapters) -> nn.Module:
    """The frozen BERT with adapters in it, and without dropout."""
    import transformers  # pyright: ignore[reportMissingImports]

    from benchmarks.spam_filter import model_folder

    encoder = transformers.AutoModel.from_pretrained(
        model_folder(),
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


def train_filter(run: "spam_filter.Run") -> np.ndarray:
    """The logits of held-out e-mails after training."""
    adapters = run.initial.get("adapters")
    encoder = None if adapters is None else _encoder(adapters)
    module = opacus.GradSampleModule(Filter(run.initial["head"], encoder), strict=False)
    optimizer = _optimizer_of_filter(run, module)
    rates = [group["lr"] for group in optimizer.param_groups]
    for step, chosen in enumerate(_batches(run.mechanism, run.seed)):
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * (1 - step / run.settings.steps)
        parts = _parts(np.array(chosen), run.settings.microbatch_size)
        _step(module, optimizer, [_take(run.data, part) for part in parts])
    module.eval()
    with torch.no_grad():
        indices = np.arange(len(run.held_out["is_spam"]))
        parts = [module(_take(run.held_out, x)) for x in _parts(indices, 32)]
    return torch.cat(parts).numpy()


def _optimizer_of_filter(run: "spam_filter.Run", module: nn.Module) -> DPOptimizer:
    named = [(name, x) for name, x in module.named_parameters() if x.requires_grad]
    of_head = [x for name, x in named if "head" in name]
    of_adapters = [x for name, x in named if "head" not in name]
    groups = [{"params": of_head, "lr": run.settings.head_rate}]
    if of_adapters:
        groups.append({"params": of_adapters, "lr": run.settings.adapter_rate})
    return DPOptimizer(
        torch.optim.Adam(groups, betas=(0.9, run.settings.b2)),
        noise_multiplier=run.mechanism.noise_multiplier,
        # Without privacy, no gradient is as long as this.
        max_grad_norm=run.settings.l2_clip_norm if run.mechanism.is_private else 1e9,
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
