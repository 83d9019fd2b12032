"""Layouts that Hydra composes: a group, such as `strategy`, names a file of conf/, whose keys can be changed.

`+` adds keys that the file does not have.

python -m examples.hydra.main strategy=pp2 +strategy.pipeline.num_microbatches=8
python -m examples.hydra.main strategy=zero3 precision=bf16 optimizer=sgd
python -m examples.hydra.main strategy=3d_2x2x2 trainer.devices=8
"""

import hydra
import lightning as L
from hydra.utils import instantiate
from omegaconf import DictConfig

from examples.gpt import GPT, StdlibText


@hydra.main(config_path="../../conf", config_name="config", version_base="1.3")
def main(config: DictConfig) -> None:
    """Train as the configuration says."""
    L.seed_everything(config.seed)
    trainer = L.Trainer(strategy=instantiate(config.strategy), **config.trainer)
    trainer.fit(GPT(**instantiate(config.model)), datamodule=StdlibText(**config.data))


if __name__ == "__main__":
    main()
