"""A GGUF file of an export, by llama.cpp's own converter, and what a reader of it gets back.

The converter is not part of this project: `convert_hf_to_gguf.py` of a llama.cpp checkout, or a package
that carries it. The round trip is of the file as written, opened again: types and bytes as packed, and
the logits and held-out loss of its dequantised weights. Nothing is said of a file that was not written.
"""

import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from model.checkpoint import load_weights
from model.config import RunConfig
from model.errors import CheckpointError, ConfigError, EnvironmentProblem
from model.read_back import NOT_RUN, cut_streams, heldout_loss, logits_difference
from model.rqwen3 import RQwen3

TYPES = ("f32", "f16", "bf16", "q8_0")
PROGRAMS = ("convert_hf_to_gguf.py", "convert-hf-to-gguf")
TIED_HEAD, EMBEDDING = "output.weight", "token_embd.weight"
VARIABLE = "RQWEN3_GGUF_CONVERTER"
TIMEOUT_S = 3600.0
TAIL_LINES = 5


def find_converter() -> list[str]:
    """The command that converts: the script that `RQWEN3_GGUF_CONVERTER` names, or one on the PATH.

    Raises:
        EnvironmentProblem: there is none, or no `gguf` to read its file with.
    """
    try:
        import gguf  # noqa: F401  # pyright: ignore[reportUnusedImport] only asked whether it is there
    except ModuleNotFoundError as error:
        raise EnvironmentProblem(
            "--gguf: the package gguf, which reads the file back, is not installed. Run: pip install gguf"
        ) from error
    named = os.environ.get(VARIABLE)
    found = named or next((path for name in PROGRAMS if (path := shutil.which(name))), None)
    if found is None or not Path(found).is_file():
        raise EnvironmentProblem(
            f"--gguf: no converter{f' at {VARIABLE} = {named}' if named else ''}. Set {VARIABLE} to llama.cpp's "
            "convert_hf_to_gguf.py, or put it on the PATH (the package convert-hf-to-gguf carries it; install that "
            "into an environment of its own, since it brings another gguf)."
        )
    return [sys.executable, found] if found.endswith(".py") else [found]


def write_gguf(folder: Path, kind: str, model: RQwen3, run: RunConfig, manifest: Path | None) -> dict[str, Any]:
    """Write `model.<kind>.gguf` into an export, read it back and compare.

    Args:
        folder: the export.
        kind: of `TYPES`; tensors that can't be packed so keep another type, and the result says which.
        model: whose weights were exported.
        run: the configuration.
        manifest: of the corpus; None measures no held-out loss.

    Returns:
        `file`, `bytes`, `tensor_types` (how many of each), `weights_difference`, `logits_difference` (largest,
        absolute), and `heldout_loss` of the file's weights, which is `NOT_RUN` without a manifest.

    Raises:
        EnvironmentProblem: there is no converter, or it failed; the end of what it said is in the message.
        ConfigError: the model is not a dense Qwen3.
        CheckpointError: the file holds other tensors than were exported.
    """
    if run.model.num_experts or not run.model.qk_norm:
        raise ConfigError("--gguf: only dense Qwen3 models are read back from GGUF here. Export without it.")
    path = folder / f"model.{kind}.gguf"
    command = [*find_converter(), str(folder), "--outfile", str(path), "--outtype", kind]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
    if done.returncode or not path.is_file():
        said = "\n".join((done.stderr or done.stdout).splitlines()[-TAIL_LINES:])
        raise EnvironmentProblem(
            f"--gguf: {' '.join(command[:2])} failed with exit code {done.returncode}:\n{said}\nMend what it names. It "
            "knows the published tokenizers alone: with one that was trained here, export without --gguf."
        )
    path.chmod(0o644)
    again, types = _read(path, run)
    loss: Any = NOT_RUN
    if manifest is not None:
        loss, _ = heldout_loss(again, cut_streams(manifest), run)
    written, read = model.state_dict(), again.state_dict()
    return {
        "file": path.name,
        "bytes": path.stat().st_size,
        "tensor_types": types,
        "weights_difference": max(float((read[name] - written[name]).abs().max()) for name in written),
        "logits_difference": logits_difference(model, again),
        "heldout_loss": loss,
    }


def _read(path: Path, run: RunConfig) -> tuple[RQwen3, dict[str, int]]:
    """The model that a GGUF file holds, its tensors dequantised, and how many there are of each type.

    Raises:
        CheckpointError: a tensor is missing, surplus, or of another shape than was packed; or a number of the
            architecture is another.
    """
    import gguf

    reader = gguf.GGUFReader(path)
    for name, wanted in (
        ("rope.freq_base", run.model.rope_theta),
        ("attention.layer_norm_rms_epsilon", run.model.rms_norm_eps),
        ("attention.key_length", run.model.head_dim),
    ):
        field = reader.get_field(f"qwen3.{name}")
        found = None if field is None else field.contents()
        if found is None or abs(float(found) - wanted) > 1e-6 * wanted:
            raise CheckpointError(f"{path}: {name} = {found}, the model has {wanted}. Export without --gguf.")
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    types = Counter(tensor.tensor_type.name for tensor in tensors.values())
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, run.model.n_layer)
    model = RQwen3(run.model)
    state: dict[str, torch.Tensor] = {}
    for name in model.state_dict():
        place = names.get_name(name, try_suffixes=(".weight",))
        if place == TIED_HEAD and run.model.tie_embeddings:
            place = EMBEDDING
        if place in tensors:
            packed = tensors[place]
            state[name] = torch.from_numpy(gguf.dequantize(packed.data, packed.tensor_type).copy())
    load_weights(model, state, str(path))
    if len(tensors) != len(dict(model.named_parameters())):
        raise CheckpointError(
            f"{path}: holds {len(tensors)} tensors, {len(state)} were exported. Use this export as is."
        )
    return model.eval(), dict(sorted(types.items()))
