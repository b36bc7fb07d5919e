"""That the example of Tunix runs, and learns."""

import dataclasses
import re

import jax
import pytest

pytest.importorskip("tunix", reason="pip install '.[tunix]'")
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.slow
def test_the_example_trains_privately(monkeypatch, capsys, tmp_path):
    import tunix_sft as example

    smaller = {"num_layers": 1, "embed_dim": 32, "hidden_dim": 64}
    config = dataclasses.replace(example.CONFIG, **smaller, head_dim=8)
    monkeypatch.setattr(example, "CONFIG", config)
    monkeypatch.setattr(example, "LENGTH", 32)
    args = ["--steps", "2", "--pre-train-steps", "2", "--output", str(tmp_path / "run")]
    monkeypatch.setattr("sys.argv", ["tunix_sft.py", *args])
    with jax.numpy_dtype_promotion("standard"):
        example.main()
    line = capsys.readouterr().out.splitlines()[-1]
    before, after, epsilon = map(float, re.findall(r"\d\.\d\d+", line)[:3])
    assert after < before
    assert epsilon <= 8.0
    assert (tmp_path / "run" / "ledger.jsonl").exists()
