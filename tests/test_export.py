"""Checkpoints converted to the formats of others, by one process and with little memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_saver import save
from torch.utils._pytree import keystr, tree_flatten_with_path

from lightning_3d.checkpoint import export_checkpoint
from lightning_3d.cli import main
from lightning_3d.errors import CheckpointError
from tests.architectures import VOCABULARY, text
from tests.hugging_face import hugging_face, text_settings
from tests.models import TinyGPT
from tests.parity import Layout, fitted, whole_state
from tests.test_checkpoint_security import Malicious
from tests.workers import WorkerPools

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled.*to save")  # by torch's own save

GPT2 = {"vocab_size": VOCABULARY, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}
LLAMA = text_settings(width=16, num_heads=2, num_layers=2)
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2, tied": ("GPT2Config", "GPT2LMHeadModel", GPT2),
    "llama": ("LlamaConfig", "LlamaForCausalLM", LLAMA | {"tie_word_embeddings": False}),
}


def _language_model(name: str) -> Any:
    config, model_class, settings = MODELS[name]
    return hugging_face(config, model_class, **settings)


def _saved(layout: Layout, model: Callable[[], L.LightningModule], data: Any, path: Path, **trainer: Any) -> Any:
    """Train and save; the whole state."""
    runs, _ = fitted(layout, model, data=data, epochs=1, **trainer)
    runs.save_checkpoint(path)
    return whole_state(runs)


class Small(L.LightningModule):
    """Tensors of several dtypes and shapes, tied ones, and extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 5), nn.Linear(5, 6)
        self.second.bias = nn.Parameter(torch.zeros(6))
        self.again = self.first
        self.register_buffer("flag", torch.tensor([True, False, True]))
        self.register_buffer("sixteen", torch.randn(3, 4).bfloat16())
        self.register_buffer("count", torch.tensor(7))
        self.register_buffer("none", torch.empty(0, 3))
        self.register_buffer("turned", torch.randn(4, 3).t())


# --------------------------------------------------------------------------------------------------------- safetensors


