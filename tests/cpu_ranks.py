"""Ultralytics' multi-GPU training on CPU processes: a trainer, and callbacks that report from the ranks.

A module of its own, because the ranks import it.
"""

from __future__ import annotations

import hashlib
import os
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch import nn

from yolo12_fastconv.training import FastDetectionTrainer, count_blocks


class _CpuParallel(nn.parallel.DistributedDataParallel):
    def __init__(self, module: nn.Module, device_ids: list[Any], **settings: Any) -> None:
        super().__init__(module, **settings)


class CpuRanksTrainer(FastDetectionTrainer):
    """Runs in as many processes as there are, over gloo. All but the device handling is Ultralytics' own."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.world_size = int(os.environ.get("WORLD_SIZE", 0))

    def _setup_ddp(self) -> None:
        dist.init_process_group("gloo")

    def _setup_train(self) -> None:
        with mock.patch.object(nn.parallel, "DistributedDataParallel", _CpuParallel):
            super()._setup_train()

    def final_eval(self) -> None:
        """Ultralytics validates the best checkpoint on a GPU."""


def report_blocks(trainer: Any) -> None:
    """Print the wrapper's class, and patched and eligible blocks of the model and of its EMA."""
    counts = [*count_blocks(trainer.model), *count_blocks(trainer.ema.ema)]
    print("BLOCKS", type(trainer.model).__name__, *counts, flush=True)


def report_weights(trainer: Any) -> None:
    """Print a digest of all parameters."""
    digest = hashlib.sha256()
    for parameter in trainer.model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    print("WEIGHTS", digest.hexdigest(), flush=True)
