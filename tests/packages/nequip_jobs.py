"""Interatomic potentials of NequIP, on crystals of copper with ASE's toy potential."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning as L
import torch
from nequip.data import AtomicDataDict
from nequip.data.dataset import EMTTestDataset
from nequip.data.transforms import ChemicalSpeciesToAtomTypeMapper, NeighborListTransform
from nequip.train import NequIPLightningModule
from nequip.utils.global_state import set_global_state
from torch.utils.data import Dataset

from tests.packages.parity import PackageJob

CUTOFF = 3.0


def crystals(num_samples: int) -> Dataset[Any]:
    """Crystals of 4 atoms, with energies and forces."""
    transforms = [
        ChemicalSpeciesToAtomTypeMapper(model_type_names=["Cu"]),
        NeighborListTransform(r_max=CUTOFF),
    ]
    dataset: Dataset[Any] = EMTTestDataset(transforms, supercell=(1, 1, 1), num_frames=num_samples)
    return dataset


@contextmanager
def global_state() -> Iterator[None]:
    """NequIP wants one, whose default dtype is put back for other tests."""
    dtype = torch.get_default_dtype()
    set_global_state()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(dtype)


def potential() -> L.LightningModule:
    return NequIPLightningModule(
        model={
            "_target_": "nequip.model.NequIPGNNModel",
            "seed": 1,
            "model_dtype": "float32",
            "type_names": ["Cu"],
            "r_max": CUTOFF,
            "l_max": 1,
            "parity": True,
            "num_layers": 2,
            "num_features": 8,
            "radial_mlp_depth": 1,
            "radial_mlp_width": 8,
            "avg_num_neighbors": 12.0,
            "per_type_energy_shifts": {"Cu": 0.0},
            "per_type_energy_scales": {"Cu": 1.0},
        },
        num_datasets={"train": 1, "val": 1, "test": 0, "predict": 0},
        optimizer={"_target_": "torch.optim.Adam", "lr": 1e-3},
        loss={
            "_target_": "nequip.train.EnergyForceLoss",
            "per_atom_energy": True,
            "coeffs": {"total_energy": 1.0, "forces": 1.0},
        },
        val_metrics={
            "_target_": "nequip.train.EnergyForceMetrics",
            "coeffs": {"total_energy_mae": 1.0, "forces_mae": 1.0},
        },
    )


def tell_replicas(module: L.LightningModule, num_ranks: int, num_replicas: int) -> None:
    """The loss is that of all replicas, times their number, as gradients are averaged."""
    module.world_size = num_replicas


JOBS = {
    "NequIP": PackageJob(
        module=potential,
        data=crystals,
        collate=AtomicDataDict.batched_from_list,
        prepare=tell_replicas,
        counts_replicas=True,
        environment=global_state,
    )
}
