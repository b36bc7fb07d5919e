import sys
import types

import pytest

from dpmp.runs._tensorboard import TensorBoard


def test_without_tensorboardx_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    board = TensorBoard(tmp_path, 0)
    board.write(1, {"noisy/loss": 0.5})
    board.close()
    assert list(tmp_path.iterdir()) == []


class Writer:
    """Stands for `tensorboardX.SummaryWriter`."""

    def __init__(self, folder, *, purge_step):
        self.calls = [("open", folder, purge_step)]

    def add_scalar(self, *args):
        self.calls.append(args)

    def close(self):
        self.calls.append(("close",))


def test_values_go_to_a_folder_of_the_run_and_hide_steps_made_before(
    tmp_path, monkeypatch
):
    module = types.SimpleNamespace(SummaryWriter=Writer)
    monkeypatch.setitem(sys.modules, "tensorboardX", module)
    board = TensorBoard(tmp_path, 40)
    board.write(50, {"noisy/loss": 0.5})
    board.close()
    folder = tmp_path / "tensorboard"
    assert board._writer.calls == [
        ("open", str(folder), 41),
        ("noisy/loss", 0.5, 50),
        ("close",),
    ]
    assert folder.stat().st_mode & 0o077 == 0


def test_tensorboardx_writes_the_scalars(tmp_path):
    pytest.importorskip("tensorboardX")
    from tensorboardX.proto import event_pb2

    board = TensorBoard(tmp_path, 0)
    board.write(3, {"noisy/loss": 0.5})
    board.close()
    (file,) = (tmp_path / "tensorboard").iterdir()
    assert file.stat().st_mode & 0o077 == 0
    # A record is its length (8 bytes), a checksum (4), the event, a checksum (4).
    content, events = file.read_bytes(), []
    while content:
        size = int.from_bytes(content[:8], "little")
        events.append(event_pb2.Event.FromString(content[12 : 12 + size]))
        content = content[16 + size :]
    scalars = [(e.step, v.tag, v.simple_value) for e in events for v in e.summary.value]
    assert scalars == [(3, "noisy/loss", 0.5)]
