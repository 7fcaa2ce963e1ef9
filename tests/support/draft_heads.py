"""Heads that predict further tokens: written into checkpoints, and listened to in an engine."""

import json
import os
from collections.abc import Sequence
from pathlib import Path

import torch
from checkpoints import write_standard
from safetensors.torch import load_file, save_file
from torch import Tensor

from attnres_serve.families.family import EMBEDDINGS

FULL = "full_attention"
ADD_ONE = ("qwen3_next", "alice_ai")  # whose norms have weights w for 1 + w
HEARD = "TEST_HEARD"  # the file that ``listen`` writes

# By family: the names of a block's tensors, of the norms of the embedding and of the hidden state,
# of the projection of both, and of norms behind the block.
NAMES = {
    "ernie4_5_moe": (
        "model.mtp_block.0.",
        ("model.mtp_emb_norm.0.weight", "model.mtp_hidden_norm.0.weight"),
        "model.mtp_linear_proj.0.weight",
        (),
    ),
    **dict.fromkeys(
        ("exaone_moe", "qwen3_next", "alice_ai"),
        (
            "mtp.layers.0.",
            ("mtp.pre_fc_norm_embedding.weight", "mtp.pre_fc_norm_hidden.weight"),
            "mtp.fc.weight",
            ("mtp.norm.weight",),
        ),
    ),
}
KEYS = {"qwen3_next": {}, "alice_ai": {"mtp_num_hidden_layers": 1}}  # of config.json


def add_head(folder: Path, base: str, answers: Sequence[Sequence[int]], seed: int = 0) -> None:
    """Give a checkpoint of the house format a head of one layer, which is accepted now and then.

    Its block adds nothing.  Its projection leads from a token's embedding to the row of the head
    for the token that follows it in ``answers``, and adds a little of the hidden state.
    """
    config = json.loads((folder / "config.json").read_text())
    layers, tensors = config["num_hidden_layers"], load_file(folder / "model.safetensors")
    further = f"model.layers.{layers}."
    block, norms, projection, behind = NAMES.get(
        base,
        (
            further,
            (f"{further}enorm.weight", f"{further}hnorm.weight"),
            f"{further}eh_proj.weight",
            (f"{further}shared_head.norm.weight",),
        ),
    )
    longer = folder.parent / f"{folder.name} with one layer more"
    kinds = config.get("layer_types")
    more = {"layer_types": [*kinds, kinds[-1]]} if kinds else {}
    write_standard(longer, base, layers=layers + 1, seed=seed, changes=more)
    # Behind the layers, or else as the first one is, but for linear attention.
    number = 0 if base in NAMES else layers
    source = f"model.layers.{kinds.index(FULL) if base in ADD_ONE else number}."
    for name, tensor in load_file(longer / "model.safetensors").items():
        if name.startswith(source):
            adds = name.endswith(("o_proj.weight", "down_proj.weight"))
            kept = torch.zeros_like(tensor) if adds else tensor
            tensors[block + name.removeprefix(source)] = kept
    embedding, head = tensors["model.embed_tokens.weight"], tensors["lm_head.weight"].float()
    if base not in NAMES:
        tensors[f"{further}embed_tokens.weight"] = embedding.clone()
        tensors[f"{further}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    neutral = torch.full_like(tensors["model.norm.weight"], base not in ADD_ONE)
    tensors |= {name: neutral.clone() for name in (*norms, *behind)}
    tensors[projection] = _follow(embedding.float(), head, answers).to(embedding.dtype)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config |= KEYS.get(base, {"num_nextn_predict_layers": 1})
    (folder / "config.json").write_text(json.dumps(config))


def write_eagle(
    folder: Path, target: Path, answers: Sequence[Sequence[int]], layers: Sequence[int] = ()
) -> Path:
    """A head of a folder of its own for a checkpoint of the house format.

    Its block adds nothing.  Without ``layers`` it is EAGLE's, and reads the next token beside what
    the last norm gives.  With them it is EAGLE-3's and reads what is before these layers: the first
    must be 0, so that it reads a token, and follows it by the one after the next.
    """
    own, tensors = json.loads((target / "config.json").read_text()), {}
    model = load_file(target / "model.safetensors")
    embedding = next(model[name].float() for name in EMBEDDINGS if name in model)
    rows, (vocabulary, hidden) = model["lm_head.weight"].float(), embedding.shape
    block, width = ("midlayer.", 2 * hidden) if layers else ("layers.0.", hidden)
    shapes = {
        **{f"self_attn.{part}_proj.weight": (hidden, width) for part in "qkv"},
        "self_attn.o_proj.weight": (hidden, hidden),
        **{f"mlp.{part}_proj.weight": (64, hidden) for part in ("gate", "up")},
        "mlp.down_proj.weight": (hidden, 64),
    }
    for name, shape in shapes.items():
        adds = name.endswith(("o_proj.weight", "down_proj.weight"))
        tensors[block + name] = torch.zeros(shape) if adds else torch.randn(shape) * 0.1
    norms = ["post_attention_layernorm"]
    if layers:
        norms += ["input_layernorm", "hidden_norm"]
        tensors |= {"norm.weight": torch.ones(hidden), "lm_head.weight": rows.clone()}
    tensors |= {f"{block}{norm}.weight": torch.ones(hidden) for norm in norms}
    follow = _follow(embedding, rows, answers, 1 + bool(layers))
    copies = [follow[:, hidden:] for _ in layers[2:]]
    tensors["fc.weight"] = torch.cat([follow, *copies], dim=1)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLMEagle3" if layers else "LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": hidden // 2,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "torch_dtype": own["dtype"],
    }
    if layers:
        config |= {"draft_vocab_size": vocabulary, "eagle_aux_hidden_state_layer_ids": [*layers]}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _follow(
    embedding: Tensor, head: Tensor, answers: Sequence[Sequence[int]], steps: int = 1
) -> Tensor:
    """``[H, 2 H]``, from the embedding of a token, normed or not, and a hidden state."""
    hidden = embedding.shape[1]
    normed = embedding / embedding.square().mean(-1, keepdim=True).sqrt()
    leads, seen = torch.zeros(hidden, hidden), set()
    for answer in answers:
        for token, follows in zip(answer, answer[steps:], strict=False):
            if token not in seen:
                seen.add(token)
                leads += torch.outer(head[follows] / head[follows].norm(), normed[token] / hidden)
    return torch.cat([leads, 0.01 * torch.eye(hidden)], dim=1)


def listen() -> None:
    """Write what vLLM's drafter is given in every step, and what it proposes.

    These are token ids, positions, hidden states, the tokens that follow, and the proposals.
    Called for every job of a process, it begins anew.
    """
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

    usual, heard = SpecDecodeBaseProposer.propose, []
    usual = getattr(usual, "usual", usual)

    def propose(self, **given):
        kinds = (
            *("target_token_ids", "target_positions", "target_hidden_states"),
            "next_token_ids",
        )
        known = [given[kind].clone() for kind in kinds]
        proposed = usual(self, **given)
        heard.append([*known, proposed.clone()])
        torch.save(heard, os.environ[HEARD])
        return proposed

    propose.usual = usual
    SpecDecodeBaseProposer.propose = propose
