"""The peer of `cells.py` for the first step of a hub's model: `transformers.Trainer`, on the same model and text.

python bench/trainer_peer.py DIR TEXT FIRST     one step; FIRST: a file that gets when it ended (unix, ns)
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments


class _First(TrainerCallback):
    def on_step_end(self, *args: Any, **named: Any) -> None:
        Path(sys.argv[3]).write_text(str(time.time_ns()))


def main() -> None:
    torch.set_num_threads(1)
    config = AutoConfig.from_pretrained(sys.argv[1])
    model = AutoModelForCausalLM.from_config(config)
    tokens = torch.frombuffer(bytearray(Path(sys.argv[2]).read_bytes()), dtype=torch.uint8).long()
    windows = tokens[: len(tokens) // config.n_positions * config.n_positions].view(-1, config.n_positions)
    data: Any = [{"input_ids": window, "labels": window} for window in windows]
    with tempfile.TemporaryDirectory() as folder:
        asked = TrainingArguments(
            folder,
            max_steps=1,
            per_device_train_batch_size=1,
            gradient_accumulation_steps=8,
            learning_rate=5e-4,
            report_to=[],
            save_strategy="no",
            use_cpu=True,
        )
        Trainer(model, asked, train_dataset=data, callbacks=[_First()]).train()


if __name__ == "__main__":
    main()
