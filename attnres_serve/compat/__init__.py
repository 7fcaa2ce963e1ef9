"""The only room that asks vLLM: hooks, objects and what differs between its versions.

A line for each file:

versions.py: the versions of vLLM that are supported
device.py: the device this runs on, before and after vLLM is imported
arguments.py: values of flags on the command line, in a file and in variables
flags/: vLLM's flags and kinds of values, read without importing vLLM
rules.py, engine_facts.py: the table of unsupported configurations; the facts that its rows read
environment.py: variables of the environment, read as vLLM reads them
source.py: facts from vLLM's source, read without importing it
host.py: the installed vLLM: its log and its mode
compiler.py: the C++ compiler that torch.compile needs on CPU
workers.py: the workers of a command line, and the cores of each on CPU
patch.py, patches.py: one replaced function; the table of all of them
prepare.py: the moments at which patches are applied
registry.py: vLLM's tables of config formats, architectures and model classes
native.py: AttnRes checkpoints that vLLM serves by itself
bare_package.py: modules of a vLLM package whose __init__ cannot be imported here
engine_config.py, drafts.py: reading and setting values of a VllmConfig; its drafts
decoder.py: model objects in a worker: norms, layers, parameters, stages
token_shards.py: the tokens of a step, divided over tensor-parallel workers
replay.py, logits.py: one sequence through a worker's modules, with separate caches; logits of
    its vectors
changing_edits.py: edits that replace others in a running engine
renewal.py: a loaded model made blank and filled again
weight_transfer.py, tensor_file.py: a trainer's weights, through mapped files
engines.py, engines_beside.py: engines of this process; engines of --data-parallel-size
unguarded.py: scripts that start an engine without a guard
openai_server.py, openai_app.py: vLLM's serve command; its FastAPI app
requests.py: calls of a server to its engine
token_counts.py, token_texts.py: tokens of an HTTP request, counted; texts of single tokens
bench_client.py: vLLM's benchmark client
workarounds/: one fault per file, all listed in docs/use/replaced.md
"""
