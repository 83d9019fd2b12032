"""The tests of Lightning's that pass with DDP and may fail with this strategy, each with the reason."""

from __future__ import annotations

_MOCKS_THE_BASE = (
    "The test puts a mock in place of Strategy.backward that calls the strategy's own backward, which here is an"
    " override of it: they call each other. The same test passes with the mock on the strategy itself."
)
_MOCKS_SAVING = (
    "The test puts a mock in place of torch.save or of TorchCheckpointIO, and counts its calls. This strategy writes"
    " files without them, a tensor at a time; the processes send each other objects by torch.save."
)
_NO_RUN = (
    "The test has the Trainer's own connector restore a checkpoint without a run, which this strategy reads within one."
)
_RESUMES_EXACTLY = (
    "The test expects a warning that a run which goes on in the middle of an epoch reads its first batches again. This"
    " strategy leaves out the batches that were trained on."
)
_ONE_ENTRY_MORE = (
    "The test compares the entries of a checkpoint. Those of this strategy have one more, by which a run goes on"
    " exactly where it was."
)
_OWN_CLOCK = (
    "The test's clock goes on whenever time.monotonic is called in the process. On several ranks the thread that"
    " watches them calls it, too."
)

_AVERAGING = "tests_pytorch/callbacks/test_stochastic_weight_avg.py"
_CHECKPOINTING = "tests_pytorch/checkpointing"
_CONNECTOR = "tests_pytorch/trainer/connectors/test_checkpoint_connector.py"
_HOOKS = "tests_pytorch/models/test_hooks.py"
_OPTIMIZATION = "tests_pytorch/trainer/optimization/test_manual_optimization.py"

REFUSALS: dict[str, str] = {
    f"{_OPTIMIZATION}::test_multiple_optimizers_manual_call_counts": _MOCKS_THE_BASE,
    f"{_OPTIMIZATION}::test_multiple_optimizers_manual_log": _MOCKS_THE_BASE,
    f"{_OPTIMIZATION}::test_step_with_optimizer_closure": _MOCKS_THE_BASE,
    f"{_OPTIMIZATION}::test_step_with_optimizer_closure_2": _MOCKS_THE_BASE,
    f"{_AVERAGING}::test_swa_callback": _MOCKS_THE_BASE,
    f"{_AVERAGING}::test_swa_callback_scheduler_step": _MOCKS_THE_BASE,
    f"{_AVERAGING}::test_swa_resume_training_from_checkpoint": _MOCKS_THE_BASE,
    f"{_AVERAGING}::test_swa_resume_training_from_checkpoint_custom_scheduler": _MOCKS_THE_BASE,
    "tests_pytorch/models/test_restore.py::test_try_resume_from_non_existing_checkpoint": (
        "A FileNotFoundError in other words, which name the rank that did not find the file."
    ),
    "tests_pytorch/models/test_restore.py::test_restarting_mid_epoch_raises_warning": _RESUMES_EXACTLY,
    "tests_pytorch/loops/test_training_epoch_loop.py::test_resume_mid_epoch_warning": _RESUMES_EXACTLY,
    f"{_CONNECTOR}::test_preloaded_checkpoint_lifecycle": _NO_RUN,
    f"{_CONNECTOR}::test_loops_restore": _NO_RUN,
    f"{_CONNECTOR}::test_restore_callbacks_in_non_fit_phases": _NO_RUN,
    f"{_CONNECTOR}::test_strict_loading": (
        "The test expects that a mock of the model's load_state_dict gets strict=True. This strategy compares the names"
        " of all ranks itself, and raises for those that do not match."
    ),
    f"{_CHECKPOINTING}/test_checkpoint_callback_frequency.py::test_default_checkpoint_freq": _MOCKS_SAVING,
    f"{_CHECKPOINTING}/test_checkpoint_callback_frequency.py::test_top_k": _MOCKS_SAVING,
    f"{_CHECKPOINTING}/test_trainer_checkpoint.py::test_trainer_save_checkpoint_storage_options": _MOCKS_SAVING,
    f"{_HOOKS}::test_trainer_model_hook_system_fit_no_val_and_resume_max_epochs": _ONE_ENTRY_MORE,
    f"{_HOOKS}::test_trainer_model_hook_system_fit_no_val_and_resume_max_steps": _ONE_ENTRY_MORE,
    "tests_pytorch/trainer/test_trainer.py::test_train_loop_system": (
        "The test's optimizer notes its steps. This strategy has copies of an optimizer that it does not know step"
        " small tensors before training, to find out whether parts of parameters can be stepped apart."
    ),
}
"""Test id, with or without its parameters -> reason."""

ON_SEVERAL_RANKS: dict[str, str] = {
    "tests_pytorch/trainer/flags/test_val_check_interval.py::test_time_and_epoch_gated_val_check": _OWN_CLOCK,
    "tests_pytorch/models/test_restore.py::test_trainer_properties_restore_ckpt_path": (
        "The test compares each rank's state of the optimizer with the file's. This strategy has a part of it on each."
    ),
}
"""Those that pass on one."""
