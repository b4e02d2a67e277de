"""vLLM on the CPU: a tiny Llama with random weights, its layers shared by two ranks (tensor parallel).

With the argument "own" its ranks use vLLM's shared memory, else what vLLM uses where they do not share any:
torch.distributed, here by the worker class below.
"""

import json
import sys
import tempfile
import time

from transformers import LlamaConfig
from vllm import LLM, SamplingParams, TokensPrompt
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from vllm.v1.worker.cpu_worker import CPUWorker

PROMPTS, TOKENS = 4, 64


class TorchDistributedWorker(CPUWorker):
    """A worker whose collectives are torch.distributed's."""

    def init_device(self):
        CpuCommunicator._all_group_ranks_share_shm_group_name = lambda self: False
        super().init_device()


def main():
    own = sys.argv[1:] == ["own"]
    with tempfile.TemporaryDirectory() as folder:
        LlamaConfig(
            architectures=["LlamaForCausalLM"],
            hidden_size=256,
            intermediate_size=512,
            num_hidden_layers=8,
            num_attention_heads=8,
            num_key_value_heads=8,
            vocab_size=1024,
            max_position_embeddings=256,
        ).save_pretrained(folder)
        model = LLM(
            model=folder,
            load_format="dummy",  # random weights, the same whatever the ranks communicate by
            skip_tokenizer_init=True,
            tensor_parallel_size=2,
            dtype="float32",
            max_model_len=128,
            enforce_eager=True,
            seed=0,
            worker_cls="auto" if own else "vllm_generate.TorchDistributedWorker",
        )
    sampling = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
    prompts = [TokensPrompt(prompt_token_ids=[(7 * i + j) % 1000 for j in range(16)]) for i in range(PROMPTS)]
    model.generate(prompts, sampling, use_tqdm=False)
    began = time.perf_counter()
    answers = model.generate(prompts, sampling, use_tqdm=False)
    seconds = time.perf_counter() - began
    tokens = [list(answer.outputs[0].token_ids) for answer in answers]
    print("RESULT", json.dumps({"ranks": 2, "tokens": tokens, "seconds": seconds}))


if __name__ == "__main__":
    main()
