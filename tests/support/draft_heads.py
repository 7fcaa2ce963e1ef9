"""Heads that predict further tokens: written into checkpoints, and listened to in an engine."""

import json
import os
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import torch
from checkpoints import write_standard
from safetensors.torch import load_file, save_file
from torch import Tensor

HEARD = "ATTNRES_TEST_HEARD"  # the file that ``listen`` writes

# By family: the names of a block's tensors, of the norms of the embedding and of the hidden state,
# of the projection of both, and of norms behind the block.
NAMES = {
    "ernie4_5_moe": (
        "model.mtp_block.0.",
        ("model.mtp_emb_norm.0.weight", "model.mtp_hidden_norm.0.weight"),
        "model.mtp_linear_proj.0.weight",
        (),
    ),
    "exaone_moe": (
        "mtp.layers.0.",
        ("mtp.pre_fc_norm_embedding.weight", "mtp.pre_fc_norm_hidden.weight"),
        "mtp.fc.weight",
        ("mtp.norm.weight",),
    ),
}


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
    write_standard(longer, base, layers=layers + 1, seed=seed)
    # A block of these families is dense, as their first layer is.
    source = f"model.layers.{0 if base in NAMES else layers}."
    for name, tensor in load_file(longer / "model.safetensors").items():
        if name.startswith(source):
            adds = name.endswith(("o_proj.weight", "down_proj.weight"))
            kept = torch.zeros_like(tensor) if adds else tensor
            tensors[block + name.removeprefix(source)] = kept
    embedding, head = tensors["model.embed_tokens.weight"], tensors["lm_head.weight"].float()
    if base not in NAMES:
        tensors[f"{further}embed_tokens.weight"] = embedding.clone()
        tensors[f"{further}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    tensors |= {name: torch.ones_like(tensors["model.norm.weight"]) for name in (*norms, *behind)}
    tensors[projection] = _follow(embedding.float(), head, answers).to(embedding.dtype)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config["num_nextn_predict_layers"] = 1
    (folder / "config.json").write_text(json.dumps(config))


def _follow(embedding: Tensor, head: Tensor, answers: Sequence[Sequence[int]]) -> Tensor:
    """``[H, 2 H]``, from the normed embedding and the normed hidden state of a token."""
    hidden = embedding.shape[1]
    normed = embedding / embedding.square().mean(-1, keepdim=True).sqrt()
    leads, seen = torch.zeros(hidden, hidden), set()
    for answer in answers:
        for token, follows in pairwise(answer):
            if token not in seen:
                seen.add(token)
                leads += torch.outer(head[follows] / head[follows].norm(), normed[token] / hidden)
    return torch.cat([leads, 0.01 * torch.eye(hidden)], dim=1)


def listen() -> None:
    """Write what vLLM gives to a head in every step: token ids, positions and hidden states."""
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

    usual, heard = SpecDecodeBaseProposer.propose, []

    def propose(self, **given):
        kinds = ("token_ids", "positions", "hidden_states")
        heard.append([given[f"target_{kind}"].clone() for kind in kinds])
        torch.save(heard, os.environ[HEARD])
        return usual(self, **given)

    SpecDecodeBaseProposer.propose = propose
