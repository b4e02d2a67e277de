"""transformers' Trainer on the CPU: a tiny random Llama, trained and evaluated on random tokens.

Arguments: the number of epochs, which is 2 by default, and the width of the model, 64.
"""

import json
import sys
import tempfile
import time

import torch
import transformers

EPOCHS, WIDTH = (*map(int, sys.argv[1:]), *(2, 64)[len(sys.argv) - 1 :])


class Tokens(torch.utils.data.Dataset):
    def __init__(self, number):
        self.tokens = torch.randint(0, 128, (number, 32), generator=torch.Generator().manual_seed(number))

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


class Losses(transformers.TrainerCallback):
    def __init__(self):
        self.losses = []

    def on_log(self, arguments, state, control, logs=None, **others):
        self.losses += [logs["loss"]] if "loss" in logs else []


def main(folder):
    transformers.set_seed(0)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=128,
            hidden_size=WIDTH,
            intermediate_size=2 * WIDTH,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
        )
    )
    arguments = transformers.TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        ddp_backend="gloo",
        per_device_train_batch_size=4,
        num_train_epochs=EPOCHS,
        learning_rate=1e-3,
        logging_steps=4,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    seen = Losses()
    trainer = transformers.Trainer(
        model=model,
        args=arguments,
        train_dataset=Tokens(64),
        eval_dataset=Tokens(17),
        callbacks=[seen],
    )
    began, began_processor = time.perf_counter(), time.process_time()
    trainer.train()
    seconds = time.perf_counter() - began
    processor_seconds = torch.tensor(time.process_time() - began_processor)
    torch.distributed.all_reduce(processor_seconds)
    evaluated = trainer.evaluate()["eval_loss"]
    if trainer.is_world_process_zero():
        result = {
            "ranks": arguments.world_size,
            "losses": [*seen.losses, evaluated],
            "seconds": seconds,
            "processor_seconds": processor_seconds.item(),
        }
        print("RESULT", json.dumps(result))


with tempfile.TemporaryDirectory() as made:
    main(made)
