"""vLLM engines in this process."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from attnres_serve import mistakes
from attnres_serve.compat import decoder
from attnres_serve.depth.layout import Layout
from attnres_serve.errors import SettingError
from attnres_serve.families import layout_of


@contextmanager
def recorded_engine(
    checkpoint: str, longest: int, settings: dict[str, str], dtype: str
) -> Iterator[tuple[Layout, Callable]]:
    """An eager engine in this process whose norms are recorded.

    Args:
        checkpoint: folder.
        longest: tokens of the longest prompt; each prompt is one forward pass.
        settings: our settings for ``additional_config``.
        dtype: of weights and activations.

    Yields:
        The layout of the decoder, and a function of token ids. It returns the inputs and the
        outputs of all sites, ``[T, d]`` each, and the logits ``[T, vocabulary]``.

    Raises:
        SettingError: vLLM refused the configuration.
    """
    import torch
    from pydantic import ValidationError
    from vllm import LLM, SamplingParams

    try:
        with _kept_here():
            llm = LLM(
                checkpoint,
                dtype=dtype,
                max_model_len=longest + 1,
                max_num_batched_tokens=max(longest + 1, 256),
                max_num_seqs=1,
                enforce_eager=True,
                enable_prefix_caching=False,
                distributed_executor_backend="uni",
                additional_config=settings,
            )
    except ValidationError as error:
        raise SettingError(mistakes.messages(error.errors())) from None
    model = decoder.inner_model(llm.llm_engine.model_executor.driver_worker.worker)
    config = llm.llm_engine.vllm_config.model_config.hf_config
    # A model with standard residuals has vLLM's class, and only the fields.
    layout = layout_of(getattr(config, "attn_res_config", None) or config.to_dict())
    paths = [*(sublayer.norm for sublayer in layout.sublayers), layout.final_norm]
    norms = [decoder.of(model).get_submodule(path) for path in paths]
    received: list[torch.Tensor] = []
    outputs: list[torch.Tensor] = []

    def before(module, args) -> None:  # the norm may overwrite its input
        received.append(args[0].clone())

    def after(module, args, output) -> None:
        outputs.append((output[0] if isinstance(output, tuple) else output).clone())

    handles = [norm.register_forward_pre_hook(before) for norm in norms]
    handles += [norm.register_forward_hook(after) for norm in norms]

    def record(ids: list[int]):
        received.clear()
        outputs.clear()
        once = SamplingParams(temperature=0, max_tokens=1)
        llm.generate([{"prompt_token_ids": ids}], once, use_tqdm=False)
        if any([*map(len, each)] != [len(ids)] * len(norms) for each in (received, outputs)):
            raise RuntimeError("the engine did not run the prompt in one forward pass")
        return [*received], [*outputs], torch.as_tensor(model.compute_logits(outputs[-1]))

    try:
        yield layout, record
    finally:
        for handle in handles:
            handle.remove()
        llm.llm_engine.engine_core.shutdown()


@contextmanager
def _kept_here() -> Iterator[None]:
    """Run engines that are made in this context in this process, for one sequence at a time.

    vLLM reads these variables when the engine is made. They are restored afterwards.
    """
    import os

    here, memory = "VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_CPU_KVCACHE_SPACE"
    before = {name: os.environ[name] for name in (here, memory) if name in os.environ}
    os.environ[here] = "0"
    # The default is most of the machine's memory, which may not be free.
    os.environ.setdefault(memory, "1")
    try:
        yield
    finally:
        for name in (here, memory):
            os.environ.pop(name, None)
        os.environ.update(before)
