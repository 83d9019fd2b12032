"""Tensor parallel for the blocks of any model: found by propagation, proved against the dense block, or left alone.

``plan_block`` decides without communication, ``verify_block`` compares the planned block with the dense one, and
``apply_block`` carries the plan out.
"""

from lightning_3d.tensor.apply import apply_block
from lightning_3d.tensor.plan.block_plan import BlockTensorPlan, WeightPlan, replicated_plan
from lightning_3d.tensor.plan.by_hand import check_roles, roles_by_hand
from lightning_3d.tensor.plan.search import plan_block
from lightning_3d.tensor.verify import Verification, verify_block

__all__ = [
    "BlockTensorPlan",
    "Verification",
    "WeightPlan",
    "apply_block",
    "check_roles",
    "plan_block",
    "replicated_plan",
    "roles_by_hand",
    "verify_block",
]
