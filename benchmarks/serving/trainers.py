"""How far the logprobs of a trainer's classes are from the engine's, in float32 and bfloat16.

    python -m benchmarks.serving.trainers --out benchmarks/results/cpu-trainers.json

FLA comes with the tests' packages.  Two models with random weights, made and saved by their
libraries: FLA's transformer with blocks of 4 sublayers, and transformers' Qwen3, which ``convert
--add-zero-queries`` makes an AttnRes model.  The engine samples answers at temperature 1; the class
computes their logprobs again in the same type.  FLA has no code for a CPU: Triton's interpreter
runs its norms, activations and rotary embedding, ``naive_attnres``, FLA's reference, its depth
attention, and torch's attention replaces FlashAttention.
"""

import argparse
import importlib.machinery
import importlib.metadata
import os
import subprocess
import sys
import tempfile
import types
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from attnres_serve import compare_logprobs
from benchmarks.common import publish

PROMPTS, PROMPT, ANSWER = 8, 16, 32  # texts, and tokens of each
LAYERS, HIDDEN, HEADS, VOCABULARY, BLOCK = 8, 256, 4, 4096, 4
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
Answers = list[tuple[list[int], list[int], list[float]]]  # prompt, answer, its logprobs


def fla_model(folder: Path) -> Any:
    """An FLA model as a trainer has it in memory; its checkpoint is in the folder."""
    _run_fla_on_a_cpu()
    from fla.models import TransformerConfig, TransformerForCausalLM
    from fla.models.transformer import modeling_transformer
    from fla.ops.attnres.naive import naive_attnres

    modeling_transformer.fused_attnres = naive_attnres
    config = TransformerConfig(
        hidden_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_heads=HEADS,
        num_kv_heads=2,
        vocab_size=VOCABULARY,
        max_position_embeddings=512,
        attnres_block_size=BLOCK,
        fuse_cross_entropy=False,
        tie_word_embeddings=False,
    )
    model = TransformerForCausalLM(config)
    for name, weight in model.named_parameters():
        if name.endswith("res_proj.weight"):
            torch.nn.init.normal_(weight, std=HIDDEN**-0.5)  # zero would mix by equal weights
    model.save_pretrained(folder)
    return model


def _run_fla_on_a_cpu() -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    from triton.runtime.autotuner import Autotuner

    def run(self: Any, *args: Any, **options: Any) -> Any:  # nothing is timed in an interpreter
        return self.fn.run(*args, **options | self.configs[0].all_kwargs())

    def attention(q: Any, k: Any, v: Any, causal: bool, **_: Any) -> Any:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        mix = torch.nn.functional.scaled_dot_product_attention
        return mix(q, k, v, is_causal=causal, enable_gqa=True).transpose(1, 2)

    Autotuner.run = run
    stand_in = types.ModuleType("flash_attn")
    stand_in.__spec__ = importlib.machinery.ModuleSpec("flash_attn", None)
    vars(stand_in).update(flash_attn_func=attention, flash_attn_varlen_func=None)
    sys.modules["flash_attn"] = stand_in


def transformers_model(folder: Path) -> Any:
    """A Qwen3 model of transformers; the folder has the AttnRes model that starts from it."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=2,
        head_dim=HIDDEN // HEADS,
        vocab_size=VOCABULARY,
        max_position_embeddings=512,
        rms_norm_eps=1e-12,  # up to which a mean of sources is as good as their sum
    )
    model = Qwen3ForCausalLM(config)
    plain = folder.with_name(f"{folder.name}-plain")
    model.save_pretrained(plain)
    command = [sys.executable, "-m", "attnres_serve", "convert", str(plain), str(folder)]
    flags = ["--add-zero-queries", "--block-size", str(BLOCK)]
    subprocess.run([*command, *flags], check=True, stdout=sys.stderr)
    return model


MODELS = {"FLA's transformer": fla_model, "transformers' Qwen3": transformers_model}


def engine_answers(folder: Path, dtype: str) -> Answers:
    """What the engine samples; for a separate process, which does not import the trainer."""
    os.environ.pop("TRITON_INTERPRET", None)
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    torch.manual_seed(0)
    prompts = torch.randint(VOCABULARY, (PROMPTS, PROMPT)).tolist()
    llm = LLM(str(folder), dtype=dtype, enforce_eager=True, skip_tokenizer_init=True)
    sampling = SamplingParams(
        temperature=1, max_tokens=ANSWER, seed=0, logprobs=0, detokenize=False, ignore_eos=True
    )
    outputs = llm.generate([TokensPrompt(prompt_token_ids=p) for p in prompts], sampling)
    llm.llm_engine.engine_core.shutdown()
    answers = []
    for prompt, output in zip(prompts, (one.outputs[0] for one in outputs), strict=True):
        tokens = list(output.token_ids)
        rows = zip(output.logprobs, tokens, strict=True)
        answers.append((prompt, tokens, [row[token].logprob for row, token in rows]))
    return answers


@torch.no_grad()
def trainer_logprobs(model: Any, answers: Answers) -> torch.Tensor:
    """Those of all tokens of the answers, ``[tokens]`` float32, by the trainer's forward pass."""
    ids = torch.tensor([prompt + tokens for prompt, tokens, _ in answers])
    logits = model(ids).logits.float()[:, PROMPT - 1 : -1]
    return logits.log_softmax(-1).gather(2, ids[:, PROMPT:, None]).flatten()


def compare(name: str, folder: Path) -> list[dict[str, Any]]:
    """A row for each type."""
    torch.manual_seed(1)
    model, rows = MODELS[name](folder).eval(), []
    for dtype, kind in DTYPES.items():
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            answers = pool.submit(engine_answers, folder, dtype).result()
        engine = [logprob for *_, logprobs in answers for logprob in logprobs]
        distance = asdict(compare_logprobs(trainer_logprobs(model.to(kind), answers), engine))
        rows.append({"trainer": name, "dtype": dtype, **distance})
        sys.stderr.write(f"{rows[-1]}\n")
    return rows


def main() -> int:
    """Compare both, and print one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, help="also write the document there")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folders = {name: Path(scratch) / str(place) for place, name in enumerate(MODELS)}
        results = [row for name, folder in folders.items() for row in compare(name, folder)]
    trainers = {
        name: importlib.metadata.version(name)
        for name in ("flash-linear-attention", "transformers")
    }
    config = {"prompts": PROMPTS, "prompt": PROMPT, "answer": ANSWER, "trainers": trainers}
    config |= {"layers": LAYERS, "hidden": HIDDEN, "vocabulary": VOCABULARY, "block": BLOCK}
    publish("serving.trainers", sys.argv[1:], options.out, config=config, results=results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
