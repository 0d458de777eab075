import pytest
import torch

from model import snapshot


def test_copy_keeps_values_while_the_original_moves_on() -> None:
    state = {"a": torch.arange(4.0), "deep": [{"b": torch.ones(2, 3).t()}], "number": 7, "losses": [1.0, 2.0]}
    taken = snapshot.take(state)
    assert taken is not None
    state["a"].fill_(9.0)
    state["deep"][0]["b"].fill_(9.0)
    state["losses"].append(3.0)
    assert taken["a"].tolist() == [0.0, 1.0, 2.0, 3.0]
    assert torch.equal(taken["deep"][0]["b"], torch.ones(3, 2))
    assert (taken["number"], taken["losses"]) == (7, [1.0, 2.0])


def test_tied_tensors_stay_one(tmp_path) -> None:
    weight = torch.randn(50, 4)
    state = {"embedding": weight, "head": weight.detach(), "other": weight.clone()}
    taken = snapshot.take(state)
    assert taken is not None
    assert taken["embedding"] is taken["head"]
    assert taken["other"] is not taken["head"]
    for name, one in (("plain", state), ("copied", taken)):
        torch.save(one, tmp_path / name)
    assert abs((tmp_path / "plain").stat().st_size - (tmp_path / "copied").stat().st_size) < 256


def test_bytes_are_those_of_all_tensors() -> None:
    state = {
        "a": torch.zeros(10),
        "b": [torch.zeros(3, dtype=torch.int64), {"c": torch.zeros(2, dtype=torch.bfloat16)}],
    }
    assert snapshot.tensor_bytes(state) == 40 + 24 + 4


@pytest.mark.parametrize(("free_bytes", "fits"), [(0, False), (600 * 2**20, True), (512 * 2**20, False)])
def test_fits_only_where_as_much_and_a_reserve_is_free(
    monkeypatch: pytest.MonkeyPatch, free_bytes: int, fits: bool
) -> None:
    monkeypatch.setattr(snapshot, "free_host_bytes", lambda: free_bytes)
    assert snapshot.fits_in_memory({"a": torch.zeros(10 * 2**18)}) is fits


def test_refused_memory_gives_none_and_other_errors_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(error: Exception):
        def copy(*_: object) -> None:
            raise error

        return copy

    monkeypatch.setattr(snapshot, "_copy", refuse(RuntimeError("DefaultCPUAllocator: can't allocate memory")))
    assert snapshot.take({}) is None
    monkeypatch.setattr(snapshot, "_copy", refuse(RuntimeError("a fault")))
    with pytest.raises(RuntimeError, match="a fault"):
        snapshot.take({})
