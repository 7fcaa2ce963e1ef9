"""Checkpoints on disk and on the hub: their contents, and whether they can be served.

A line for each file:

check.py: the command check: what would be served
checked.py: the checks of a checkpoint, without an engine
not_attnres.py: the error for one without AttnRes
files.py, read.py, write.py: a folder's config.json and headers; files of weights, read and
    written
other_files.py: pickles, adapters and other weights that are not served
hub.py: a folder, or a Hugging Face id
headers.py: all tensors, checked by the headers
tensors.py, base_tensors.py: checks of single tensors; the tensors of the family, without those of
    AttnRes
tensor_index.py: the tensors of a checkpoint, checked as they are read
tensor_names.py: the names of a checkpoint's tensors, before its headers are checked
adapter_tables.py: the embedding and the head, which an adapter may repeat
names.py: names in a checkpoint, and those of the house format
renaming/: unknown names: what they may be, and --rename
plain_config.py: AttnRes tensors beside the config.json of a plain model
quantized.py: the tensors of a quantized layer
finite.py: whether the numbers are finite in the type that is served
edited.py: edits written into the queries and biases of sites
needs.py: what a server needs besides the tensors
cache.py, blocks.py: the KV cache on CPU: its size, and its blocks
tokenizer.py, tokenizer_class.py, tokenizer_copy.py: reading a tokenizer, the class that reads it,
    and a repaired copy
kimi_tokenizer.py, token_ids.py: Kimi's tokenizer; ids against the rows of the embedding
draft.py, draft_folder.py, aux_stream.py: drafts: their sources, a draft's folder, the hidden
    states that EAGLE's heads read
convert/: the command convert: its plan and its source
"""
