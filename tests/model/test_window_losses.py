import numpy as np
import torch

from model import window_losses
from model.checkpoint import load_model
from model.order import window_numbers
from model.windows import TokenWindows


def arguments(tiny, step: int, checkpoint) -> list[str]:
    return [
        *("--step", str(step), "--checkpoint", str(checkpoint), "--config", str(tiny.config_path)),
        *("--manifest", str(tiny.manifest_path), "--out", str(tiny.root / "losses.npy")),
    ]


def test_losses_equal_a_plain_float64_softmax_and_make_up_the_loss_of_the_step(tiny) -> None:
    tiny.set(save_every_steps=2)
    tiny.start(1, "--until-step", "3").communicate()
    checkpoint = tiny.checkpoints / "step_2.pt"  # the weights that step 3 began with
    assert window_losses.main(arguments(tiny, 3, checkpoint)) == 0
    losses = np.load(tiny.root / "losses.npy")
    assert (losses.dtype, losses.shape) == (np.float32, (8, 32))

    windows = TokenWindows(tiny.manifest, 32)
    tokens = torch.from_numpy(windows.read(window_numbers(16, 8, len(windows), tiny.config.training.seed)))
    with torch.no_grad():
        logits = load_model(checkpoint, tiny.config.model)(tokens[:, :-1]).double()
    expected = -torch.log_softmax(logits, -1).gather(-1, tokens[:, 1:, None]).squeeze(-1).numpy()
    assert np.abs(losses - expected).max() < 1e-5
    history = torch.load(tiny.checkpoints / "step_3.pt", weights_only=True)["loss_history"]
    assert abs(losses.mean() - history[2]) < 1e-5


def test_step_outside_the_run_is_refused(tiny, capsys) -> None:
    tiny.start(1, "--until-step", "1").communicate()
    assert window_losses.main(arguments(tiny, 13, tiny.checkpoints / "step_1.pt")) == 2
    assert "--step 13: the run has the steps 1 to 12" in capsys.readouterr().err
