"""One model on two nodes, which here are two sets of processes that meet at the loopback."""

import pytest
import serving
from goldens import check_golden_over_http, expected
from serving import GOLDENS, OURS, free_port, tail
from trace_http import check, trace

from attnres_serve.verify.oracle import load
from tests.end_to_end.test_parallel import BLOCK, IN_MID_BLOCK, LAYERS

pytestmark = [pytest.mark.engine, pytest.mark.soak]

GOLDEN = GOLDENS / BLOCK
FLAGS = (
    *("--max-model-len", "256", "--dtype", "float32", "--enable-prompt-tokens-details"),
    *("--nnodes", "2", "--master-addr", "127.0.0.1"),
)
LOOPBACK = {"VLLM_HOST_IP": "127.0.0.1"}  # where workers of two nodes listen
SPLITS = {
    "tensor parallel": (("--tensor-parallel-size", "2", "--enforce-eager"), LOOPBACK),
    "stages that part a block": (  # vLLM has none in eager mode on CPU
        ("--pipeline-parallel-size", "2"),
        LOOPBACK | {"VLLM_PP_LAYER_PARTITION": f"{IN_MID_BLOCK},{LAYERS[BLOCK] - IN_MID_BLOCK}"},
    ),
}
ENDS = 60  # seconds


@pytest.mark.parametrize(("split", "env"), SPLITS.values(), ids=SPLITS)
def test_two_nodes_answer_as_one_worker(split, env, tmp_path):
    """And trace.  What the golden expects is what one worker answers."""
    flags = (*FLAGS, *split, "--master-port", str(free_port()))
    words = (*OURS, str(GOLDEN), *flags, "--node-rank", "1", "--headless")
    variables = serving.environment(**env)
    second = serving.forks.begin(words, tmp_path / "second", variables, {}, True)
    try:
        with serving.running(
            *(OURS, GOLDEN, tmp_path / "first", *flags, "--node-rank", "0"), fresh=True, **env
        ) as server:
            check_golden_over_http(server, GOLDEN)
            check(trace(server, prompt=expected(GOLDEN)[-1]["prompt"]), load(GOLDEN))
            assert server.info["executed"]
            assert second.poll() is None, tail(tmp_path / "second")
        assert second.poll() is None  # it is stopped for itself
        second.terminate()
        second.wait(ENDS)
    finally:
        second.kill()
