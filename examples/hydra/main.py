"""Layouts that Hydra composes: `strategy` names a file of conf/strategy, whose keys can be changed; `+` adds others.

python -m examples.hydra.main strategy=pp2
python -m examples.hydra.main strategy=zero1 +strategy.zero.bucket_size=10
python -m examples.hydra.main strategy=3d trainer.devices=8
"""

import hydra
import lightning as L
from hydra.utils import instantiate
from omegaconf import DictConfig

from examples.gpt import GPT, StdlibText


@hydra.main(config_path="conf", config_name="config", version_base="1.3")
def main(config: DictConfig) -> None:
    """Train as the configuration says."""
    L.seed_everything(config.seed)
    trainer = L.Trainer(strategy=instantiate(config.strategy), **config.trainer)
    trainer.fit(GPT(**config.model), datamodule=StdlibText(**config.data))


if __name__ == "__main__":
    main()
