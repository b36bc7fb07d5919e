"""The transformer of `models.py` in PyTorch, and its training steps with Opacus.

torch and Opacus need not be installed, and are imported when they are used:

    pip install torch --index-url https://download.pytorch.org/whl/cpu
    pip install '.[peers]'
"""

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import numpy as np

PEERS = ("torch", "opacus")


def missing() -> list[str]:
    """The packages that would have to be installed."""
    return [name for name in PEERS if importlib.util.find_spec(name) is None]


def steps(
    params: Any, tokens: np.ndarray, *, heads: int, in_bfloat16: bool
) -> dict[str, Callable[[], Callable[[], float]]]:
    """What makes the training steps, by name. Each step returns the loss.

    Args:
      params: of `models.transformer`, with its layers in a list.
      tokens: (batch size, length), the same in all steps.
      heads: of attention.
      in_bfloat16: whether the model computes under `torch.autocast`. Parameters are
        float32.
    """

    def maker(mode: str | None) -> Callable[[], Callable[[], float]]:
        return lambda: _make_step(params, tokens, heads, mode, in_bfloat16)

    return {
        "torch, plain": maker(None),
        "Opacus, hooks": maker("hooks"),
        "Opacus, ghost": maker("ghost"),
    }


def _make_step(
    params: Any, tokens: np.ndarray, heads: int, mode: str | None, in_bfloat16: bool
) -> Callable[[], float]:
    torch: Any = importlib.import_module("torch")
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
    torch: Any = importlib.import_module("torch")
    model = transformer(params, heads)
    inner = getattr(torch.optim, optimizer)(model.parameters(), lr=1e-3)
    loss_fn = torch.nn.CrossEntropyLoss()
    if mode is None:
        return model, inner, loss_fn
    data = torch.utils.data.TensorDataset(torch.from_numpy(tokens.astype(np.int64)))
    made = (
        importlib.import_module("opacus")
        .PrivacyEngine()
        .make_private(
            module=model,
            optimizer=inner,
            criterion=loss_fn,
            data_loader=torch.utils.data.DataLoader(data, batch_size=len(tokens)),
            noise_multiplier=noise_multiplier,
            max_grad_norm=1.0,
            poisson_sampling=False,  # the batch is given
            grad_sample_mode=mode,
        )
    )
    model, private, *rest = made
    return model, private, rest[0] if mode == "ghost" else loss_fn


def transformer(params: Any, heads: int) -> Any:
    """The model, with the parameters of `models.transformer`."""
    torch: Any = importlib.import_module("torch")
    nn = torch.nn

    def tensor(x: Any) -> Any:
        return nn.Parameter(torch.tensor(np.asarray(x, np.float32)))

    def dense(x: Any) -> Any:
        layer = nn.Linear(*x.shape, bias=False)
        layer.weight = tensor(np.asarray(x, np.float32).T.copy())
        return layer

    def norm(x: Any) -> Any:
        layer = nn.RMSNorm(len(x), eps=1e-6)
        layer.weight = tensor(x)
        return layer

    def embedding(x: Any) -> Any:
        layer = nn.Embedding(*x.shape)
        layer.weight = tensor(x)
        return layer

    class Block(nn.Module):
        def __init__(self, p: Any):
            super().__init__()
            self.norms = nn.ModuleList(map(norm, p["norms"]))
            self.qkv, self.out = dense(p["qkv"]), dense(p["out"])
            self.up, self.down = dense(p["up"]), dense(p["down"])

        def forward(self, x: Any) -> Any:
            size = (*x.shape[:2], heads, x.shape[2] // heads)
            parts = self.qkv(self.norms[0](x)).chunk(3, dim=-1)
            q, k, v = (y.reshape(size).transpose(1, 2) for y in parts)
            mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(mixed.transpose(1, 2).reshape(x.shape))
            hidden = nn.functional.gelu(self.up(self.norms[1](x)), approximate="tanh")
            return x + self.down(hidden)

    class Transformer(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = embedding(params["embed"])
            self.position = embedding(params["position"])
            self.blocks = nn.ModuleList(map(Block, params["blocks"]))
            self.head = dense(params["head"])

        def forward(self, tokens: Any) -> Any:
            positions = torch.arange(tokens.shape[1]).expand(tokens.shape)
            positions = positions.contiguous()  # Opacus asks for that
            x = self.embed(tokens) + self.position(positions)
            for block in self.blocks:
                x = block(x)
            return self.head(x)

    return Transformer()
