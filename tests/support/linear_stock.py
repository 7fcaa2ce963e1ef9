"""Models of stock vLLM with our layers of linear attention, where a CPU cannot run vLLM's own."""


def qwen3_next() -> None:
    """vLLM's Gated DeltaNet in C++ knows bfloat16 and two sizes of heads alone."""
    from vllm.model_executor.models import qwen3_next  # noqa: F401

    from attnres_serve.model import linear_attention

    linear_attention.replace_on_cpu()
