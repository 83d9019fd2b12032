"""The tests of Lightning's that pass with DDP and may fail with this strategy, each with the reason."""

from __future__ import annotations

_MOCKS_THE_BASE = (
    "The test puts a mock in place of Strategy.backward that calls the strategy's own backward, which here is an"
    " override of it: they call each other. The same test passes with the mock on the strategy itself."
)
_FOLDERS = (
    "A checkpoint is a folder, which torch.load does not read; ThreeDStrategy(save_distributed_checkpoint=False) writes"
    " one file."
)

_OPTIMIZATION = "tests_pytorch/trainer/optimization/test_manual_optimization.py"

REFUSALS: dict[str, str] = {
    f"{_OPTIMIZATION}::test_multiple_optimizers_manual_call_counts": _MOCKS_THE_BASE,
    f"{_OPTIMIZATION}::test_multiple_optimizers_manual_log": _MOCKS_THE_BASE,
    f"{_OPTIMIZATION}::test_step_with_optimizer_closure": _MOCKS_THE_BASE,
    f"{_OPTIMIZATION}::test_step_with_optimizer_closure_2": _MOCKS_THE_BASE,
    "tests_pytorch/callbacks/test_stochastic_weight_avg.py::test_swa_callback": _MOCKS_THE_BASE,
    "tests_pytorch/callbacks/test_stochastic_weight_avg.py::test_swa_callback_scheduler_step": _MOCKS_THE_BASE,
    "tests_pytorch/callbacks/test_stochastic_weight_avg.py::test_swa_resume_training_from_checkpoint": _MOCKS_THE_BASE,
    "tests_pytorch/models/test_restore.py::test_correct_step_and_epoch": _FOLDERS,
    "tests_pytorch/models/test_restore.py::test_try_resume_from_non_existing_checkpoint": (
        "A FileNotFoundError in other words, which name the rank that did not find the file."
    ),
    "tests_pytorch/models/test_restore.py::test_trainer_properties_restore_ckpt_path": _FOLDERS,
    "tests_pytorch/loops/test_loops.py::test_loop_restart_progress_multiple_dataloaders": _FOLDERS,
    "tests_pytorch/loops/test_loops.py::test_loop_state_on_exception": _FOLDERS,
    "tests_pytorch/trainer/connectors/test_checkpoint_connector.py::test_train_dataloaders_save_and_restore": _FOLDERS,
}
"""Test id, with or without its parameters -> reason."""
