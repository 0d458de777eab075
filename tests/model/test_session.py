import pytest
import torch

from model.errors import CheckpointError, ConfigError
from model.session import TrainSession, set_threads
from model.windows import TokenWindows


def session(tiny) -> TrainSession:
    return TrainSession(tiny.config, TokenWindows(tiny.manifest, 32))


def test_stop_between_micro_batches_leaves_the_step_before(tiny) -> None:
    straight, stopped = session(tiny), session(tiny)
    answers = iter([False, True])
    assert stopped.train_step(lambda: next(answers)) is None  # one micro-batch done, then told to stop
    assert stopped.step == 0
    assert all(parameter.grad is None for parameter in stopped.model.parameters())
    for one in (straight, stopped):
        result = one.train_step()
        assert result is not None
        assert result.step == 1
        one.close()
    pairs = zip(straight.model.parameters(), stopped.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_stop_between_micro_batches_puts_the_dropouts_random_state_back(tiny) -> None:
    text = tiny.config_path.read_text().replace("max_seq_len = 64", "max_seq_len = 64\ndropout = 0.2")
    tiny.config_path.write_text(text)
    one = session(tiny)
    before, answers = torch.get_rng_state(), iter([False, True])
    assert one.train_step(lambda: next(answers)) is None
    assert torch.equal(torch.get_rng_state(), before)
    assert one.train_step() is not None
    assert not torch.equal(torch.get_rng_state(), before)
    one.close()


def test_reset_gives_the_fresh_session(tiny) -> None:
    used, fresh = session(tiny), session(tiny)
    for _ in range(2):
        used.train_step()
    used.reset()
    assert (used.step, used.loss_history, used.data_offset, len(used.optimizer.state)) == (0, [], 0, 0)
    results = [one.train_step() for one in (used, fresh)]
    assert results[0] is not None
    assert results[1] is not None
    assert results[0].loss == results[1].loss
    pairs = zip(used.model.parameters(), fresh.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    used.close()
    fresh.close()


def test_blocks_that_no_compiler_takes_run_without_one_aloud(tiny, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    text = tiny.config_path.read_text() + "compile_on_cpu = true\n"
    plain = session(tiny)
    tiny.config_path.write_text(text)
    one = session(tiny)
    assert one.compiled
    assert list(one.state()["model_state_dict"]) == list(plain.state()["model_state_dict"])  # no wrapper's prefix

    def refuse(*_: object) -> None:
        raise RuntimeError("no C++ compiler here")

    for block in one.model.model.layers:
        monkeypatch.setattr(block, "_compiled_call_impl", refuse)
    results = [each.train_step() for each in (one, plain)]
    assert results[0] is not None
    assert results[1] is not None
    assert results[0].loss == results[1].loss
    assert not one.compiled
    assert "the blocks are not compiled (no C++ compiler here)" in capsys.readouterr().err
    one.close()
    plain.close()


def test_first_step_of_a_sequence_as_short_as_the_tables_are_tells_the_logits(tiny) -> None:
    tiny.config_path.write_text(tiny.config_path.read_text().replace("max_seq_len = 64", "max_seq_len = 32"))
    one = session(tiny)
    assert one.train_step() is not None
    assert one.start_logit_std is not None
    one.close()


def test_clipping_switched_off_leaves_the_gradient_and_still_tells_its_norm(tiny) -> None:
    text, weights, norms = tiny.config_path.read_text(), list[torch.Tensor](), list[float]()
    for clip in ("0", "1e9", "1e-3"):
        tiny.config_path.write_text(f"{text}grad_clip = {clip}\nadam_eps = 1.0\n")  # so that the size matters
        one = session(tiny)
        result = one.train_step()
        one.close()
        assert result is not None
        norms.append(result.grad_norm)
        weights.append(torch.cat([parameter.detach().flatten() for parameter in one.model.parameters()]))
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    assert norms[0] == norms[1] == norms[2] > 1e-3


def test_gradient_of_a_step_is_that_of_all_its_windows_together(tiny) -> None:
    one = session(tiny)
    tokens_SL = one._next_tokens()
    assert tokens_SL is not None
    whole = one.model.loss(tokens_SL[:, :-1], tokens_SL[:, 1:])
    whole.backward()
    expected = [parameter.grad.clone() for parameter in one.model.parameters() if parameter.grad is not None]
    one.optimizer.zero_grad(set_to_none=True)
    total = sum(one._micro_batch(part) for part in tokens_SL.split(2))
    one.close()
    assert abs(total - whole.item()) < 1e-6
    for parameter, gradient in zip(one.model.parameters(), expected, strict=True):
        assert parameter.grad is not None
        assert (parameter.grad - gradient).abs().max() < 1e-6


def test_state_has_the_six_entries_and_plain_names(tiny) -> None:
    one = session(tiny)
    one.train_step()
    one.close()
    state = one.state()
    assert list(state) == [
        "step",
        "model_state_dict",
        "optimizer_state_dict",
        "scheduler_state_dict",
        "loss_history",
        "data_offset",
    ]
    assert (state["step"], state["data_offset"], len(state["loss_history"])) == (1, 256, 1)
    assert all(name.startswith(("model.", "lm_head.")) for name in state["model_state_dict"])


def test_tokenizer_with_more_ids_than_rows_is_refused(tiny) -> None:
    tiny.set(vocab_size=256)
    with pytest.raises(ConfigError, match=r"model\.vocab_size = 256 has fewer rows than the tokenizer's 257"):
        session(tiny)


def test_cuda_where_there_is_none_is_refused(tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    tiny.set(device="cuda")
    with pytest.raises(ConfigError, match=r"training\.device = 'cuda'"):
        session(tiny)


def test_restore_of_another_data_position_is_refused(tiny, tmp_path) -> None:
    from model import checkpoint

    one = session(tiny)
    state = one.state() | {"step": 3}
    sidecar = {"data_fingerprint": tiny.manifest.sha256}
    saved = checkpoint.save(tmp_path / "step_3.pt", state, sidecar)
    with pytest.raises(CheckpointError, match="stands at token 0 of the data, but step 3"):
        one.restore(saved)


@pytest.mark.parametrize(("granted", "threads"), [("1", 1), ("", None), ("none", None), ("4096", None)])
def test_threads_follow_slurm_and_the_affinity(
    monkeypatch: pytest.MonkeyPatch, granted: str, threads: int | None
) -> None:
    from model import session as module

    monkeypatch.setenv("SLURM_CPUS_PER_TASK", granted)
    monkeypatch.setattr(module.os, "sched_getaffinity", lambda pid: {0, 5, 7})
    assert set_threads() == (threads or 3)
