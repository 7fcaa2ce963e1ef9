"""One model on two nodes, which here are two sets of processes that meet at the loopback."""

import pytest
import serving
from goldens import check_golden_over_http
from serving import GOLDENS, OURS, free_port, tail

pytestmark = [pytest.mark.engine, pytest.mark.soak]

GOLDEN = GOLDENS / "fla_transformer_block"
FLAGS = (
    *("--enforce-eager", "--max-model-len", "256", "--dtype", "float32"),
    "--enable-prompt-tokens-details",
)
ENDS = 60  # seconds


@pytest.mark.parametrize("split", [("--tensor-parallel-size", "2")], ids=["tensor parallel"])
def test_two_nodes_answer_as_one_worker(split, tmp_path):
    """What the golden expects is what one worker answers."""
    meet = ("--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(free_port()))
    words = (*OURS, str(GOLDEN), *FLAGS, *split, *meet, "--node-rank", "1", "--headless")
    second = serving.forks.begin(words, tmp_path / "second", serving.environment(), {}, True)
    try:
        with serving.running(
            *(OURS, GOLDEN, tmp_path / "first", *FLAGS, *split, *meet, "--node-rank", "0"),
            fresh=True,
        ) as server:
            check_golden_over_http(server, GOLDEN)
            assert server.info["executed"]
            assert second.poll() is None, tail(tmp_path / "second")
        assert second.poll() is None  # it is stopped for itself
        second.terminate()
        second.wait(ENDS)
    finally:
        second.kill()