@pytest.mark.parametrize(("layout", "name"), [(Layout(tp=2), "gpt2, tied"), (Layout(dp=2, zero=3), "llama")], ids=str)
def test_transformers_reads_what_a_layout_saved(
    workers: WorkerPools, tmp_path: Path, layout: Layout, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = Layout(**{**vars(layout), "save_distributed_checkpoint": True})
    states = workers(2).run(_saved, folders, partial(_language_model, name), text, tmp_path / "saved.ckpt")
    main(["checkpoint", "convert", str(tmp_path / "saved.ckpt"), str(tmp_path / "out"), "--prefix", "model."])
    _assert_inspected(
        tmp_path / "saved.ckpt", layout, states[0], "model.lm_head.weight" if "tied" in name else None, capsys
    )
    model = _language_model(name).model
    model.config.save_pretrained(tmp_path / "out")
    loaded, said = type(model).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(said.values()), said
    state = {fqn.removeprefix("model."): value for fqn, value in states[0].items()}
    assert loaded.state_dict().keys() == state.keys()
    for fqn, value in loaded.state_dict().items():
        assert torch.equal(value, state[fqn]), fqn
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert ("lm_head.weight" in written) != ("tied" in name)


def _assert_inspected(
    path: Path, layout: Layout, state: dict[str, Any], tied: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command tells what was saved: by which layout, when, and the bytes of each kind."""
    capsys.readouterr()
    main(["checkpoint", "inspect", str(path), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["saved_from"] == {"pp": 1, "dp": layout.dp, "cp": 1, "tp": layout.tp}
    assert {fqn: tuple(tensor["shape"]) for fqn, tensor in found["parameters"].items()} == {
        fqn: tuple(value.shape) for fqn, value in state.items()
    }
    weights = sum(value.nbytes for fqn, value in state.items() if fqn != tied)
    assert (found["bytes"]["weights"], found["form"], found["global_step"] > 0) == (weights, "folder", True)
    (optimizer,) = found["optimizers"]
    assert optimizer["bytes"] == found["bytes"]["optimizer_states"] > 0
    assert found["loops"]["fit_loop.epoch_progress"] == 1
    main(["checkpoint", "inspect", str(path)])
    assert "saved from" in capsys.readouterr().out


@pytest.mark.parametrize("is_folder", [True, False], ids=["folder", "file"])
def test_all_kinds_of_tensors(tmp_path: Path, is_folder: bool) -> None:
    state = Small().state_dict()
    _write(tmp_path / "saved", state, is_folder=is_folder)
    export_checkpoint(tmp_path / "saved", tmp_path / "out")
    written = load_file(tmp_path / "out" / "model.safetensors")
    missing = state.keys() - written.keys()
    assert missing == (set() if is_folder else {"again.weight", "again.bias"})  # no section says what is tied
    for fqn, value in written.items():
        assert value.dtype == state[fqn].dtype
        assert torch.equal(value, state[fqn]), fqn


def _write(path: Path, state: dict[str, Any], *, is_folder: bool, **rest: Any) -> None:
    if is_folder:
        save({"state_dict": state}, checkpoint_id=path, no_dist=True)
        torch.save(rest, path / "meta.pt")
    else:
        torch.save({"state_dict": state, **rest}, path)


# ------------------------------------------------------------------------------------------------------------- one file


class Groups(TinyGPT):
    """Two groups of parameters, without states, and extra state."""

    def configure_optimizers(self) -> Any:
        weights = [parameter for parameter in self.parameters() if parameter.dim() > 1]
        rest = [parameter for parameter in self.parameters() if parameter.dim() == 1]
        return torch.optim.SGD([{"params": rest}, {"params": weights, "lr": 0.3}], lr=0.1)

    def get_extra_state(self) -> Any:
        return {"more": {"values": torch.ones(3)}, "count": 4}

    def set_extra_state(self, state: Any) -> None:
        assert state == self.get_extra_state()


def test_a_folder_becomes_the_file_that_would_have_been_saved(workers: WorkerPools, tmp_path: Path) -> None:
    workers(2).run(_saved_twice, tmp_path)
    export_checkpoint(tmp_path / "folder", tmp_path / "out.ckpt", format="file")
    with zipfile.ZipFile(tmp_path / "out.ckpt") as file:
        assert file.testzip() is None
    ours, theirs = (torch.load(tmp_path / name, weights_only=True) for name in ("out.ckpt", "file.ckpt"))
    torch.testing.assert_close(_leaves(ours), _leaves(theirs), rtol=0, atol=0)
    state = ours["state_dict"]
    assert state["head.weight"].data_ptr() == state["tokens.weight"].data_ptr()


def _leaves(checkpoint: Any) -> dict[str, Any]:
    """Tensors as they are, of all else its text."""
    found = tree_flatten_with_path(checkpoint)[0]
    as_tensors = [leaf if isinstance(leaf, Tensor) else torch.tensor([*repr(leaf).encode()]) for _, leaf in found]
    return {keystr(path): leaf for (path, _), leaf in zip(found, as_tensors, strict=True)}


def _saved_twice(path: Path) -> None:
    runs, _ = fitted(Layout(dp=2, zero=3), Groups, epochs=1, callbacks=[EMAWeightAveraging()])
    for saved, is_folder in (("folder", True), ("file.ckpt", False)):
        runs.strategy.run.checkpoints._writes_folders = is_folder  # type: ignore[attr-defined]
        runs.save_checkpoint(path / saved)


# --------------------------------------------------------------------------------------------------------------- memory


NUM_TENSORS, MIB_OF_EACH = 20, 8

_MEASURED = """
import sys
from pathlib import Path
from lightning_3d.checkpoint import export_checkpoint

def megabytes(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) / 1024

Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
before = megabytes("VmRSS")
export_checkpoint(*sys.argv[1:3], format=sys.argv[3], max_shard_size=int(sys.argv[4]))
print(megabytes("VmHWM") - before)
"""


@pytest.mark.parametrize("format", ["safetensors", "file"])
def test_memory_holds_one_tensor_or_one_file(tmp_path: Path, format: str) -> None:
    """160 MiB in tensors of 8 MiB; the peak of all that is resident, beside what Python and torch themselves take."""
    rows = MIB_OF_EACH * 2**18 // 1024
    large = {f"weight{i}": torch.full((rows, 1024), float(i)) for i in range(NUM_TENSORS)}
    _write(tmp_path / "saved", large, is_folder=True)
    arguments = map(str, [tmp_path / "saved", tmp_path / "out", format, MIB_OF_EACH * 2**20])
    command = [sys.executable, "-W", "ignore", "-c", _MEASURED, *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
    assert result.returncode == 0, result.stderr
    used = float(result.stdout.splitlines()[-1])
    assert used < MIB_OF_EACH + 40, f"{used} MiB for {NUM_TENSORS * MIB_OF_EACH} MiB"


# --------------------------------------------------------------------------------------------------------------- errors


ERRORS: dict[str, tuple[list[str], str]] = {
    "remote": (["saved", "memory://out"], "memory://out is on a remote file system: export works on those that are"),
    "a group that runs code": (
        ["bad", "out.ckpt", "--format=file"],
        "bad holds objects of classes that are not unpickled",
    ),
    "sparse": (["sparse.ckpt", "out"], "the checkpoint holds a tensor of torch.sparse_coo, which can't be exported"),
    "nothing there": (["other", "out"], "there is no checkpoint other"),
    "a folder of something else": (["empty", "out"], "empty is no checkpoint: a folder of one has the file meta.pt"),
    "there": (["saved", "full"], "full is there already: export to another path, or set overwrite=True"),
    "another checkpoint": (["saved", "bad", "--overwrite=true"], "bad is there already, and is no such checkpoint"),
    "an export": (
        ["saved", "exported", "--format=folder", "--overwrite=true"],
        "exported is there already, and is no such checkpoint",
    ),
    "a file there": (["saved", "text", "--overwrite=true"], "text is there already, and is no such checkpoint"),
    "itself": (["saved", "saved", "--format=folder", "--overwrite=true"], "saved is the checkpoint itself"),
    "prefix": (["saved", "out", "--prefix=model."], "flag, sixteen, count and 8 more in saved do not begin with"),
    "nothing left out": (["saved", "out", "--leave_out+=x.*"], "leave_out has 'x.*', which no name in saved matches"),
    "size": (["saved", "out", "--max_shard_size=5 apples"], "max_shard_size '5 apples' is no number of bytes"),
    "option of another format": (
        ["saved", "out", "--format=file", "--prefix=a"],
        "prefix and leave_out are for format",
    ),
    "a file to a folder": (["plain.ckpt", "out", "--format=fsdp"], "plain.ckpt is a file, which has no names of"),
    "no tensor": (["extra.ckpt", "out"], "extra in extra.ckpt: no tensor, as safetensors needs it. Leave it out"),
    "dtype": (["complex.ckpt", "out"], "x is torch.complex128, a dtype that safetensors does not have"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_are_one_line_and_leave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    _write(Path("saved"), Small().state_dict(), is_folder=True)
    _write(Path("plain.ckpt"), Small().state_dict(), is_folder=False)
    _write(Path("extra.ckpt"), {"x": torch.ones(2), "extra": 3}, is_folder=False)
    _write(Path("complex.ckpt"), {"x": torch.ones(2, dtype=torch.complex128)}, is_folder=False)
    _write(Path("sparse.ckpt"), {"x": torch.eye(2).to_sparse()}, is_folder=False)
    state = {"state_dict": {}, "optimizer_0": {"state": {}, "param_groups": [{"params": [], "lr": Malicious()}]}}
    save(state, checkpoint_id=Path("bad"), no_dist=True)
    torch.save({"lr_schedulers": []}, "bad/meta.pt")
    for folder in ("empty", "full", "exported"):
        Path(folder).mkdir()
    for file in ("text", "full/notes", "exported/model.safetensors"):
        Path(file).write_text("mine")
    before = _contents(Path())
    arguments, said = ERRORS[name]
    with pytest.raises(SystemExit) as raised:
        main(["checkpoint", "convert", *arguments])
    assert raised.value.code == 1
    error = capsys.readouterr().err
    assert error.startswith(f"lightning-3d: {said}"), error
    assert error.count("\n") == 1
    assert _contents(Path()) == before


def _contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_an_export_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    _write(tmp_path / "saved", Small().state_dict(), is_folder=True)
    export_checkpoint(tmp_path / "saved", tmp_path / "out")
    before = _contents(tmp_path / "out")
    for file in (tmp_path / "saved").glob("*.distcp"):
        os.truncate(file, file.stat().st_size // 2)
    # Without a manifest, as Lightning writes folders, it is found while it is read.
    for target, overwrite in (("out", True), ("new", False)):
        with pytest.raises(CheckpointError, match="saved is no checkpoint, or damaged"):
            export_checkpoint(tmp_path / "saved", tmp_path / target, overwrite=overwrite)
    assert _contents(tmp_path / "out") == before
    assert {path.name for path in tmp_path.iterdir()} == {"saved", "out"}


@pytest.mark.parametrize("place", ["file", "rest"])
def test_nothing_is_unpickled_that_is_not_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    monkeypatch.chdir(tmp_path)
    _write(Path("saved"), Small().state_dict(), is_folder=place == "rest", more=Malicious())
    with pytest.raises(CheckpointError, match="holds objects of classes that are not unpickled, as they may run code"):
        export_checkpoint("saved", "out.ckpt", format="file")
    assert not Path("ran").exists()
    assert not Path("out.ckpt").exists()
    export_checkpoint("saved", "out.ckpt", format="file", weights_only=False)
    assert Path("ran").exists()
