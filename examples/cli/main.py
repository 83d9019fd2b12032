"""Lightning's command line, with every setting of Trainer, strategy, model and data in YAML.

python -m examples.cli.main fit --config conf/cli/pp2.yaml
python -m examples.cli.main fit --config conf/cli/pp2.yaml --trainer.strategy.zero.stage=3
"""

from lightning.pytorch.cli import LightningCLI

from examples.gpt import GPT, StdlibText

if __name__ == "__main__":
    # A job that SLURM starts again finds the file with its settings.
    LightningCLI(GPT, StdlibText, save_config_kwargs={"overwrite": True})
